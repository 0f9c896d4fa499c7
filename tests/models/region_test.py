"""Which activations a layer names, and what saving them changes."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from optimus_jax.models.blocks import BLOCKS, run
from optimus_jax.models.layers import Sizes
from optimus_jax.models.region import POLICIES, SEQUENTIAL, Kept, Recording
from optimus_jax.models.weights import initialise
from tests.models.small import quick_jit, random_like

ROWS, LENGTH, WIDTH, HEADS, KV, HIDDEN = 2, 6, 24, 6, 2, 20
SIZES = Sizes(WIDTH, HEADS, KV, HIDDEN, layers=2)
HEAD = WIDTH // HEADS
ALL = ("qkv_proj", "scores", "attention", "out_proj", "mlp_up")
X = np.random.default_rng(1).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
DY = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)


@functools.cache
def weights(name: str) -> Any:
    def declare(rngs: nnx.Rngs) -> nnx.Module:
        return BLOCKS[name].declare(rngs, SIZES)

    return random_like(jax.eval_shape(lambda: initialise(declare, jax.random.key(0))))


def recorded(name: str, names: tuple[str, ...], p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    region = Recording(SEQUENTIAL, names)
    return run(BLOCKS[name].pieces(True), p, x, region), region.saved


def backward(name: str, p: Any, x: jax.Array, dy: jax.Array, saved: Any) -> Any:
    _, vjp = jax.vjp(partial(run, BLOCKS[name].pieces(True), region=Kept(SEQUENTIAL, saved)), p, x)
    return vjp(dy)


def shapes(name: str) -> Any:
    saved = jax.eval_shape(partial(recorded, name, ALL), weights(name), X)[1]
    return jax.tree.map(lambda x: x.shape, saved)


def test_names_and_shapes_of_what_a_layer_keeps() -> None:
    square, up = (ROWS, HEADS, LENGTH, LENGTH), (ROWS, LENGTH, HIDDEN)
    kept = {
        "qkv_proj": (3, ROWS, HEADS, LENGTH, HEAD),
        "scores": square,
        "attention": X.shape,
        "out_proj": X.shape,
        "mlp_up": up,
    }
    assert shapes("gpt") == shapes("vit") == kept
    # both products of a layer's end are one sum, which has one name
    assert shapes("vit22b") == {name: kept[name] for name in ALL if name != "out_proj"}
    keys = ROWS, KV, LENGTH, HEAD
    queries = ROWS, HEADS, LENGTH, HEAD
    wanted = {**kept, "qkv_proj": (queries, keys, keys), "mlp_up": (ROWS, LENGTH, 2, HIDDEN)}
    assert shapes("llama") == wanted


def test_policies_save_more_and_more_of_what_layers_name() -> None:
    full, selective, none = (set(POLICIES[name]) for name in ("full", "selective", "none"))
    assert full == set()
    assert none - selective == {"scores"}
    assert none == set(ALL)


@pytest.mark.parametrize("policy", ["selective", "none"])
@pytest.mark.parametrize("name", ["gpt", "vit22b", "llama"])
def test_saved_activations_give_the_same_gradients(name: str, policy: str) -> None:
    p = weights(name)
    y, saved = quick_jit(partial(recorded, name, POLICIES[policy]))(p, X)
    again = quick_jit(partial(backward, name))
    plain, found = again(p, X, DY, {}), again(p, X, DY, saved)
    np.testing.assert_array_equal(y, quick_jit(partial(run, BLOCKS[name].pieces(True)))(p, X))

    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    jax.tree.map(check, found, plain)


def products(name: str, policy: str) -> int:
    """Matrix products that are left in a compiled backward."""
    p, names = weights(name), POLICIES[policy]
    saved = jax.eval_shape(partial(recorded, name, names), p, X)[1]
    lowered = jax.jit(partial(backward, name)).lower(p, X, DY, saved)
    return lowered.compile().as_text().count(" dot(")


@pytest.mark.parametrize(
    ("name", "forward", "last"), [("gpt", 6, 1), ("vit22b", 6, 2), ("llama", 7, 1)]
)
def test_what_is_saved_is_not_computed_again(name: str, forward: int, last: int) -> None:
    """Two products of the backward for each of the forward, and those computed again: all but the
    last ones, the scores alone, none."""
    assert products(name, "full") == 2 * forward + forward - last
    assert products(name, "selective") == 2 * forward + 1
    assert products(name, "none") == 2 * forward


def test_the_saved_value_is_the_one_that_counts() -> None:
    """Another value in its place changes the result: it is not only carried along."""
    p = weights("gpt")
    saved = recorded("gpt", ("attention",), p, X)[1]
    other = {"attention": 2 * saved["attention"]}
    steps = BLOCKS["gpt"].pieces(True)
    y, changed = (run(steps, p, X, Kept(SEQUENTIAL, s)) for s in (saved, other))
    assert np.abs(y - changed).max() > 0.1


def test_two_layers_in_one_recording_are_refused() -> None:
    region = Recording(SEQUENTIAL, ("mlp_up",))
    steps = BLOCKS["gpt"].pieces(True)
    run(steps, weights("gpt"), X, region)
    with pytest.raises(ValueError, match="mlp_up is kept twice"):
        run(steps, weights("gpt"), X, region)
