"""The filled schedule against the other methods, known times and the lower bound."""

from __future__ import annotations

import pytest

from optimus_jax.schedule.filled import filled
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Pipeline
from tests.schedule.planned import planned


@pytest.mark.parametrize(
    ("stages", "microbatches", "encoder", "most"),
    [(2, 4, 0.5, 15.75), (2, 4, 1, 18.5), (4, 8, 1, 33.75), (4, 8, 2, 41)],
)
def test_known_times(stages: int, microbatches: int, encoder: float, most: float) -> None:
    """The optimum over units; for the last, where only that is known, over whole microbatches."""
    found = planned("filled", "1f1b", stages, microbatches, 1, encoder)
    assert found.timing.end <= most + 1e-9
    assert found.program_end <= most + 1e-9


@pytest.mark.parametrize("encoder", [0.25, 0.5, 1, 2])
@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1), (2, 3, 1), (2, 4, 1), (4, 4, 1), (4, 8, 1), (2, 2, 2), (2, 4, 2), (4, 4, 2)],
    ids=str,
)
def test_never_longer_than_coarse_or_phased(sizes: tuple[int, int, int], encoder: float) -> None:
    found = planned("filled", "1f1b", *sizes, encoder)
    for other in ("coarse", "phased"):
        than = planned(other, "1f1b", *sizes, encoder)
        assert found.timing.end <= than.timing.end + 1e-9
        assert found.program_end <= than.program_end + 1e-9


@pytest.mark.parametrize("encoder", [0.25, 1])
def test_spreading_beats_every_schedule_of_whole_microbatches(encoder: float) -> None:
    """Where bubbles are wide: whole ones take at least one encoder pass at each end."""
    found = planned("filled", "1f1b", 4, 8, 1, encoder)
    assert found.timing.end < 33 + 3 * encoder
    first = [t for o in found.schedule.orders for t in o if (t.kind, t.microbatch) == (Kind.EF, 0)]
    assert len(first) == 4


@pytest.mark.parametrize(
    ("stages", "microbatches", "encoder", "end"),
    [(2, 4, 0.5, 16.5), (4, 8, 1, 36), (1, 2, 1, 12)],
)
def test_known_times_of_whole_microbatches(
    stages: int, microbatches: int, encoder: float, end: float
) -> None:
    """The optimum: the LLM alone, one whole forward before it and one whole backward after it."""
    found = planned("filled_whole", "1f1b", stages, microbatches, 1, encoder)
    assert found.timing.end == pytest.approx(end)
    assert found.program_end == pytest.approx(end)


@pytest.mark.parametrize("encoder", [0.25, 0.5, 1, 2])
@pytest.mark.parametrize("sizes", [(2, 3, 1), (2, 4, 1), (4, 8, 1), (4, 4, 2)], ids=str)
def test_filled_whole_cuts_no_microbatch(sizes: tuple[int, int, int], encoder: float) -> None:
    found = planned("filled_whole", "1f1b", *sizes, encoder)
    work = [t for order in found.schedule.orders for t in order if t.kind.is_encoder]
    assert sorted(map(str, work)) == sorted(
        f"{kind}{i}" for kind in ("EF", "EB") for i in range(sizes[1])
    )
    spread = planned("filled", "1f1b", *sizes, encoder)
    assert spread.program_end <= found.program_end + 1e-9, "spreading may only help"


@pytest.mark.parametrize("sizes", [(2, 4, 1), (4, 4, 1), (2, 4, 2)], ids=str)
def test_encoder_tasks_go_between_those_of_the_llm(sizes: tuple[int, int, int]) -> None:
    found = planned("filled", "1f1b", *sizes, 1).schedule
    pipe = found.pipeline
    for order, llm in zip(found.orders, one_f_one_b(pipe), strict=True):
        assert tuple(t for t in order if not t.kind.is_encoder) == llm
        forward, backward = (
            sorted((t.microbatch, u) for t in order if t.kind == kind for u in pipe.units_of(t))
            for kind in (Kind.EF, Kind.EB)
        )
        assert forward == backward


def test_planning_twice_gives_the_same_schedule() -> None:
    pipe = Pipeline(2, 4)
    again = filled(one_f_one_b(pipe), pipe, Durations.uniform(pipe, encoder=1))
    assert again == planned("filled", "1f1b", 2, 4, 1, 1).schedule


def test_an_encoder_without_cost_adds_no_time() -> None:
    pipe = Pipeline(4, 4)
    durations = Durations.uniform(pipe, encoder=0.0)
    assert event_driven(filled(one_f_one_b(pipe), pipe, durations), durations).end == 21
