"""Which collectives are the LLM's, which were to have encoder work beside them, and which do.

The executor names what it traces (jax.named_scope): the tasks of the LLM by direction, the data
parallel collectives at both ends of a step, everything that is the encoder's, and `paired` around
each collective that encoder work is tied to (with pairing off: would be tied to).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from optimus_jax.gpu.windows import Collective, Kernel, within

TENSOR = {"forward": "llm_forward", "backward": "llm_backward"}
DATA = {"gather": "gather_llm", "scatter": "scatter_llm"}
ENCODER, PAIRED = "encoder", ("paired", "unpaired")

Counts = dict[str, float]
Runs = Callable[[Collective], float]


@dataclasses.dataclass(frozen=True)
class Tally:
    """By direction (keys of TENSOR and DATA): collectives, those planned to have encoder work
    beside them, and those of the planned ones that have at least one matrix product of the
    encoder's between start and done."""

    collectives: Counts
    planned: Counts
    filled: Counts


def direction(collective: Collective) -> str | None:
    """The key of TENSOR or DATA that a collective belongs to. None for the encoder's own, for
    exchanges between stages, and for what is neither."""
    if within(collective.op_name, ENCODER) or collective.kind == "collective-permute":
        return None
    for key, scope in {**TENSOR, **DATA}.items():
        if within(collective.op_name, scope):
            return key
    return None


def is_planned(collective: Collective) -> bool:
    return any(within(collective.op_name, scope) for scope in PAIRED)


def encoder_kernels(collective: Collective) -> list[Kernel]:
    """The kernels between start and done that are the encoder's or hold a product of its."""
    return [k for k in collective.inside if within(k.op_name, ENCODER) or encoder_products(k)]


def encoder_products(kernel: Kernel) -> list[str]:
    return [name for name in kernel.products if within(name, ENCODER)]


def is_filled(collective: Collective) -> bool:
    return any(map(encoder_products, collective.inside))


def tally(collectives: Iterable[Collective], runs: Runs = lambda _: 1) -> Tally:
    """Counts places in the program; with `runs`, how often each place is run through."""
    keys = (*TENSOR, *DATA)
    found = Tally(*(dict.fromkeys(keys, 0.0) for _ in range(3)))
    for collective in collectives:
        key = direction(collective)
        if key is None:
            continue
        times = runs(collective)
        found.collectives[key] += times
        found.planned[key] += times * is_planned(collective)
        found.filled[key] += times * (is_planned(collective) and is_filled(collective))
    return found


def only(counts: Mapping[str, float], keys: Iterable[str]) -> dict[str, float]:
    """Some of the counts, whole ones as whole numbers."""
    return {k: int(counts[k]) if float(counts[k]).is_integer() else counts[k] for k in keys}
