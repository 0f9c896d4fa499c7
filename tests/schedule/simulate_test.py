"""Times by hand, under both timing rules, and what cannot be timed."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.schedule.dataflow import Content, Dataflow, Value
from optimus_jax.schedule.exchange import Placement
from optimus_jax.schedule.simulate import (
    Durations,
    EncoderDurations,
    Exchange,
    Item,
    event_driven,
    simulate,
)
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError, Task

PIPE = Pipeline(2, 1)


def activation(microbatch: int) -> Value:
    return Value(Content.ACTIVATION, microbatch, 1)


def gradient(microbatch: int) -> Value:
    return Value(Content.GRADIENT, microbatch, 0)


def exchange(*values: Value) -> Exchange:
    return Exchange((0, 1), values[0].payload, list(values))


def sequence(text: str, **exchanges: Exchange) -> list[Item]:
    """`F0 x B0`: tasks, and exchanges by name."""
    return [exchanges[word] if word in exchanges else Task.parse(word) for word in text.split()]


def test_uniform_durations_share_out_stages_and_microbatches() -> None:
    pipe = Pipeline(2, 4, chunks=2, encoders=(EncoderPipeline((5,)),))
    d = Durations.uniform(pipe, forward=1.0, backward=3.0, encoder=2.0)
    assert (d.forward, d.backward) == ((0.5,) * 4, (1.5,) * 4)
    (encoder,) = d.encoders
    assert encoder.forward == pytest.approx((0.2,) * 5)
    assert encoder.backward == pytest.approx((0.6,) * 5)
    assert (d.transfer, d.epilogue) == (0, 0)
    assert Durations.uniform(pipe, encoder_backward=1.0).encoders[0].backward == (0.1,) * 5


@pytest.mark.parametrize(
    ("task", "device", "seconds"),
    [
        ("F0", 1, 2),
        ("F1c1", 0, 3),
        ("B0", 0, 5),
        ("B0c1", 1, 8),
        ("EF0", 0, 2 * (10 + 20 + 30)),
        ("EF0.1", 1, 10 + 20 + 30),
        ("EF0.1[1:3)", 0, 20 + 30),
        ("EB0.0+1[0:1)", 0, 2 * 100),
        ("EB0[2:3)", 0, 2 * 300),
    ],
)
def test_tasks_last_as_long_as_their_parts(task: str, device: int, seconds: float) -> None:
    pipe = Pipeline(2, 2, chunks=2, encoders=(EncoderPipeline((3,)),))
    encoder = EncoderDurations((10, 20, 30), (100, 200, 300))
    d = Durations((1, 2, 3, 4), (5, 6, 7, 8), (encoder,))
    assert d.of(Task.parse(task), device, pipe) == seconds


def test_event_driven_times_by_hand() -> None:
    schedule = Schedule.parse("0: EF0 F0 B0 EB0\n1: F0 B0", PIPE)
    timing = event_driven(schedule, Durations.uniform(PIPE, encoder=0.5))
    assert timing.intervals == [
        [(0, 0.5), (0.5, 1.5), (4.5, 6.5), (6.5, 7.5)],
        [(1.5, 2.5), (2.5, 4.5)],
    ]
    assert timing.end == 7.5


def test_transfers_take_time_between_devices_but_no_device_waits_to_send() -> None:
    pipe = Pipeline(2, 2)
    durations = dataclasses.replace(Durations.uniform(pipe), transfer=0.25)
    schedule = Schedule.parse("0: F0 F1 B0 B1\n1: F0 B0 F1 B1", pipe)
    assert event_driven(schedule, durations).intervals == [
        [(0, 1), (1, 2), (4.5, 6.5), (7.5, 9.5)],
        [(1.25, 2.25), (2.25, 4.25), (4.25, 5.25), (5.25, 7.25)],
    ]


def test_the_log_has_causes_before_effects() -> None:
    pipe = Pipeline(2, 2)
    schedule = Schedule.parse("0: F0 F1 B0 B1\n1: F0 B0 F1 B1", pipe)
    log = event_driven(schedule, Durations.uniform(pipe)).log
    assert [f"{task}@{device}" for device, task, _, _ in log] == [
        *("F0@0", "F1@0", "F0@1", "B0@1", "F1@1", "B0@0", "B1@1", "B1@0"),
    ]
    assert log[3] == (1, Task.parse("B0"), 2, 4)


def test_an_exchange_occupies_both_devices_at_once() -> None:
    x, y = exchange(activation(0)), exchange(gradient(0))
    placement = Placement(
        Schedule.parse("0: F0 B0\n1: F0 B0", PIPE),
        [sequence("F0 x y B0", x=x, y=y), sequence("x F0 B0 y", x=x, y=y)],
    )
    timing = placement.timing(dataclasses.replace(Durations.uniform(PIPE), transfer=0.5))
    assert timing.intervals == [
        [(0, 1), (1, 1.5), (4.5, 5), (5, 7)],
        [(1, 1.5), (1.5, 2.5), (2.5, 4.5), (4.5, 5)],
    ]


def test_a_sender_waits_in_an_exchange_but_not_in_an_asynchronous_transfer() -> None:
    pipe = Pipeline(2, 3)
    slow = dataclasses.replace(Durations.uniform(pipe), forward=(1.0, 3.0))
    orders = tuple(tuple(map(Task.parse, ("F0", "F1", "F2"))) for _ in range(2))
    flow = Dataflow(pipe, orders, frozenset())
    x, y, z = (exchange(activation(i)) for i in range(3))

    asynchronous = simulate(orders, flow, slow)
    assert asynchronous.intervals == [[(0, 1), (1, 2), (2, 3)], [(1, 4), (4, 7), (7, 10)]]
    meeting = [
        sequence("F0 x F1 y F2 z", x=x, y=y, z=z),
        sequence("x F0 y F1 z F2", x=x, y=y, z=z),
    ]
    assert simulate(meeting, flow, slow).intervals == [
        [(0, 1), (1, 1), (1, 2), (4, 4), (4, 5), (7, 7)],
        [(1, 1), (1, 4), (4, 4), (4, 7), (7, 7), (7, 10)],
    ]


def test_values_that_nobody_makes_are_there_from_the_start() -> None:
    orders = ((), (Task.parse("F0"),))
    timing = simulate(orders, Dataflow(PIPE, orders, frozenset()), Durations.uniform(PIPE))
    assert timing.intervals == [[], [(0, 1)]]


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    pipe = Pipeline(2, 2)
    schedule = Schedule.parse("0: F0 B0 F1 B1\n1: F1 B1 F0 B0", pipe)
    with pytest.raises(ScheduleError, match="cycle") as refused:
        event_driven(schedule, Durations.uniform(pipe))
    for part in (
        "device 0 before B0 waits for gradient of microbatch 0 stage 0 from B0 on device 1",
        "device 1 before F1 waits for activation of microbatch 1 stage 1 from F1 on device 0",
    ):
        assert part in str(refused.value)


def test_only_the_cycle_is_named_and_not_who_waits_for_it() -> None:
    pipe = Pipeline(3, 1)
    schedule = Schedule.parse("0: F0 B0\n1: F0 B0\n2: B0 F0", pipe)
    with pytest.raises(
        ScheduleError, match=r"cycle: device 2 before B0 waits for .* F0 on device 2$"
    ):
        event_driven(schedule, Durations.uniform(pipe))


def test_exchanges_in_opposite_orders_are_a_cycle() -> None:
    pipe = Pipeline(2, 2)
    early, late = exchange(activation(0)), exchange(activation(1))
    back = exchange(gradient(0)), exchange(gradient(1))
    names = {"a0": early, "a1": late, "g0": back[0], "g1": back[1]}
    placement = Placement(
        Schedule.parse("0: F0 F1 B0 B1\n1: F0 B0 F1 B1", pipe),
        [
            sequence("F0 F1 a1 a0 g0 B0 g1 B1", **names),
            sequence("a0 F0 B0 g0 a1 F1 B1 g1", **names),
        ],
    )
    with pytest.raises(ScheduleError, match="cycle") as refused:
        placement.timing(Durations.uniform(pipe))
    for part in (
        "device 0 before B0 waits in the exchange 0-1 of activation of microbatch 1 stage 1",
        "device 1 before F0 waits in the exchange 0-1 of activation of microbatch 0 stage 1",
    ):
        assert part in str(refused.value)


def test_a_moving_value_without_exchange_is_refused() -> None:
    x = exchange(activation(0))
    placement = Placement(
        Schedule.parse("0: F0 B0\n1: F0 B0", PIPE),
        [sequence("F0 x B0", x=x), sequence("x F0 B0", x=x)],
    )
    with pytest.raises(
        ScheduleError,
        match=r"gradient .* has no exchange: B0 on device 1 makes it, B0 on device 0 reads it",
    ):
        placement.timing(Durations.uniform(PIPE))
