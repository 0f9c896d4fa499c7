"""Methods of an answer as views of one LLM pipeline's ranks (rank_views), and the LLM's passes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from optimus_jax.fill.backbone import Backbone, Interval
from optimus_jax.fill.baselines import Baseline, Inside
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.packing import slices
from optimus_jax.fill.pieces import Piece
from optimus_jax.plan.rank_views import View, Work, micro, name, view
from optimus_jax.plan.times import Times
from optimus_jax.schedule.actions import Action


@dataclasses.dataclass(frozen=True)
class Layers:
    """Of a pass of an `encoder_first` or `balanced` pipeline: seconds of its encoder layers, and of
    its LLM layers, of which there may be none, the collectives, from where these layers begin."""

    encoder: float
    llm: int
    slots: tuple[Interval, ...]

    def split(self, start: float, end: float, kind: str) -> tuple[Interval, Interval]:
        """Encoder and LLM part of a pass: forward the encoder runs first, backward the LLM does."""
        if not self.llm:
            return (start, start + self.encoder), (end, end)
        if kind == "F":
            return (start, start + self.encoder), (start + self.encoder, end)
        return (end - self.encoder, end), (start, end - self.encoder)


def passes(backbone: Backbone, chunks: int, layers: Mapping[Action, Layers] | None = None) -> View:
    """The LLM's passes by rank, in a Backbone's time: each with the number of the pattern in
    `tp_slots` that its tensor-parallel slots have. Encoder layers in them (`layers`) are left out.
    """
    patterns: dict[tuple[tuple[int, int], ...], int] = {}
    rows = []
    for rank, row in enumerate(backbone.passes):
        slots, k, found = backbone.slots[rank], 0, []
        for start, end, action in row:
            assert isinstance(action, Action)
            inner: list[Interval] = []
            while k < len(slots) and slots[k][0] < end:
                inner.append((slots[k][0] - start, slots[k][1] - start))
                k += 1
            if layers:
                _, (start, end) = layers[action].split(start, end, action.kind)
                inner = list(layers[action].slots)
            if end <= start:
                continue
            entry: dict[str, Any] = {
                "name": name(action, backbone.ranks, chunks),
                "kind": action.kind,
                "start": micro(start) / 1e6,
                "end": micro(end) / 1e6,
            }
            if inner:
                pattern = tuple((micro(s), micro(e)) for s, e in inner)
                entry["slots"] = patterns.setdefault(pattern, len(patterns))
            found.append(entry)
        rows.append(found)
    offsets = [[[s / 1e6, e / 1e6] for s, e in pattern] for pattern in patterns]
    return {"tp_slots": offsets, "devices": rows}


def of_filling(filling: Filling, names: Sequence[str], chunks: int) -> View:
    """Encoder work beside the LLM's passes; of a Filling without any, the LLM alone."""
    ranks: list[list[Piece]] = [[] for _ in filling.backbone.passes]
    texts: dict[int, str] = {}  # by part
    units: dict[tuple[int, str, int], int] = defaultdict(int)
    for piece in filling.pieces:
        part = piece.part
        ranks[filling.placed[piece.encoder].plan.first(part.pipeline) + piece.stage].append(piece)
        if id(part) not in texts:
            texts[id(part)] = f"{piece.kind}{part.microbatch}"
            if part.unit:
                key = piece.encoder, piece.kind, part.microbatch
                texts[id(part)] += f".{units[key]}"
                units[key] += 1
    most = slices([one.plan for one in filling.placed])
    rows = [
        [_work(filling, group, most, texts, names) for group in _groups(filling, row, most)]
        for row in ranks
    ]
    return view(filling.backbone, chunks, filling.delay, filling.tail, most, rows)


def _groups(filling: Filling, row: Sequence[Piece], most: int) -> list[list[Piece]]:
    """A rank's pieces in order of time, those of one part in consecutive tensor-parallel slots
    together. No other work lies between them on the same devices."""
    groups: list[list[Piece]] = []
    last: dict[int, list[Piece]] = {}  # by slice
    for piece in sorted(row, key=lambda one: _place(filling, one)):
        first, count = _slices(filling, piece, most)
        group = last.get(first)
        if (
            group is None
            or not (piece.slot and group[0].slot and group[0].part is piece.part)
            or any(last.get(lane) is not group for lane in range(first, first + count))
        ):
            group = []
            groups.append(group)
        group.append(piece)
        last.update(dict.fromkeys(range(first, first + count), group))
    return groups


def _slices(filling: Filling, piece: Piece, most: int) -> tuple[int, int]:
    """The first of the slices that a piece runs on, and how many they are."""
    copies = filling.placed[piece.encoder].plan.copies
    return piece.part.pipeline % copies * (most // copies), most // copies


def _work(
    filling: Filling,
    group: Sequence[Piece],
    most: int,
    texts: Mapping[int, str],
    names: Sequence[str],
) -> Work:
    piece = group[0]
    about: dict[str, Any] = {
        "name": texts[id(piece.part)],
        "kernels": sum(one.kernels for one in group),
        "pipeline": piece.part.pipeline,
    }
    if filling.placed[piece.encoder].plan.stages > 1:
        about["stage"] = piece.stage
    if len(names) > 1:
        about["encoder"] = names[piece.encoder]
    if _is_early(filling, piece):
        about["next"] = True
    runs = []
    for one in group:
        start = _place(filling, one)
        runs.append((start, start + one.end - one.start))
    lane, lanes = _slices(filling, piece, most)
    return Work(piece.kind, tuple(runs), lane, lanes, piece.slot, about)


def _place(filling: Filling, piece: Piece) -> float:
    """When a piece starts. What lies in the step before lies at the same place of every step, where
    it works on the microbatches of the next one."""
    return piece.start + (filling.backbone.step if _is_early(filling, piece) else 0.0)


def _is_early(filling: Filling, piece: Piece) -> bool:
    """Whether a frozen encoder's forward lies in the step before."""
    crosses = filling.placed[piece.encoder].crosses
    return crosses and piece.start < filling.backbone.frame[0] - 1e-9


def of_phased(backbone: Backbone, chunks: int, forward: float, backward: float) -> View:
    """Blocks of so many seconds before and after the LLM's step on every rank: `phased` is a
    formula that places no single microbatch."""
    begin, end = -backbone.all_gather, backbone.end + backbone.reduce_scatter
    blocks = [
        Work(kind, ((start, until),), about={"name": kind, "all": True})
        for kind, start, until in (
            ("EF", begin - forward, begin),
            ("EB", end, end + backward),
        )
        if until > start
    ]
    return view(backbone, chunks, forward, backward, 1, [blocks] * backbone.ranks)


def layers_of(baseline: Baseline, inside: Inside, times: Times) -> dict[Action, Layers]:
    """What each pass of a pipeline with encoder and LLM layers consists of."""
    every = sum(baseline.encoder_layers)
    found: dict[Action, Layers] = {}
    for row in baseline.backbone.passes:
        for _, _, action in row:
            assert isinstance(action, Action)
            share = baseline.encoder_layers[action.stage] / every if every else 0.0
            seconds = sum(
                n * (s.forward if action.kind == "F" else s.backward) for n, s in inside.encoders
            )
            llm = baseline.llm_layers[action.stage]
            slots = times.llm_pass(action.kind, llm).slots
            found[action] = Layers(share * seconds, llm, slots)
    return found


def of_baseline(baseline: Baseline, layers: Mapping[Action, Layers]) -> View:
    """Encoder layers inside the LLM's own passes."""
    backbone = baseline.backbone
    rows: list[list[Work]] = []
    collectives = []
    for row in backbone.passes:
        found, total = [], 0.0
        for start, end, action in row:
            assert isinstance(action, Action)
            mine = layers[action]
            total += sum(e - s for s, e in mine.slots)
            span, _ = mine.split(start, end, action.kind)
            if span[1] > span[0]:
                about = {"name": f"E{name(action, backbone.ranks, baseline.chunks)}"}
                found.append(Work(f"E{action.kind}", (span,), inside=True, about=about))
        rows.append(found)
        collectives.append(total)
    return view(backbone, baseline.chunks, 0.0, 0.0, 1, rows, collectives)
