"""Every method on encoders of several stages."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import ON_ANY_PIPELINE, schedule
from optimus_jax.schedule.program import payloads
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule
from optimus_jax.schedule.validate import validate
from tests.schedule import arithmetic
from tests.schedule.encoder_stages_test import BASE, PIPE, PROGRAM, TWO, written
from tests.schedule.random_schedules import random_schedule

PIPES = [
    Pipeline(2, 3, encoders=(EncoderPipeline((2, 1)),)),
    Pipeline(4, 3, 2, encoders=(EncoderPipeline((1, 3), units=3),)),
    Pipeline(4, 3, encoders=(EncoderPipeline((2, 1, 1, 2), units=2), EncoderPipeline((2,)))),
    Pipeline(4, 2, 3, encoders=(EncoderPipeline((3, 1)), EncoderPipeline((1, 1, 1, 1)))),
    Pipeline(2, 3, llm_layers=(3, 2), encoders=(EncoderPipeline((2,)), EncoderPipeline((2, 2)))),
]


@pytest.mark.parametrize("pipe", PIPES, ids=lambda p: f"P{p.stages} V{p.chunks} {len(p.encoders)}")
def test_random_plans_compute_the_sequential_result(pipe: Pipeline) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        window = rng.choice([0.0, 0.1])
        durations = dataclasses.replace(
            Durations.uniform(pipe, encoder=rng.uniform(0.3, 2)),
            gather=rng.choice([0.0, 0.5]),
            scatter=rng.choice([0.0, 0.7]),
            overlap=rng.random() < 0.5,
            window=(window, 2 * window),
        )
        found = random_schedule(pipe, rng, [0] if seed == 2 else None, fused=0.3 * (seed % 2))
        assert Schedule.parse(str(found), pipe) == found
        program = lower(found, durations, bucket=1)
        validate(program, found)
        assert arithmetic.run(program) == arithmetic.sequential(pipe, found.encoded), found
        assert program.end(durations) >= event_driven(found, durations).end - 1e-9


METHOD_PIPES = [
    Pipeline(4, 4, encoders=(EncoderPipeline((2, 2)),)),
    Pipeline(4, 3, encoders=(EncoderPipeline((1, 1, 1, 1)),)),
    Pipeline(2, 2, 2, encoders=(EncoderPipeline((2, 1)), EncoderPipeline((3,)))),
    Pipeline(4, 3, encoders=(EncoderPipeline((1,)), EncoderPipeline((1, 1)))),
    Pipeline(2, 2, 3, encoders=(EncoderPipeline((1, 1), units=3),)),
    Pipeline(2, 3, encoders=()),
]


@pytest.mark.parametrize("method", [m for m in ON_ANY_PIPELINE if m != "filled_whole"])
@pytest.mark.parametrize("pipe", METHOD_PIPES, ids=lambda p: f"P{p.stages} M{p.microbatches}")
def test_every_method_runs_every_plan(pipe: Pipeline, method: str) -> None:
    durations = Durations.uniform(pipe, encoder=0.7)
    found = schedule(method, "1f1b", pipe, durations)
    program = lower(found, durations, bucket=1)
    validate(program, found)
    assert arithmetic.run(program) == arithmetic.sequential(pipe, found.encoded)
    ideal = event_driven(found, durations).end
    assert 1 - 1e-9 <= program.end(durations) / ideal <= 1.07
    if method == "filled":
        for other in ("phased", "coarse"):
            than = event_driven(schedule(other, "1f1b", pipe, durations), durations).end
            assert ideal <= than * 1.01


def test_phased_keeps_a_pipeline_of_an_encoder_busy() -> None:
    """Device 1 waits for the first unit only, then works on unit after unit."""
    pipe = Pipeline(2, 2, encoders=(EncoderPipeline((1, 1)),))
    durations = Durations.uniform(pipe, encoder=1.0)
    found = schedule("phased", "1f1b", pipe, durations)
    assert str(found) == "0: EF0 EF1 F0 F1 B0 B1 EB0 EB1\n1: EF0 EF1 F0 B0 F1 B1 EB0 EB1"
    starts = event_driven(found, durations).intervals
    assert starts[1][:2] == [(0.5, 1.0), (1.0, 1.5)]
    assert [start for start, _ in starts[0][2:4]] == [1.0, 2.0]


def test_encoder_first_takes_the_pipeline_of_the_entry() -> None:
    pipe = Pipeline(4, 2, encoders=(EncoderPipeline((1, 1)), EncoderPipeline((1,))))
    found = schedule("encoder_first", "1f1b", pipe, Durations.uniform(pipe))
    places = {
        (task.encoder, device)
        for device, order in enumerate(found.orders)
        for task in order
        if task.kind.is_encoder
    }
    assert places == {(0, 0), (0, 1), (1, 0)}


def test_every_encoder_has_its_own_transfer_times() -> None:
    uniform = Durations.uniform(TWO)
    first, second = uniform.encoders
    durations = dataclasses.replace(
        uniform,
        transfer=1.0,
        encoders=(
            dataclasses.replace(first, hidden_transfer=0.25),
            dataclasses.replace(second, feature_transfer=0.5),
        ),
    )
    assert [durations.travel(payload) for payload in payloads(TWO)] == [1.0, 1.0, 0.25, 0.5]
    chain = event_driven(
        Schedule.parse(written(BASE), PIPE),
        dataclasses.replace(durations, encoders=durations.encoders[:1]),
    )
    # half a microbatch: 2/3 of 0.5 on device 0, the transfer, 1/3 of 0.5 on device 1
    assert chain.intervals[1][0] == pytest.approx((1 / 3 + 0.25, 0.5 + 0.25))


def test_tables_hold_int32() -> None:
    for table in (PROGRAM.table, PROGRAM.pattern, PROGRAM.prologue, PROGRAM.epilogue):
        assert table.dtype == np.int32
