"""Bytes that a traced program holds at once, counted before anything compiles.

The count follows XLA's own rules, not a factor that was fitted:

- A value has memory from the operation that computes it to the last one that reads it, both
  included, in the order of the trace (XLA orders the operations of its CPU programs breadth first,
  so what a forward computes for the backward of the same layer waits as it does here).
- Elementwise operations, and those that only move or repeat elements, are computed where they are
  used and have no memory (fusion), unless a product, a reduction, a collective or a loop reads
  them. Costly ones (exp, division) are not computed twice: with two readers they have memory.
- Loops update what they carry in place: the carry is counted once, where it was made. Reshapes,
  slice updates and scatters share their operand's memory.
- A body's own values are counted while its loop runs. A carried value that a body computes anew,
  and does not update, takes memory twice: XLA copies the old one first.
- Where 16-bit products are emulated (CPUs), what is computed in bfloat16 is held in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

ALIGNMENT = 64  # bytes, XLA's on CPUs

_CALLS = {
    "jit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
    "shard_map",
}
_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "optimization_barrier", "stop_gradient"}
_IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}
_ELEMENTWISE = """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp convert_element_type
    dynamic_slice eq floor ge gt integer_pow iota is_finite le lt max min mul ne neg not or rem rev
    round select_n sign slice square sub transpose xor
"""
_TRANSCENDENTAL = "cos div erf exp exp2 expm1 log log1p logistic pow rsqrt sin sqrt tanh"
_CHEAP = frozenset(_ELEMENTWISE.split())
_COSTLY = frozenset(_TRANSCENDENTAL.split())


class Moment(NamedTuple):
    """While one operation of a program runs: bytes held around it, and bytes that it needs inside,
    if it is a loop."""

    primitive: str
    held: int
    inside: int

    @property
    def total(self) -> int:
        return self.held + self.inside


def moments(jaxpr: Any, emulated: bool = False, carried: int | None = None) -> list[Moment]:
    """One for each operation of the program, calls inlined. Inputs are not counted, nor are
    outputs: a step gives its donated inputs' memory back, and a loop updates what it carries.

    With `emulated`, bfloat16 values take four bytes. `carried` is for the body of a loop: where the
    carry starts among its inputs.
    """
    program = _Program(jaxpr)
    count = len(program.steps)
    anew = () if carried is None else program.computed_anew(carried)
    held = [sum(value.bytes(emulated) for value in anew)] * (count + 1)
    for t, step in enumerate(program.steps):
        for value in step.outputs:
            if program.has_memory(value):
                size = value.bytes(emulated)
                for u in range(t, max(t, min(program.last_use(value), count - 1)) + 1):
                    held[u] += size
    inside = [
        max(
            (m.total for body in step.bodies() for m in moments(body, emulated, step.carried)),
            default=0,
        )
        for step in program.steps
    ]
    return [Moment(s.primitive, held[t], inside[t]) for t, s in enumerate(program.steps)]


@dataclasses.dataclass(eq=False)
class _Value:
    """An array of a program; two are the same only if they are one object."""

    aval: Any

    def bytes(self, emulated: bool = False) -> int:
        return array_bytes(self.aval, emulated)


def array_bytes(x: Any, emulated: bool = False) -> int:
    """Memory of an array of known shape and dtype."""
    if not hasattr(x, "shape"):
        return 0
    width = x.dtype.itemsize
    if emulated and x.dtype.name == "bfloat16":
        width = 4
    return math.ceil(math.prod(x.shape) * width / ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(eq=False)
class _Step:
    """An operation; literal inputs are None."""

    primitive: str
    inputs: list[_Value | None]
    outputs: list[_Value]
    params: dict[str, Any]

    @property
    def carried(self) -> int | None:
        """Where the carry starts among the inputs of a loop's body."""
        if self.primitive == "while":
            return int(self.params["body_nconsts"])
        return self._scanned[0] if self.primitive == "scan" else None

    @property
    def _scanned(self) -> tuple[int, int]:
        """A scan's constants and what it carries: their numbers among its inputs."""
        if "num_consts" in self.params:
            return int(self.params["num_consts"]), int(self.params["num_carry"])
        constants, carry, _ = self.params["ft_in"].unpack()  # from jax 0.12 on
        return len(constants), len(carry)

    def bodies(self) -> list[Any]:
        """What runs inside a loop or a branch."""
        if self.primitive == "while":
            return [self.params["body_jaxpr"].jaxpr]
        if self.primitive == "scan":
            return [self.params["jaxpr"].jaxpr]
        return [branch.jaxpr for branch in self.params.get("branches", ())]

    def shared(self) -> Iterable[tuple[_Value, _Value]]:
        """(output, input) pairs that have one memory."""
        inputs: list[_Value | None] = []
        if self.primitive in _VIEWS:
            inputs = self.inputs
        elif self.primitive in _IN_PLACE:
            inputs = self.inputs[:1]
        elif self.primitive == "while":
            inputs = self.inputs[self.params["cond_nconsts"] + self.params["body_nconsts"] :]
        elif self.primitive == "scan":
            constants, carry = self._scanned
            inputs = self.inputs[constants : constants + carry]
        return [(o, i) for o, i in zip(self.outputs, inputs, strict=False) if i is not None]


class _Program:
    """A jaxpr without calls, views and dead code, and what is known of its values."""

    def __init__(self, jaxpr: Any):
        inputs = [_Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        steps, outputs = _inlined(jaxpr, known)
        self._root: dict[_Value, _Value] = {}
        self._made: dict[_Value, _Step] = {}
        self._needed: dict[_Value, bool] = {}
        self._last: dict[_Value, int] = {}
        kept = _needed(steps, outputs)
        for step in kept:
            self._root.update(step.shared())
            self._made.update(dict.fromkeys(step.outputs, step))
        self.steps = [step for step in kept if step.primitive not in _VIEWS]
        self._readers: dict[_Value, list[int]] = {}
        for t, step in enumerate(self.steps):
            for value in step.inputs:
                if value is not None:
                    self._readers.setdefault(self.root(value), []).append(t)
        self._outputs = {self.root(value) for value in outputs if value is not None}
        self._results, self._inputs = outputs, inputs

    def root(self, value: _Value) -> _Value:
        """The value whose memory this one is in."""
        while value in self._root:
            value = self._root[value]
        return value

    def has_memory(self, value: _Value) -> bool:
        """Whether a step's output has memory of its own: no input's, no output's, not fused."""
        return value not in self._root and value not in self._outputs and self._is_stored(value)

    def computed_anew(self, first: int) -> list[_Value]:
        """Outputs that are neither the carried value in their place nor an update of it; the carry
        starts at input `first`."""
        found = []
        for old, new in zip(self._inputs[first:], self._results, strict=False):
            value = new and self.root(new)
            if value in self._made and not self._updates(value, old):
                found.append(value)
        return found

    def _updates(self, value: _Value, old: _Value) -> bool:
        """Whether an elementwise operation makes `value` of `old`, and can write over it."""
        step = self._made[value]
        elementwise = step.primitive in _CHEAP | _COSTLY and value.aval.shape == old.aval.shape
        return elementwise and any(i and self.root(i) is old for i in step.inputs)

    def last_use(self, value: _Value) -> int:
        """The last step that reads a stored value, itself or through what is fused into it."""
        if value not in self._last:
            self._last[value] = len(self.steps) if value in self._outputs else -1
            for t in self._readers.get(value, ()):
                through = [
                    self.last_use(o)
                    for o in map(self.root, self.steps[t].outputs)
                    if o is not value and not self._is_stored(o)
                ]
                self._last[value] = max(self._last[value], t, *through)
        return self._last[value]

    def _is_stored(self, value: _Value) -> bool:
        if value not in self._needed:
            self._needed[value] = self._must_be_stored(value)
        return self._needed[value]

    def _must_be_stored(self, value: _Value) -> bool:
        step = self._made.get(value)
        if step is None or step.primitive not in _CHEAP | _COSTLY or value in self._outputs:
            return True
        readers = [self.steps[t].primitive for t in self._readers.get(value, ())]
        twice = step.primitive in _COSTLY and len(readers) > 1
        return twice or any(name not in _CHEAP | _COSTLY for name in readers)


def _inlined(jaxpr: Any, known: dict[Any, _Value]) -> tuple[list[_Step], list[_Value | None]]:
    """The steps of a jaxpr in order and its outputs; `known` has the values of its inputs."""

    def read(v: Any) -> _Value | None:
        return None if hasattr(v, "val") else known[v]

    steps: list[_Step] = []
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [read(v) for v in equation.invars]
        called = next((equation.params[k] for k in _BODY if k in equation.params), None)
        if name in _CALLS and called is not None:
            body = getattr(called, "jaxpr", called)
            given = zip(body.invars, inputs, strict=True)
            inner = {v: value or _Value(v.aval) for v, value in given}
            inner |= {v: _Value(v.aval) for v in body.constvars}
            more, results = _inlined(body, inner)
            steps += more
            outputs = [r or _Value(v.aval) for r, v in zip(results, equation.outvars, strict=True)]
        else:
            outputs = [_Value(v.aval) for v in equation.outvars]
            steps.append(_Step(name, inputs, outputs, equation.params))
        known.update(zip(equation.outvars, outputs, strict=True))
    return steps, [read(v) for v in jaxpr.outvars]


_BODY = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _needed(steps: list[_Step], outputs: list[_Value | None]) -> list[_Step]:
    """The steps that something reads."""
    wanted, kept = set(outputs), []
    for step in reversed(steps):
        if any(value in wanted for value in step.outputs):
            wanted.update(step.inputs)
            kept.append(step)
    return kept[::-1]
