"""What others ship: the encoder inside the LLM's own pipeline, timed by the same simulation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from optimus_jax.fill.backbone import Backbone, ChunkPass, backbone
from optimus_jax.schedule.action_orders import interleaved_1f1b, one_f_one_b
from optimus_jax.schedule.actions import ActionTable, time_actions
from optimus_jax.schedule.task import ScheduleError

_SWEEPS = 8
_WAYS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer's forward and backward on one device, collectives included."""

    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A pipeline that holds encoder and LLM layers. `encoder_layers` and `llm_layers` are their
    numbers by virtual stage."""

    method: str
    chunks: int
    encoder_layers: tuple[int, ...]
    llm_layers: tuple[int, ...]
    backbone: Backbone

    @property
    def step(self) -> float:
        return self.backbone.step


@dataclasses.dataclass(frozen=True)
class Inside:
    """Pipelines of encoder and LLM layers: their sizes and the seconds of a layer. `encoders` are
    (layers, seconds of one) of each encoder; `busy` and `latency` those of a pass's transfer."""

    ranks: int
    microbatches: int
    encoders: tuple[tuple[int, LayerSeconds], ...]
    llm_layers: int
    llm: LayerSeconds
    busy: float = 0.0
    latency: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0

    def table(self, chunks: int) -> ActionTable:
        """1F1B, interleaved over several chunks."""
        if chunks > 1:
            return interleaved_1f1b(self.ranks, self.microbatches, chunks)
        return one_f_one_b(self.ranks, self.microbatches)

    def time(self, seconds: Sequence[LayerSeconds]) -> Backbone:
        """The step of a pipeline whose virtual stages take `seconds`, in (interleaved) 1F1B."""
        return backbone(
            self.table(len(seconds) // self.ranks),
            [v % self.ranks for v in range(len(seconds))],
            {
                "F": [ChunkPass(((s.forward, False),), self.busy) for s in seconds],
                "B": [ChunkPass(((s.backward, False),), self.busy) for s in seconds],
            },
            all_gather=self.all_gather,
            reduce_scatter=self.reduce_scatter,
            latency=self.latency,
        )

    def with_encoder_first(self, method: str, split: Sequence[int]) -> Baseline:
        """All encoder layers in virtual stage 0, `split[v]` LLM layers in virtual stage v."""
        seconds = [LayerSeconds(n * self.llm.forward, n * self.llm.backward) for n in split]
        forward = seconds[0].forward + sum(n * s.forward for n, s in self.encoders)
        backward = seconds[0].backward + sum(n * s.backward for n, s in self.encoders)
        seconds[0] = LayerSeconds(forward, backward)
        every = (sum(n for n, _ in self.encoders),) + (0,) * (len(split) - 1)
        chunks = len(split) // self.ranks
        return Baseline(method, chunks, every, tuple(split), self.time(seconds))


def encoder_first(inside: Inside, chunks: int = 1) -> Baseline:
    """Megatron-LM as it comes: every encoder in the first stage, LLM layers shared out equally."""
    split = _equal(inside.llm_layers, inside.ranks * chunks)
    return inside.with_encoder_first("encoder_first", split)


def encoder_first_tuned(inside: Inside, most_chunks: int = 4) -> Baseline:
    """The same with the best number of chunks and of LLM layers in each virtual stage that local
    search finds: from the split with the least largest load, one layer at a time moves while the
    step gets shorter; from equal shares if they are better than what that leads to. More chunks are
    tried until they are no better: the encoder is one chunk that is far longer than all others."""
    best: Baseline | None = None
    for chunks in range(1, most_chunks + 1):
        whole_groups = chunks == 1 or inside.microbatches % inside.ranks == 0
        if not whole_groups or inside.ranks * chunks > inside.llm_layers:
            break
        found = inside.with_encoder_first("encoder_first_tuned", _tuned(inside, chunks))
        if best is not None and found.step >= best.step:
            break
        best = found
    if best is None:
        raise ScheduleError(f"{inside.llm_layers} LLM layers cannot fill {inside.ranks} stages")
    return best


def _tuned(inside: Inside, chunks: int) -> list[int]:
    """LLM layers of each virtual stage."""
    ranks, count = inside.ranks, inside.ranks * chunks
    encoder = [sum(n * getattr(s, way) for n, s in inside.encoders) for way in _WAYS]
    layer = inside.llm.forward + inside.llm.backward
    split = [0] * count
    for _ in range(inside.llm_layers):
        loads = [split[v] * layer + (sum(encoder) if v == 0 else 0.0) for v in range(count)]
        rank = min(range(ranks), key=lambda r: sum(loads[r::ranks]))
        split[min(range(rank, count, ranks), key=lambda v: loads[v])] += 1
    table, home = inside.table(chunks), [v % ranks for v in range(count)]

    def seconds(split: list[int]) -> float:
        rows = [[n * getattr(inside.llm, way) + inside.busy for n in split] for way in _WAYS]
        for row, more in zip(rows, encoder, strict=True):
            row[0] += more
        times = time_actions(table, home, {"F": rows[0], "B": rows[1]}, inside.latency)
        return max(row[-1][1] for row in times)

    def descend(split: list[int]) -> tuple[float, list[int]]:
        best = seconds(split)
        for _ in range(_SWEEPS):
            before = best
            for giver, taker in itertools.permutations(range(count), 2):
                if not split[giver]:
                    continue
                split[giver] -= 1
                split[taker] += 1
                found = seconds(split)
                if found < best - 1e-9:
                    best = found
                else:
                    split[giver] += 1
                    split[taker] -= 1
            if best == before:
                break
        return best, split

    best, split = descend(split)
    equal = _equal(inside.llm_layers, count)
    return descend(equal)[1] if seconds(equal) < best - 1e-9 else split


def _equal(layers: int, count: int) -> list[int]:
    share, more = divmod(layers, count)
    return [share + (v < more) for v in range(count)]


def balanced(inside: Inside, chunks: int, weights: tuple[float, float]) -> Baseline:
    """Megatron-LM balanced: encoder and LLM layers in a row, cut into virtual stages with the least
    largest cost (Optimus, appendix B), a cost being `weights` of an encoder and an LLM layer. Very
    many cuts share the optimum and their steps differ by a quarter, so a rule decides: each
    virtual stage, from the last one back, begins as early as the least largest cost of the layers
    before its end allows.

    Raises ScheduleError for several encoders or fewer layers than virtual stages.
    """
    if len(inside.encoders) != 1:
        raise ScheduleError(f"balanced has one encoder, not {len(inside.encoders)}")
    (encoder_layers, encoder), count = inside.encoders[0], inside.ranks * chunks
    costs = [weights[0]] * encoder_layers + [weights[1]] * inside.llm_layers
    if len(costs) < count:
        raise ScheduleError(f"{len(costs)} layers cannot fill {count} virtual stages")
    cuts = _cuts(costs, count)
    held = []
    for begin, end in itertools.pairwise(cuts):
        vit = max(0, min(end, encoder_layers) - begin)
        held.append((vit, end - begin - vit))
    seconds = [
        LayerSeconds(
            v * encoder.forward + g * inside.llm.forward,
            v * encoder.backward + g * inside.llm.backward,
        )
        for v, g in held
    ]
    return Baseline(
        "balanced",
        chunks,
        tuple(v for v, _ in held),
        tuple(g for _, g in held),
        inside.time(seconds),
    )


def _cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Where each part begins, and the end: least largest sum, ties to the earliest begin.
    F(l, m) = min over j < l of max(F(j, m - 1), t_{j+1} + ... + t_l)."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    n, slack = len(costs), 1e-12 * total[-1]
    best = [list(total)]
    begins: list[list[int]] = [[0] * (n + 1)]
    for m in range(2, parts + 1):
        row, begin = [float("inf")] * (n + 1), [0] * (n + 1)
        before = best[-1]
        for end in range(m, n + 1):
            for j in range(m - 1, end):
                largest = max(before[j], total[end] - total[j])
                if largest < row[end] - slack:
                    row[end], begin[end] = largest, j
                if before[j] >= row[end]:
                    break  # before[j] only grows with j
        best.append(row)
        begins.append(begin)
    cuts = [n]
    for m in range(parts, 0, -1):
        cuts.append(begins[m - 1][cuts[-1]])
    return cuts[::-1]
