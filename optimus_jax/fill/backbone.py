"""The LLM's own step at kernel resolution: when its passes run, and where its devices idle."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

from optimus_jax.schedule.actions import Action, ActionTable, time_actions

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ChunkPass:
    """One pass of a virtual stage: seconds of compute and of exposed tensor-parallel collectives in
    turn, as (seconds, is_collective), then `busy` seconds in which sending occupies the device."""

    pieces: tuple[tuple[float, bool], ...]
    busy: float = 0.0

    @functools.cached_property
    def seconds(self) -> float:
        return sum(s for s, _ in self.pieces) + self.busy

    @functools.cached_property
    def slots(self) -> tuple[Interval, ...]:
        """Collectives as intervals from the start of the pass."""
        found, at = [], 0.0
        for seconds, is_collective in self.pieces:
            if is_collective and seconds > 0:
                found.append((at, at + seconds))
            at += seconds
        return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
    """A timed step of one LLM pipeline. Time 0 is when the first stage may start: parameters are
    gathered from -all_gather to 0, gradients scattered from `end` to end + reduce_scatter.

    `passes[rank]` are (start, end, action) in order. `need[i]` is F_i, when the first stage wants
    the features of microbatch i, `given[i]` is B_i, when their gradient is there (Optimus, section
    3.1); microbatches are numbered in the order in which the LLM takes them.
    """

    passes: tuple[tuple[tuple[float, float, Action], ...], ...]
    slots: tuple[tuple[Interval, ...], ...]
    need: tuple[float, ...]
    given: tuple[float, ...]
    end: float
    all_gather: float
    reduce_scatter: float

    @property
    def ranks(self) -> int:
        return len(self.passes)

    @property
    def microbatches(self) -> int:
        return len(self.need)

    @property
    def step(self) -> float:
        """Seconds of a step of the LLM alone."""
        return self.all_gather + self.end + self.reduce_scatter

    @property
    def frame(self) -> Interval:
        """When a step of the LLM alone begins and ends."""
        return -self.all_gather, self.end + self.reduce_scatter

    @functools.cached_property
    def gaps(self) -> tuple[tuple[Interval, ...], ...]:
        """By rank, idle intervals between its passes."""
        return tuple(
            tuple((a[1], b[0]) for a, b in itertools.pairwise(row) if b[0] - a[1] > 1e-9)
            for row in self.passes
        )

    def bubbles(self) -> dict[str, float]:
        """Seconds of idle time by cause, mean over the ranks (the classes of Optimus, table 1)."""
        count, total = self.ranks, dict.fromkeys(BUBBLES, 0.0)
        for rank, row in enumerate(self.passes):
            total["dp_all_gather"] += self.all_gather
            total["dp_reduce_scatter"] += self.reduce_scatter
            total["pp_warmup"] += row[0][0]
            total["pp_cooldown"] += self.end - row[-1][1]
            total["pp_other"] += sum(e - s for s, e in self.gaps[rank])
            total["tp"] += sum(e - s for s, e in self.slots[rank])
        return {name: seconds / count for name, seconds in total.items()}


BUBBLES = ("dp_all_gather", "dp_reduce_scatter", "pp_warmup", "pp_cooldown", "pp_other", "tp")


def backbone(
    table: ActionTable,
    ranks: Sequence[int],
    passes: Mapping[str, Sequence[ChunkPass]],
    *,
    all_gather: float = 0.0,
    reduce_scatter: float = 0.0,
    latency: float = 0.0,
) -> Backbone:
    """Times an action table. `passes[kind][virtual stage]` is what a pass takes, `ranks` the rank
    of each virtual stage, `latency` seconds of a transfer that occupies nobody."""
    seconds = {kind: tuple(p.seconds for p in row) for kind, row in passes.items()}
    times = time_actions(table, ranks, seconds, latency)
    rows, slots = [], []
    need: dict[int, float] = {}
    given: dict[int, float] = {}
    for actions, row in zip(table, times, strict=True):
        rows.append(tuple((s, e, a) for a, (s, e) in zip(actions, row, strict=True)))
        mine: list[Interval] = []
        for start, end, action in rows[-1]:
            mine += [(start + s, start + e) for s, e in passes[action.kind][action.stage].slots]
            if action.stage == 0:
                if action.kind == "F":
                    need[action.microbatch] = start
                elif action.kind in "BI":
                    given[action.microbatch] = end
        slots.append(tuple(mine))
    order = sorted(need, key=lambda i: need[i])
    return Backbone(
        tuple(rows),
        tuple(slots),
        tuple(need[i] for i in order),
        tuple(given[i] for i in order),
        max(row[-1][1] for row in rows),
        all_gather,
        reduce_scatter,
    )
