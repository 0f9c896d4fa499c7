"""Where exchanges go, and what the meetings cost against asynchronous transfers."""

from __future__ import annotations

import random

import pytest

from optimus_jax.schedule.dataflow import LLM, Dataflow
from optimus_jax.schedule.exchange import Placement, place_exchanges
from optimus_jax.schedule.methods import ON_ANY_PIPELINE, schedule
from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.simulate import Durations, EncoderDurations, Exchange, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError, Task
from tests.schedule.planned import planned
from tests.schedule.random_schedules import random_schedule


def written(placement: Placement) -> list[str]:
    """A line for each device; `-1` is an exchange of LLM values with device 1, `~1` of features."""
    lines = []
    for device, sequence in enumerate(placement.sequences):
        words = [
            str(x)
            if isinstance(x, Task)
            else f"{'-' if x.payload == LLM else '~'}{x.other(device)}"
            for x in sequence
        ]
        lines.append(" ".join(words))
    return lines


def test_1f1b_meets_right_after_making_and_right_before_using() -> None:
    pipe = Pipeline(2, 3)
    found = schedule("text_only", "1f1b", pipe, Durations.uniform(pipe))
    assert written(place_exchanges(found, Durations.uniform(pipe))) == [
        "F0 -1 F1 -1 -1 B0 F2 -1 B1 -1 B2",
        "-0 F0 -0 B0 -0 F1 B1 -0 F2 B2 -0",
    ]


def test_features_share_an_exchange() -> None:
    pipe = Pipeline(2, 2)
    durations = Durations.uniform(pipe, encoder=0.5)
    placement = place_exchanges(schedule("phased", "1f1b", pipe, durations), durations)
    assert written(placement) == [
        "EF0 F0 ~1 -1 F1 -1 -1 B0 -1 B1 ~1 EB0",
        "EF1 ~0 -0 F0 -0 B0 -0 F1 B1 -0 ~0 EB1",
    ]
    features = [x for x in placement.sequences[0] if isinstance(x, Exchange) and x.payload != LLM]
    assert [len(x.values) for x in features] == [2, 2]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 2), (3, 3, 2)], ids=str)
def test_every_moving_value_has_one_exchange_between_its_making_and_its_use(
    sizes: tuple[int, ...], seed: int
) -> None:
    pipe = Pipeline(*sizes, encoders=(EncoderPipeline((3,)),))
    durations = Durations.uniform(pipe, encoder=0.7)
    found = random_schedule(pipe, random.Random(seed))
    placement = place_exchanges(found, durations)
    flow = Dataflow.of(found)
    sequences = placement.sequences
    assert tuple(tuple(x for x in s if isinstance(x, Task)) for s in sequences) == found.orders

    exchanges = {id(x): x for s in sequences for x in s if isinstance(x, Exchange)}.values()
    moved = [v for x in exchanges for v in x.values]
    assert sorted(moved) == sorted(v for v in flow.producer if flow.moves(v))
    for exchange in exchanges:
        for value in exchange.values:
            (sender, maker), (receiver, user) = flow.producer[value], flow.consumer[value]
            assert exchange.pair == (min(sender, receiver), max(sender, receiver))
            assert exchange.payload == value.payload
            assert sequences[sender].index(maker) < sequences[sender].index(exchange)
            assert sequences[receiver].index(exchange) < sequences[receiver].index(user)
        for device in exchange.pair:
            sent = sum(flow.producer[v][0] == device for v in exchange.values)
            assert sent <= (1 if exchange.payload == LLM else pipe.encoders[0].units)
    assert placement.timing(durations).end >= event_driven(found, durations).end - 1e-9


RATIO_SIZES = [(p, m, v) for p in (2, 4) for m in (p, 2 * p) for v in (1, 2)] + [
    *((8, 8, 1), (8, 8, 2))
]


def ratio(method: str, order: str, sizes: tuple[int, int, int], encoder: float) -> float:
    found = planned(method, order, *sizes, encoder)
    return found.program_end / found.timing.end


@pytest.mark.parametrize("encoder", [0.5, 1])
@pytest.mark.parametrize("sizes", RATIO_SIZES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ON_ANY_PIPELINE)
def test_meetings_cost_little(
    method: str, order: str, sizes: tuple[int, int, int], encoder: float
) -> None:
    if order == "1f1b" or sizes[2] == 1:
        assert 1 - 1e-9 <= ratio(method, order, sizes, encoder) <= 1.05


@pytest.mark.parametrize("sizes", [(2, 4, 1), (2, 8, 1), (4, 8, 1), (8, 16, 1), (4, 8, 2)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_meetings_cost_nothing_without_encoder(order: str, sizes: tuple[int, int, int]) -> None:
    if order == "1f1b" or sizes[2] == 1:
        assert ratio("text_only", order, sizes, 0.5) == 1


@pytest.mark.parametrize("sizes", [(2, 4, 1), (4, 4, 1), (2, 4, 2)], ids=str)
def test_transfers_that_take_time_are_placed_too(sizes: tuple[int, int, int]) -> None:
    pipe = Pipeline(*sizes)
    durations = Durations(
        *((1 / pipe.chunks,) * pipe.virtual_stages, (2 / pipe.chunks,) * pipe.virtual_stages),
        (EncoderDurations((0.5 / pipe.stages,), (1 / pipe.stages,)),),
        transfer=0.02,
    )
    found = schedule("phased", "1f1b", pipe, durations)
    end = place_exchanges(found, durations).timing(durations).end
    assert 1 <= end / event_driven(found, durations).end <= 1.05


def test_a_stage_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ScheduleError, match="durations of forward must be positive"):
        Durations((1.0, 0.0), (2.0, 1.0))


def test_values_that_stay_need_no_exchange() -> None:
    schedule_of_one = Schedule.parse("0: EF0 F0 B0 EB0", Pipeline(1, 1))
    durations = Durations.uniform(schedule_of_one.pipeline)
    assert written(place_exchanges(schedule_of_one, durations)) == ["EF0 F0 B0 EB0"]
