"""Stretches: a filling's encoder work by stage and unit, as the executor's units cut it."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

from optimus_jax.fill.filling import Filling
from optimus_jax.fill.pieces import Piece
from optimus_jax.schedule.task import Kind, Pipeline, ScheduleError

_EPSILON = 1e-9


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The work of one stage of an encoder pipeline on some units of a microbatch: its pieces in
    order of time, and the numbers of kernels before each."""

    encoder: int
    kind: Kind
    microbatch: int
    device: int
    units: tuple[int, ...]
    pieces: tuple[Piece, ...]
    before: tuple[int, ...]

    def place(self, share: float, early: bool) -> tuple[float, Piece]:
        """Time and piece of the first kernel after a share of the work, or of the last before."""
        total = self.before[-1] + self.pieces[-1].kernels
        number = share * total
        index = int(number + 1e-6) if early else int(number - 1e-6)
        k = bisect_right(self.before, index) - 1
        piece = self.pieces[k]
        along = (index - self.before[k]) / piece.kernels
        return piece.start + along * (piece.end - piece.start), piece


class Stretches:
    """A filling as passes and stretches. `need` says when the LLM wants the features of a
    microbatch.

    Raises ScheduleError if backwards are split."""

    def __init__(self, filling: Filling, pipe: Pipeline):
        self.passes = filling.backbone.passes
        self.starts = [[start for start, _, _ in row] for row in self.passes]
        kinds = {a.kind for row in self.passes for _, _, a in row}
        if not kinds <= {"F", "B"}:
            raise ScheduleError(f"the executor runs whole backwards (B), not {sorted(kinds)}")
        # the filling numbers microbatches in the order in which the LLM takes them
        taken = sorted((start, a.microbatch) for start, _, a in self.passes[0] if a[:2] == (0, "F"))
        self.need = {i: start for start, i in taken}
        self.uses_slots = any(piece.slot for piece in filling.pieces)
        numbers = [i for _, i in taken]
        self.all = [
            dataclasses.replace(one, microbatch=numbers[one.microbatch])
            for one in _found(filling, pipe)
        ]


def _found(filling: Filling, pipe: Pipeline) -> Iterator[Stretch]:
    """Units of the planner, of a copy each, are joined to the executor's, of all copies."""
    units = _units(filling, pipe)
    held: dict[tuple[int, Kind, int, int], dict[int, list[Piece]]] = {}
    for piece in filling.pieces:
        block = piece.part.pipeline // filling.placed[piece.encoder].plan.copies
        key = piece.encoder, Kind(piece.kind), piece.part.microbatch, block
        held.setdefault(key, {}).setdefault(id(piece.part), []).append(piece)
    for key, parts in held.items():
        encoder, kind, microbatch, block = key
        stages = filling.placed[encoder].plan.stages
        groups = units[encoder, microbatch, block]
        order = sorted(parts.values(), key=lambda found: min(p.start for p in found))
        for n, group in enumerate(groups):
            # of n parts, those between n/groups and (n + 1)/groups
            low, high = (len(order) * k // len(groups) for k in (n, n + 1))
            mine = [p for part in order[low : max(high, low + 1)] for p in part]
            for stage in range(stages):
                pieces = sorted((p for p in mine if p.stage == stage), key=lambda p: p.end)
                before, count = [], 0
                for piece in pieces:
                    before.append(count)
                    count += piece.kernels
                device = block * stages + stage
                yield Stretch(
                    encoder, kind, microbatch, device, group, tuple(pieces), tuple(before)
                )


def _units(filling: Filling, pipe: Pipeline) -> dict[tuple[int, int, int], list[tuple[int, ...]]]:
    """By encoder, microbatch and block of ranks, the groups of units that stay together: all units
    of a whole microbatch, single ones of a spread one."""
    found: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
    for k, one in enumerate(filling.placed):
        every, copies = tuple(range(pipe.encoders[k].units)), one.plan.copies
        load = [0] * pipe.pipelines(k)
        for i, owners in one.forward.owners().items():
            blocks = [j // copies for j in owners]
            if len(owners) == 1:
                found[k, i, blocks[0]] = [every]
                continue
            # largest remainders, so that the units come out even
            exact = {b: blocks.count(b) * len(every) / len(owners) for b in sorted(set(blocks))}
            counts = {b: int(x + _EPSILON) for b, x in exact.items()}
            for b in sorted(exact, key=lambda b: (counts[b] - exact[b], load[b])):
                if sum(counts.values()) < len(every):
                    counts[b] += 1
            for b, n in counts.items():
                load[b] += n
            left = list(every)
            for b, n in counts.items():
                found[k, i, b] = [(left.pop(0),) for _ in range(n)]
    return found
