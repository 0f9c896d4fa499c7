"""Kinds of work in a step, and the seconds that its operations take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from optimus_jax.config import Config

DENSE = "products: {}"
FORWARD, AGAIN, INPUT, WEIGHT, GRADIENT = (
    "forward",
    "forward again",
    "gradient of inputs",
    "gradient of weights",
    "gradient",
)
ATTENTION, SOFTMAX = "attention: products", "attention: scale, mask, softmax"
HEADS, NORMS, GELU = "attention: heads split and joined", "layer norms", "GELU"
RESIDUAL, ENDS = "residuals, biases", "embedding, loss"
SUMS, SLOTS = "gradients added to their sums", "slots, slices of weights, copies"
ZEROS, ASTRAY = "buffers filled at the start", "encoder work outside its loop"
CLIPPING, OPTIMISER = "gradient norm, scaling", "AdamW"
EXCHANGE, REDUCTION = "exchanges, with waiting", "sums over processes, with waiting"
REST = "dispatch and the rest"
KINDS = (
    *(DENSE.format(p) for p in (FORWARD, AGAIN, INPUT, WEIGHT)),
    *(ATTENTION, SOFTMAX, HEADS, NORMS, GELU, RESIDUAL, ENDS, SUMS, SLOTS, ZEROS, ASTRAY),
    *(CLIPPING, OPTIMISER, REDUCTION, EXCHANGE, REST),
)
CORE = "attention"  # a product's name for all of attention between the dense ones


@dataclasses.dataclass(frozen=True)
class Work:
    """What an operation is: its kind; of products also which (`qkv`) and in which pass."""

    kind: str
    product: str = ""
    part: str = ""
    flops: float = 0.0


@dataclasses.dataclass
class Spent:
    """Seconds of each run of each operation in one step, and of the whole step."""

    wall: float
    runs: dict[tuple[str, Work], list[float]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, work: Work, seconds: float) -> None:
        self.runs.setdefault((name, work), []).append(seconds)

    def of(self, kind: str) -> float:
        """Seconds of a kind of work; of the rest, what no other kind took."""
        if kind == REST:
            return self.wall - sum(self.of(other) for other in KINDS if other != REST)
        return sum(sum(runs) for (_, work), runs in self.runs.items() if work.kind == kind)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that tell products apart."""

    positions: int  # rows of a microbatch times their positions
    sequence: int
    products: dict[tuple[int, int], str]  # by (inputs, outputs)

    @classmethod
    def of(cls, config: Config) -> Shapes:
        llm = config.model.llm
        d, f, rows = llm.width, llm.hidden, config.train.batch // config.parallel.microbatches
        names = {(d, 3 * d): "qkv", (d, d): "out", (d, f): "up", (f, d): "down"}
        names[d, config.model.vocabulary] = "head"
        return cls(rows * config.model.sequence, config.model.sequence, names)

    def dense(self, m: int, k: int, n: int, backward: bool, part: str) -> Work:
        """The product of [m, k] and [k, n]; `part` is what it is if it is not a gradient."""
        pairs = [(k, n)]
        if backward and k == self.positions:
            part, pairs = WEIGHT, [(m, n), (n, m)]
        elif backward:
            part, pairs = INPUT, [(n, k)]
        name = next((self.products[pair] for pair in pairs if pair in self.products), "other")
        return Work(DENSE.format(part), name, part, 2.0 * m * k * n)


def self_times(spans: Iterable[tuple[float, float, Any]]) -> Iterator[tuple[Any, float]]:
    """(key, own time) of nested spans (start, end, key) of one thread."""
    open_: list[list[Any]] = []
    for start, end, key in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ and open_[-1][0] <= start:
            yield open_[-1][1], open_.pop()[2]
        if open_:
            open_[-1][2] -= end - start
        open_.append([end, key, end - start])
    for _, key, own in open_:
        yield key, own
