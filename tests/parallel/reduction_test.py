"""Weights gathered before a step and gradients summed after it, against sums made by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from optimus_jax.parallel import reduction
from optimus_jax.parallel.layout import Layout, specs
from optimus_jax.parallel.mesh import EncoderGrid, Grid, make_meshes
from optimus_jax.parallel.reduction import gather, reduce_gradients

GRID = Grid(2, 2, 2, (EncoderGrid("vision", 2, 2),))
P, T = "pi", "ti"  # the axes of stages and tensor shards that have two devices

LAYOUTS = {
    "plain": Layout("llm", ((), ()), ("dp",), ()),
    "cut": Layout("llm", ((P,), (), (T,)), ("dp",), ()),
    "held by stages too": Layout("llm", ((), (T,)), ("dp", P), ()),
    "partial": Layout("llm", ((), ()), ("dp",), (T,)),
    "zero": Layout("llm", ((P,), ()), ("dp",), (), zero=1),
    "zero, cut alike": Layout("llm", ((P,), ()), ("dp",), (), zero=0),
    "zero, partial": Layout("llm", ((), ()), ("dp", P), (T,), zero=0),
    "alone": Layout("llm", ((), ()), (), ()),
}
SHAPES = {
    "plain": (3, 4),
    "cut": (2, 5, 6),
    "held by stages too": (7, 4),
    "partial": (5, 3),
    "zero": (4, 6),
    "zero, cut alike": (8, 3),
    "zero, partial": (8, 3),
    "alone": (2, 2),
}


@pytest.fixture
def mesh() -> Any:
    return make_meshes(GRID, jax.devices()).mesh


def parts(name: str, seed: int = 0) -> np.ndarray:
    """The gradient that each device has, [dp, P, T, local shape]; the weight's size, cut."""
    layout, shape = LAYOUTS[name], SHAPES[name]
    local = [n // GRID.extent(axes) for n, axes in zip(shape, layout.cut, strict=True)]
    return np.random.default_rng(seed).normal(size=(2, 2, 2, *local)).astype(np.float32)


def summed(name: str, own: np.ndarray) -> np.ndarray:
    """By device, the gradient of its part of the weight."""
    layout = LAYOUTS[name]
    over = tuple(("dp", P, T).index(a) for a in layout.replicas + layout.partial)
    return np.broadcast_to(own.sum(over, keepdims=True), own.shape) if over else own


@pytest.mark.parametrize("together", [0, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_summed_over_those_who_hold_the_weight(
    mesh: Any, together: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "TOGETHER", together)
    own = {name: parts(name, k).astype(dtype) for k, name in enumerate(LAYOUTS)}
    axes = ("dp", P, T)

    def step(grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g[0, 0, 0], grads)
        reduced = reduce_gradients(grads, LAYOUTS)
        assert {g.dtype for g in jax.tree.leaves(reduced)} == {jnp.dtype(dtype)}
        return jax.tree.map(lambda g: g[None, None, None], reduced)

    every = Spec(*axes)
    run = jax.shard_map(step, mesh=mesh, in_specs=(every,), out_specs=every, check_vma=False)
    found = jax.jit(run)(own)
    for name, layout in LAYOUTS.items():
        wanted = summed(name, own[name].astype(np.float32))
        got = np.asarray(found[name], np.float32)
        for place in np.ndindex(2, 2, 2):
            mine = wanted[place]
            if layout.zero is not None:  # its own part along the replicas, in their order
                rank = 0
                for axis in layout.replicas:
                    rank = 2 * rank + place[axes.index(axis)]
                count = GRID.extent(layout.replicas)
                mine = np.split(mine, count, axis=layout.zero)[rank]
            rtol = 1e-6 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(got[place], mine, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_gathered_from_their_masters_in_the_compute_dtype(
    mesh: Any, dtype: str
) -> None:
    random = np.random.default_rng(0)
    masters = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    run = jax.shard_map(
        lambda w: gather(w, LAYOUTS, dtype),
        mesh=mesh,
        in_specs=(specs(LAYOUTS),),
        out_specs=specs(LAYOUTS, master=False),
        check_vma=False,
    )
    found = jax.jit(run)(masters)
    for name, weight in masters.items():
        assert found[name].dtype == jnp.dtype(dtype)
        for shard in found[name].addressable_shards:
            wanted = weight[shard.index].astype(dtype)
            np.testing.assert_array_equal(np.asarray(shard.data), wanted, err_msg=name)


def collectives(mesh: Any, layouts: dict[str, Layout], shapes: dict[str, Any]) -> int:
    """All-reduces of the reduction."""
    own = {name: jnp.zeros((2, 2, 2, *shape)) for name, shape in shapes.items()}

    def step(grads: Any) -> Any:
        return reduce_gradients(jax.tree.map(lambda g: g[0, 0, 0], grads), layouts)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(Spec("dp", P, T),), out_specs=Spec(), check_vma=False
    )
    return str(jax.make_jaxpr(run)(own)).count(" psum")


def test_small_gradients_travel_together_and_large_ones_alone(mesh: Any) -> None:
    whole, partial = Layout("llm", ((),), ("dp",), ()), Layout("llm", ((),), ("dp",), (T,))
    small = {
        f"{name}{k}": layout for k in range(5) for name, layout in (("w", whole), ("p", partial))
    }
    assert collectives(mesh, small, dict.fromkeys(small, (3,))) == 2
    large = {"a": whole, "b": whole, "c": whole}
    assert collectives(mesh, large, {"a": (3,), "b": (3,), "c": (1 << 18,)}) == 2
    assert collectives(mesh, large, dict.fromkeys(large, (1 << 18,))) == 3
