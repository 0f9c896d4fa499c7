"""Checkpoints know no plan: what one saves, any other takes up, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from optimus_jax.checkpoint import CheckpointError, Checkpoints
from optimus_jax.runtime.trainer import Trainer, TrainState
from tests.runtime.curves_test import PLANS, config_of, trainer_of

Made = dict[str, Trainer]
PLAN = "one device"


@pytest.fixture(scope="module")
def trainers() -> Made:
    return {name: trainer_of(plan)[0] for name, plan in PLANS.items()}


def on_host(state: Any) -> Any:
    return jax.tree.map(np.asarray, state)


def random_state(trainer: Trainer) -> TrainState:
    """A stage-free state in which no two numbers are the same by design."""
    rng = np.random.default_rng(0)

    def one(x: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=x.shape).astype(x.dtype) if x.shape else np.ones((), x.dtype)
        return jax.device_put(values, x.sharding)

    return jax.tree.map(one, trainer.abstract())


def test_the_tree_on_disk_names_parts_and_no_stages(trainers: Made) -> None:
    for trainer in trainers.values():
        params = trainer.abstract().params
        assert params.keys() == {"encoders", "llm"}
        assert params["encoders"].keys() == {"vision"}
        assert params["encoders"]["vision"].keys() == {"embed", "layers", "projector"}
        assert params["llm"].keys() == {"embed", "layers", "head"}
        assert params["llm"]["layers"]["mlp"]["up"].shape == (4, 16, 32)
        assert params["encoders"]["vision"]["layers"]["mlp"]["up"].shape == (2, 16, 32)


def test_a_state_goes_from_plan_to_plan_bit_for_bit(trainers: Made, tmp_path: pathlib.Path) -> None:
    """Each plan takes up what the one before it saved, the first one what the last one saved."""
    first = next(iter(trainers))
    state = random_state(trainers[first])
    want = on_host(state)
    for step, name in enumerate([*trainers, first]):
        trainer, checkpoints = trainers[name], Checkpoints(tmp_path, config_of(PLANS[name]))
        if step:
            state = checkpoints.restore(step - 1, trainer.abstract())
        free = trainer.unstage(trainer.stage(state))
        checkpoints.save(step, free)
        checkpoints.wait()
        checkpoints.close()
        assert jax.tree.structure(free) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, on_host(free), want)


def test_another_kind_of_layers_does_not_resume(trainers: Made, tmp_path: pathlib.Path) -> None:
    plan, trainer = PLANS["one device"], trainers["one device"]
    checkpoints = Checkpoints(tmp_path, config_of(plan))
    checkpoints.save(1, random_state(trainer))
    checkpoints.wait()
    checkpoints.close()
    config = config_of(plan, {"block": "llama", "kv_heads": 1})
    again = Checkpoints(tmp_path, config)
    with pytest.raises(CheckpointError) as error:
        again.restore(1, trainer.abstract())
    again.close()
    assert "model.llm.block: 'gpt' there, 'llama' in the configuration" in str(error.value)
    assert "model.llm.kv_heads: 0 there, 1 in the configuration" in str(error.value)


def opened(workdir: pathlib.Path, digest: str = "") -> Checkpoints:
    checkpoints = Checkpoints(workdir, config_of(PLANS[PLAN]))
    checkpoints.digest = digest
    return checkpoints


def save(checkpoints: Checkpoints, trainer: Trainer) -> None:
    checkpoints.save(1, random_state(trainer))
    checkpoints.wait()
    checkpoints.close()


def test_settings_newer_than_a_checkpoint_had_their_defaults(
    trainers: Made, tmp_path: pathlib.Path
) -> None:
    trainer = trainers[PLAN]
    old = opened(tmp_path)
    del old.stream["data"]["mirror"], old.model["model"]["llm"]["kv_heads"]
    del old.model["model"]["more_encoders"]
    save(old, trainer)
    again = opened(tmp_path)
    again.restore(1, trainer.abstract())
    again.stream["data"]["mirror"] = True
    with pytest.raises(CheckpointError, match="data.mirror: False there, True in the config"):
        again.restore(1, trainer.abstract())
    again.close()


def test_other_pictures_resume_only_if_they_may(trainers: Made, tmp_path: pathlib.Path) -> None:
    trainer = trainers[PLAN]
    save(opened(tmp_path, "these"), trainer)
    again = opened(tmp_path, "these")
    again.restore(1, trainer.abstract())
    again.digest = "others"
    with pytest.raises(CheckpointError) as error:
        again.restore(1, trainer.abstract())
    assert "was trained on other pictures or captions than there are now" in str(error.value)
    assert "--config.data.allow_changes=True" in str(error.value)
    again.allow_changes = True
    again.restore(1, trainer.abstract())
    again.close()
    reader = Checkpoints(tmp_path, config_of(PLANS[PLAN]), read_only=True)
    assert reader.restore_params(trainer.abstract().params)[0] == 1
    reader.manager.close()


def test_a_checkpoint_without_a_digest_resumes(trainers: Made, tmp_path: pathlib.Path) -> None:
    save(opened(tmp_path), trainers[PLAN])
    again = opened(tmp_path, "others")
    again.restore(1, trainers[PLAN].abstract())
    again.close()
