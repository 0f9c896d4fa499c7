"""Checkpoints by Orbax: stage-free trees that any plan can resume, saved in the background."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from optimus_jax.config import Config, DataConfig, ModelConfig
from optimus_jax.data import tokens
from optimus_jax.errors import UserError
from optimus_jax.settings import with_defaults


class CheckpointError(UserError):
    """A checkpoint that is missing or does not fit the configuration; the message says why."""


class Checkpoints:
    """The checkpoints of one run, in `workdir`/checkpoints, the newest `keep` of them.

    With `read_only`, nothing in the folder is touched: a training run may be writing there.
    `digest` is that of the examples (sources.Source), for training runs.
    """

    digest = ""

    def __init__(self, workdir: pathlib.Path, config: Config, read_only: bool = False):
        self.folder = (workdir / "checkpoints").absolute()
        self.model = {
            "model": dataclasses.asdict(config.model),
            "characters": tokens.CHARACTERS,
        }
        # what makes a resumed run see the examples that come next, and no others
        data = dataclasses.asdict(config.data)
        del data["folder"], data["allow_changes"]  # the digest tells what the pictures are
        self.allow_changes = config.data.allow_changes
        self.stream = {
            "data": data,
            "train": {"seed": config.train.seed, "batch": config.train.batch},
        }
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=config.train.keep,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The newest saved step: the number of steps done."""
        return self.manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Starts to save a stage-free state; returns when the devices' arrays are copied."""
        if step in self.manager.all_steps():
            return
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()),
                facts=ocp.args.JsonSave({**self.model, **self.stream, "digest": self.digest}),
            ),
        )

    def restore(self, step: int, abstract: Any) -> Any:
        """The state saved after `step` steps, laid out as `abstract` says.

        Raises CheckpointError naming every setting of model and data that differs, or if the
        examples do and may not.
        """
        digest = self._check(step, {**self.model, **self.stream}).get("digest")
        # none in checkpoints from before there were digests
        if digest and digest != self.digest and not self.allow_changes:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} was trained on other pictures or"
                " captions than there are now: --config.data.allow_changes=True goes on with those"
                " of now, another --workdir trains anew"
            )
        wanted = ocp.args.StandardRestore(abstract._asdict())
        found = self.manager.restore(step, args=ocp.args.Composite(state=wanted))
        return type(abstract)(**found["state"])

    def restore_params(self, abstract: Any) -> tuple[int, Any]:
        """The newest step and its weights alone.

        Raises CheckpointError if there is none or it has another model.
        """
        step = self.latest()
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.folder}: train first")
        self._check(step, self.model)
        item = ocp.args.PyTreeRestore(
            item={"params": abstract},
            restore_args={
                "params": jax.tree.map(
                    lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype), abstract
                )
            },
            partial_restore=True,
        )
        with ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(read_only=True),
            item_handlers={"state": ocp.PyTreeCheckpointHandler()},
        ) as manager:
            found = manager.restore(step, args=ocp.args.Composite(state=item))
        return step, found["state"]["params"]

    def _check(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.manager.restore(
            step, args=ocp.args.Composite(facts=ocp.args.JsonRestore())
        )["facts"]
        # settings that are newer than the checkpoint had their defaults
        for key, kind in (("model", ModelConfig), ("data", DataConfig)):
            found[key] = with_defaults(kind, found.get(key) or {})
        del found["data"]["folder"], found["data"]["allow_changes"]
        differ = list(_differences({key: found.get(key) for key in wanted}, wanted, ""))
        if differ:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} has other settings:\n  "
                + "\n  ".join(differ)
                + "\nuse another --workdir, or the settings of the checkpoint"
            )
        return found

    def wait(self) -> None:
        """Returns when what was saved is on disk."""
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()


def _differences(found: Any, wanted: Any, path: str) -> Any:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            yield from _differences(found.get(key), wanted.get(key), f"{path}.{key}".lstrip("."))
    elif found != wanted and path != "model.dtype":  # weights are float32 in any case
        yield f"{path}: {found!r} there, {wanted!r} in the configuration"
