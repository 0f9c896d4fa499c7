"""The LLM's pipeline order as an action table, in the notation of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from optimus_jax.schedule.task import ScheduleError

KIND_WORDS = {
    "F": "forward",
    "B": "whole backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


class Action(NamedTuple):
    """One kind of work on one microbatch at one virtual stage, written as torch writes it: `3B1` is
    the whole backward (B) of microbatch 1 at virtual stage 3. Which rank holds a virtual stage is
    said elsewhere: it depends on the order."""

    stage: int
    kind: str  # a key of KIND_WORDS
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


ActionTable = tuple[tuple[Action, ...], ...]  # of each rank, in order; no entries for idle time

Seconds = Callable[[Action], float] | Mapping[str, Sequence[float]]

_NOTATION = re.compile(r"(0|[1-9][0-9]*)([FBIW])(0|[1-9][0-9]*)")
_NO_COMPUTATION = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|[A-Z_]*SHARD|REDUCE_GRAD)[0-9]*")


def to_csv(table: ActionTable) -> str:
    """One line for each rank, such as `0F0,0F1,0B0,0B1`: what torch's schedules read back with
    `_load_csv(..., format="compute_only")`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(str, actions) for actions in table)
    return out.getvalue()


def from_csv(text: str) -> ActionTable:
    """The table that `text` holds, one line for each rank; empty cells are idle time and dropped.

    Reads what torch writes with `_dump_csv(..., format="compute_only")`. Raises ScheduleError,
    naming row and column as counted from 1, for a cell that is no action.
    """
    table = []
    for row, cells in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
        actions = []
        for column, cell in enumerate(map(str.strip, cells), 1):
            match = _NOTATION.fullmatch(cell)
            if match:
                actions.append(Action(int(match[1]), match[2], int(match[3])))
            elif cell:
                raise ScheduleError(f"row {row}, column {column}: {cell!r} {_why_not(cell)}")
        table.append(tuple(actions))
    return tuple(table)


def _why_not(cell: str) -> str:
    if _NO_COMPUTATION.fullmatch(cell):
        return "computes nothing; torch leaves such cells out with format='compute_only'"
    if cell.endswith("OVERLAP_F_B"):
        return "runs a forward and a backward at once; here a rank runs one action at a time"
    return "is not an action; actions look like 0F0, 3B1, 2I0, 2W0"


def check(
    table: ActionTable, stages: int, microbatches: int, chunks: int, ranks: Sequence[int]
) -> None:
    """Raises ScheduleError unless every virtual stage runs each microbatch forward once and
    backward once, whole (B) or split (I and W), on its rank in `ranks`, and no rank waits for
    ever."""
    virtual = stages * chunks
    if len(table) != stages:
        raise ScheduleError(f"{len(table)} rows of actions for {stages} ranks")
    if len(ranks) != virtual:
        raise ScheduleError(
            f"{len(ranks)} ranks of virtual stages for {stages} stages x {chunks} chunks"
        )
    seen: set[tuple[int, str, int]] = set()
    for rank, actions in enumerate(table):
        for action in actions:
            stage, kind, microbatch = action
            known = kind in KIND_WORDS and 0 <= stage < virtual and 0 <= microbatch < microbatches
            if not known:
                raise ScheduleError(
                    f"{action} on rank {rank}: there are the kinds {', '.join(KIND_WORDS)},"
                    f" {virtual} virtual stages and {microbatches} microbatches"
                )
            if ranks[stage] != rank:
                raise ScheduleError(
                    f"{action} stands on rank {rank}, but stage {stage} is on rank {ranks[stage]}"
                )
            if action in seen:
                raise ScheduleError(f"{action} stands twice on rank {rank}")
            seen.add(action)
    for stage, i in itertools.product(range(virtual), range(microbatches)):
        part = next((k for k in "IW" if (stage, k, i) in seen), "")
        if part and (stage, "B", i) in seen:
            raise ScheduleError(
                f"{stage}B{i} and {stage}{part}{i} both stand on rank {ranks[stage]}:"
                " a backward is whole (B) or split (I and W)"
            )
        for kind in "FIW" if part else "FB":
            if (stage, kind, i) not in seen:
                raise ScheduleError(f"{stage}{kind}{i} is missing on rank {ranks[stage]}")
    time_actions(table, ranks, dict.fromkeys(KIND_WORDS, (0.0,) * virtual))


def time_actions(
    table: ActionTable, ranks: Sequence[int], seconds: Seconds, p2p: float = 0.0
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Start and end of each action of each rank, in seconds from the first possible start.

    `ranks` holds the rank of each virtual stage, `seconds` the length of an action or, for each
    kind, one length for each virtual stage. Transfers are asynchronous: an action starts when its
    rank is free and its input is there, `p2p` after it was made if on another rank. Raises
    ScheduleError if ranks wait for one another, naming the actions. The table should have passed
    `check`.

    A microbatch takes 2n steps through n virtual stages, up by their F and down by their B or I;
    each step reads what the one before it made, and W reads what its I made.
    """
    if p2p < 0:
        raise ScheduleError(f"a transfer cannot take negative time, got {p2p}")
    virtual, lengths = len(ranks), _lengths(table, len(ranks), seconds)
    width = 1 + max((action.microbatch for actions in table for action in actions), default=0)
    steps: dict[tuple[int, str], tuple[int, int, float]] = {}  # slots read, slots written, travel
    for stage, rank in enumerate(ranks):
        up, down = stage * width, (2 * virtual - 1 - stage) * width
        before = ranks[stage - 1] if stage else rank
        after = ranks[stage + 1] if stage < virtual - 1 else rank
        steps[stage, "F"] = up, up + width, p2p * (before != rank)
        steps[stage, "B"] = steps[stage, "I"] = down, down + width, p2p * (after != rank)
        steps[stage, "W"] = down + width, (2 * virtual + 1) * width, 0.0

    made = [0.0] * width + [-1.0] * (2 * virtual + 1) * width  # when, or -1
    waiting: dict[int, int] = {}  # rank that waits for a slot
    clock, at = [0.0] * len(table), [0] * len(table)
    times: list[list[tuple[float, float]]] = [[] for _ in table]
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        actions, own, now, k = table[rank], lengths[rank], clock[rank], at[rank]
        done = times[rank].append
        while k < len(actions):
            stage, kind, i = actions[k]
            read, write, travel = steps[stage, kind]
            arrival = made[read + i]
            if arrival < 0:
                waiting[read + i] = rank
                break
            start = max(now, arrival + travel)
            now = start + own[k]
            done((start, now))
            made[write + i] = now
            if write + i in waiting:
                ready.append(waiting.pop(write + i))
            k += 1
        clock[rank], at[rank] = now, k
    if any(k < len(actions) for k, actions in zip(at, table, strict=True)):
        raise ScheduleError(_deadlock(table, virtual, at))
    return tuple(map(tuple, times))


def _lengths(table: ActionTable, virtual: int, seconds: Seconds) -> list[list[float]]:
    """Seconds of each action of each rank."""
    for rank, actions in enumerate(table):
        for action in actions:
            if not 0 <= action.stage < virtual or action.kind not in KIND_WORDS:
                raise ScheduleError(
                    f"{action} on rank {rank}: there are {virtual} virtual stages"
                    f" and the kinds {', '.join(KIND_WORDS)}"
                )
    if callable(seconds):
        lengths = [[seconds(action) for action in actions] for actions in table]
    else:
        for kind, row in seconds.items():
            if len(row) != virtual:
                raise ScheduleError(f"{len(row)} seconds of {kind} for {virtual} virtual stages")
        lacking = {kind for actions in table for _, kind, _ in actions} - seconds.keys()
        if lacking:
            raise ScheduleError(f"there are no seconds of {', '.join(sorted(lacking))}")
        lengths = [[seconds[kind][stage] for stage, kind, _ in actions] for actions in table]
    if min(map(min, filter(None, lengths)), default=0.0) < 0:
        raise ScheduleError("actions cannot take negative time")
    return lengths


def _deadlock(table: ActionTable, virtual: int, at: Sequence[int]) -> str:
    """Follows who waits for whom from the first stuck rank until a rank comes up again."""
    home = {action: rank for rank, actions in enumerate(table) for action in actions}
    rank = next(r for r, k in enumerate(at) if k < len(table[r]))
    path: dict[int, str] = {}
    while rank not in path:
        action = table[rank][at[rank]]
        stage, kind, i = action
        if kind == "F":
            inputs = [Action(stage - 1, "F", i)]
        elif kind == "W":
            inputs = [Action(stage, "I", i)]
        elif stage == virtual - 1:
            inputs = [Action(stage, "F", i)]
        else:
            inputs = [Action(stage + 1, k, i) for k in "BI"]
        found = next((a for a in inputs if a in home), None)
        if found is None:
            names = " or ".join(map(str, inputs))
            return f"{action} on rank {rank} waits for {names}, which no rank runs"
        path[rank] = f"rank {rank} at {action} waits for {found} of rank {home[found]}"
        rank = home[found]
    cycle = list(path.values())[list(path).index(rank) :]
    return f"the order deadlocks: {'; '.join(cycle)}"


@dataclasses.dataclass(frozen=True)
class Loop:
    """Chunks laid round the ranks: virtual stage v is on rank v % stages. A rank takes microbatches
    in groups, each group chunk by chunk. Raises ScheduleError if a size is not positive."""

    stages: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.stages, self.microbatches, self.chunks) < 1:
            raise ScheduleError(
                f"sizes of a pipeline must be positive: {self.stages} stages,"
                f" {self.microbatches} microbatches, {self.chunks} chunks"
            )

    @property
    def total(self) -> int:
        """Forwards of one rank, of all its chunks."""
        return self.microbatches * self.chunks

    @functools.cached_property
    def group(self) -> int:
        """Microbatches of a group: torch's rounds, which are Megatron-LM's groups of `stages` where
        `stages` divides the microbatches, and all of them if they are fewer than two groups.
        Raises ScheduleError if there are several chunks and the groups would differ in size."""
        rounds = max(1, self.microbatches // self.stages)
        if self.chunks > 1 and self.microbatches % rounds:
            fits = [m for m in range(1, 2 * self.microbatches) if not m % max(1, m // self.stages)]
            below = max(m for m in fits if m < self.microbatches)
            above = min(m for m in fits if m > self.microbatches)
            raise ScheduleError(
                f"interleaving on {self.stages} stages takes microbatches in equal groups of at"
                f" least {self.stages}: {self.microbatches} do not make {rounds},"
                f" near it are {below} and {above}"
            )
        return self.microbatches // rounds

    def warmup(self, each: int) -> tuple[int, ...]:
        """Forwards of each rank before its first backward: on the last rank the first group as far
        as its last chunk, on every rank `each` more than on the next one; cut to all forwards."""
        first = (self.chunks - 1) * self.group
        ranks = range(self.stages - 1, -1, -1)
        return tuple(min(first + each * below, self.total) for below in ranks)

    def forward(self, rank: int, k: int) -> Action:
        """The k-th forward of a rank."""
        chunk, microbatch = self._deal(k)
        return Action(chunk * self.stages + rank, "F", microbatch)

    def backward(self, rank: int, k: int, kind: str = "B") -> Action:
        """The k-th backward of a rank, or its k-th I or W: from the last chunk to the first."""
        chunk, microbatch = self._deal(k)
        return Action((self.chunks - 1 - chunk) * self.stages + rank, kind, microbatch)

    def _deal(self, k: int) -> tuple[int, int]:
        group, within = divmod(k, self.group * self.chunks)
        chunk, place = divmod(within, self.group)
        return chunk, group * self.group + place
