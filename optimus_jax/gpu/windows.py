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
# What they call is scheduled instruction by instruction; a fusion is one kernel.
_CONTROL = {"call", "conditional", "while"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO. `op_name` is jax's name stack, `called` the computations that it names."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    op_name: str
    called: tuple[str, ...]
    rest: str  # the attributes

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        if self.opcode == "custom-call":
            return bool(_PRODUCT_CALL.search(self.rest))
        return self.opcode in ("dot", "convolution", "ragged-dot", "scaled-dot")

    @property
    def is_sync(self) -> bool:
        return '"is_sync":true' in self.rest.replace(" ", "")


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
    return list(_Module(hlo).walk())


def within(op_name: str, scope: str) -> bool:
    """Whether a name stack passes through jax.named_scope(scope), also under jvp and transpose."""
    return scope in re.split(r"[/()]", op_name)


class _Module:
    """The computations of a module by name, each a list of instructions."""

    def __init__(self, hlo: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, current = "", None
        for line in hlo.splitlines():
            if head := _COMPUTATION.match(line):
                current = self.computations.setdefault(head["name"], [])
                self.entry = head["name"] if head["entry"] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _instruction(line)):
                current.append(found)

    def walk(self) -> Iterator[Collective]:
        yield from self._walk(self.entry, ())

    def _walk(self, computation: str, where: tuple[str, ...]) -> Iterator[Collective]:
        lines = self.computations.get(computation, [])
        done_at = {name: k for k, op in enumerate(lines) if _ends(op) for name in op.operands}
        for k, op in enumerate(lines):
            if op.opcode in _CONTROL:
                for n, name in enumerate(op.called):
                    branch = f"{op.name}[{n}]" if op.opcode == "conditional" else op.name
                    yield from self._walk(name, (*where, branch))
                continue
            inner = next((i for i in self._all_of(op) if _kind(i) in COLLECTIVES), None)
            if inner is None or _ends(op):
                continue
            starts = op.opcode.endswith("-start") and op.name in done_at and not op.is_sync
            inside = lines[k + 1 : done_at[op.name]] if starts else []
            yield Collective(
                where=where,
                computation=computation,
                name=op.name,
                kind=_kind(inner),
                op_name=op.op_name or inner.op_name,
                operands=len(op.operands if inner is op else inner.operands),
                is_sync=not starts,
                inside=tuple(self._kernels(inside)),
            )

    def _kernels(self, lines: Iterable[Instruction]) -> Iterator[Kernel]:
        for op in lines:
            if op.opcode not in _NOTHING and not _ends(op):
                products = tuple(i.op_name for i in self._all_of(op) if i.is_product)
                yield Kernel(op.name, op.opcode, op.op_name, products)

    def _all_of(self, op: Instruction) -> Iterator[Instruction]:
        """The instruction and all that it fuses or runs; each computation once."""
        waiting, seen = [op], set()
        while waiting:
            op = waiting.pop()
            yield op
            for name in op.called:
                if name not in seen:
                    seen.add(name)
                    waiting += self.computations.get(name, [])


def _kind(op: Instruction) -> str:
    return op.opcode.removesuffix("-start")


def _ends(op: Instruction) -> bool:
    return op.opcode.endswith("-done")


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    right = match["right"]
    if right.startswith("("):  # a tuple's type
        right = right[_closing(right, 0) + 1 :].lstrip()
    else:
        right = right.partition(" ")[2]
    opcode, _, _ = right.partition("(")
    end = _closing(right, len(opcode))
    operands, rest = right[len(opcode) + 1 : end], right[end + 1 :]
    op_name = _OP_NAME.search(rest)
    called = [n for groups in _CALLED.findall(rest) for n in _NAME.findall(" ".join(groups))]
    return Instruction(
        match["name"],
        opcode.strip(),
        tuple(_OPERAND.findall(operands)),
        op_name[1] if op_name else "",
        tuple(called),
        rest,
    )


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; the end if none does."""
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    return len(text)


_BRACKET = re.compile(r"[()]")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*-> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<right>.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_NAME = re.compile(r"[\w.\-]+")
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(matmul|gemm|conv|fmha)', re.IGNORECASE)
