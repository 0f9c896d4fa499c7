"""Scores of readers that are known: one that reads, one that does not look."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optimus_jax import evaluate, train
from optimus_jax.config import Config, from_config_dict
from optimus_jax.data import sources, tokens
from optimus_jax.train import example_batches
from tests.conftest import RunHere
from tests.data.small_sets import fashion_folder, own_folder, stamps_folder

EXAMPLES = 40


@pytest.fixture
def config(values: dict[str, Any]) -> Config:
    return from_config_dict({**values, "evaluate_examples": EXAMPLES})


class Reader:
    """Stands for a decoder: looks each picture up, or says the same to all."""

    def __init__(self, config: Config, looks: bool):
        rows = sources.make(config.data).load("heldout") or EXAMPLES
        batches = example_batches(config, "heldout", rows)
        images = batches.rows(0, range(rows))["image"]
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


class Judge(Reader):
    """Stands for a decoder: gives a picture with its own caption a loss of 1 for each character,
    and of 3 with others."""

    def losses(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        own = [
            self.captions_of[image.tobytes()] == tokens.decode(row)
            for image, row in zip(batch["image"], batch["tokens"], strict=True)
        ]
        return np.where(own, 1.0, 3.0) * batch["weights"].sum(1)


def other_config(values: dict[str, Any], name: str, folder: pathlib.Path) -> Config:
    given = importlib.import_module(f"configs.{name}").get_config().to_dict()
    given["data"]["folder"] = str(folder)
    return from_config_dict({**given, "evaluate_examples": EXAMPLES})


def test_garments_are_scored_by_whole_captions(
    values: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = other_config(values, "fashion", fashion_folder(tmp_path, test=10))
    found = scores(config, tmp_path, True, monkeypatch)
    assert found == {"caption_accuracy": 1.0, "shuffled_accuracy": 0.0}
    names = [path.name for path in (tmp_path / "samples").iterdir()]
    assert "1_is_a-photo-of-trousers_read_a-photo-of-trousers.png" in names


def test_stamps_are_scored_by_losses(
    values: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = other_config(values, "stamps", stamps_folder(tmp_path))
    monkeypatch.setattr(evaluate, "load_decoder", lambda config, workdir: Judge(config, True))
    found = evaluate.evaluate(config, tmp_path)
    samples = found.pop("samples")
    assert found == pytest.approx(
        {"heldout_loss": 1, "shuffled_loss": 3, "loss_gap_error": found["loss_gap_error"]}
    )
    # all gaps are 2 for each character, so they differ only by the captions' lengths, none here
    assert found["loss_gap_error"] == pytest.approx(0, abs=1e-6)
    assert 3 < len(samples) <= 8
    assert all(sample["caption"] == sample["reading"] for sample in samples)
    with Image.open(sorted((tmp_path / "samples").iterdir())[0]) as picture:
        assert picture.mode == "RGB"


def test_no_more_than_all_held_out_pictures_are_scored(
    values: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = other_config(values, "fashion", fashion_folder(tmp_path, test=7))
    rows: list[int] = []
    reader = Reader(config, False)
    monkeypatch.setattr(reader, "captions", lambda images: rows.append(len(images)) or [""] * 7)
    monkeypatch.setattr(evaluate, "load_decoder", lambda config, workdir: reader)
    assert evaluate.evaluate(config, tmp_path)["caption_accuracy"] == 0
    assert rows == [7]


def test_shifts_give_no_picture_its_own_or_an_equal_caption() -> None:
    captions = ["a", "b", "a", "c", "d", "e"]
    assert evaluate.other_shifts(captions, 9) == [1, 3, 5]
    assert evaluate.other_shifts(captions, 2) == [1, 3]
    spread = evaluate.other_shifts(list("abcdefghijklmnopq"), 4)
    assert spread == [1, 5, 9, 13]
    assert evaluate.other_shifts(["a", "a"], 3) == []


def test_captions_that_repeat_are_paired_with_others_each_for_itself() -> None:
    captions = ["a", "a", "a", "b"]
    found = evaluate.other_pictures(captions, 3)
    assert [pairing.tolist() for pairing in found] == [[3, 3, 3, 0], [3, 3, 3, 1], [3, 3, 3, 2]]
    (shifted,) = evaluate.other_pictures(["a", "b"], 3)
    assert shifted.tolist() == [1, 0]
    with pytest.raises(evaluate.command.UserError, match="2 held-out captions are all 'a'"):
        evaluate.other_pictures(["a", "a"], 3)


def test_pictures_of_a_folder_are_scored_by_whole_captions_and_by_losses(
    values: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = own_folder(tmp_path / "own", lambda k: f"thing {k % 3}")
    config = other_config(values, "own", pictures)
    monkeypatch.setattr(evaluate, "load_decoder", lambda config, workdir: Judge(config, True))
    found = evaluate.evaluate(config, tmp_path)
    assert found["caption_accuracy"] == 1 and found["shuffled_accuracy"] < 1
    assert (found["heldout_loss"], found["shuffled_loss"]) == pytest.approx((1, 3))
    assert found["samples"][0]["caption"] == found["samples"][0]["reading"]


@pytest.mark.parametrize(
    ("caption", "word"),
    [
        ("3 1 4", "314"),
        ("A “No”, sir!", "A-No-sir"),
        ("", ""),
        ("../etc", "etc"),
        ("x" * 99, "x" * 80),
    ],
)
def test_captions_become_parts_of_file_names(caption: str, word: str) -> None:
    assert evaluate.file_word(caption) == word


@pytest.mark.parametrize("name", ["fashion", "stamps"])
@pytest.mark.parametrize("module", [evaluate, train])
def test_missing_data_ends_a_command_in_words(
    run_here: RunHere,
    tmp_path: pathlib.Path,
    module: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the devices of this process are there already
    monkeypatch.setattr(train, "prepare_devices", lambda config, **_: None)
    words = [f"--config=configs/{name}.py", f"--config.data.folder={tmp_path}/none"]
    done = run_here(module.main, *words, f"--workdir={tmp_path}/run")
    assert done.code == 2
    assert done.err.startswith(f"the data set {name!r} is not in {tmp_path}/none")
    assert f"bash launch/data.sh {name}" in done.err and done.err.count("\n") == 1


def test_nothing_to_evaluate_is_said(config: Config, tmp_path: pathlib.Path) -> None:
    with pytest.raises(evaluate.command.UserError, match=f"no checkpoints in {tmp_path}"):
        evaluate.load_decoder(config, tmp_path)
