"""Where values move: an exchange joins a task boundary of the sender to one of the receiver."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

from optimus_jax.schedule.dataflow import LLM, Dataflow, Value
from optimus_jax.schedule.placement import Placement as Placement
from optimus_jax.schedule.simulate import (
    Durations,
    Exchange,
    Item,
    event_driven,
    simulate,
)
from optimus_jax.schedule.task import Schedule, ScheduleError, Task

_EPSILON = 1e-9


class _Window(NamedTuple):
    """An idle stretch of a device before item `position` of its sequence."""

    start: float
    end: float
    position: int
    strict: bool  # the next item is an exchange: one that ends at `end` would tie with it


class _Meeting(NamedTuple):
    """A possible exchange at time `at`, before the given positions of sender and receiver."""

    delay: float
    at: float
    sender: int
    receiver: int
    price: float = 0.0  # of a meeting that delays: how long the step then takes


def place_exchanges(schedule: Schedule, durations: Durations) -> Placement:
    """Gives every moving value an exchange at which it delays the timeline least.

    Between the value's production and its use, take the pair of boundaries with the least delay. Of
    pairs without delay take the earliest for activations and gradients, the latest for features and
    theirs, and let values share an exchange: one of each way for the LLM, up to `units` each way
    for features and hidden states. Where every pair delays, take the one that lengthens the step
    least. Values are placed in the order of their production; if the step then takes longer than
    with asynchronous transfers, also LLM values first, and in the order of use, and the best is
    kept.

    Raises ScheduleError if a value finds no place without a cycle.
    """
    placement = place_within(schedule, durations, float("inf"))
    assert placement is not None
    return placement


def place_within(schedule: Schedule, durations: Durations, limit: float) -> Placement | None:
    """As `place_exchanges`, but None as soon as it is clear that the step takes `limit` or longer.

    Raises ScheduleError if a value finds no place without a cycle.
    """
    ideal = event_driven(schedule, durations).end
    best: Placement | None = None
    refused: ScheduleError | None = None
    for order in (_by_production, _llm_first, _by_use):
        try:
            placement = _Placing(schedule, durations).run(order, limit)
        except ScheduleError as error:
            refused = error
            continue
        if placement is None:
            continue
        best, limit = placement, placement.timing(durations).end
        if limit <= ideal + _EPSILON:
            break
        limit -= _EPSILON
    if best is None and refused is not None:
        raise refused
    return best


Order = Callable[[Value, float, float], tuple[float, ...]]  # value, made at, used at -> sort key


def _by_production(value: Value, made: float, used: float) -> tuple[float, ...]:
    return (made,)


def _llm_first(value: Value, made: float, used: float) -> tuple[float, ...]:
    return value.payload != LLM, made


def _by_use(value: Value, made: float, used: float) -> tuple[float, ...]:
    return (used,)


class _Placing:
    def __init__(self, schedule: Schedule, durations: Durations):
        self.schedule, self.durations = schedule, durations
        self.flow = Dataflow.of(schedule)
        self.sequences: list[list[Item]] = [list(order) for order in schedule.orders]
        self.timing = simulate(self.sequences, self.flow, durations)

    def run(self, order: Order, limit: float) -> Placement | None:
        """None if the step takes `limit` or longer: a further exchange never makes it shorter."""
        made: dict[Value, float] = {}
        used: dict[Value, float] = {}
        for device, task, start, end in self.timing.log:
            assert isinstance(task, Task)
            reads, writes = self.flow.io[device, task]
            used.update(dict.fromkeys(reads, start))
            made.update((v, end) for v in writes if self.flow.moves(v))
        for value in sorted(made, key=lambda v: order(v, made[v], used[v])):
            self._place(value)
            if self.timing.end >= limit:
                return None
        return Placement(self.schedule, self.sequences)

    def _place(self, value: Value) -> None:
        sender, maker = self.flow.producer[value]
        receiver, user = self.flow.consumer[value]
        made = self.sequences[sender].index(maker)
        used = self.sequences[receiver].index(user)
        shared = self._share(value, sender, receiver, made, used)
        if shared is not None:
            shared.values.append(value)
            return
        meetings = self._meetings(value, sender, receiver, made, used)
        exchange = Exchange((min(sender, receiver), max(sender, receiver)), value.payload)
        exchange.values.append(value)
        if meetings[0].delay == 0:
            self._insert(exchange, meetings[0], sender, receiver)
            return
        for meeting in self._priced(meetings, exchange, sender, receiver):
            self._insert(exchange, meeting, sender, receiver)
            try:
                self.timing = simulate(self.sequences, self.flow, self.durations)
                return
            except ScheduleError:  # it closes a cycle
                for device, position in ((sender, meeting.sender), (receiver, meeting.receiver)):
                    del self.sequences[device][position]
                    del self.timing.intervals[device][position]
        raise ScheduleError(
            f"no exchange for {value} without a cycle: {maker} on device {sender} makes it,"
            f" {user} on device {receiver} reads it"
        )

    def _share(
        self, value: Value, sender: int, receiver: int, made: int, used: int
    ) -> Exchange | None:
        """The first exchange between the same devices, at the right time, with room this way."""
        payload = value.payload
        encoders = self.schedule.pipeline.encoders
        room = 1 if payload == LLM else encoders[payload.encoder].units
        open_at_receiver = {
            id(x) for x in self.sequences[receiver][:used] if isinstance(x, Exchange)
        }
        for item in self.sequences[sender][made + 1 :]:
            if (
                isinstance(item, Exchange)
                and item.payload == payload
                and receiver in item.pair
                and id(item) in open_at_receiver
                and sum(self.flow.producer[v][0] == sender for v in item.values) < room
            ):
                return item
        return None

    def _meetings(
        self, value: Value, sender: int, receiver: int, made: int, used: int
    ) -> list[_Meeting]:
        """Pairs of boundaries that overlap or come next to it, best first."""
        # none beside the gathering of weights
        ahead = self.timing.beside.ahead
        first = max(made + 1, ahead[sender])
        left = self._windows(sender, first, len(self.sequences[sender]))
        right = self._windows(receiver, ahead[receiver], used)
        starts, ends = [w.start for w in right], [w.end for w in right]
        found, travel = [], self.durations.travel(value.payload)
        for a in left:
            # the receiver's windows that overlap, and one more on each side
            low = bisect.bisect_left(ends, a.start - _EPSILON) - 1
            high = bisect.bisect_right(starts, a.end + _EPSILON) + 1
            for b in right[max(low, 0) : high]:
                at = max(a.start, b.start)
                delay = 0.0
                for window in (a, b):
                    over = at + travel - window.end
                    if over > _EPSILON or (window.strict and over > -_EPSILON):
                        delay = max(delay, over, _EPSILON)
                found.append(_Meeting(delay, at, a.position, b.position))
        late = value.is_feature
        return sorted(found, key=lambda m: (round(m.delay, 9), -m.at if late else m.at))

    def _priced(
        self, meetings: list[_Meeting], exchange: Exchange, sender: int, receiver: int
    ) -> list[_Meeting]:
        """The meetings with their prices, cheapest first, then in the order given.

        The step then takes the longest way through the meeting, or what it takes now: the time up
        to it and the longest ways from the items after it (as in `Packing`). Exact unless the
        meeting closes a cycle.
        """
        if len(self.timing.log) < sum(map(len, self.sequences)):  # exchanges without delay are new
            self.timing = simulate(self.sequences, self.flow, self.durations)
        tails, travel = self._tails(), self.durations.travel(exchange.payload)
        priced = []
        for m in meetings:
            rest = max(tails[sender][m.sender], tails[receiver][m.receiver])
            price = max(self.timing.end, m.at + travel + rest)
            priced.append(m._replace(price=round(price, 9)))
        return sorted(priced, key=lambda m: m.price)

    def _tails(self) -> list[list[float]]:
        """For every item of every device, the longest way from its start to the end of the step,
        and 0 for the end of the sequence."""
        scatter, overlap = self.durations.scatter, self.durations.overlap
        behind = self.timing.beside.behind
        # last item first
        tails = [[0.0 if overlap else scatter] for _ in self.sequences]
        entered: dict[int, float] = {}  # exchanges of which one device is done
        moved = {v for s in self.sequences for x in s if isinstance(x, Exchange) for v in x.values}
        use: dict[Value, float] = {}
        for device, item, start, end in reversed(self.timing.log):
            rest = tails[device][-1]
            if overlap and len(self.sequences[device]) - len(tails[device]) == behind[device] - 1:
                rest = max(rest, scatter)
            if isinstance(item, Exchange):
                tail = rest + end - start
                if id(item) in entered:
                    tail = max(tail, entered[id(item)])
                    tails[item.other(device)][-1] = tail
                entered[id(item)] = tail
            else:
                reads, writes = self.flow.io[device, item]
                for value in writes:
                    if value in use and value not in moved:
                        moves = self.flow.moves(value)
                        away = self.durations.travel(value.payload) if moves else 0.0
                        rest = max(rest, use[value] + away)
                tail = rest + end - start
                use.update(dict.fromkeys(reads, tail))
            tails[device].append(tail)
        return [row[::-1] for row in tails]

    def _windows(self, device: int, first: int, last: int) -> list[_Window]:
        sequence, intervals = self.sequences[device], self.timing.intervals[device]
        windows = []
        for k in range(first, last + 1):
            start = intervals[k - 1][1] if k else 0.0
            if k == self.timing.beside.ahead[device]:
                start = max(start, self.durations.gather)
            following = sequence[k] if k < len(sequence) else None
            end = intervals[k][0] if following is not None else float("inf")
            windows.append(_Window(start, end, k, isinstance(following, Exchange)))
        return windows

    def _insert(self, exchange: Exchange, meeting: _Meeting, sender: int, receiver: int) -> None:
        interval = meeting.at, meeting.at + self.durations.travel(exchange.payload)
        for device, position in ((sender, meeting.sender), (receiver, meeting.receiver)):
            self.sequences[device].insert(position, exchange)
            self.timing.intervals[device].insert(position, interval)
