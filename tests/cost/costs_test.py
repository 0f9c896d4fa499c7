"""Costs: operation counts against the model's own, and where each part's seconds go."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import pytest

from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.analytic import ADAMW, analytic
from optimus_jax.cost.costs import Costs, EncoderCosts, Pass, emulated
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.transformer import Transformer
from optimus_jax.errors import UserError
from optimus_jax.models.mllm import Mllm
from optimus_jax.schedule.program import Payload
from optimus_jax.schedule.task import EncoderPipeline, Pipeline

COSTS = Costs(
    source="by hand",
    llm_layer=Pass(1.0, 3.0),
    llm_embedding=Pass(0.125, 0.25),
    head=0.5,
    encoders={"vision": EncoderCosts(Pass(10.0, 30.0), Pass(100.0, 200.0), Pass(1000.0, 3000.0))},
    exchange=0.1,
    epilogue=7.0,
)


LLM, VISION = Payload("llm"), Payload("feature")
EARS = {"layers": 1, "width": 32, "heads": 2, "hidden": 40, "patch": 4, "input": "audio"}


def changed(values: dict[str, Any], **groups: Any) -> Config:
    """A Config with other settings in the named groups."""

    def merged(old: Any, new: Any) -> Any:
        if not isinstance(new, dict):
            return new
        return {**old, **{key: merged(old.get(key, {}), value) for key, value in new.items()}}

    return from_config_dict(merged(values, groups))


def test_operations_of_a_layer_counted_by_hand() -> None:
    # width 2, hidden 3, 5 positions; a multiplication and an addition each:
    qkv, out, up, down = 2 * (2 * 6), 2 * (2 * 2), 2 * (2 * 3), 2 * (3 * 2)
    scores, mixing = 2 * (5 * 2), 2 * (5 * 2)
    one_position = layer_flops_forward(Transformer("", 1, 2, 1, 3), 5) / 5
    assert one_position == qkv + out + up + down + scores + mixing == 96


def products(jaxpr: Any) -> int:
    """Operations of all matrix products that a traced function runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[k] for k in contracted)
            total += 2 * inner * math.prod(eqn.outvars[0].aval.shape)
        for inner_jaxpr in jax_core.jaxprs_in_params(eqn.params):
            total += products(inner_jaxpr)
    return total


def flops_of(function: Any, *shapes: Any) -> int:
    return products(jax.make_jaxpr(function)(*shapes).jaxpr)


def recomputed(function: Any) -> Any:
    """The backward as a task runs it: the forward again, then the gradient."""

    def backward(p: Any, x: jax.Array) -> Any:
        y, vjp = jax.vjp(function, p, x)
        return vjp(jnp.ones_like(y))

    return backward


@pytest.fixture
def odd(values: dict[str, Any]) -> Config:
    """All sizes differ, so that none can stand for another."""
    return changed(
        values,
        model={
            "image_height": 12,
            "projector_hidden": 20,
            "encoder": {"width": 24, "heads": 3, "hidden": 28},
            "audio_frames": 12,
            "audio_bands": 5,
            "more_encoders": {"ears": EARS},
        },
    )


def test_operations_are_those_of_the_matrix_products_that_the_model_runs(odd: Config) -> None:
    model, chip = Mllm(odd.model), HARDWARE["cpu_core"]
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rows, unit = odd.microbatch_rows, odd.microbatch_rows // odd.parallel.pp
    c = odd.model

    def layer(part: Any) -> Any:
        return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), part)

    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    text = array(rows, c.sequence, c.llm.width)
    seen = array(unit, c.image_height, c.image_width, 1, dtype=jnp.uint8)
    heard = array(unit, c.audio_frames, c.audio_bands)
    targets = array(rows, c.sequence, dtype=jnp.int32), array(rows, c.sequence)

    def count(seconds: float) -> float:
        return (seconds - chip.latency) * chip.flops["float32"] * chip.efficiency

    costs = analytic(odd)
    llm = layer(shapes["llm"]["layers"])
    parts: list[tuple[Pass, Any, Any, Any]] = [(costs.llm_layer, model.llm_layer, llm, text)]
    for name, x in (("vision", seen), ("ears", heard)):
        own, p = costs.encoders[name], shapes["encoders"][name]
        patches = array(unit, c.features_of(name), c.encoders[name].width)
        run = functools.partial(model.encoder_layer, name)
        parts.append((own.layer, run, layer(p["layers"]), patches))
        parts.append(
            (own.projector, functools.partial(model.project, name), p["projector"], patches)
        )
        embed = flops_of(functools.partial(model.embed_input, name), p["embed"], x)
        assert count(own.input_embedding.forward) == pytest.approx(embed)
    for found, function, p, x in parts:
        assert count(found.forward) == pytest.approx(flops_of(function, p, x))
        assert count(found.backward) == pytest.approx(flops_of(recomputed(function), p, x))

    def head(p: Any, x: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        loss = lambda p, x: model.summed_loss(p, x, targets, weights)  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(p, x)

    assert count(costs.head) == pytest.approx(flops_of(head, shapes["llm"]["head"], text, *targets))


def test_durations_have_the_pipelines_shape_and_ends(values: dict[str, Any]) -> None:
    config = changed(
        values,
        parallel={"pp": 2, "chunks": 2},
        model={"encoder": {"layers": 3}, "llm": {"layers": 5}},
    )
    found = COSTS.durations(config)
    assert found.forward == (2.125, 1.0, 1.0, 1.5)  # 2, 1, 1, 1 layers, embedding, head
    assert found.backward == (6.25, 3.0, 3.0, 3.0)
    (encoder,) = found.encoders
    assert encoder.forward == (110.0, 10.0, 1010.0)
    assert encoder.backward == (230.0, 30.0, 3030.0)
    assert (found.transfer, found.epilogue) == (0.1, 7.0)


def test_one_stage_and_one_encoder_layer_hold_both_ends(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 1}, model={"encoder": {"layers": 1}})
    found = COSTS.durations(config)
    assert (found.forward, found.backward) == ((2.625,), (6.25,))
    (encoder,) = found.encoders
    assert (encoder.forward, encoder.backward) == ((1110.0,), (3230.0,))
    assert found.transfer == 0.0  # there is nobody to exchange with


def test_a_task_takes_time_beside_its_layers(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 2, "chunks": 2}, model={"llm": {"layers": 5}})
    found = dataclasses.replace(COSTS, llm_task=Pass(20.0, 40.0)).durations(config)
    assert found.forward == (22.125, 21.0, 21.0, 21.5)
    assert found.backward == (46.25, 43.0, 43.0, 43.0)


@pytest.mark.parametrize(
    ("pp", "feature_exchange", "wanted"),
    [(2, 0.25, (0.1, 0.25)), (2, 0.0, (0.1, 0.0)), (2, None, (0.1, 0.1)), (1, 0.25, (0.0, 0.0))],
)
def test_features_may_travel_faster_or_slower(
    values: dict[str, Any],
    pp: int,
    feature_exchange: float | None,
    wanted: tuple[float, float],
) -> None:
    config = changed(values, parallel={"pp": pp})
    vision = dataclasses.replace(COSTS.encoders["vision"], feature_exchange=feature_exchange)
    found = dataclasses.replace(COSTS, encoders={"vision": vision}).durations(config)
    assert (found.travel(LLM), found.travel(VISION)) == wanted


def test_hidden_states_travel_where_an_encoder_has_stages(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 2, "encoder": {"pp": 2}})
    vision = dataclasses.replace(COSTS.encoders["vision"], hidden_exchange=0.3)
    found = dataclasses.replace(COSTS, encoders={"vision": vision}).durations(config)
    assert found.travel(Payload("hidden")) == 0.3
    assert COSTS.durations(config).travel(Payload("hidden")) == 0.1


def test_another_pipeline_of_the_same_model_has_its_own_stages_and_units(
    values: dict[str, Any],
) -> None:
    """The LLM begins in stage 1, and one unit is a whole microbatch, not half of one."""
    config = changed(
        values,
        parallel={"pp": 2, "chunks": 2},
        model={"encoder": {"layers": 3}, "llm": {"layers": 5}},
    )
    assert config.pipeline.encoders[0].units == 2
    pipe = Pipeline(2, config.parallel.microbatches, 2, (0, 1, 2, 2), (EncoderPipeline((3, 0)),))
    found = COSTS.durations(config, pipe)
    assert found.forward == (0.0, 1.125, 2.0, 2.5)
    assert found.backward == (0.0, 3.25, 6.0, 6.0)
    assert found.encoders[0].forward == (220.0, 20.0, 2020.0)
    assert found.encoders[0].backward == (460.0, 60.0, 6060.0)


def test_costs_of_another_model_are_refused(values: dict[str, Any]) -> None:
    audio = {"audio_frames": 12, "audio_bands": 5, "more_encoders": {"ears": EARS}}
    with pytest.raises(UserError, match="costs of vision say nothing of ears"):
        COSTS.durations(changed(values, model=audio))


@pytest.mark.parametrize(("fuse", "wanted"), [(False, (0.0, 0.0)), (True, (0.5, 0.75))])
def test_only_an_executor_with_fused_tasks_has_windows(
    values: dict[str, Any], fuse: bool, wanted: tuple[float, float]
) -> None:
    config = changed(
        values,
        parallel={"pp": 1, "tp": 2, "fuse": fuse},
        model={"vocabulary": 84, "text_length": 48},
    )
    around = {"gather": 2.0, "scatter": 3.0, "overlap": True, "window": Pass(0.5, 0.75)}
    found = dataclasses.replace(COSTS, **around).durations(config)
    assert found.window == wanted
    assert (found.gather, found.scatter, found.overlap) == (2.0, 3.0, True)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (2, 1, 6, 1), (2, 2, 4, 2), (4, 3, 12, 2)])
def test_emulated_tasks_take_what_the_configuration_says(
    values: dict[str, Any], sizes: tuple[int, int, int, int]
) -> None:
    pp, chunks, layers, stages = sizes
    values["emulate"] = {
        **{"chunk_forward_s": 0.5, "backward": 3.0},
        **{"encoder": 0.25, "encoder_backward": 0.75},
    }
    groups = {
        "parallel": {"pp": pp, "chunks": chunks, "encoder": {"pp": stages}},
        "model": {"encoder": {"layers": 3}, "llm": {"layers": layers}},
        "train": {"batch": 48},
    }
    config = changed(values, **groups)
    found = emulated(config).durations(config)
    assert found.forward == pytest.approx((0.5,) * (pp * chunks))
    assert found.backward == pytest.approx((1.5,) * (pp * chunks))
    stage, (encoder,) = 0.5 * chunks, found.encoders
    for layers_s, ratio in ((encoder.forward, 0.25), (encoder.backward, 0.75)):
        assert len(layers_s) == 3 and len(set(layers_s)) == 1
        units = pp // stages  # to a microbatch, each through all stages
        assert sum(layers_s) * units == pytest.approx(ratio * stage)
    assert (found.travel(LLM), found.travel(VISION), found.epilogue) == (0, 0, 0)
    assert emulated(config).source == "emulated"


def test_emulated_chunks_take_time_in_proportion_to_their_layers(values: dict[str, Any]) -> None:
    values["emulate"] = {"chunk_forward_s": 0.5, "backward": 2.0}
    config = changed(values, parallel={"pp": 2}, model={"llm": {"layers": 5}})
    found = emulated(config).durations(config)
    assert found.forward == pytest.approx((0.6, 0.4)), "3 and 2 layers; 2.5 would take 0.5"
    assert found.backward == pytest.approx((1.2, 0.8))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "[]", "null", '"costs"', "{}", '{"costs": 3}', '{"costs": {}}'),
        '{"source": "half"}',
        '{"costs": {"source": "measured", "speed": 1.0}}',
    ],
)
def test_what_holds_no_costs_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError):
        Costs.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("head", "fast"), ("head", None), ("exchange", [1.0]), ("epilogue", {"forward": 1.0})),
        *(("llm_layer", 3.0), ("llm_layer", {"forward": 1.0}), ("llm_layer", None)),
        *(("overlap", 1.0), ("source", 3), ("encoders", {}), ("encoders", {"vision": 3})),
        ("encoders", {"vision": {"layer": {"forward": 1.0, "backward": 1.0}}}),
        ("llm_layer", {"forward": "a", "backward": 1.0}),
        *(("head", float("nan")), ("exchange", -1.0)),
    ],
    ids=str,
)
def test_costs_that_are_not_seconds_are_refused(
    tmp_path: pathlib.Path, part: str, value: Any
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**dataclasses.asdict(COSTS), part: value}))
    with pytest.raises(ValueError):
        Costs.load(path)


def test_a_missing_file_is_another_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        Costs.load(tmp_path / "costs.json")


def test_costs_survive_json(tmp_path: pathlib.Path, values: dict[str, Any]) -> None:
    vision = dataclasses.replace(COSTS.encoders["vision"], feature_exchange=0.5)
    more = dataclasses.replace(
        COSTS,
        llm_task=Pass(2.0, 4.0),
        encoders={"vision": vision, "ears": COSTS.encoders["vision"]},
        overlap=True,
        window=Pass(0.1, 0.2),
    )
    for costs in (COSTS, more, analytic(from_config_dict(values))):
        costs.save(tmp_path / "costs.json")
        assert Costs.load(tmp_path / "costs.json") == costs


def test_analytic_costs_name_themselves_and_follow_the_chip(values: dict[str, Any]) -> None:
    costs = analytic(changed(values, hardware="h100", model={"dtype": "bfloat16"}))
    assert costs.source == "analytic (h100)"
    chip = HARDWARE["h100"]
    # 8 rows of 49 positions, width 64, hidden 256
    flops = 8 * 49 * (2 * (4 * 64 * 64 + 2 * 64 * 256) + 4 * 49 * 64)
    assert costs.llm_layer.forward == pytest.approx(flops / (989e12 * 0.5) + 10e-6)
    assert costs.llm_layer.backward == pytest.approx(3 * flops / (989e12 * 0.5) + 10e-6)
    assert costs.exchange == pytest.approx(8 * 49 * 64 * 2 / chip.link + chip.latency)
    assert costs.llm_embedding == Pass(10e-6, 10e-6)


def test_payloads_are_twice_as_large_in_float32(values: dict[str, Any]) -> None:
    chip = HARDWARE["cpu_core"]
    payloads = [
        analytic(changed(values, model={"dtype": dtype})).exchange - chip.latency
        for dtype in ("float32", "bfloat16")
    ]
    assert payloads[0] == pytest.approx(2 * payloads[1])


def test_encoder_units_share_a_microbatch(values: dict[str, Any]) -> None:
    """Of two stages each takes half; of two tensor shards too, if the encoder is cut over none of
    them; over two encoder stages none is."""
    chip = HARDWARE["cpu_core"]
    plans: dict[str, tuple[dict[str, Any], int]] = {
        "two stages": ({"pp": 2}, 2),
        "two lanes": ({"pp": 1, "tp": 2}, 2),
        "one pipeline": ({"pp": 2, "encoder": {"pp": 2}}, 1),
    }
    wide = {"vocabulary": 84, "text_length": 48}
    one = analytic(changed(values, parallel={"pp": 1}, model=wide)).encoders["vision"]
    for name, (plan, parts) in plans.items():
        other = analytic(changed(values, parallel=plan, model=wide)).encoders["vision"]
        for part in ("layer", "input_embedding", "projector"):
            whole, share = (getattr(c, part).forward - chip.latency for c in (one, other))
            assert whole == pytest.approx(parts * share), name


def test_tensor_shards_share_a_layer_and_wait_for_one_another(values: dict[str, Any]) -> None:
    wide = {"vocabulary": 84, "text_length": 48}
    plan = {"pp": 1, "tp": 2, "encoder": {"tp": 2}}
    config = changed(values, hardware="h100", parallel=plan, model={**wide, "dtype": "bfloat16"})
    whole = changed(
        values, hardware="h100", parallel={"pp": 1}, model={**wide, "dtype": "bfloat16"}
    )
    chip, costs, alone = HARDWARE["h100"], analytic(config), analytic(whole)
    rows, width, length = config.microbatch_rows, 64, config.model.sequence
    # a gather and a scatter of half of the activations, at the attention and at the MLP
    sums = 4 * chip.nvlink.seconds(rows * length * width * 2 / 2)
    computed = alone.llm_layer.forward - chip.latency
    assert costs.llm_layer.forward == pytest.approx(computed / 2 + chip.latency + sums)
    again = 3 * computed / 2 + chip.latency + 2 * sums
    assert costs.llm_layer.backward == pytest.approx(again)
    assert costs.head - chip.latency == pytest.approx((alone.head - chip.latency) / 2)
    assert costs.window == Pass(0.0, 0.0), "without fused tasks nothing hides"
    fused = analytic(changed(values, hardware="h100", parallel={**plan, "fuse": True}, model=wide))
    sums = 4 * chip.nvlink.seconds(rows * length * width * 4 / 2)
    assert dataclasses.astuple(fused.window) == pytest.approx((sums, 2 * sums))
    on_cores = analytic(changed(values, parallel={**plan, "fuse": True}, model=wide))
    assert on_cores.window == Pass(0.0, 0.0), "a core that communicates does not compute"


def test_a_policy_that_keeps_activations_computes_less_again(values: dict[str, Any]) -> None:
    chip = HARDWARE["cpu_core"]
    found = {
        policy: analytic(changed(values, parallel={"recompute": policy})).llm_layer
        for policy in ("full", "selective", "none")
    }
    config = changed(values)
    forward = found["full"].forward - chip.latency
    rows, length = config.microbatch_rows, config.model.sequence
    scores = 2 * rows * length**2 * 64 / (chip.flops["float32"] * chip.efficiency)
    for policy, again in (("full", forward), ("selective", scores), ("none", 0.0)):
        assert found[policy].forward == found["full"].forward
        assert found[policy].backward - chip.latency == pytest.approx(2 * forward + again)


def ring(parameters: float, devices: int, size: int = 4) -> float:
    """Seconds in which devices gather, or scatter, so many weights."""
    chip = HARDWARE["cpu_core"]
    if devices == 1:
        return 0.0
    return chip.latency + size * parameters * (devices - 1) / devices / chip.link


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(
    ("dp", "pp", "llm_layers", "replicas"),
    [(1, 1, 2, 1), (1, 2, 1, 2), (2, 1, 2, 2), (2, 2, 1, 4)],
)
def test_weights_and_gradients_of_replicas(
    values: dict[str, Any], dp: int, pp: int, llm_layers: int, replicas: int, zero: bool
) -> None:
    """Two layers each; the encoder is whole on every device."""
    chip, layer = HARDWARE["cpu_core"], 4 * 64**2 + 2 * 64 * 256
    llm, encoder = llm_layers * layer, 2 * layer
    found = analytic(changed(values, parallel={"dp": dp, "pp": pp, "zero": zero}))
    held = llm / dp + encoder / replicas if zero else llm + encoder
    optimiser = ADAMW * held / (chip.flops["float32"] * chip.efficiency)
    own, others = ring(llm, dp), 2 * ring(encoder, replicas)
    if zero:
        assert (found.gather, found.scatter) == pytest.approx((own, own))
        assert found.epilogue == pytest.approx(others + optimiser)
    else:
        assert (found.gather, found.scatter) == (0.0, 0.0)
        assert found.epilogue == pytest.approx(2 * own + others + optimiser)
    assert not found.overlap


def test_gpus_communicate_beside_encoder_tasks(values: dict[str, Any]) -> None:
    assert analytic(changed(values, hardware="h100")).overlap


def test_every_chip_knows_every_dtype() -> None:
    for chip in HARDWARE.values():
        assert chip.flops.keys() == {"float32", "bfloat16"}
        numbers = [*chip.flops.values(), chip.link, chip.latency]
        assert min(numbers) > 0
        assert 0 < chip.efficiency <= 1
