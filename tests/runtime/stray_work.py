"""What a compiled step may not contain: copies of its arrays, and products that left their loop."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from optimus_jax.hlo import CONTROL, Instruction, Module


def copies_in_loops(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Names of copies of arrays with one of `shapes`, in loops: paid each time the loop goes round.

    Truth values do not count: no slot or gradient has any. Before and after all loops, equal zeros
    of the start may share a buffer that is then copied once a step.
    """
    wanted, module = set(shapes), Module(hlo)
    return [
        f"{op.name} {dtype}{list(shape)}"
        for name in module.in_loops()
        for op, dtype, shape in _copies(module.computations[name])
        if shape in wanted and dtype != "pred"
    ]


def copies_beside_loops(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Names of copies of arrays with one of `shapes`, whatever dimensions of size 1 they have,
    outside all loops: paid once a step, and the copy is held beside the array.

    Copies of one value at all places do not count: two arrays that start equal are each filled
    anyway.
    """
    wanted = {tuple(n for n in shape if n > 1) for shape in shapes} - {()}
    module = Module(hlo)
    loops = module.in_loops()
    return [
        f"{op.name} {dtype}{list(shape)}"
        for name, ops in module.computations.items()
        if name not in loops
        for op, dtype, shape in _copies(ops)
        if not _FILLED.fullmatch(op.operands[0]) and tuple(n for n in shape if n > 1) in wanted
    ]


def products_beside_loops(hlo: str) -> list[str]:
    """Names of matrix products that run each time a loop's body does, though the body has loops of
    its own: in a tick, work that XLA moved out of the zero-or-one-trip loop that it belongs to, and
    that is now paid whether the tick has that task or not.

    The entry computation, which runs once a step, is left out.
    """
    module = Module(hlo)
    return [
        op.name
        for name, ops in module.computations.items()
        if name != module.entry and any(_loops(op, module) for op in ops)
        for op in ops
        if op.opcode not in CONTROL and any(x.is_product for x in module.all_of(op))
    ]


def _loops(op: Instruction, module: Module) -> bool:
    """Whether it is a loop, or a call of one: newer versions put each into a computation."""
    if op.opcode == "call":
        return any(x.opcode == "while" for x in module.all_of(op))
    return op.opcode == "while"


def _copies(ops: Iterable[Instruction]) -> Iterator[tuple[Instruction, str, tuple[int, ...]]]:
    for op in ops:
        if op.opcode in ("copy", "copy-start") and op.array:
            yield op, *op.array


_FILLED = re.compile(r"(wrapped_)?broadcast[.\d]*")
