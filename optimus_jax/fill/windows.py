"""Windows: the idle time of one device as room for kernels of one length."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from optimus_jax.fill.backbone import Backbone, Interval

FAR = 1e6  # seconds: the open ends before and after the LLM's work
_SLACK = 1e-9


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Encoder kernels as they are placed: each computes for `compute` seconds. In a window without
    LLM work it takes `full` seconds, its share of the encoder's own collectives included; those
    of a kernel in a tensor-parallel slot run beside the LLM's next compute."""

    compute: float
    full: float


@dataclasses.dataclass(frozen=True)
class SlotRule:
    """What encoder work may do in tensor-parallel slots: `use` says whether at all, `usable` which
    share of the slots, `contention` how much longer a kernel takes beside the collective."""

    use: bool = True
    usable: float = 1.0
    contention: float = 1.0


class Windows:
    """Idle intervals of a rank in order of time, with how many kernels each holds.

    Made of `negated` intervals, time runs backward, and packing late is packing early: forwards are
    placed from their deadlines back, backwards from their releases on, by the same code.
    """

    def __init__(
        self, intervals: Sequence[tuple[float, float, bool]], kernel: Kernel, rule: SlotRule
    ):
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.each: list[float] = []
        self.slot: list[bool] = []
        self.before: list[int] = [0]
        for start, end, is_slot in intervals:
            each = kernel.compute * rule.contention if is_slot else kernel.full
            room = int((end - start) / each + _SLACK)
            if room > 0:
                self.starts.append(start)
                self.ends.append(end)
                self.each.append(each)
                self.slot.append(is_slot)
                self.before.append(self.before[-1] + room)

    def place(self, start: float, end: float, count: int) -> tuple[float, float, int]:
        """Puts `count` kernels at the earliest places within [start, end): first start, last end,
        and how many found no place."""
        starts, ends, each, before = self.starts, self.ends, self.each, self.before
        i = bisect_right(ends, start + _SLACK)
        if i == len(ends) or starts[i] >= end:
            return start, start, count
        first = starts[i] if starts[i] > start else start
        until = ends[i] if ends[i] < end else end
        room = int((until - first) / each[i] + _SLACK)
        if room >= count:
            return first, first + count * each[i], 0
        left = count - room
        if until == end and ends[i] >= end:
            return first, first + room * each[i], left
        begun, done = (first, first + room * each[i]) if room else (None, start)
        # whole windows i + 1 .. j - 1, then what of window j lies before `end`
        target = before[i + 1] + left
        k = bisect_left(before, target, i + 2) - 1 if i + 1 < len(ends) else len(ends)
        j = bisect_left(starts, end)  # windows from j on start too late
        if k < j and k < len(ends):
            finish = starts[k] + (target - before[k]) * each[k]
            if finish <= end + _SLACK:
                return (starts[i + 1] if begun is None else begun), finish, 0
        last = min(j, len(ends)) - 1
        if last <= i:
            return (start if begun is None else begun), done, left
        fits = min(int((end - starts[last]) / each[last] + _SLACK), before[last + 1] - before[last])
        placed = before[last] - before[i + 1] + max(fits, 0)
        if not placed:
            return (start if begun is None else begun), done, left
        if fits <= 0:
            last -= 1
            fits = before[last + 1] - before[last]
        finish = starts[last] + fits * each[last]
        return (starts[i + 1] if begun is None else begun), finish, left - placed

    def runs(
        self, start: float, end: float, count: int
    ) -> Iterator[tuple[float, float, int, bool]]:
        """The places that `place` finds, window by window: start, end, how many kernels, and
        whether in a slot."""
        for i in range(bisect_right(self.ends, start + _SLACK), len(self.ends)):
            if not count or self.starts[i] >= end:
                return
            first, each = max(self.starts[i], start), self.each[i]
            fits = min(count, int((min(self.ends[i], end) - first) / each + _SLACK))
            if fits > 0:
                yield first, first + fits * each, fits, self.slot[i]
                count -= fits


def intervals_of(
    backbone: Backbone, rank: int, rule: SlotRule, ends: str = "both", between: bool = True
) -> list[tuple[float, float, bool]]:
    """Idle intervals of a rank as (start, end, is tensor-parallel slot). `ends` says whether the
    open ones before its first pass and after its last one belong to it ("both", "before", "after",
    "none"), `between` whether those between do; "periodic" are those of the step before and of this
    one, without what lies outside them."""
    if ends == "periodic":
        (low, high), period = backbone.frame, backbone.step
        own = [
            (max(s, low), min(e, high), slot)
            for s, e, slot in intervals_of(backbone, rank, rule, "both", between)
        ]
        return [(s - period, e - period, slot) for s, e, slot in own] + own
    row = backbone.passes[rank]
    found: list[tuple[float, float, bool]] = []
    if between:
        found += [(s, e, False) for s, e in backbone.gaps[rank]]
        if rule.use:
            found += [
                (s, e, True)
                for k, (s, e) in enumerate(backbone.slots[rank])
                if int((k + 1) * rule.usable + _SLACK) > int(k * rule.usable + _SLACK)
            ]
        found.sort()
    if ends in ("both", "before"):
        found.insert(0, (-FAR, row[0][0], False))
    if ends in ("both", "after"):
        found.append((row[-1][1], FAR, False))
    return found


def negated(intervals: Sequence[tuple[float, float, bool]]) -> list[tuple[float, float, bool]]:
    """The same with time running backward."""
    return [(-e, -s, slot) for s, e, slot in reversed(intervals)]


def complement(busy: Sequence[Interval]) -> list[Interval]:
    """What busy intervals leave of all time."""
    found, at = [], -FAR
    for start, end in sorted(busy):
        if start > at:
            found.append((at, start))
        at = max(at, end)
    return [*found, (at, FAR)]
