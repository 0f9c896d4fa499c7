"""Rows of a Program's table: which column holds what, and the task that a row names."""

from __future__ import annotations

import functools

import numpy as np

from optimus_jax.schedule.task import Kind, Pipeline, ScheduleError, Task

KINDS = {Kind.F: 1, Kind.B: 2, Kind.EF: 3, Kind.EB: 4}  # 0 is idle
ENCODER_KINDS = (KINDS[Kind.EF], KINDS[Kind.EB])
NONE = -1  # no slot


class Columns:
    """Where each field stands in a row of the table.

    Of the LLM task, one entry each: `kind` (0 if there is none), `microbatch`, `chunk`, `layers`
    (their count), `first` and `last` (whether it is the first or last virtual stage with layers),
    `saved` slot, `read` and `write` wire slots. Of the encoder task: `e_kind` (0 if there is none),
    `encoder`, `e_microbatch`, `count` of units, layers `begin` to `end` of the device's own stage,
    `embeds` and `projects` (whether it runs the patch embedding before them or the projector behind
    them, forward or backward). A row with both is a fused task. `send` and `receive` wire slots of
    the exchange after the task.

    One entry for each unit: `unit`; slots `e_saved` of its saved state; `e_read` and `e_write` of
    features or hidden states, NONE if the neighbouring layer is in the saved state; `e_send` and
    `e_receive` of the exchange after the task, of the class of its pattern.

    `feature`: slots of all units, encoder by encoder, that the LLM's first stage reads in F and
    writes in B.
    """

    SCALARS = (
        *("kind", "microbatch", "chunk", "layers", "first", "last", "saved", "read", "write"),
        *("e_kind", "encoder", "e_microbatch", "count", "begin", "end", "embeds", "projects"),
        *("send", "receive"),
    )
    VECTORS = ("unit", "e_saved", "e_read", "e_write", "e_send", "e_receive")
    FEATURE = "feature"
    NAMES = (*SCALARS, *VECTORS, FEATURE)
    SLOTS = (
        *("saved", "read", "write", "send", "receive", "feature"),
        *("e_saved", "e_read", "e_write", "e_send", "e_receive"),
    )

    def __init__(self, pipe: Pipeline):
        units = [encoder.units for encoder in pipe.encoders]
        self.at: dict[str, int | slice] = {name: k for k, name in enumerate(self.SCALARS)}
        self.units = max(units, default=0)
        self.width = len(self.SCALARS)
        sizes = {**dict.fromkeys(self.VECTORS, self.units), self.FEATURE: sum(units)}
        for name, size in sizes.items():
            self.at[name] = slice(self.width, self.width + size)
            self.width += size

    def __getitem__(self, name: str) -> int | slice:
        return self.at[name]

    def idle_row(self) -> np.ndarray:
        row = np.zeros(self.width, np.int32)
        for name in self.SLOTS:
            row[self.at[name]] = NONE
        return row


@functools.lru_cache
def columns_of(pipe: Pipeline) -> Columns:
    """The columns of a pipeline's rows."""
    return Columns(pipe)


def task_of(row: np.ndarray, pipe: Pipeline, device: int) -> Task | None:
    """The task that a row of a device's table names; None if idle. ScheduleError for an unknown
    kind or encoder."""
    at = columns_of(pipe)
    llm = _kind(int(row[at["kind"]]), Kind.F, Kind.B)
    kind = _kind(int(row[at["e_kind"]]), Kind.EF, Kind.EB)
    inside = None
    if kind:
        encoder = int(row[at["encoder"]])
        if not 0 <= encoder < len(pipe.encoders):
            raise ScheduleError(f"there is no encoder {encoder}")
        units = tuple(int(u) for u in row[at["unit"]][: row[at["count"]]])
        first, _ = pipe.stage_layers(encoder, device)
        layers = first + int(row[at["begin"]]), first + int(row[at["end"]])
        inside = Task(kind, int(row[at["e_microbatch"]]), 0, units, layers, encoder)
        inside = pipe.short(inside, device)
    if not llm:
        return inside
    return Task(llm, int(row[at["microbatch"]]), int(row[at["chunk"]]), inside=inside)


def _kind(number: int, *kinds: Kind) -> Kind | None:
    if not number:
        return None
    for kind in kinds:
        if KINDS[kind] == number:
            return kind
    raise ScheduleError(f"no task has kind {number}")
