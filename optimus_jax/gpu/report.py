"""What a compile for absent GPUs shows, in words and as values."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any

import jax

from optimus_jax.gpu.compilation import Compiled
from optimus_jax.gpu.runs import runs
from optimus_jax.gpu.tally import (
    DATA,
    TENSOR,
    Tally,
    direction,
    encoder_kernels,
    is_filled,
    is_planned,
    only,
    tally,
)
from optimus_jax.gpu.target import Target
from optimus_jax.gpu.windows import Collective, within

PLANNED, UNPAIRED, CONTROL = "as planned", "pairing off", "control"
Passes = Mapping[str, Mapping[str, float]]  # as runs.passes gives them

MIB, GIB = 2**20, 2**30
LIMITS = """\
What this cannot say: it is the order in which kernels would be launched, for GPUs that are not
there, and XLA's own model of their times. Nothing ran and nothing was tuned; whether kernels and
collectives really run side by side, and how much each slows the other, only GPUs can tell. XLA may
combine collectives, or turn one kind into another: what is counted is what it made of them."""


def values(target: Target, found: Mapping[str, Compiled], counts: Passes) -> dict[str, Any]:
    """The JSON object: the compile as planned, and the others under their names. Counts are those
    of one step of one device, the mean of the stages; `places` those in the program's text."""
    first, *others = found
    names = {UNPAIRED: "pairing_off", CONTROL: "control"}
    return {
        "target": str(target),
        "jax": jax.__version__,
        **_values(found[first], counts),
        **{names[name]: _values(found[name], counts) for name in others},
    }


def _values(compiled: Compiled, passes: Passes) -> dict[str, Any]:
    every = compiled.collectives
    return {
        **_counts(tally(every, runs(every, passes))),
        "places": _counts(tally(every)),
        "synchronous": sum(c.is_sync for c in compiled.collectives),
        "predicted_us": round(predicted_us(compiled), 3),
        "memory": compiled.memory,
        "compile_s": round(compiled.seconds, 3),
    }


def _counts(counts: Tally) -> dict[str, Any]:
    return {
        "llm_collectives": only(counts.collectives, TENSOR),
        "dp_collectives": only(counts.collectives, DATA),
        "planned_windows": only(counts.planned, (*TENSOR, *DATA)),
        "with_encoder_compute": only(counts.filled, (*TENSOR, *DATA)),
    }


def predicted_us(compiled: Compiled) -> float:
    """XLA's times of all computations that it timed, each once."""
    return sum(timed.us for timed in compiled.timed)


def text(target: Target, found: Mapping[str, Compiled], counts: Passes) -> str:
    """For people: what was compiled, the counts side by side, each collective of the LLM, and what
    is not overlapped."""
    compiled = found[PLANNED]
    lines = [
        f"training step for {target.count} x {target.gpu.name}, jax {jax.__version__}: compiled in"
        f" {compiled.seconds:.1f} s",
        _memory(target, compiled),
        "",
        *_table(found, counts),
        "",
        *_collectives(compiled),
        "",
        *_times(compiled),
        "",
        *_exposed(compiled),
        "",
        LIMITS,
    ]
    return "\n".join(lines)


def _memory(target: Target, compiled: Compiled) -> str:
    total, held = compiled.memory["total"], target.gpu.memory
    parts = ", ".join(f"{k} {_size(v)}" for k, v in compiled.memory.items() if k != "total")
    verdict = "" if total <= held else ": DOES NOT FIT"
    return f"memory of a device: {_size(total)} of {_size(held)} ({parts}){verdict}"


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _table(found: Mapping[str, Compiled], passes: Passes) -> list[str]:
    """Counts in a step and in the program's text, a block of rows for each compile."""
    keys = (*TENSOR, *DATA)
    lines = [f"{'in a step of a device (in the program)':44}" + "".join(f"{k:>15}" for k in keys)]
    for name, compiled in found.items():
        every = compiled.collectives
        step, places = tally(every, runs(every, passes)), tally(every)
        for label, field in (
            (f"{name}: collectives of the LLM", "collectives"),
            ("  planned to have encoder work beside them", "planned"),
            ("  of these, with products of the encoder", "filled"),
        ):
            a, b = getattr(step, field), getattr(places, field)
            cells = (f"{a[k]:g} ({b[k]:g})" for k in keys)
            lines.append(f"{label:44}" + "".join(f"{cell:>15}" for cell in cells))
        lines.append(
            f"{'  XLA predicts, every timed loop once':44}{predicted_us(compiled):>12,.0f} us"
        )
    return lines


def _collectives(compiled: Compiled) -> list[str]:
    """One line for each of the LLM's collectives; equal ones together."""
    lines = [
        f"{_label(c):44}{_mark(c):6}{_inside(c)}"
        for c in compiled.collectives
        if direction(c) is not None
    ]
    if not lines:
        return ["The LLM has no tensor-parallel or data-parallel collective in this program."]
    counted = collections.Counter(lines)
    return [
        "between start and done (a: asynchronous, S: synchronous):",
        *(f"  {line}" + (f" ({n} times)" if n > 1 else "") for line, n in counted.items()),
    ]


def _label(c: Collective) -> str:
    planned = "paired " if is_planned(c) else ""
    combined = f" of {c.operands}" if c.operands > 1 else ""
    return f"{direction(c)}: {planned}{c.kind}{combined}"


def _mark(c: Collective) -> str:
    return "S" if c.is_sync else f"a{len(encoder_kernels(c))}"


def _inside(c: Collective) -> str:
    if not c.inside:
        return "nothing"
    own = {k.name for k in encoder_kernels(c)}
    products = sum(bool(k.products) for k in c.inside if k.name in own)
    kinds = collections.Counter(k.opcode.removesuffix("-start") for k in c.inside)
    every = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    return f"{every}; the encoder's: {len(own)}, {products} with products"


def _times(compiled: Compiled) -> list[str]:
    """XLA's time of one pass through each loop that has a collective of the LLM."""
    own: dict[str, set[str]] = {}
    for c in compiled.collectives:
        if key := direction(c):
            own.setdefault(c.computation, set()).add(("paired " if is_planned(c) else "") + key)
    rows = [
        f"  {', '.join(sorted(own[t.name])):44}{t.us:>10,.0f} us, no kernel in {t.idle_us:,.0f}"
        for t in compiled.timed
        if t.name in own
    ]
    if not rows:
        return ["XLA timed no loop with a collective of the LLM."]
    return [
        f"XLA timed {len(compiled.timed)} computations, those with asynchronous collectives, each"
        " by itself: a loop",
        "inside takes no time there. One pass through those with collectives of the LLM:",
        *rows,
    ]


def _exposed(compiled: Compiled) -> list[str]:
    """What nothing lies beside, and what was planned and did not come about."""
    counted: collections.Counter[str] = collections.Counter()
    for c in compiled.collectives:
        if is_planned(c) and direction(c) and not is_filled(c):
            counted[f"{_label(c)}: no product of the encoder inside"] += 1
        elif c.is_sync or not c.inside:
            what = "synchronous" if c.is_sync else "nothing inside"
            counted[f"{_place(c)}: {c.kind}, {what}"] += 1
    if not counted:
        return ["Every collective has kernels beside it."]
    return ["not overlapped:", *(f"  {n:4} x {what}" for what, n in sorted(counted.items()))]


def _place(c: Collective) -> str:
    """Whose collective it is: a direction, the encoder, or the end of its name stack."""
    if key := direction(c):
        return key
    if within(c.op_name, "encoder"):
        return "the encoder's"
    if c.kind == "collective-permute":
        return "exchange between stages"
    scopes = [s for s in re.split(r"/", c.op_name) if s not in ("while", "body", "closed_call")]
    return "/".join(scopes[-2:]) or "unnamed"
