"""The text of a compiled module (HLO) as computations of instructions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

# What they call runs instruction by instruction; a fusion is one kernel.
CONTROL = {"call", "conditional", "while"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO. `shape` is the text of its type, `op_name` jax's name stack, `called` the
    computations that it names."""

    name: str
    shape: str
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
    def array(self) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and dimensions; None of tuples and tokens."""
        found = _ARRAY.match(self.shape)
        return found and (found[1], tuple(int(n) for n in found[2].split(",") if n))


class Module:
    """The computations of a module by name, each a list of instructions, and the entry's name."""

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

    def all_of(self, op: Instruction) -> Iterator[Instruction]:
        """The instruction and all that it fuses or runs; each computation once."""
        waiting, seen = [op], set()
        while waiting:
            op = waiting.pop()
            yield op
            for name in op.called:
                if name not in seen:
                    seen.add(name)
                    waiting += self.computations.get(name, [])

    def in_loops(self) -> set[str]:
        """The computations that run inside some loop."""
        every = [op for ops in self.computations.values() for op in ops]
        waiting = [name for op in every if op.opcode == "while" for name in op.called]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in found and name in self.computations:
                found.add(name)
                waiting += [called for op in self.computations[name] for called in op.called]
        return found


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    right = match["right"]
    if right.startswith("("):  # a tuple's type
        end = _closing(right, 0) + 1
        shape, right = right[:end], right[end:].lstrip()
    else:
        shape, _, right = right.partition(" ")
    opcode, _, _ = right.partition("(")
    end = _closing(right, len(opcode))
    operands, rest = right[len(opcode) + 1 : end], right[end + 1 :]
    op_name = _OP_NAME.search(rest)
    called = [n for groups in _CALLED.findall(rest) for n in _NAME.findall(" ".join(groups))]
    return Instruction(
        match["name"],
        shape,
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
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*-> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<right>.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_NAME = re.compile(r"[\w.\-]+")
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(matmul|gemm|conv|fmha)', re.IGNORECASE)
