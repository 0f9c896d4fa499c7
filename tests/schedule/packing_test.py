"""A packing prices places exactly, and takes back what it did."""

from __future__ import annotations

import random

import pytest

from optimus_jax.schedule.packing import Packing, Part
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, ScheduleError, Task
from optimus_jax.schedule.validate import check_complete


def random_packing(sizes: tuple[int, ...], seed: int) -> Packing:
    """Uneven durations, some microbatches in units, put in a random order."""
    rng, pipe = random.Random(seed), Pipeline(*sizes)

    def uneven(count: int, mean: float) -> tuple[float, ...]:
        return tuple(mean * rng.uniform(0.5, 1.5) for _ in range(count))

    stages = pipe.virtual_stages
    llm = uneven(stages, 1), uneven(stages, 2)
    encoder = EncoderDurations(uneven(1, 0.5), uneven(1, 1))
    durations = Durations(*llm, (encoder,), transfer=0.1 * (seed % 2))
    parts: list[Part] = []
    for i in range(pipe.microbatches):
        parts += rng.choice([[Part(i)], [Part(i, (u,)) for u in range(pipe.stages)]])
    packing = Packing(one_f_one_b(pipe), pipe, durations, parts)
    for part in rng.sample(range(len(parts)), len(parts)):
        packing.put(part)
    return packing


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(2, 3), (3, 4), (2, 2, 2)], ids=str)
def test_its_time_is_the_event_driven_time_of_its_schedule(
    sizes: tuple[int, ...], seed: int
) -> None:
    packing = random_packing(sizes, seed)
    for merged in (False, True):
        schedule = packing.schedule(merged)
        check_complete(schedule)
        assert event_driven(schedule, packing.durations).end == pytest.approx(packing.end)
    timing = event_driven(packing.schedule(merged=False), packing.durations)
    for numbers, intervals in zip(packing.orders, timing.intervals, strict=True):
        heads = [packing.head[n] for n in numbers]
        assert heads == pytest.approx([start for start, _ in intervals])


@pytest.mark.parametrize("seed", range(5))
def test_taking_parts_out_makes_no_step_longer(seed: int) -> None:
    packing = random_packing((2, 4), seed)
    text_only = Packing(one_f_one_b(packing.pipe), packing.pipe, packing.durations, []).end
    for part in range(len(packing.parts)):
        before = packing.end
        packing.take([part])
        assert not {n for row in packing.numbers[part] for n in row} & {
            n for order in packing.orders for n in order
        }
        assert packing.end <= before
    assert packing.end == pytest.approx(text_only)


def test_restoring_undoes_taking_and_putting() -> None:
    packing = random_packing((2, 4), 0)
    snapshot, schedule = packing.snapshot(), packing.schedule(merged=False)
    packing.take([0, 2, 1])
    for part in (1, 2, 0):
        packing.put(part)
    packing.take(list(range(len(packing.parts))))
    heads = random_packing((2, 4), 0).head
    packing.restore(snapshot)
    assert packing.end == snapshot.end
    assert packing.head == heads
    assert packing.schedule(merged=False) == schedule


def test_neighbouring_units_of_a_microbatch_merge() -> None:
    pipe = Pipeline(1, 1, encoders=(EncoderPipeline(units=3),))
    packing = Packing(
        one_f_one_b(pipe), pipe, Durations.uniform(pipe), [Part(0, (u,)) for u in (2, 0, 1)]
    )
    for part in (0, 1, 2):
        packing.put(part)
    assert str(packing.schedule(merged=True)) == "0: EF0 F0 B0 EB0"
    apart = [str(task) for task in packing.schedule(merged=False).orders[0]]
    assert sorted(apart[:3]) == ["EF0.0", "EF0.1", "EF0.2"]


def test_orders_that_wait_for_one_another_are_refused() -> None:
    pipe = Pipeline(2, 2)
    orders = tuple(tuple(map(Task.parse, text.split())) for text in ("F0 B0 F1 B1", "F1 B1 F0 B0"))
    with pytest.raises(ScheduleError, match="cycle"):
        Packing(orders, pipe, Durations.uniform(pipe), [])
