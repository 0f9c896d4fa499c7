"""Probes: Programs that run one kind of task over and over, so that its seconds can be told.

A Program is a table, so any sequence of tasks runs in the compiled training step as it is. A probe
has a preparation, which leaves finite numbers in all slots that its task reads, and then the task
some times; the same Program without the task, run by turns, is what its time is compared with.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from optimus_jax.schedule.program import (
    KINDS,
    EncoderSlots,
    Payload,
    Program,
    Shape,
    Slots,
    alphabet,
    columns_of,
)
from optimus_jax.schedule.task import Kind, Pipeline

Row = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A task or an exchange to be timed, `repeats` times in one step, on all devices at once.

    `kind` None is an exchange of values of class `moved`. An LLM task has `layers` layers and is of
    the `first` or `last` virtual stage, of both or of neither; if `fused`, an encoder's task of
    layers [begin, end) runs inside. An encoder task is of one unit of `encoder` and runs layers
    [begin, end) of its stage; `embeds` and `projects` say whether patch embedding and projector
    are in it. Any stage may run any of them: all have weights of every part, stages with fewer
    layers than others zeros.
    """

    name: str
    kind: Kind | None
    repeats: int = 1
    layers: int = 0
    first: bool = False
    last: bool = False
    encoder: int = 0
    begin: int = 0
    end: int = 0
    embeds: bool = False
    projects: bool = False
    fused: bool = False
    moved: Payload | None = None


def encoder_layers(pipe: Pipeline, encoder: int) -> int:
    """Layers of an encoder that every stage with layers has."""
    return min(n for n in pipe.encoders[encoder].layers if n)


def fused_layers(pipe: Pipeline) -> int:
    """Layers of the first encoder that go into an LLM task of any stage with layers."""
    return min(encoder_layers(pipe, 0), *(n for n in pipe.llm_layers if n))


def named(name: str, encoder: int) -> str:
    """A probe's name, which tells encoders after the first by their number."""
    return f"{name} {encoder}" if encoder else name


def probes(pipe: Pipeline, repeats: int, fuse: bool = False) -> list[Probe]:
    """All probes of a pipeline; with `fuse` those of fused tasks too. Tasks without layers show
    what is not in the layers; they are short, and run more often."""
    most, often = max(pipe.llm_layers), 4 * repeats
    found = []
    for kind in (Kind.F, Kind.B):
        found.append(Probe(f"{kind} layers", kind, repeats, layers=most))
        found.append(Probe(f"{kind} none", kind, often))
        found.append(Probe(f"{kind} first", kind, often, first=True))
    found.append(Probe("F last", Kind.F, often, last=True))
    for k in range(len(pipe.encoders)):
        end = encoder_layers(pipe, k)
        for kind in (Kind.EF, Kind.EB):

            def add(part: str, times: int, kind: Kind = kind, k: int = k, **layers: int) -> None:
                found.append(Probe(named(f"{kind} {part}", k), kind, times, encoder=k, **layers))  # type: ignore[arg-type]

            add("whole", 2 * repeats, end=end, embeds=True, projects=True)
            add("patches", often, embeds=True)
            add("projector", often, begin=end, end=end, projects=True)
    if fuse:
        inside = fused_layers(pipe)
        for kind in (Kind.F, Kind.B):
            found.append(Probe(f"{kind} fused", kind, repeats, layers=most, end=inside, fused=True))
    for payload in dict.fromkeys(p.payload for p in alphabet(pipe) if p.links):
        found.append(Probe(exchange(payload), None, 2 * often, moved=payload))
    return found


def exchange(payload: Payload) -> str:
    """The name of the probe of a class."""
    words = "exchange" if payload.content == "llm" else f"{payload.content} exchange"
    return named(words, payload.encoder)


def program(probe: Probe | None, pipe: Pipeline, shape: Shape, run: bool) -> Program:
    """The Program of a probe with its task, or without (`run` false); of None, an idle one.

    Microbatches, chunks and slots of saved inputs change from one time to the next, as they do in
    training. Raises ValueError if there are too few ticks.
    """
    at = columns_of(pipe)
    rows, pattern = _prepared(probe, pipe, shape.slots), 0
    if probe is not None and probe.kind is None:
        # a task before each exchange, with and without it: so it is in training, and devices that
        # come from a task are less in step than devices that come from an exchange
        rows += [_task(probe, pipe, shape.slots, k) for k in range(probe.repeats)]
        pattern = _pattern(pipe, probe) if run else 0
    elif probe is not None and run:
        rows += [_task(probe, pipe, shape.slots, k) for k in range(probe.repeats)]
    if len(rows) > shape.ticks:
        raise ValueError(f"{probe}: {len(rows)} ticks do not fit into {shape.ticks}")
    table = np.broadcast_to(at.idle_row(), (len(rows), pipe.stages, at.width)).copy()
    patterns = np.zeros(len(rows), np.int32)
    for t, row in enumerate(rows):
        for name, value in row.items():
            where = at[name]
            table[t, :, where.start if isinstance(where, slice) else where] = value
        if pattern and t >= len(rows) - probe.repeats:  # type: ignore[union-attr]
            patterns[t] = pattern
    return Program(pipe, shape.slots, table, patterns).padded(*shape)


def shape(pipe: Pipeline, repeats: int, fuse: bool = False) -> Shape:
    """The least shape that all probes fit."""
    encoders = tuple(EncoderSlots(1, int(sizes.stages > 1), 2 * repeats) for sizes in pipe.encoders)
    slots = Slots(1, min(repeats, pipe.microbatches), encoders)
    ticks = max(len(_prepared(p, pipe, slots)) + p.repeats for p in probes(pipe, repeats, fuse))
    return Shape(ticks, slots, 0, 0)


def _pattern(pipe: Pipeline, probe: Probe) -> int:
    """The first pattern of a class: of LLM values and hidden states the even links, of features
    the first encoder pipeline that does not end where they are needed."""
    return next(k for k, p in enumerate(alphabet(pipe)) if p.links and p.payload == probe.moved)


def _used(probe: Probe, slots: Slots) -> tuple[int, int]:
    """How many slots of saved inputs of the LLM and of the encoder a probe goes through."""
    saved = slots.encoders[probe.encoder].saved
    return min(slots.saved, probe.repeats), min(saved, probe.repeats)


def _prepared(probe: Probe | None, pipe: Pipeline, slots: Slots) -> list[Row]:
    if probe is None:
        return []
    f = KINDS[Kind.F]
    # the head without layers leaves a gradient in the wire slot
    rows: list[Row] = [{"kind": f, "first": 1, "last": 1, "saved": 0, "write": 0}]
    saved, encoder = _used(probe, slots)
    if probe.kind == Kind.B:
        rows += [{"kind": f, "first": 1, "saved": s, "layers": probe.layers} for s in range(saved)]
    k = probe.moved.encoder if probe.moved else probe.encoder
    end = encoder_layers(pipe, k) if pipe.encoders else 0
    whole = {"e_kind": KINDS[Kind.EF], "encoder": k, "count": 1, "end": end, "embeds": 1}
    if probe.fused or (probe.kind and probe.kind.is_encoder):
        rows += [{**whole, "projects": 1, "e_saved": s, "e_write": 0} for s in range(encoder)]
    if probe.moved and probe.moved.content == "feature":
        rows.append({**whole, "projects": 1, "e_saved": 0, "e_write": 0})
    if probe.moved and probe.moved.content == "hidden":
        rows.append({**whole, "e_saved": 0, "e_write": 0})
    return rows


def _task(probe: Probe, pipe: Pipeline, slots: Slots, k: int) -> Row:
    saved, _ = _used(probe, slots)
    if probe.kind and probe.kind.is_encoder:
        return _encoder_task(probe, probe.kind, pipe, slots, k)
    kind = probe.kind or Kind.F
    row: Row = {
        "kind": KINDS[kind],
        "microbatch": k % pipe.microbatches,
        "chunk": k % pipe.chunks,
        "layers": probe.layers,
        "first": int(probe.first),
        "last": int(probe.last),
        "saved": k % saved,
        "read": 0,
    }
    if probe.moved:
        names = ("send", "receive") if probe.moved.content == "llm" else ("e_send", "e_receive")
        row.update(dict.fromkeys(names, 0))
    if probe.fused:
        row.update(_encoder_task(probe, kind.inside, pipe, slots, k))
    return row


def _encoder_task(probe: Probe, kind: Kind, pipe: Pipeline, slots: Slots, k: int) -> Row:
    _, encoder = _used(probe, slots)
    row: Row = {
        "e_kind": KINDS[kind],
        "encoder": probe.encoder,
        "e_microbatch": k % pipe.microbatches,
        "count": 1,
        "begin": probe.begin,
        "end": probe.end,
        "embeds": int(probe.embeds),
        "projects": int(probe.projects),
        "unit": k % pipe.encoders[probe.encoder].units,
        "e_saved": k % encoder,
    }
    if probe.projects:  # features, or their gradient
        row["e_write" if kind == Kind.EF else "e_read"] = 0
    return row
