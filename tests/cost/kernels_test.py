"""Kernels of a layer: counted by hand at small sizes, roofline and links, profiles in files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import pytest

from optimus_jax.cost.hardware import HARDWARE, Chip, Link
from optimus_jax.cost.kernels import (
    Kernel,
    LayerKernels,
    layer_kernels,
    load_profile,
    save_profile,
)
from optimus_jax.cost.transformer import MODELS, Transformer
from optimus_jax.errors import UserError

# 1 operation, 1 byte of memory or 1 byte of NVLink in a second each, the network four times slower
SLOW = Chip(
    flops={"float32": 1.0, "bfloat16": 1.0},
    efficiency=0.5,
    latency=0.0,
    memory=1.0,
    memory_bandwidth=1e-9,
    node=4,
    nvlink=Link(1.0, 0.25),
    network=Link(0.25, 1.0),
)
COMPUTE_BOUND = dataclasses.replace(SLOW, memory_bandwidth=1e9)
SMALL = Transformer("small", layers=1, width=8, heads=4, hidden=20)
N, S = 2 * 3, 3  # two rows of three positions


def small(
    tp: int = 2, model: Transformer = SMALL, chip: Chip = SLOW, **more: object
) -> LayerKernels:
    return layer_kernels(model, 2, S, tp, chip, **more)  # type: ignore[arg-type]


def names(kernels: Sequence[Kernel]) -> list[str]:
    return [kernel.name for kernel in kernels]


def of(kernels: tuple[Kernel, ...], name: str) -> Kernel:
    (found,) = [kernel for kernel in kernels if kernel.name == name]
    return found


def test_a_layer_under_sequence_parallelism() -> None:
    layer = small()
    assert names(layer.forward) == [
        *("attention_norm", "attention_all_gather", "qkv", "attention", "out"),
        *("attention_reduce_scatter", "mlp_norm", "mlp_all_gather", "up", "activation", "down"),
        "mlp_reduce_scatter",
    ]
    assert names(layer.backward) == [
        *("mlp_all_gather", "down_input_gradient", "down_weight_gradient", "activation"),
        *("up_input_gradient", "up_weight_gradient", "mlp_reduce_scatter", "mlp_norm"),
        *("attention_all_gather", "out_input_gradient", "out_weight_gradient", "attention"),
        *("qkv_input_gradient", "qkv_weight_gradient", "attention_reduce_scatter"),
        "attention_norm",
    ]
    assert layer.recompute == layer.forward


def test_all_reduces_stand_in_for_gathers_and_scatters() -> None:
    layer = small(sequence_parallel=False)
    calls = [k for k in layer.forward + layer.backward if k.is_communication]
    assert names(calls[:2]) == ["attention_all_reduce", "mlp_all_reduce"]
    assert names(calls[2:]) == ["mlp_all_reduce", "attention_all_reduce"]
    assert names(layer.forward)[:2] == ["attention_norm", "qkv"]
    assert names(layer.forward)[-2:] == ["down", "mlp_all_reduce"]
    assert names(layer.backward)[0] == "down_input_gradient"
    assert names(layer.backward)[-2:] == ["attention_all_reduce", "attention_norm"]
    both = [k for k in small().forward if k.is_communication]
    padded = 4 / 3  # of three positions
    assert padded * sum(k.sent for k in calls[:2]) == sum(k.sent for k in both)


def test_one_device_has_nobody_to_talk_to() -> None:
    layer = small(tp=1)
    everything = names(layer.forward + layer.backward)
    assert not [name for name in everything if "gather" in name or "reduce" in name]
    assert layer.communication_s == 0 < layer.compute_s


def test_a_parallel_block_communicates_once() -> None:
    model = dataclasses.replace(SMALL, parallel_block=True, qk_norm=True, gated=True)
    layer = small(model=model)
    assert names(layer.forward) == [
        *("norm", "all_gather", "qkv", "qk_norm", "attention", "out"),
        *("up", "gate", "activation", "down", "reduce_scatter"),
    ]
    assert names(layer.backward)[0] == "all_gather"
    assert names(layer.backward)[-2:] == ["reduce_scatter", "norm"]


def test_matrices_counted_by_hand() -> None:
    # tp 2: 12 of 24 columns of qkv, 4 rows of out, 10 columns of up, 10 rows of down; bfloat16
    layer = small()
    for name, a, b in (("qkv", 8, 12), ("out", 4, 8), ("up", 8, 10), ("down", 10, 8)):
        kernel = of(layer.forward, name)
        assert kernel.flops == 2 * N * a * b
        assert kernel.bytes == 2 * (N * a + a * b + N * b)
        inward = of(layer.backward, f"{name}_input_gradient")
        assert (inward.flops, inward.bytes) == (kernel.flops, kernel.bytes)
        own = of(layer.backward, f"{name}_weight_gradient")
        assert own.flops == kernel.flops
        assert own.bytes == 2 * (N * a + N * b) + 2 * 4 * a * b  # float32 read and written


def test_attention_and_elementwise_counted_by_hand() -> None:
    # tp 2: 2 heads of 2, so 4 values each of query, key, value and output at a position
    layer = small()
    forward, backward = of(layer.forward, "attention"), of(layer.backward, "attention")
    scores = mixing = 2 * N * S * 4
    assert (forward.flops, forward.bytes) == (scores + mixing, 2 * N * (4 + 4 + 4 + 4))
    assert (backward.flops, backward.bytes) == (5 * scores, 2 * N * 8 * 4)
    causal = small(model=dataclasses.replace(SMALL, causal=True))
    assert of(causal.forward, "attention").flops == (scores + mixing) / 2
    assert of(causal.backward, "attention").flops == 5 * scores / 2
    assert of(causal.forward, "qkv") == of(layer.forward, "qkv")

    norm = of(layer.forward, "attention_norm")
    assert (norm.flops, norm.bytes) == (0, 2 * 4 * 2 * 2 * 8), "2 of 4 padded positions, 2 rows"
    whole = of(small(sequence_parallel=False).forward, "attention_norm")
    assert whole.bytes == 2 * 4 * N * 8
    assert of(layer.forward, "activation").bytes == 2 * N * 10 * 2
    assert of(layer.backward, "activation").bytes == 2 * N * 10 * 3
    gated = small(model=dataclasses.replace(SMALL, gated=True, qk_norm=True))
    assert of(gated.forward, "activation").bytes == 2 * N * 10 * 3
    assert of(gated.backward, "activation").bytes == 2 * N * 10 * 5
    assert of(gated.forward, "qk_norm").bytes == 2 * N * (4 + 4) * 2
    assert of(gated.backward, "qk_norm").bytes == 2 * N * (4 + 4) * 3
    assert dataclasses.replace(of(gated.forward, "gate"), name="up") == of(gated.forward, "up")


def test_collectives_send_all_but_their_own_part() -> None:
    model = dataclasses.replace(SMALL, heads=8, kv_heads=8, hidden=24)
    for tp, link, padded in ((2, SLOW.nvlink, 4), (4, SLOW.nvlink, 4), (8, SLOW.network, 8)):
        kernel = of(small(tp, model).forward, "mlp_all_gather")
        sent = 2 * (2 * padded) * 8 * (tp - 1) / tp
        assert (kernel.flops, kernel.sent) == (0, sent)
        assert kernel.seconds == link.latency + sent / link.bandwidth
        assert of(small(tp, model).backward, "mlp_reduce_scatter").sent == sent


def test_compute_takes_the_longer_of_operations_and_bytes() -> None:
    qkv = of(small(chip=COMPUTE_BOUND).forward, "qkv")
    assert qkv.seconds == qkv.flops / 0.5  # the chip's own efficiency
    assert of(small(chip=COMPUTE_BOUND, efficiency=0.25).forward, "qkv").seconds == qkv.flops / 0.25
    qkv = of(small().forward, "qkv")
    assert qkv.seconds == pytest.approx(qkv.bytes * 1e9)
    assert of(small(dtype="float32").forward, "qkv").bytes == 2 * qkv.bytes


def test_frozen_layers_pass_gradients_through() -> None:
    frozen, trained = small(frozen=True), small()
    assert frozen.forward == trained.forward == frozen.recompute
    assert frozen.backward == tuple(
        k for k in trained.backward if not k.name.endswith("weight_gradient")
    )


def test_seconds_of_passes_add_up() -> None:
    layer = small(chip=COMPUTE_BOUND)
    assert layer.forward_s == pytest.approx(sum(k.seconds for k in layer.forward))
    assert layer.backward_s == pytest.approx(sum(k.seconds for k in layer.backward))
    assert layer.recompute_s == layer.forward_s
    assert layer.communication_s == pytest.approx(8 * of(layer.forward, "mlp_all_gather").seconds)
    both = layer.forward_s + layer.backward_s
    assert layer.compute_s + layer.communication_s == pytest.approx(both)


def test_keys_and_values_are_shared_out_until_each_device_has_one_head() -> None:
    model = dataclasses.replace(SMALL, kv_heads=2)
    columns = {1: 8 + 2 * 4, 2: 4 + 2 * 2, 4: 2 + 2 * 2}  # at tp 4 two devices hold the same head
    for tp, wide in columns.items():
        assert of(small(tp, model).forward, "qkv").flops == 2 * N * 8 * wide


def test_gpt_175b_beside_the_formula_and_the_papers_figures() -> None:
    """24 h^2 s b + 4 s^2 h b is 15.26 TFLOP forward for two rows of 2048 (a mask not counted)."""
    model = dataclasses.replace(MODELS["GPT-175B"], causal=False)
    layer = layer_kernels(model, 2, 2048, 8, HARDWARE["h100"])
    assert 8 * sum(k.flops for k in layer.forward) == pytest.approx(15.26e12, rel=1e-3)
    gather = of(layer.forward, "mlp_all_gather")
    assert gather.sent == 2 * 2 * 2048 * 12288 * 7 / 8
    # the paper sees about 300 us; NVLink at its peak takes two thirds of that
    assert gather.seconds == pytest.approx(11.8e-6 + gather.sent / 450e9)
    assert 150e-6 < gather.seconds < 300e-6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tp": 3}, "small: tp 3 does not share out 4 heads.* tp can be 1, 2, 4"),
        ({"tp": 8}, "tp can be 1, 2, 4"),
        ({"tp": 0}, "must be positive, got 2, 3 and 0"),
        ({"dtype": "int8"}, "no rate for 'int8', only for float32, bfloat16"),
        ({"model": dataclasses.replace(SMALL, hidden=6), "tp": 4}, "hidden of 6; tp can be 1, 2$"),
        (
            {"model": Transformer("six", 1, 12, 6, 12, kv_heads=3), "tp": 2},
            "3 heads of keys and values.* tp can be 1, 3, 6",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused_in_words(
    more: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        small(**more)  # type: ignore[arg-type]


PROFILE = {
    ("llm", "forward", "qkv"): 0.5,
    ("llm", "backward", "qkv_weight_gradient"): 0.25,
    ("llm", "recompute", "qkv"): 0.125,
    ("vit", "forward", "norm"): 2.0,
}


def test_a_profile_survives_its_file(tmp_path: pathlib.Path) -> None:
    save_profile(tmp_path / "profile.json", PROFILE)
    assert load_profile(tmp_path / "profile.json") == PROFILE
    with pytest.raises(FileNotFoundError):
        load_profile(tmp_path / "other.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", '{"llm": 3}', '{"llm": {"forward": {"qkv": "fast"}}}'),
        *('{"llm": {"forward": 1.0}}', '{"llm": {"forward": {"qkv": -1.0}}}'),
        *('{"llm": {"forward": {"qkv": NaN}}}', '{"llm": {"forward": {"qkv": true}}}'),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(UserError, match="is no profile, such as"):
        load_profile(tmp_path / "profile.json")


def test_measured_seconds_take_the_place_of_estimates() -> None:
    layer = small()
    found = layer.measured(PROFILE, "llm")
    assert of(found.forward, "qkv").seconds == 0.5
    assert of(found.recompute, "qkv").seconds == 0.125
    assert of(found.backward, "qkv_weight_gradient").seconds == 0.25
    assert of(found.backward, "qkv_input_gradient") == of(layer.backward, "qkv_input_gradient")
    assert of(found.forward, "qkv").flops == of(layer.forward, "qkv").flops
    assert found.forward_s == pytest.approx(
        layer.forward_s - of(layer.forward, "qkv").seconds + 0.5
    )


@pytest.mark.parametrize(
    ("key", "module", "message"),
    [
        (("llm", "forward", "qkv"), "encoder", "no module 'encoder', only llm"),
        (("llm", "update", "qkv"), "llm", "no pass 'update' .*only forward, backward, recompute"),
        (("llm", "forward", "gate"), "llm", "no kernel 'gate' in forward, only attention_norm, "),
        (("llm", "backward", "qkv"), "llm", "no kernel 'qkv' in backward, only mlp_all_gather, "),
    ],
)
def test_names_that_no_layer_has_are_refused(
    key: tuple[str, str, str], module: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        small().measured({key: 1.0}, module)
