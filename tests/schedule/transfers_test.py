"""Transfers of features that take another time than those of the LLM, wherever time is counted."""

from __future__ import annotations

import dataclasses
import random

import pytest

from optimus_jax.schedule.dataflow import LLM, Payload
from optimus_jax.schedule.exchange import place_exchanges
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import ON_ANY_PIPELINE, schedule
from optimus_jax.schedule.packing import Packing, Part
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task
from optimus_jax.schedule.validate import validate

FEATURES = Payload("feature")
UNEQUAL = [(0.25, 0.75), (0.75, 0.125), (0.0, 0.5), (0.5, 0.0)]  # LLM values, features
SIZES = [(1, 2, 1), (2, 3, 1), (4, 4, 1), (2, 2, 2)]
CASES = [
    (method, sizes, transfers)
    for method in ON_ANY_PIPELINE
    for sizes in SIZES
    for transfers in UNEQUAL
    if sizes[0] < 4 or not method.startswith("filled")  # which take long to plan
]
unequal = pytest.mark.parametrize("transfers", UNEQUAL, ids=str)


def durations_of(pipe: Pipeline, transfer: float, feature: float | None) -> Durations:
    """F = 1, B = 2, e = 1 of whole stages and microbatches."""
    uniform = Durations.uniform(pipe)
    encoder = dataclasses.replace(uniform.encoders[0], feature_transfer=feature)
    return dataclasses.replace(uniform, transfer=transfer, encoders=(encoder,))


def test_travel() -> None:
    pipe = Pipeline(2, 1)
    times = [durations_of(pipe, 0.5, feature) for feature in (None, 0.0, 2.0)]
    assert [d.travel(LLM) for d in times] == [0.5, 0.5, 0.5]
    assert [d.travel(FEATURES) for d in times] == [0.5, 0.0, 2.0]


def test_negative_transfers_are_refused() -> None:
    for times in ((-0.1, None), (0.1, -0.1)):
        with pytest.raises(ScheduleError, match="negative"):
            durations_of(Pipeline(2, 1), *times)


# The encoder runs on stage 1: two transfers of features stand in the way, and two of the LLM.
AWAY = "0: F0 B0\n1: EF0 F0 B0 EB0"


@pytest.mark.parametrize(
    ("transfer", "feature", "end"),
    [
        (0.0, 0.0, 1 + 1 + 1 + 2 + 2 + 2),
        (0.0, 0.5, 9 + 2 * 0.5),
        (0.5, 0.0, 9 + 2 * 0.5),
        (0.25, 4.0, 9 + 2 * 0.25 + 2 * 4),
        (0.25, None, 9 + 4 * 0.25),
    ],
)
def test_every_transfer_in_a_chain_lengthens_it_by_its_own_time(
    transfer: float, feature: float | None, end: float
) -> None:
    pipe = Pipeline(2, 1)
    chain, durations = Schedule.parse(AWAY, pipe), durations_of(pipe, transfer, feature)
    assert event_driven(chain, durations).end == end
    assert place_exchanges(chain, durations).timing(durations).end == end
    program = lower(chain, durations)
    assert program.end(durations) == end
    meetings = program.trace(durations).meetings
    assert [(m.payload, m.end - m.start) for m in meetings] == [
        (payload, durations.travel(payload)) for payload in (FEATURES, LLM, LLM, FEATURES)
    ]


def test_an_encoder_beside_the_first_stage_needs_no_transfer_of_features() -> None:
    pipe = Pipeline(2, 1)
    near = Schedule.parse("0: EF0 F0 B0 EB0\n1: F0 B0", pipe)
    durations = durations_of(pipe, 0.0, 100.0)
    assert event_driven(near, durations).end == 9
    assert lower(near, durations).end(durations) == 9


@pytest.mark.parametrize(("method", "sizes", "transfers"), CASES, ids=str)
def test_a_program_takes_the_time_of_its_placement(
    method: str, sizes: tuple[int, int, int], transfers: tuple[float, float]
) -> None:
    pipe = Pipeline(*sizes)
    durations = durations_of(pipe, *transfers)
    found = schedule(method, "1f1b", pipe, durations)
    placed = place_exchanges(found, durations).timing(durations)
    program = lower(found, durations)
    validate(program, found)
    assert program.end(durations) == pytest.approx(placed.end)
    assert program.end(durations) >= event_driven(found, durations).end - 1e-9
    wanted = {(d, x): end for d, x, _, end in placed.log if isinstance(x, Task)}
    for device, row in enumerate(program.time(durations)):
        for task, _, end in row:
            assert end == pytest.approx(wanted[device, task]), (device, task)


@unequal
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes", [(2, 3, 1), (3, 4, 1), (2, 2, 2)], ids=str)
def test_a_packing_knows_the_event_driven_time_of_its_schedule(
    sizes: tuple[int, int, int], seed: int, transfers: tuple[float, float]
) -> None:
    chance, pipe = random.Random(seed), Pipeline(*sizes)
    durations = durations_of(pipe, *transfers)
    parts: list[Part] = []
    for i in range(pipe.microbatches):
        parts += chance.choice([[Part(i)], [Part(i, (u,)) for u in range(pipe.stages)]])
    packing = Packing(one_f_one_b(pipe), pipe, durations, parts)
    for part in chance.sample(range(len(parts)), len(parts)):
        packing.put(part)
        some = packing.schedule(merged=False)
        if len(some.encoded) == pipe.microbatches and all(n >= 0 for n in packing.device):
            assert event_driven(some, durations).end == pytest.approx(packing.end)
    assert event_driven(packing.schedule(True), durations).end == pytest.approx(packing.end)


def test_filled_keeps_features_at_home_where_they_travel_slowly() -> None:
    pipe = Pipeline(2, 4)
    slow = durations_of(pipe, 0.0, 50.0)
    found = schedule("filled", "1f1b", pipe, slow)
    kept = all(not t.kind.is_encoder for t in found.orders[1])
    assert kept, "one way of 50 is longer than the whole step"
    quick = schedule("filled", "1f1b", pipe, durations_of(pipe, 50.0, 0.0))
    assert any(t.kind == Kind.EF for t in quick.orders[1])
