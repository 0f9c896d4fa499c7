"""Operations of layers against the products that the model runs."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import pytest

from optimus_jax.config import Config
from optimus_jax.cost.analytic import analytic
from optimus_jax.cost.costs import Pass
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.transformer import Transformer
from optimus_jax.models.mllm import Mllm
from tests.cost.costs_test import EARS, changed


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
