"""Greedy decoding against a plain loop, and the score of its readings."""

from __future__ import annotations

import numpy as np
import pytest

from optimus_jax import decode
from optimus_jax.data import tokens
from optimus_jax.decode import Decoder, caption_accuracy, digit_accuracy
from tests.models.small import quick_jit, random_batch, random_weights, small_model

MODEL = small_model()
CONFIG = MODEL.config
CAPTION = {tokens.EOS, *range(tokens.FIRST_CHARACTER, tokens.SIZE)}


def telling_case() -> tuple[dict, np.ndarray]:
    """Weights and pictures, from black to white, that make the readings differ."""
    weights, images = random_weights(MODEL, seed=6), random_batch(MODEL, 6)["image"]
    encoder = weights["encoders"]["vision"]
    encoder["projector"]["mlp"]["down"] *= 4
    encoder["embed"]["position"] *= 0.3
    weights["llm"]["embed"]["position"] *= 2
    levels = 38 * np.arange(6, dtype=np.uint8)
    return weights, images // 4 + levels[:, None, None, None]


def greedy(weights: dict, images: np.ndarray) -> tuple[list[list[int]], int]:
    """The ids that follow each picture, one position and one row at a time, and how often the
    likeliest token could not stand in a caption."""
    logits, refused = quick_jit(MODEL.logits), 0
    ids = np.full((len(images), CONFIG.sequence), tokens.PAD, np.int32)
    ids[:, : CONFIG.image_tokens] = tokens.IMAGE
    ids[:, CONFIG.image_tokens] = tokens.BOS
    for position in range(CONFIG.image_tokens, CONFIG.sequence - 1):
        scores = np.asarray(logits(weights, {"image": images, "tokens": ids}))
        for row in range(len(images)):
            ranked = np.argsort(-scores[row, position])
            refused += int(ranked[0]) not in CAPTION
            ids[row, position + 1] = next(t for t in ranked if int(t) in CAPTION)
    return ids[:, CONFIG.image_tokens + 1 :].tolist(), refused


def test_captions_are_those_of_a_plain_greedy_loop() -> None:
    weights, images = telling_case()
    ids, refused = greedy(weights, images)
    captions = Decoder(MODEL, weights).captions(images)
    assert captions == [tokens.decode(row) for row in ids]
    # mistakes would show: readings differ, some end early, some likeliest tokens are refused
    assert len(set(captions)) > 1
    assert any(tokens.EOS in row[:-1] for row in ids)
    assert refused > 0


def test_many_pictures_are_read_and_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, images = telling_case()
    batch = {name: np.asarray(x) for name, x in random_batch(MODEL, 6).items()}
    batch = {name: x[:5] for name, x in {**batch, "image": images}.items()}
    whole = Decoder(MODEL, weights)
    captions, losses = whole.captions(batch["image"]), whole.losses(batch)
    monkeypatch.setattr(decode, "ROWS", 2)
    parts = Decoder(MODEL, weights)
    assert parts.captions(batch["image"]) == captions
    assert len(set(captions)) > 1
    np.testing.assert_allclose(parts.losses(batch), losses, rtol=1e-5)


def test_losses_are_those_of_each_row_alone() -> None:
    weights, _ = telling_case()
    batch = {name: np.asarray(x) for name, x in random_batch(MODEL, 3).items()}
    losses, loss = Decoder(MODEL, weights).losses(batch), quick_jit(MODEL.loss)
    assert losses.shape == (3,)
    for row in range(3):
        alone = {name: x[row : row + 1] for name, x in batch.items()}
        mean = float(loss(weights, alone))
        assert losses[row] == pytest.approx(mean * batch["weights"][row].sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("readings", "captions", "share"),
    [(["a cat", "a dog"], ["a cat", "a do"], 0.5), ([""], [""], 1), (["a"], ["b"], 0)],
)
def test_caption_accuracy(readings: list[str], captions: list[str], share: float) -> None:
    assert caption_accuracy(readings, captions) == share


@pytest.mark.parametrize(
    ("readings", "captions", "share"),
    [
        (["3 1 4"], ["3 1 4"], 1),
        (["3 1 5"], ["3 1 4"], 2 / 3),
        ([""], ["3 1 4"], 0),
        (["1 4"], ["3 1 4"], 0),  # one too few, so none is at its place
        (["3"], ["3 1 4"], 1 / 3),
        (["3 1 4 1"], ["3 1 4"], 1),  # a digit too many costs nothing
        (["314"], ["3 1 4"], 0),  # one word
        (["  3  1 "], ["3 1"], 1),
        (["1", "2 2 2"], ["1", "2 9 9"], 2 / 4),  # of all digits, not of captions
        (["2 2 2", "1"], ["1", "2 2 2"], 0),
    ],
)
def test_digit_accuracy(readings: list[str], captions: list[str], share: float) -> None:
    assert digit_accuracy(readings, captions) == pytest.approx(share)


def test_a_reading_for_each_caption() -> None:
    with pytest.raises(ValueError, match="longer"):
        digit_accuracy(["1"], ["1", "2"])
