"""Costs: operation counts against the model's own, and where each part's seconds go."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import pytest

from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.costs import Costs, Pass, analytic, emulated
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.transformer import Transformer
from optimus_jax.models.mllm import Mllm

COSTS = Costs(
    source="by hand",
    llm_layer=Pass(1.0, 3.0),
    llm_embedding=Pass(0.125, 0.25),
    head=0.5,
    encoder_layer=Pass(10.0, 30.0),
    patch_embedding=Pass(100.0, 200.0),
    projector=Pass(1000.0, 3000.0),
    exchange=0.1,
    epilogue=7.0,
)


def changed(values: dict[str, Any], **groups: Any) -> Config:
    """A Config with other settings in the named groups."""

    def merged(old: Any, new: Any) -> Any:
        if not isinstance(new, dict):
            return new
        return {**old, **{key: merged(old[key], value) for key, value in new.items()}}

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
    patches = array(unit, c.image_tokens, c.encoder.width)
    image = array(unit, c.image_height, c.image_width, 1, dtype=jnp.uint8)
    targets = array(rows, c.sequence, dtype=jnp.int32), array(rows, c.sequence)

    def count(seconds: float) -> float:
        return (seconds - chip.latency) * chip.flops["float32"] * chip.efficiency

    costs = analytic(odd)
    for found, function, p, x in (
        (costs.llm_layer, model.llm_layer, layer(shapes["llm"]["layers"]), text),
        (costs.encoder_layer, model.encoder_layer, layer(shapes["encoder"]["layers"]), patches),
        (costs.projector, model.project, shapes["projector"], patches),
    ):
        assert count(found.forward) == pytest.approx(flops_of(function, p, x))
        assert count(found.backward) == pytest.approx(flops_of(recomputed(function), p, x))
    patch_forward = flops_of(model.embed_image, shapes["encoder"]["embed"], image)
    assert count(costs.patch_embedding.forward) == pytest.approx(patch_forward)

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
    assert found.encoder_forward == (110.0, 10.0, 1010.0)
    assert found.encoder_backward == (230.0, 30.0, 3030.0)
    assert (found.transfer, found.epilogue) == (0.1, 7.0)


def test_one_stage_and_one_encoder_layer_hold_both_ends(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 1}, model={"encoder": {"layers": 1}})
    found = COSTS.durations(config)
    assert (found.forward, found.backward) == ((2.625,), (6.25,))
    assert (found.encoder_forward, found.encoder_backward) == ((1110.0,), (3230.0,))
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
    found = dataclasses.replace(COSTS, feature_exchange=feature_exchange).durations(config)
    assert (found.travel(False), found.travel(True)) == wanted


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 5), (2, 2, 4), (4, 3, 12)])
def test_emulated_tasks_take_what_the_configuration_says(
    values: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    pp, chunks, layers = sizes
    values["emulate"] = {
        **{"chunk_forward_s": 0.5, "backward": 3.0},
        **{"encoder": 0.25, "encoder_backward": 0.75},
    }
    groups = {
        "parallel": {"pp": pp, "chunks": chunks},
        "model": {"encoder": {"layers": 3}, "llm": {"layers": layers}},
        "train": {"batch": 48},
    }
    config = changed(values, **groups)
    found = emulated(config).durations(config)
    assert found.forward == (0.5,) * (pp * chunks), "however many layers a chunk has"
    assert found.backward == (1.5,) * (pp * chunks)
    stage = 0.5 * chunks
    for layers_s, ratio in ((found.encoder_forward, 0.25), (found.encoder_backward, 0.75)):
        assert len(layers_s) == 3 and len(set(layers_s)) == 1
        assert sum(layers_s) * pp == pytest.approx(ratio * stage)  # pp units to a microbatch
    assert (found.travel(False), found.travel(True), found.epilogue) == (0, 0, 0)
    assert emulated(config).source == "emulated"


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
        *(("llm_layer", 3.0), ("llm_layer", {"forward": 1.0}), ("projector", None)),
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
    more = dataclasses.replace(COSTS, llm_task=Pass(2.0, 4.0), feature_exchange=0.5)
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
    chip = HARDWARE["cpu_core"]
    one = analytic(changed(values, parallel={"pp": 1}))
    two = analytic(changed(values, parallel={"pp": 2}))
    for part in ("encoder_layer", "patch_embedding", "projector"):
        whole, half = (getattr(c, part).forward - chip.latency for c in (one, two))
        assert whole == pytest.approx(2 * half)
    assert one.llm_layer == two.llm_layer


def test_the_epilogue_reduces_what_devices_share(values: dict[str, Any]) -> None:
    chip = HARDWARE["cpu_core"]
    layer = 4 * 64**2 + 2 * 64 * 256
    cases = {  # (dp, pp): LLM and encoder layers of the largest device; weights that are reduced
        (1, 1): (2 + 2, 0),
        (1, 2): (1 + 2, 2),  # the encoder is on both stages
        (2, 1): (2 + 2, 2 + 2),
        (2, 2): (1 + 2, 1 + 2),
    }
    for (dp, pp), (held, reduced) in cases.items():
        found = analytic(changed(values, parallel={"dp": dp, "pp": pp})).epilogue
        optimiser = 30 * held * layer / (chip.flops["float32"] * chip.efficiency)
        assert found == pytest.approx(2 * 4 * reduced * layer / chip.link + optimiser)


def test_every_chip_knows_every_dtype() -> None:
    for chip in HARDWARE.values():
        assert chip.flops.keys() == {"float32", "bfloat16"}
        numbers = [*chip.flops.values(), chip.link, chip.latency]
        assert min(numbers) > 0
        assert 0 < chip.efficiency <= 1
