"""Profiles of machines that are made up: the costs that were put in come out."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from optimus_jax.config import Config
from optimus_jax.cost.costs import Costs, EncoderCosts, Pass
from optimus_jax.measure import profile
from optimus_jax.measure.rounds import Spread
from optimus_jax.schedule.program import KINDS, LLM, Payload, Program, Shape, alphabet
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline
from tests.measure.profile_test import config_of, numbers


class Machine:
    """Stands for a Session on a machine that takes exactly `costs`: a Program is its own tables,
    and its seconds are those of its rows; the first run of all is a slow one."""

    def __init__(self, config: Config, costs: Costs, pipe: Pipeline | None = None):
        self.config, self.costs = config, costs
        self.pipe = pipe or config.pipeline
        self.shape: Shape = profile.shape(config, self.pipe)
        self.mesh = types.SimpleNamespace(size=3, devices=np.array(jax.devices()[:3]))
        self.runs = 0
        self.emulated_forward: float | None = None
        self.lates: list[float] = []

    def place(self, program: Program) -> Program:
        assert program.shape == self.shape
        return program

    def seconds(self, program: Program, late: float = 0.0) -> float:
        self.runs += 1
        self.lates.append(late)
        total = self.costs.epilogue + (self.runs == 1) + 2 * late
        for row, pattern in zip(program.table, program.pattern, strict=True):
            total += self._task(dict(zip(program.columns.SCALARS, row[0], strict=False)))
            moved = alphabet(program.pipeline)[pattern]
            if moved.links:
                total += self._exchange(moved.payload)
        return total

    def _exchange(self, payload: Payload) -> float:
        if payload == LLM:
            return self.costs.exchange
        encoder = list(self.costs.encoders.values())[payload.encoder]
        seconds = getattr(encoder, f"{payload.content}_exchange")
        assert seconds is not None
        return seconds

    def _task(self, row: dict[str, int]) -> float:
        llm, own = self._llm(row), self._encoder(row)
        if row["kind"] and row["e_kind"]:
            way = "forward" if row["kind"] == KINDS[Kind.F] else "backward"
            own -= (row["end"] - row["begin"]) * getattr(self.costs.window, way)
        return llm + own

    def _llm(self, row: dict[str, int]) -> float:
        c = self.costs
        if row["kind"] == KINDS[Kind.F]:
            ends = row["first"] * c.llm_embedding.forward + row["last"] * c.head
            return c.llm_task.forward + row["layers"] * c.llm_layer.forward + ends
        if row["kind"] == KINDS[Kind.B]:
            layers = row["layers"] * c.llm_layer.backward
            return c.llm_task.backward + layers + row["first"] * c.llm_embedding.backward
        return 0.0

    def _encoder(self, row: dict[str, int]) -> float:
        if not row["e_kind"]:
            return 0.0
        total, way = 0.0, "forward" if row["e_kind"] == KINDS[Kind.EF] else "backward"
        c = list(self.costs.encoders.values())[row["encoder"]]
        for part, times in (
            (c.input_embedding, row["embeds"]),
            (c.layer, row["end"] - row["begin"]),
            (c.projector, row["projects"]),
        ):
            total += times * getattr(part, way)
        return total * row["count"]


VISION = EncoderCosts(
    layer=Pass(0.005, 0.016),
    input_embedding=Pass(0.0015, 0.0025),
    projector=Pass(0.003, 0.009),
    feature_exchange=0.0003,
)
TRUE = Costs(
    source="measured",
    llm_layer=Pass(0.010, 0.030),
    llm_embedding=Pass(0.001, 0.002),
    head=0.007,
    encoders={"vision": VISION},
    exchange=0.0004,
    epilogue=0.02,
    llm_task=Pass(0.0005, 0.0006),
)
EARS = EncoderCosts(
    layer=Pass(0.002, 0.0045),
    input_embedding=Pass(0.00025, 0.0005),
    projector=Pass(0.00125, 0.00225),
    feature_exchange=0.00035,
    hidden_exchange=0.00015,
)


@pytest.mark.parametrize("sizes", [(3, 1, 9), (2, 2, 9)])
def test_a_profile_finds_the_costs_of_its_machine(sizes: tuple[int, int, int]) -> None:
    config = config_of(*sizes)
    taken = profile.take(Machine(config, TRUE), rounds=3)  # type: ignore[arg-type]
    assert taken.costs.source == TRUE.source
    assert numbers(taken.costs) == pytest.approx(numbers(TRUE))
    assert {s.count for s in taken.measurements.values()} == {3}
    assert max(s.iqr for s in taken.measurements.values()) < 1e-9, "the slow run was a warm-up"
    assert (taken.where["devices"], taken.where["rounds"]) == (3, 3)
    assert taken.where["jax"] == jax.__version__


def test_a_profile_finds_the_costs_of_every_encoder() -> None:
    """The second one has two stages of three layers each."""
    config = config_of(pp=2, llm_layers=4, ears=2)
    costs = dataclasses.replace(TRUE, encoders={"vision": VISION, "ears": EARS})
    taken = profile.take(Machine(config, costs), rounds=2)  # type: ignore[arg-type]
    assert list(taken.costs.encoders) == ["vision", "ears"]
    assert numbers(taken.costs) == pytest.approx(numbers(costs))
    lines = profile.text(taken, config).splitlines()
    assert any("encoder forward of a unit, 4 layers, vision" in line for line in lines)
    assert any("encoder forward of a unit, 3 layers, ears" in line for line in lines)
    assert any("exchange between encoder stages, ears" in line for line in lines)


def test_a_profile_finds_what_fused_layers_hide() -> None:
    config = config_of(pp=1, llm_layers=4, fuse=True)
    vision = dataclasses.replace(VISION, feature_exchange=None)
    costs = dataclasses.replace(
        TRUE, encoders={"vision": vision}, exchange=0.0, window=Pass(0.001, 0.003)
    )
    taken = profile.take(Machine(config, costs), rounds=2)  # type: ignore[arg-type]
    assert numbers(taken.costs) == pytest.approx(numbers(costs))


def test_a_profile_of_another_pipeline_runs_the_reference_that_it_is_given() -> None:
    """Device 0 has the encoder and no LLM layer."""
    config = config_of()
    pipe = Pipeline(3, 6, 1, (0, 4, 5), (EncoderPipeline((4, 0, 0), 1),))
    machine, ran = Machine(config, TRUE, pipe), []

    def reference() -> float:
        ran.append(len(ran))
        return 0.25

    taken = profile.take(machine, rounds=3, reference=reference)  # type: ignore[arg-type]
    assert taken.reference == Spread(0.25, 0.0, 3)
    assert len(ran) == 4, "and once to warm up"
    assert taken.costs.llm_layer.forward == pytest.approx(TRUE.llm_layer.forward)
    found = taken.costs.durations(config, pipe).encoders[0]
    assert found.forward == pytest.approx((0.0065, 0.005, 0.005, 0.008))


def test_sleeping_tasks_are_timed_out_of_step() -> None:
    machine = Machine(config_of(), TRUE)
    machine.emulated_forward = 0.5
    taken = profile.take(machine, rounds=2)  # type: ignore[arg-type]
    assert set(machine.lates) == {0.0, 0.5}, "exchanges and the epilogue in step"
    found = taken.costs.encoders["vision"].layer.forward
    assert found == pytest.approx(VISION.layer.forward), "being late is no part of a task"
    assert taken.costs.llm_layer.forward == pytest.approx(TRUE.llm_task.forward / 3)
