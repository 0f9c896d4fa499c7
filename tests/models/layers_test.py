"""The parts of a transformer layer against their definitions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from optimus_jax.models import blocks, layers, prenorm
from optimus_jax.models.layers import Sizes
from optimus_jax.models.region import SEQUENTIAL
from optimus_jax.models.weights import initialise, logical_axes
from tests.models import slow
from tests.models.small import quick_jit, random_like

WIDTH, HEADS, HIDDEN, LENGTH = 12, 3, 20, 5


def block_weights(seed: int = 0) -> dict:
    sizes = Sizes(WIDTH, HEADS, HEADS, HIDDEN, layers=2)
    declare = lambda rngs: prenorm.Block(rngs, sizes)  # noqa: E731
    return random_like(jax.eval_shape(lambda: initialise(declare, jax.random.key(0))), seed)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)


def test_layer_norm(x: np.ndarray) -> None:
    p = block_weights()["mlp_norm"]
    wanted = [[slow.layer_norm(p, v) for v in row] for row in 3 * x + 7]
    np.testing.assert_allclose(layers.layer_norm(p, 3 * x + 7), wanted, rtol=1e-4, atol=1e-5)


def test_layer_norm_of_a_constant_vector_is_its_bias() -> None:
    p = {"scale": np.full(4, 2.0, np.float32), "bias": np.arange(4, dtype=np.float32)}
    np.testing.assert_array_equal(
        layers.layer_norm(p, np.full((1, 1, 4), 9, np.float32)), [[p["bias"]]]
    )


def test_mlp_is_gelu_between_two_affine_maps(x: np.ndarray) -> None:
    p = block_weights()["mlp"]
    wanted = [[slow.mlp(p, v) for v in row] for row in x]
    np.testing.assert_allclose(layers.mlp(p, x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_neighbouring_heads_share_keys_and_values(kv_heads: int, causal: bool) -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(2, n, LENGTH, 4)) for n in (6, kv_heads, kv_heads))
    found = layers.attend(*map(jnp.float32, (q, k, v)), causal, SEQUENTIAL)
    assert found.shape == (2, LENGTH, 6 * 4)
    for row in range(2):
        for n in range(6):
            shared = n // (6 // kv_heads)
            wanted = slow.mix(q[row, n], k[row, shared], v[row, shared], causal)
            own = found[row, :, 4 * n : 4 * n + 4]
            np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-5)


def test_softmax_gradients_are_those_of_jax() -> None:
    rng = np.random.default_rng(8)
    q, k, v = (jnp.float32(rng.normal(size=(1, 2, LENGTH, 4))) for _ in range(3))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        share = jax.nn.softmax(jnp.einsum("bnth,bnsh->bnts", q, k) / 2, axis=-1)
        return jnp.einsum("bnts,bnsh->btnh", share, v).reshape(1, LENGTH, 8)

    def gradients(mixed: Any) -> Any:
        loss = lambda q, k, v: jnp.sin(3 * mixed(q, k, v)).sum()  # noqa: E731
        return quick_jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    found = gradients(lambda q, k, v: layers.attend(q, k, v, False, SEQUENTIAL))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, gradients(plain))


@pytest.mark.parametrize("causal", [True, False])
def test_block(x: np.ndarray, causal: bool) -> None:
    p = block_weights()
    wanted = [slow.block(p, row, causal) for row in x]
    found = quick_jit(partial(blocks.run, prenorm.pieces(causal)))(p, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_normalised_in_float32(x: np.ndarray) -> None:
    """Far from zero, bfloat16 has no digits left for the differences."""
    p = {"scale": jnp.ones(WIDTH, jnp.bfloat16), "bias": jnp.zeros(WIDTH, jnp.bfloat16)}
    far = jnp.asarray(x + 30, jnp.bfloat16)
    found = layers.layer_norm(p, far)
    assert found.dtype == jnp.bfloat16
    wanted = layers.layer_norm({k: v.astype(jnp.float32) for k, v in p.items()}, np.float32(far))
    np.testing.assert_allclose(np.float32(found), wanted, rtol=2**-8, atol=1e-6)


def dtypes_of(name: str, jaxpr: Any) -> set[np.dtype]:
    """The dtypes in which a traced function runs an operation."""
    found = {eqn.invars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == name}
    for eqn in jaxpr.eqns:
        for inner in jax_core.jaxprs_in_params(eqn.params):
            found |= dtypes_of(name, inner)
    return found


def test_the_softmax_of_bfloat16_attention_runs_in_float32() -> None:
    p = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), block_weights())
    x = jnp.ones((1, LENGTH, WIDTH), jnp.bfloat16)
    attention = prenorm.pieces(causal=True)[:3]
    traced = jax.make_jaxpr(partial(blocks.run, attention))(p, x)
    assert dtypes_of("exp", traced.jaxpr) == {np.dtype("float32")}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_block_computes_in_the_dtype_it_is_given(x: np.ndarray, dtype: jnp.dtype) -> None:
    p = jax.tree.map(lambda w: jnp.asarray(w, dtype), block_weights())
    run = partial(blocks.run, prenorm.pieces(causal=True))
    assert jax.eval_shape(run, p, jnp.asarray(x, dtype)).dtype == dtype


def test_what_is_added_to_the_residual_starts_smaller_in_deep_stacks() -> None:
    def initial(layers_of_stack: int) -> Any:
        sizes = Sizes(64, 4, 4, 256, layers_of_stack)
        declare = lambda rngs: prenorm.Block(rngs, sizes)  # noqa: E731
        p = quick_jit(lambda key: initialise(declare, key))(jax.random.key(0))
        return jax.tree.map(np.asarray, p)

    shallow, deep = initial(2), initial(8)
    for part, into, back in (("attention", "qkv", "out"), ("mlp", "up", "down")):
        np.testing.assert_array_equal(deep[part][into], shallow[part][into])
        np.testing.assert_allclose(deep[part][back], shallow[part][back] / 2, rtol=1e-5)
        for name in (into, back):
            assert abs(deep[part][name].mean()) < deep[part][name].std() / 10
            assert not deep[part][f"{name}_bias"].any()
    for norm in ("attention_norm", "mlp_norm"):
        assert (deep[norm]["scale"] == 1).all()
        assert not deep[norm]["bias"].any()


def test_stacked_layers_start_apart_and_do_not_depend_on_one_another() -> None:
    def declare(rngs: nnx.Rngs) -> layers.Mlp:
        return layers.Mlp(rngs, 4, 6, 4, 0.02)

    make = quick_jit(lambda key: initialise(declare, key, layers=3))
    stacked = make(jax.random.key(3))
    assert {w.shape[0] for w in jax.tree.leaves(stacked)} == {3}
    up = np.asarray(stacked["up"])
    assert len(np.unique(up)) == up.size
    np.testing.assert_array_equal(up, make(jax.random.key(3))["up"])
    assert not np.any(up == make(jax.random.key(4))["up"])


def test_axes_name_each_dimension() -> None:
    def declare(rngs: nnx.Rngs) -> layers.Mlp:
        return layers.Mlp(rngs, 4, 6, 5, 0.02)

    plain = {
        "up": ("width", "hidden"),
        "up_bias": ("hidden",),
        "down": ("hidden", "width"),
        "down_bias": ("width",),
    }
    assert logical_axes(declare) == plain
    stacked = {name: ("layers", *axes) for name, axes in plain.items()}
    assert logical_axes(declare, stacked=True) == stacked
