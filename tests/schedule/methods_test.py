"""Every method on every order: complete, in time for the LLM, a Program that validates."""

from __future__ import annotations

import textwrap

import pytest

from optimus_jax.schedule.dependency import dependency_points
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import ON_ANY_PIPELINE, schedule
from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, ScheduleError
from optimus_jax.schedule.validate import check_complete, validate
from tests.schedule.planned import planned

SIZES = [
    (stages, microbatches, chunks)
    for stages in (1, 2, 4)
    for chunks in (1, 2)
    for microbatches in sorted({1, stages - 1, stages, 2 * stages + 1} - {0})
    if chunks == 1 or microbatches % stages == 0
]
CASES = [(order, *sizes) for order in ORDERS for sizes in SIZES if order == "1f1b" or sizes[2] == 1]


def bound(pipe: Pipeline, text_only: float, encoder: float) -> float:
    """No schedule with F=1, B=2 on this order is shorter: the first microbatch's encoder precedes
    all LLM work, the last one's backward follows it, and no device does less than its share."""
    m, share = pipe.microbatches, 3 * encoder / pipe.stages
    return max(text_only + share, 3 * m + m * share)


@pytest.mark.parametrize("encoder", [0.5, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_on_every_order(case: tuple[str, int, int, int], encoder: float) -> None:
    ends = {}
    for method in ON_ANY_PIPELINE:
        found = planned(method, *case, encoder)
        check_complete(found.schedule)
        everything = set(range(found.schedule.pipeline.microbatches))
        assert found.schedule.encoded == (set() if method == "text_only" else everything)
        assert dependency_points(found.timing).violations() == []
        validate(found.program, found.schedule)
        assert found.program_end >= found.timing.end - 1e-9
        ends[method] = found.timing.end
    least = bound(Pipeline(*case[1:]), ends.pop("text_only"), encoder)
    assert all(end >= least - 1e-9 for end in ends.values()), (least, ends)


PICTURES = {
    ("text_only", 2, 2): """
        0: F0 F1 B0 B1
        1: F0 B0 F1 B1
    """,
    ("encoder_first", 2, 2): """
        0: EF0 F0 EF1 F1 B0 EB0 B1 EB1
        1: F0 B0 F1 B1
    """,
    ("encoder_first", 2, 2, 2): """
        0: EF0 F0 EF1 F1 F0c1 F1c1 B0c1 B1c1 B0 EB0 B1 EB1
        1: F0 F1 F0c1 B0c1 F1c1 B1c1 B0 B1
    """,
    ("phased", 2, 3): """
        0: EF0 EF2.0 F0 F1 B0 F2 B1 B2 EB0 EB2.0
        1: EF1 EF2.1 F0 B0 F1 B1 F2 B2 EB1 EB2.1
    """,
    ("phased", 4, 2): """
        0: EF0.0 EF1.0 F0 F1 B0 B1 EB0.0 EB1.0
        1: EF0.1 EF1.1 F0 F1 B0 B1 EB0.1 EB1.1
        2: EF0.2 EF1.2 F0 F1 B0 B1 EB0.2 EB1.2
        3: EF0.3 EF1.3 F0 B0 F1 B1 EB0.3 EB1.3
    """,
}


@pytest.mark.parametrize(("case", "picture"), PICTURES.items(), ids=str)
def test_methods_look_like_their_pictures(case: tuple, picture: str) -> None:
    method, *sizes = case
    pipe = Pipeline(*sizes)
    found = schedule(method, "1f1b", pipe, Durations.uniform(pipe))
    assert str(found) == textwrap.dedent(picture).strip()


@pytest.mark.parametrize(
    ("method", "encoder", "end"),
    [("text_only", 0.5, 15), ("phased", 0.5, 18), ("phased", 1, 21), ("coarse", 0.5, 16.5)]
    + [("encoder_first", 0.5, 19.5), ("encoder_first", 1, 25), ("encoder_first", 2, 36)],
)
def test_known_times_of_two_stages_and_four_microbatches(
    method: str, encoder: float, end: float
) -> None:
    pipe = Pipeline(2, 4)
    durations = Durations.uniform(pipe, encoder=encoder)
    assert event_driven(schedule(method, "1f1b", pipe, durations), durations).end == end


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 6), (4, 8), (3, 7)])
def test_phased_adds_the_encoder_shared_evenly(stages: int, microbatches: int) -> None:
    pipe = Pipeline(stages, microbatches)
    durations = Durations.uniform(pipe, encoder=0.5)
    text, phased = (
        event_driven(schedule(method, "1f1b", pipe, durations), durations).end
        for method in ("text_only", "phased")
    )
    assert phased == pytest.approx(text + microbatches * (0.5 + 1.0) / stages)


@pytest.mark.parametrize("method", ON_ANY_PIPELINE)
def test_orders_that_do_not_exist_are_refused(method: str) -> None:
    for order, pipe in (("gpipe", Pipeline(2, 2, chunks=2)), ("1f1b", Pipeline(2, 3, chunks=2))):
        with pytest.raises(ScheduleError):
            schedule(method, order, pipe, Durations.uniform(pipe))


@pytest.mark.parametrize(
    "units",
    [
        1,
        2,
        3,
        5,
    ],
)
def test_phased_spreads_any_number_of_units(units: int) -> None:
    pipe = Pipeline(3, 4, encoders=(EncoderPipeline(units=units),))
    durations = Durations.uniform(pipe)
    found = schedule("phased", "1f1b", pipe, durations)
    validate(lower(found, durations), found)
