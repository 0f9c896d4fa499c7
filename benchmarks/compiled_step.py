"""What each instruction of our compiled step is, told from the step's text."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

from work_kinds import (
    AGAIN,
    ASTRAY,
    ATTENTION,
    CLIPPING,
    CORE,
    ENDS,
    EXCHANGE,
    FORWARD,
    GELU,
    GRADIENT,
    HEADS,
    NORMS,
    OPTIMISER,
    REDUCTION,
    RESIDUAL,
    REST,
    SLOTS,
    SOFTMAX,
    SUMS,
    ZEROS,
    Shapes,
    Work,
)

_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+) ", re.M)
_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
_MOVES = {
    *("parameter", "constant", "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice"),
    *("dynamic-update-slice", "pad", "concatenate", "broadcast", "select", "compare", "iota"),
    *("convert", "tuple", "get-tuple-element"),
}
_COLLECTIVES = "collective-permute", "all-reduce"
_FUNCTIONS = {  # innermost first decides
    "layer_norm": NORMS,
    **dict.fromkeys(("attend", "join_heads", "_qkv"), HEADS),
    "_up": GELU,
    **dict.fromkeys(("_out", "_down"), RESIDUAL),
    "add_at": SUMS,
    **dict.fromkeys(("get", "put", "LlmTasks.layer", "Tick._exchange", "Tick._move"), SLOTS),
    **dict.fromkeys(("embed", "summed_loss", "logits", "LlmTasks._head", "LlmTasks._embed"), ENDS),
    "LlmTasks._embed_backward": ENDS,
    "make": ZEROS,
    "reduce_gradients": REDUCTION,
    **dict.fromkeys(("global_norm", "clip"), CLIPPING),
    **dict.fromkeys(("scale_by_adam", "tree_update_moment", "apply_updates"), OPTIMISER),
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str
    dims: tuple[int, ...]  # () of tuples too
    real: bool
    operands: list[str]
    rest: str

    def named(self, what: str, otherwise: str = "") -> str:
        found = re.search(rf"\b{what}=%?([\w.\-]+)", self.rest)
        return found[1] if found else otherwise

    def sizes(self, what: str) -> list[int]:
        found = re.search(rf"\b{what}=\{{([\d,]*)\}}", self.rest)
        return [int(x) for x in found[1].split(",") if x] if found else []


class CompiledStep:
    """What each instruction of a compiled step is, from its text."""

    def __init__(self, hlo: str, shapes: Shapes):
        self.shapes = shapes
        self.bodies: dict[str, list[Instruction]] = {}
        self.by_name: dict[str, Instruction] = {}
        names = hlo[hlo.index("FunctionNames") : hlo.index("FileLocations")]
        functions = dict(re.findall(r'^(\d+) "(.*)"', names, re.M))
        locations = {a: functions[b] for a, b in _LOCATION.findall(hlo)}
        self.frames = {int(a): (locations[b], int(p) - 1) for a, b, p in _FRAME.findall(hlo)}
        body: list[Instruction] = []
        for line in hlo.splitlines():
            if head := _HEAD.match(line):
                body = self.bodies[head[1]] = []
            elif found := _INSTRUCTION.match(line):
                name, shape, opcode, operands, rest = found.groups()
                array = re.match(r"(\w+)\[([\d,]*)\]", shape)
                dims = tuple(int(x) for x in array[2].split(",") if x) if array else ()
                real = array is not None and array[1][0] in "fb"  # floats and bfloat16
                made = Instruction(opcode, dims, real, re.findall(r"%([\w.\-]+)", operands), rest)
                body.append(made)
                self.by_name[name] = made

    def functions(self, i: Instruction) -> list[str]:
        """The functions that an instruction's source stands in, innermost first."""
        names, frame = [], int(i.named("stack_frame_id", "0"))
        while frame in self.frames:
            name, frame = self.frames[frame]
            names.append(name)
        return names

    @functools.cache  # noqa: B019
    def work(self, name: str) -> Work:
        i = self.by_name.get(name)
        if i is None or i.opcode in ("while", "conditional", "call"):
            return Work(REST)
        inside = self.bodies.get(i.named("calls"), [])
        around = self.functions(i)
        backward = "transpose(jvp" in i.rest
        again = not backward and any(f.startswith("LlmTasks.backward") for f in around)
        part = AGAIN if again else FORWARD
        if i.opcode in _COLLECTIVES:
            return Work(EXCHANGE if "Tick._exchange" in "".join(around) else REDUCTION)
        if any(f.startswith("EncoderTasks.") for f in around):
            return Work(ASTRAY)
        for dot in (x for x in (i, *inside) if x.opcode == "dot"):
            left = self.by_name[dot.operands[0]].dims
            k = math.prod(left[d] for d in dot.sizes("lhs_contracting_dims"))
            if dot.sizes("lhs_batch_dims"):
                flops = 2.0 * k * math.prod(dot.dims)
                return Work(ATTENTION, CORE, GRADIENT if backward else part, flops)
            m = math.prod(left) // k
            return self.shapes.dense(m, k, math.prod(dot.dims) // m, backward, part)
        sums = [x for x in inside or [i] if x.real and x.dims and x.opcode not in _MOVES]
        kinds = [k for x in reversed(sums) if (k := self._by_function(self.functions(x)))]
        own = self._by_function(around)
        kind = kinds[0] if kinds else own or (SLOTS if i.opcode == "copy" else REST)
        if kind == REST and any(x.opcode.startswith("reduce") for x in sums):
            return Work(RESIDUAL)  # a bias gradient that XLA cut in two, which lost its source
        if kind in (HEADS, GELU) and backward and len(i.dims) == 1:
            return Work(RESIDUAL)
        if kind == HEADS:
            near = [i, *(self.by_name[x] for x in i.operands if x in self.by_name)]
            if any(x.dims[-2:] == (self.shapes.sequence,) * 2 for x in near):
                return Work(SOFTMAX, CORE, GRADIENT if backward else part)
        return Work(kind)

    @staticmethod
    def _by_function(names: list[str]) -> str:
        for name in names:
            for function, kind in _FUNCTIONS.items():
                if name == function or name.startswith(function + "."):
                    return kind
            if "update_fn" in name:  # optax
                return OPTIMISER
        return ""
