"""Probes: Programs that run one kind of task over and over, so that its seconds can be told.

A Program is a table, so any sequence of tasks runs in the compiled training step as it is. A probe
has a preparation, which leaves finite numbers in all slots that its task reads, and then the task
some times; the same Program without the task, run by turns, is what its time is compared with.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from optimus_jax.schedule.program import KINDS, Columns, Program, Slots, alphabet
from optimus_jax.schedule.task import Kind, Pipeline

Row = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A task or an exchange to be timed, `repeats` times in one step, on all devices at once.

    `kind` None is an exchange of LLM values, or of features. An LLM task has `layers` layers and
    is of the `first` or `last` virtual stage, of both or of neither; an encoder task is of one unit
    and runs layers [begin, end).
    """

    name: str
    kind: Kind | None
    repeats: int = 1
    layers: int = 0
    first: bool = False
    last: bool = False
    begin: int = 0
    end: int = 0
    features: bool = False


def probes(pipe: Pipeline, repeats: int) -> list[Probe]:
    """All probes of a pipeline. Tasks without layers show what is not in the layers; they are
    short, and run more often."""
    most, layers, often = max(pipe.llm_layers), pipe.encoder_layers, 4 * repeats
    found = []
    for kind in (Kind.F, Kind.B):
        found.append(Probe(f"{kind} layers", kind, repeats, layers=most))
        found.append(Probe(f"{kind} none", kind, often))
        found.append(Probe(f"{kind} first", kind, often, first=True))
    found.append(Probe("F last", Kind.F, often, last=True))
    for kind in (Kind.EF, Kind.EB):
        found.append(Probe(f"{kind} whole", kind, 2 * repeats, end=layers))
        found.append(Probe(f"{kind} patches", kind, often))
        found.append(Probe(f"{kind} projector", kind, often, begin=layers, end=layers))
    if pipe.stages > 1:
        found.append(Probe("exchange", None, 2 * often))
        found.append(Probe("feature exchange", None, 2 * often, features=True))
    return found


def program(probe: Probe | None, pipe: Pipeline, slots: Slots, ticks: int, run: bool) -> Program:
    """The Program of a probe with its task, or without (`run` false); of None, an idle one.

    Microbatches, chunks and slots of saved inputs change from one time to the next, as they do in
    training. Raises ValueError if there are too few ticks.
    """
    at = Columns(pipe.units)
    rows, pattern = _prepared(probe, pipe, slots), 0
    if probe is not None and probe.kind is None:
        # a task before each exchange, with and without it: so it is in training, and devices that
        # come from a task are less in step than devices that come from an exchange
        rows += [_task(probe, pipe, slots, k) for k in range(probe.repeats)]
        pattern = _pattern(pipe, probe.features) if run else 0
    elif probe is not None and run:
        rows += [_task(probe, pipe, slots, k) for k in range(probe.repeats)]
    if len(rows) > ticks:
        raise ValueError(f"{probe}: {len(rows)} ticks do not fit into {ticks}")
    table = np.broadcast_to(at.idle_row(), (ticks, pipe.stages, at.width)).copy()
    patterns = np.zeros(ticks, np.int32)
    for t, row in enumerate(rows):
        for name, value in row.items():
            where = at[name]
            table[t, :, where.start if isinstance(where, slice) else where] = value
        if pattern and t >= len(rows) - probe.repeats:  # type: ignore[union-attr]
            patterns[t] = pattern
    return Program(pipe, slots, table, patterns)


def ticks_needed(pipe: Pipeline, slots: Slots, repeats: int) -> int:
    """Ticks that the longest of the probes takes."""
    return max(len(_prepared(p, pipe, slots)) + p.repeats for p in probes(pipe, repeats))


def _pattern(pipe: Pipeline, features: bool) -> int:
    """The first pattern of a class: the even links, or the first encoder pipeline with stage 0."""
    return next(k for k, p in enumerate(alphabet(pipe)) if p.features == features and p.links)


def _used(probe: Probe, slots: Slots) -> tuple[int, int]:
    """How many slots of saved inputs of the LLM and of the encoder a probe goes through."""
    return min(slots.saved, probe.repeats), min(slots.encoder, probe.repeats)


def _prepared(probe: Probe | None, pipe: Pipeline, slots: Slots) -> list[Row]:
    if probe is None:
        return []
    f, ef = KINDS[Kind.F], KINDS[Kind.EF]
    # the head without layers leaves a gradient in the wire slot
    rows: list[Row] = [{"kind": f, "first": 1, "last": 1, "saved": 0, "write": 0}]
    saved, encoder = _used(probe, slots)
    whole = {"kind": ef, "count": 1, "begin": 0, "end": pipe.encoder_layers, "feature": 0}
    if probe.kind == Kind.B:
        rows += [{"kind": f, "first": 1, "saved": s, "layers": probe.layers} for s in range(saved)]
    if probe.kind in (Kind.EF, Kind.EB):
        rows += [{**whole, "encoder": s} for s in range(encoder)]
    if probe.features:
        rows.append({**whole, "encoder": 0})
    return rows


def _task(probe: Probe, pipe: Pipeline, slots: Slots, k: int) -> Row:
    saved, encoder = _used(probe, slots)
    row: Row = {"kind": KINDS[probe.kind or Kind.F], "microbatch": k % pipe.microbatches}
    if probe.kind is None and probe.features:
        row.update(feature_send=0, feature_receive=0)
    elif probe.kind is None:
        row.update(send=0, receive=0)
    elif probe.kind.is_encoder:
        return {
            **row,
            "count": 1,
            "begin": probe.begin,
            "end": probe.end,
            "unit": k % pipe.units,
            "encoder": k % encoder,
            "feature": 0,
        }
    return {
        **row,
        "chunk": k % pipe.chunks,
        "layers": probe.layers,
        "first": int(probe.first),
        "last": int(probe.last),
        "saved": k % saved,
        "read": 0,
        "write": -1,
    }
