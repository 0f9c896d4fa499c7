"""Scores of readers that are known: one that reads, one that does not look."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optimus_jax import evaluate
from optimus_jax.config import Config, from_config_dict
from optimus_jax.train import example_batches

EXAMPLES = 40


@pytest.fixture
def config(values: dict[str, Any]) -> Config:
    return from_config_dict({**values, "evaluate_examples": EXAMPLES})


class Reader:
    """Stands for a decoder: looks each picture up, or says the same to all."""

    def __init__(self, config: Config, looks: bool):
        batches = example_batches(config, "heldout", EXAMPLES)
        images = batches.rows(0, range(EXAMPLES))["image"]
        self.captions_of = dict(
            zip((image.tobytes() for image in images), batches.captions(0), strict=True)
        )
        self.looks = looks

    def captions(self, images: np.ndarray) -> list[str]:
        return [self.captions_of[image.tobytes()] if self.looks else "1 2 3 4" for image in images]


def scores(config: Config, workdir: pathlib.Path, looks: bool, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(evaluate, "load_decoder", lambda config, workdir: Reader(config, looks))
    return evaluate.evaluate(config, workdir)


def test_a_reader_is_right_and_wrong_about_pictures_of_others(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scores(config, tmp_path, True, monkeypatch)
    assert found["digit_accuracy"] == 1
    assert found["shuffled_accuracy"] < 0.3


def test_who_does_not_look_scores_the_same_with_pictures_shuffled(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scores(config, tmp_path, False, monkeypatch)
    assert 0 < found["digit_accuracy"] == found["shuffled_accuracy"] < 0.3


def test_samples_are_named_by_caption_and_reading_and_replace_older_ones(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(config, tmp_path, False, monkeypatch)
    scores(config, tmp_path, True, monkeypatch)
    batches = example_batches(config, "heldout", EXAMPLES)
    captions = [caption.replace(" ", "") for caption in batches.captions(0)]
    samples = sorted((tmp_path / "samples").iterdir())
    assert [path.name for path in samples] == [
        f"{k}_is_{captions[k]}_read_{captions[k]}.png" for k in range(8)
    ]
    image = batches.rows(0, [0])["image"][0, :, :, 0]
    with Image.open(samples[0]) as picture:
        np.testing.assert_array_equal(np.asarray(picture)[::8, ::8], image)
        assert picture.size == (8 * 40, 8 * 16)


def test_nothing_to_evaluate_is_said(config: Config, tmp_path: pathlib.Path) -> None:
    with pytest.raises(evaluate.command.UserError, match=f"no checkpoints in {tmp_path}"):
        evaluate.load_decoder(config, tmp_path)
