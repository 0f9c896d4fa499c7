"""A model with several encoders and a modern LLM, as a whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.data.noise import random_batch
from optimus_jax.models import language
from optimus_jax.models.mllm import Mllm
from tests.models.small import modern_model, quick_jit, random_weights, small_model

MODEL = modern_model()
CONFIG = MODEL.config
WEIGHTS = random_weights(MODEL)
BATCH = random_batch(CONFIG, 2)

loss_and_gradients = quick_jit(jax.value_and_grad(MODEL.loss))


def slices(stack: Any) -> list[Any]:
    count = len(jax.tree.leaves(stack)[0])
    return [jax.tree.map(lambda w, k=k: w[k], stack) for k in range(count)]


def test_features_stand_in_the_order_of_the_encoders() -> None:
    def hidden(params: Any, batch: Any) -> jax.Array:
        features = []
        for name, x in (("vision", batch["image"]), ("sound", batch["audio"])):
            own = params["encoders"][name]
            x = MODEL.embed_input(name, own["embed"], x)
            for layer in slices(own["layers"]):
                x = MODEL.encoder_layer(name, layer, x)
            features.append(MODEL.project(name, own["projector"], x))
        llm = params["llm"]
        tokens, seen = batch["tokens"], jnp.concatenate(features, 1)
        x = language.embed(llm["embed"], tokens, seen, CONFIG.image_token)
        for layer in slices(llm["layers"]):
            x = MODEL.llm_layer(layer, x)
        return x

    assert [CONFIG.features_of(name) for name in CONFIG.encoders] == [4, 8]
    wanted = quick_jit(hidden)(WEIGHTS, BATCH)
    found = quick_jit(MODEL.hidden)(WEIGHTS, BATCH)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_every_weight_takes_part_unless_there_are_no_images() -> None:
    _, gradients = loss_and_gradients(WEIGHTS, BATCH, True)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        norm = float(np.linalg.norm(gradient))
        assert np.isfinite(norm) and norm > 1e-6, path
    _, gradients = loss_and_gradients(WEIGHTS, BATCH, False)
    assert not any(np.any(g) for g in jax.tree.leaves(gradients["encoders"]))


def test_recomputing_layers_changes_nothing() -> None:
    again = dataclasses.replace(MODEL, recompute=True)
    found = quick_jit(jax.value_and_grad(again.loss))(WEIGHTS, BATCH)
    wanted = loss_and_gradients(WEIGHTS, BATCH, True)

    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())

    jax.tree.map(check, found, wanted)


def test_llama_has_no_learned_positions_and_no_bias_in_the_heads_norm() -> None:
    llm = WEIGHTS["llm"]
    assert set(llm["embed"]) == {"token"}
    assert set(llm["head"]["norm"]) == {"scale"}
    assert set(random_weights(small_model())["llm"]["embed"]) == {"token", "position"}
    tokens = np.full((1, CONFIG.sequence), 5)
    features = np.zeros((1, CONFIG.image_tokens, CONFIG.llm.width), np.float32)
    x = MODEL.embed_text(llm["embed"], tokens, features)
    np.testing.assert_array_equal(x, np.broadcast_to(llm["embed"]["token"][5], x.shape))


def test_axes_cut_keys_and_values_by_their_heads() -> None:
    axes, shapes = MODEL.axes(), jax.eval_shape(MODEL.init, jax.random.key(0))
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    jax.tree.map(lambda a, x: None if len(a) == x.ndim else 1 / 0, axes, shapes, is_leaf=is_axes)
    attention = axes["llm"]["layers"]["attention"]
    assert attention["kv"] == ("layers", "width", None, "heads", None)
    assert shapes["llm"]["layers"]["attention"]["kv"].shape == (2, 48, 2, 4, 6)
    norm = axes["encoders"]["vision"]["layers"]["attention"]["qk_norm"]
    assert norm == {"query_scale": ("layers", None), "key_scale": ("layers", None)}


@pytest.mark.parametrize("taken", [("image",), ("audio",), ("image", "audio")])
def test_batches_have_what_encoders_take(taken: tuple[str, ...]) -> None:
    image, sound = CONFIG.encoder, CONFIG.more_encoders["sound"]
    by_input = {"image": image, "audio": sound}
    first, *more = (by_input[name] for name in taken)
    others = {f"other{k}": encoder for k, encoder in enumerate(more)}
    config = dataclasses.replace(CONFIG, encoder=first, more_encoders=others)
    batch = random_batch(config, 3)
    assert set(batch) == {*taken, "tokens", "targets", "weights"}
    assert ((batch["tokens"] == config.image_token).sum(1) == config.image_tokens).all()
    if "audio" in taken:
        assert (batch["audio"].shape, batch["audio"].dtype) == ((3, 24, 5), np.float32)
    loss = jax.eval_shape(Mllm(config).loss, random_weights(Mllm(config)), batch)
    assert loss.shape == ()
