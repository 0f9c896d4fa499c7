"""What lies between the start and the done of each collective, read from scheduled HLO.

The text of a GPU compile lists each computation in the order in which it is launched. An
asynchronous collective is a pair, and whatever stands between the two may run beside it. The order
is all that is read here: how long a collective or a kernel takes, the text does not say.

jax 0.10 writes a synchronous collective as a start with "is_sync":true and its done next to it;
jax 0.12 writes it plain, and wraps some collectives, as other kernels, in fusion-start and -done.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from optimus_jax.hlo import CONTROL, Instruction, Module

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
# Bookkeeping, of which the GPU sees nothing.
_NOTHING = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What runs within a window: one kernel, a copy, or a whole loop or branch. `products` are the
    name stacks of the matrix products that it holds."""

    name: str
    opcode: str
    op_name: str
    products: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """`where` are the loops and branches around it, outermost first, `computation` the innermost's.
    `operands` above one are those of several collectives that XLA combined. A synchronous one has
    nothing inside."""

    where: tuple[str, ...]
    computation: str
    name: str
    kind: str
    op_name: str
    operands: int
    is_sync: bool
    inside: tuple[Kernel, ...]


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a scheduled module, in the order of its text's walk from the entry.

    Raises ValueError if the text is no scheduled module.
    """
    if "is_scheduled=true" not in hlo.partition("\n")[0]:
        raise ValueError("not the HLO of a finished compile: its first line lacks is_scheduled")
    module = Module(hlo)
    return list(_walk(module, module.entry, ()))


def within(op_name: str, scope: str) -> bool:
    """Whether a name stack passes through jax.named_scope(scope), also under jvp and transpose."""
    return scope in re.split(r"[/()]", op_name)


def _walk(module: Module, computation: str, where: tuple[str, ...]) -> Iterator[Collective]:
    lines = module.computations.get(computation, [])
    done_at = {name: k for k, op in enumerate(lines) if _ends(op) for name in op.operands}
    for k, op in enumerate(lines):
        if op.opcode in CONTROL:
            for n, name in enumerate(op.called):
                branch = f"{op.name}[{n}]" if op.opcode == "conditional" else op.name
                yield from _walk(module, name, (*where, branch))
            continue
        inner = next((i for i in module.all_of(op) if _kind(i) in COLLECTIVES), None)
        if inner is None or _ends(op):
            continue
        starts = op.opcode.endswith("-start") and op.name in done_at and not _is_sync(op)
        inside = lines[k + 1 : done_at[op.name]] if starts else []
        yield Collective(
            where=where,
            computation=computation,
            name=op.name,
            kind=_kind(inner),
            op_name=op.op_name or inner.op_name,
            operands=len(op.operands if inner is op else inner.operands),
            is_sync=not starts,
            inside=tuple(_kernels(module, inside)),
        )


def _kernels(module: Module, lines: Iterable[Instruction]) -> Iterator[Kernel]:
    for op in lines:
        if op.opcode not in _NOTHING and not _ends(op):
            products = tuple(i.op_name for i in module.all_of(op) if i.is_product)
            yield Kernel(op.name, op.opcode, op.op_name, products)


def _is_sync(op: Instruction) -> bool:
    return '"is_sync":true' in op.rest.replace(" ", "")


def _kind(op: Instruction) -> str:
    return op.opcode.removesuffix("-start")


def _ends(op: Instruction) -> bool:
    return op.opcode.endswith("-done")
