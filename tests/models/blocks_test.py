"""ViT-22B's and LLaMA's layers against torch, written once more from their papers."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from optimus_jax.config import EncoderConfig, LlmConfig
from optimus_jax.models import blocks
from optimus_jax.models.blocks import BLOCKS, run
from optimus_jax.models.layers import Sizes
from optimus_jax.models.weights import initialise
from tests.models.small import quick_jit, random_like

ROWS, LENGTH, WIDTH, HEADS, KV, HIDDEN = 2, 7, 48, 6, 2, 20
HEAD = WIDTH // HEADS


@functools.cache
def weights(name: str, kv_heads: int = KV) -> Any:
    sizes = Sizes(WIDTH, HEADS, kv_heads, HIDDEN, layers=2)

    def declare(rngs: nnx.Rngs) -> nnx.Module:
        return BLOCKS[name].declare(rngs, sizes)

    return random_like(jax.eval_shape(lambda: initialise(declare, jax.random.key(0))))


X = np.random.default_rng(1).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
DY = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)


def torch_vit22b(torch: Any, p: Any, x: Any, causal: bool) -> Any:
    F = torch.nn.functional
    n = F.rms_norm(x, (WIDTH,), p["norm"]["scale"], 1e-5)
    weight = p["attention"]["qkv"].reshape(WIDTH, 3, WIDTH)
    q, k, v = ((n @ weight[:, c]).view(ROWS, LENGTH, HEADS, HEAD).transpose(1, 2) for c in range(3))
    q = F.rms_norm(q, (HEAD,), p["attention"]["qk_norm"]["query_scale"], 1e-5)
    k = F.rms_norm(k, (HEAD,), p["attention"]["qk_norm"]["key_scale"], 1e-5)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out = mixed.transpose(1, 2).flatten(2) @ p["attention"]["out"].flatten(0, 1)
    hidden = F.gelu(n @ p["mlp"]["up"] + p["mlp"]["up_bias"], approximate="tanh")
    return x + out + hidden @ p["mlp"]["down"] + p["bias"]


def torch_llama(torch: Any, p: Any, x: Any, causal: bool) -> Any:
    """As Hugging Face's LlamaDecoderLayer has it."""
    F = torch.nn.functional
    n = F.rms_norm(x, (WIDTH,), p["attention_norm"]["scale"], 1e-5)
    q = torch.einsum("btd,dnh->bnth", n, p["attention"]["q"])
    k, v = (torch.einsum("btd,dkh->bkth", n, p["attention"]["kv"][:, c]) for c in range(2))
    inverse = 1 / 10000 ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(LENGTH).float(), inverse).repeat(1, 2)

    def turn(x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-b, a), dim=-1) * angles.sin()

    repeats = HEADS // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (turn(k), v))
    mixed = F.scaled_dot_product_attention(turn(q), k, v, is_causal=causal)
    x = x + torch.einsum("bnth,nhd->btd", mixed, p["attention"]["out"])
    n = F.rms_norm(x, (WIDTH,), p["mlp_norm"]["scale"], 1e-5)
    gate, up = n @ p["mlp"]["up"][:, 0], n @ p["mlp"]["up"][:, 1]
    return x + (F.silu(gate) * up) @ p["mlp"]["down"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "kv_heads", "other"),
    [("vit22b", KV, torch_vit22b), ("llama", KV, torch_llama), ("llama", HEADS, torch_llama)],
)
def test_values_and_gradients_are_those_of_torch(
    name: str, kv_heads: int, other: Any, causal: bool
) -> None:
    torch = pytest.importorskip("torch")
    p = weights(name, kv_heads)

    def ours(p: Any, x: jax.Array) -> Any:
        y, vjp = jax.vjp(partial(run, BLOCKS[name].pieces(causal)), p, x)
        return y, vjp(DY)

    y, gradients = quick_jit(ours)(p, X)
    theirs = jax.tree.map(lambda w: torch.tensor(w, requires_grad=True), (p, X))
    wanted = other(torch, *theirs, causal)
    wanted.backward(torch.tensor(DY))

    def check(found: Any, tensor: Any) -> None:
        scale = np.abs(tensor).max()
        np.testing.assert_allclose(found, tensor, rtol=0, atol=1e-5 * scale)

    check(y, wanted.detach().numpy())
    jax.tree.map(lambda found, leaf: check(found, leaf.grad.numpy()), gradients, theirs)


@pytest.mark.parametrize("name", BLOCKS)
def test_pieces_in_a_row_are_the_layer_whoever_passes_the_state_on(name: str) -> None:
    """Each piece takes arrays alone, so that they may run far apart."""
    steps, p = BLOCKS[name].pieces(False), weights(name)
    state = (X,)
    for step in steps:
        state = tuple(map(np.asarray, step(p, state, blocks.SEQUENTIAL)))
    np.testing.assert_allclose(state[0], run(steps, p, X), rtol=1e-6, atol=1e-6)
    assert len(steps) >= 4
    assert len(state) == 1


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_causal_in_an_llm_and_never_in_an_encoder(name: str) -> None:
    llm = LlmConfig(2, WIDTH, HEADS, HIDDEN, block=name)
    encoder = EncoderConfig(2, WIDTH, HEADS, HIDDEN, patch=1, block=name)
    p = weights(name, HEADS)
    other = X.copy()
    other[:, -1] *= -1
    for part, causal in ((llm, True), (encoder, False)):
        change = run(blocks.pieces(part), p, other) - run(blocks.pieces(part), p, X)
        first = np.abs(change[:, :-1]).max()
        assert (first == 0) if causal else (first > 1e-3), part


def test_kv_heads_of_zero_are_as_many_as_heads() -> None:
    def shape(kv_heads: int) -> tuple[int, ...]:
        part = LlmConfig(2, WIDTH, HEADS, HIDDEN, block="llama", kv_heads=kv_heads)
        made = jax.eval_shape(lambda: initialise(blocks.declare(part), jax.random.key(0)))
        return made["attention"]["kv"].shape

    assert shape(0) == (WIDTH, 2, HEADS, HEAD)
    assert shape(3) == (WIDTH, 2, 3, HEAD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_in_the_dtype_it_is_given(name: str, dtype: str) -> None:
    p, x = jax.tree.map(lambda w: jax.numpy.asarray(w, dtype), (weights(name), X))
    assert jax.eval_shape(partial(run, BLOCKS[name].pieces(True)), p, x).dtype == dtype
