"""Every part of the model cut over a tensor group against the same part on one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from optimus_jax.models.blocks import BLOCKS, run
from optimus_jax.models.layers import Sizes
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import initialise, logical_axes
from optimus_jax.parallel.tensor import TensorRegion, is_partial
from tests.models.small import modern_model, quick_jit, random_batch, random_like, random_weights

AXES = ("to", "ti")
CUT = ("heads", "hidden", "vocabulary")
MODEL = modern_model()
CONFIG = MODEL.config
WEIGHTS = random_weights(MODEL)
BATCH = random_batch(MODEL, 2)


def is_axes(x: Any) -> bool:
    return isinstance(x, tuple)


def mesh(tp: int) -> Mesh:
    """Two axes, one after the other, so that their order counts."""
    return Mesh(np.array(jax.devices()[:tp]).reshape(tp // 2, 2), AXES)


def noise(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Part:
    """`run(p, x, region)`, the place of its weights in the tree of all, and which of x and y are
    cut along positions where the sequence is."""

    run: Callable[[Any, jax.Array, Region], jax.Array]
    place: tuple[str, ...]
    weights: Any
    axes: Any
    x: np.ndarray
    x_cut: bool = True
    y_cut: bool = True


def block(name: str, causal: bool) -> Part:
    sizes = Sizes(width=48, heads=8, kv_heads=4, hidden=36, layers=2)

    def declare(rngs: nnx.Rngs) -> nnx.Module:
        return BLOCKS[name].declare(rngs, sizes)

    weights = random_like(jax.eval_shape(lambda: initialise(declare, jax.random.key(0))))
    steps = BLOCKS[name].pieces(causal)
    place = ("llm" if causal else "encoders", "layers")
    return Part(partial(run, steps), place, weights, logical_axes(declare), noise(2, 8, 48))


def end(run: Any, place: tuple[str, ...], x: np.ndarray, **cuts: bool) -> Part:
    weights, axes = WEIGHTS, MODEL.axes()
    for name in place:
        weights, axes = weights[name], axes[name]
    return Part(run, place, weights, axes, x, **cuts)


def embed_input(name: str, p: Any, x: jax.Array, region: Region) -> jax.Array:
    """Of the batch's own pictures or sound: x stands in for them, unused."""
    return MODEL.embed_input(name, p, jnp.asarray(BATCH[CONFIG.encoders[name].input]), region)


def head(p: Any, x: jax.Array, region: Region) -> jax.Array:
    return MODEL.summed_loss(p, x, BATCH["targets"], BATCH["weights"], region)


def embed_text(p: Any, x: jax.Array, region: Region) -> jax.Array:
    return MODEL.embed_text(p, BATCH["tokens"], x, region)


VISION = ("encoders", "vision")
SOUND = ("encoders", "sound")
LLM = CONFIG.llm.width
PARTS = {
    "vit": block("vit", causal=False),
    "gpt": block("gpt", causal=True),
    "vit22b": block("vit22b", causal=False),
    "llama": block("llama", causal=True),
    "pictures": end(partial(embed_input, "vision"), (*VISION, "embed"), noise(1, 4), x_cut=False),
    "sound": end(partial(embed_input, "sound"), (*SOUND, "embed"), noise(1, 4), x_cut=False),
    "projector": end(
        partial(MODEL.project, "vision"), (*VISION, "projector"), noise(2, 4, 16), y_cut=False
    ),
    "text": end(embed_text, ("llm", "embed"), noise(2, CONFIG.image_tokens, LLM), x_cut=False),
    "head": end(head, ("llm", "head"), noise(2, CONFIG.sequence, LLM), y_cut=False),
}


def value_and_gradients(part: Part, p: Any, x: jax.Array, dy: jax.Array, region: Region) -> Any:
    y, vjp = jax.vjp(lambda p, x: part.run(p, x, region), p, x)
    return y, *vjp(dy)


def is_cut(axes: tuple[str | None, ...]) -> bool:
    return any(name in CUT for name in axes)


def weight_specs(axes: Any) -> Any:
    def one(names: tuple[str | None, ...]) -> Spec:
        return Spec(*(AXES if name in CUT else None for name in names))

    return jax.tree.map(one, axes, is_leaf=is_axes)


def places(tree: Any, start: tuple[str, ...]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: (*start, *(step.key for step in path)), tree, is_leaf=is_axes
    )


def sharded(part: Part, tp: int, sequence: bool, make: Any = TensorRegion) -> Any:
    """A function like value_and_gradients, over a tensor group. Weights that are not cut give one
    gradient for each rank, [ranks, ...], after the sum over ranks where they are partial."""
    along = Spec(None, AXES if sequence else None)
    x_spec, y_spec = along if part.x_cut else Spec(), along if part.y_cut else Spec()
    specs, paths = weight_specs(part.axes), places(part.axes, part.place)

    def own(axes: Any, path: Any, gradient: jax.Array) -> jax.Array:
        if is_cut(axes):
            return gradient
        if is_partial(path, cut=False, sequence=sequence):
            gradient = jax.lax.psum(gradient, AXES)
        return gradient[None]

    def local(p: Any, x: jax.Array, dy: jax.Array) -> Any:
        region = make(AXES, tp, sequence)
        y, dp, dx = value_and_gradients(part, p, x, dy, region)
        return y, jax.tree.map(own, part.axes, paths, dp, is_leaf=is_axes), dx

    out = jax.tree.map(
        lambda axes, spec: spec if is_cut(axes) else Spec(AXES), part.axes, specs, is_leaf=is_axes
    )
    return jax.shard_map(
        local,
        mesh=mesh(tp),
        in_specs=(specs, x_spec, y_spec),
        out_specs=(y_spec, out, x_spec),
        check_vma=False,
    )


def assert_close(found: Any, wanted: Any, name: object = "") -> None:
    """To 1e-5 of the greatest value."""
    scale = np.abs(wanted).max()
    assert scale > 0, name
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale, err_msg=str(name))


@functools.cache
def on_one_device(name: str) -> Any:
    """The part's value and gradients, and what they were computed from."""
    part = PARTS[name]
    shape = jax.eval_shape(lambda p, x: part.run(p, x, SEQUENTIAL), part.weights, part.x).shape
    inputs = part.weights, part.x, noise(*shape, seed=2)
    return inputs, quick_jit(partial(value_and_gradients, part, region=SEQUENTIAL))(*inputs)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("name", "tp"), [(name, tp) for name in PARTS for tp in (2, 4) if name in BLOCKS or tp == 4]
)
def test_a_part_cut_over_devices_is_the_part(name: str, tp: int, sequence: bool) -> None:
    part = PARTS[name]
    inputs, (y, dp, dx) = on_one_device(name)
    y_, dp_, dx_ = quick_jit(sharded(part, tp, sequence))(*inputs)
    assert_close(y_, y, "value")
    if name not in ("pictures", "sound"):
        assert_close(dx_, dx, "gradient of the input")

    def check(axes: Any, path: Any, found: Any, wanted: Any) -> None:
        if is_cut(axes):
            return assert_close(found, wanted, path)
        assert found.shape == (tp, *wanted.shape)
        for copy in found:  # whole on every rank
            assert_close(copy, wanted, path)

    paths = places(part.axes, part.place)
    jax.tree.map(check, part.axes, paths, dp_, dp, is_leaf=is_axes)


def composed(params: Any, batch: Any, region: Region) -> jax.Array:
    """The loss before division, with one region for all parts, layers in a plain loop."""
    features = []
    for name, encoder in CONFIG.encoders.items():
        own = params["encoders"][name]
        x = MODEL.embed_input(name, own["embed"], batch[encoder.input], region)
        for k in range(encoder.layers):
            layer = jax.tree.map(lambda w, k=k: w[k], own["layers"])
            x = MODEL.encoder_layer(name, layer, x, region)
        features.append(MODEL.project(name, own["projector"], x, region))
    llm = params["llm"]
    x = MODEL.embed_text(llm["embed"], batch["tokens"], jnp.concatenate(features, 1), region)
    for k in range(CONFIG.llm.layers):
        x = MODEL.llm_layer(jax.tree.map(lambda w, k=k: w[k], llm["layers"]), x, region)
    return MODEL.summed_loss(llm["head"], x, batch["targets"], batch["weights"], region)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_the_whole_model_cut_over_devices_is_the_model(sequence: bool) -> None:
    part = Part(
        lambda p, _, region: composed(p, BATCH, region),
        (),
        WEIGHTS,
        MODEL.axes(),
        np.zeros((1, 4), np.float32),
        x_cut=False,
        y_cut=False,
    )
    total = BATCH["weights"].sum()
    loss, gradients = quick_jit(jax.value_and_grad(MODEL.loss))(WEIGHTS, BATCH)
    inputs = WEIGHTS, part.x, np.float32(1 / total)
    y, dp, _ = quick_jit(sharded(part, 4, sequence))(*inputs)
    assert float(y) / total == pytest.approx(float(loss), rel=1e-5)

    def check(axes: Any, path: Any, found: Any, wanted: Any) -> None:
        found = found if is_cut(axes) else found[0]
        assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max(), path

    jax.tree.map(check, part.axes, places(part.axes, ()), dp, gradients, is_leaf=is_axes)
