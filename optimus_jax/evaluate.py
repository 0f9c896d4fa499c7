"""python -m optimus_jax.evaluate: how many held-out digits the trained model reads right."""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags

from optimus_jax import command, report
from optimus_jax.config import Config

command.define_config()


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
            command.say(f"{name} {value:.4f}")
    if flags.FLAGS.json:
        command.emit(scores)
    return 0


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, float]:
    """digit_accuracy: of held-out pictures. shuffled_accuracy: the same readings against captions
    of other pictures, which shows what a model that does not look would get.

    Raises CheckpointError if there is nothing to evaluate.
    """
    from optimus_jax.decode import digit_accuracy
    from optimus_jax.train import example_batches

    decoder = load_decoder(config, workdir)
    batches = example_batches(config, "heldout", config.evaluate_examples)
    captions = batches.captions(0)
    images = batches.rows(0, range(config.evaluate_examples))["image"]
    readings = decoder.captions(images)
    save_samples(workdir, images, captions, readings)
    # a shift by one pairs no picture with its own caption
    shuffled = readings[-1:] + readings[:-1]
    return {
        "digit_accuracy": digit_accuracy(readings, captions),
        "shuffled_accuracy": digit_accuracy(shuffled, captions),
    }


def load_decoder(config: Config, workdir: pathlib.Path) -> Any:
    """The newest weights of a run, on one device, whatever plan saved them."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from optimus_jax.checkpoint import Checkpoints
    from optimus_jax.decode import Decoder
    from optimus_jax.models.mllm import Mllm

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
    workdir: pathlib.Path, images: Any, captions: list[str], readings: list[str], count: int = 8
) -> None:
    """The first pictures, enlarged, named by their captions, to look at and to try generate on."""
    from PIL import Image

    folder = workdir / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(min(count, len(images))):
        picture = Image.fromarray(images[k, :, :, 0])
        name = f"{k}_is_{captions[k]}_read_{readings[k]}".replace(" ", "")
        for old in folder.glob(f"{k}_is_*.png"):
            old.unlink()
        picture.resize((8 * picture.width, 8 * picture.height), Image.Resampling.NEAREST).save(
            folder / f"{name}.png"
        )


if __name__ == "__main__":
    command.run(main)
