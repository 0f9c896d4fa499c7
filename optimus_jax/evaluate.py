"""python -m optimus_jax.evaluate: how well the trained model reads held-out pictures."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from optimus_jax import command, report
from optimus_jax.config import Config
from optimus_jax.data import sources

command.define_config()

SAMPLES = 8  # pictures that are saved, and captions that are shown
SHIFTS = 8  # pairings of captions with other pictures that the shuffled loss is the mean of


@dataclasses.dataclass(frozen=True)
class Readings:
    """What there is to judge: the held-out `batch` (arrays by name, [N, ...]), its `captions`, and
    what `decoder` read instead of each."""

    decoder: Any
    batch: dict[str, np.ndarray]
    captions: list[str]
    readings: list[str]


def main() -> int:
    config, workdir = command.config(), command.workdir()
    scores = evaluate(config, workdir)
    found = report.load(workdir)
    if found is not None:
        report.save(workdir, {**found, **scores})
        command.say(report.text({**found, **scores}))
        command.say(f"\nreport: {report.folder(workdir)}")
    else:
        for name, value in scores.items():
            if isinstance(value, float):
                command.say(f"{name} {value:.4f}")
    for sample in scores.get("samples", []):
        command.say(f"{sample['caption']!r} was read as {sample['reading']!r}")
    if flags.FLAGS.json:
        command.emit(scores)
    return 0


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """The scores of the data set, by name; see SCORES. Leaves some pictures in the run's folder.

    Raises UserError if the data is missing, CheckpointError if there is nothing to evaluate.
    """
    from optimus_jax.train import example_batches

    source = sources.make(config.data)
    count = source.load("heldout") or config.evaluate_examples
    count = min(count, config.evaluate_examples)
    batches = example_batches(config, "heldout", count)
    decoder = load_decoder(config, workdir)
    batch, captions = batches.rows(0, range(count)), batches.captions(0)
    readings = decoder.captions(batch["image"])
    save_samples(workdir, batch["image"], captions, readings)
    return SCORES[source.score](Readings(decoder, batch, captions, readings))


def _digits(found: Readings) -> dict[str, Any]:
    """digit_accuracy: of held-out pictures. shuffled_accuracy: the same readings against captions
    of other pictures, which shows what a model that does not look would get."""
    from optimus_jax.decode import digit_accuracy

    return _accuracies("digit_accuracy", digit_accuracy, found)


def _captions(found: Readings) -> dict[str, Any]:
    """caption_accuracy: whole captions right. shuffled_accuracy: as for digits."""
    from optimus_jax.decode import caption_accuracy

    return _accuracies("caption_accuracy", caption_accuracy, found)


def _accuracies(
    name: str, accuracy: Callable[[list[str], list[str]], float], found: Readings
) -> dict[str, Any]:
    # a shift by one pairs no picture with its own caption
    shuffled = found.readings[-1:] + found.readings[:-1]
    return {
        name: accuracy(found.readings, found.captions),
        "shuffled_accuracy": accuracy(shuffled, found.captions),
    }


def _both(found: Readings) -> dict[str, Any]:
    """Accuracies and losses: captions of one's own pictures may be labels, or all different."""
    return {**_captions(found), **_loss(found)}


def _loss(found: Readings) -> dict[str, Any]:
    """heldout_loss: nats for each character of the held-out captions, their ends included.
    shuffled_loss: of the same captions with other held-out pictures, the mean over some pairings.
    loss_gap_error: the standard error of the difference, over pictures. samples: some readings."""
    images, characters = found.batch["image"], found.batch["weights"].sum()
    own = found.decoder.losses(found.batch)
    others = [
        found.decoder.losses({**found.batch, "image": images[chosen]})
        for chosen in other_pictures(found.captions, SHIFTS)
    ]
    gaps = np.mean(others, axis=0) - own
    return {
        "heldout_loss": float(own.sum() / characters),
        "shuffled_loss": float(np.mean(others, axis=0).sum() / characters),
        "loss_gap_error": float(gaps.std() * len(gaps) ** 0.5 / characters),
        "samples": [
            {"caption": caption, "reading": reading}
            for caption, reading in zip(found.captions[:SAMPLES], found.readings, strict=False)
        ],
    }


def other_pictures(captions: list[str], most: int) -> list[np.ndarray]:
    """Up to `most` pairings, int [N] each, that give no caption its own picture or one with an
    equal caption: shifts where there are any, else each caption picks among its others.

    Raises UserError if all captions are equal.
    """
    count = len(captions)
    if shifts := other_shifts(captions, most):
        return [(np.arange(count) - shift) % count for shift in shifts]
    words = np.array(captions)
    others = [np.flatnonzero(words != caption) for caption in captions]
    if not all(map(len, others)):
        raise command.UserError(
            f"the {count} held-out captions are all {captions[0]!r}: there is none to compare with;"
            " a larger config.evaluate_examples may help"
        )
    return [
        np.array(
            [
                other[(k + pairing * len(other) // most) % len(other)]
                for k, other in enumerate(others)
            ]
        )
        for pairing in range(most)
    ]


def other_shifts(captions: list[str], most: int) -> list[int]:
    """Up to `most` shifts, spread evenly, that give no picture its own or an equal caption: picture
    k goes to caption k + shift."""
    valid = [
        shift
        for shift in range(1, len(captions))
        if all(captions[k - shift] != caption for k, caption in enumerate(captions))
    ]
    return [valid[k * len(valid) // most] for k in range(most)] if len(valid) > most else valid


SCORES: dict[str, Callable[[Readings], dict[str, Any]]] = {
    "digits": _digits,
    "captions": _captions,
    "loss": _loss,
    "both": _both,
}


def load_decoder(config: Config, workdir: pathlib.Path) -> Any:
    """The newest weights of a run, on one device, whatever plan saved them."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from optimus_jax.checkpoint import Checkpoints
    from optimus_jax.decode import Decoder
    from optimus_jax.models.mllm import Mllm
    from optimus_jax.train import require_senses

    require_senses(config)
    if config.parallel.method == "text_only":
        raise command.UserError(
            "config.parallel.method=text_only trains without pictures: there is nothing to read"
        )
    if not (workdir / "checkpoints").is_dir():
        raise command.UserError(
            f"no checkpoints in {workdir}: train first, or name another folder with --workdir"
        )
    model = Mllm(config.model)
    here = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    checkpoints = Checkpoints(workdir, config, read_only=True)
    step, params = checkpoints.restore_params(abstract)
    checkpoints.close()
    command.say(f"weights after step {step} from {checkpoints.folder}")
    return Decoder(model, params)


def save_samples(
    workdir: pathlib.Path, images: Any, captions: list[str], readings: list[str]
) -> None:
    """The first pictures, enlarged, named by their captions, to look at and to try generate on."""
    from PIL import Image

    folder = workdir / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(min(SAMPLES, len(images))):
        grey = images.shape[-1] == 1
        picture = Image.fromarray(images[k, :, :, 0] if grey else images[k])
        name = f"{k}_is_{file_word(captions[k])}_read_{file_word(readings[k])}"
        for old in folder.glob(f"{k}_is_*.png"):
            old.unlink()
        picture.resize((8 * picture.width, 8 * picture.height), Image.Resampling.NEAREST).save(
            folder / f"{name}.png"
        )


def file_word(caption: str) -> str:
    """A caption as a part of a file name: digits together, words joined by hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"(?<=\d) (?=\d)", "", caption)).strip("-")[:80]


if __name__ == "__main__":
    command.run(main)
