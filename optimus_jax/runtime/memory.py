"""The memory table of one device: what a training step holds, in bytes, before it compiles.

    print(memory_table(executor, trainer.train_step().trace(state, batch, *tables)))

Every array of the step is in one of the rows. Shapes give all but two of them: what the fullest
task computes with, and what reduction and update add, are counted in the traced program
(runtime/liveness.py). Beside XLA's analysis of the compiled step: benchmarks/memory.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from optimus_jax.parallel.layout import is_layout
from optimus_jax.runtime import slots as slot_buffers
from optimus_jax.runtime.liveness import Moment, array_bytes, moments

if TYPE_CHECKING:
    from optimus_jax.runtime.executor import Executor


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes of one kind of array during the ticks, and after them, in the reduction of the
    gradients and the update."""

    name: str
    ticks: int
    after: int


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """Bytes on one device, by what they hold, in the two parts of a step. All devices hold the
    same: the step is one program."""

    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def ticks(self) -> int:
        return sum(row.ticks for row in self.rows)

    @property
    def after(self) -> int:
        return sum(row.after for row in self.rows)

    @property
    def total(self) -> int:
        """The most at any time."""
        return max(self.ticks, self.after)

    def activations(self, module: str) -> int:
        """Bytes of a module's slots: "llm" or an encoder's name."""
        return sum(r.ticks for r in self.rows if r.name in {f"{module} {x}" for x in _SLOTS})

    def __str__(self) -> str:
        width = max(len(row.name) for row in (*self.rows, Row("most at any time", 0, 0)))
        head = f"{'MB':{width}} {'ticks':>10} {'after':>10}"
        ends = Row("sum", self.ticks, self.after), Row("most at any time", self.total, self.total)
        body = [
            f"{row.name:{width}} {row.ticks / 1e6:10.3f} {row.after / 1e6:10.3f}"
            for row in (*self.rows, *ends)
        ]
        return "\n".join((head, *body))

    def to_json(self) -> str:
        rows = {row.name: {"ticks": row.ticks, "after": row.after} for row in self.rows}
        return json.dumps({"total": self.total, "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> MemoryTable:
        rows = json.loads(text)["rows"]
        return cls(tuple(Row(name, x["ticks"], x["after"]) for name, x in rows.items()))


_SLOTS = ("wire", "saved", "kept", "feature", "hidden")


def memory_table(executor: Executor, traced: Any) -> MemoryTable:
    """The table of a traced training step (jax.stages.Traced of Trainer.train_step, of arrays or
    of shapes).

    Where the devices are CPUs, bfloat16 weights and what is computed with them count four bytes a
    value, since XLA computes there in float32.
    """
    emulated = executor.meshes.mesh.devices.flat[0].platform == "cpu"
    (state, batch, *tables), _ = traced.args_info
    inputs = _local_bytes(traced)
    sizes = {}
    for name, part in (
        ("master weights", state.params),
        ("optimiser state", (state.optimizer, state.step)),
        ("batch", batch),
        ("tables", tables),
    ):
        sizes[name] = sum(next(inputs) for _ in jax.tree.leaves(part))
    arguments = tuple(Row(name, size, size) for name, size in sizes.items())
    carry = slot_buffers.shapes(executor, state.params)
    slots = {"llm wire": carry.wire, "llm saved": carry.saved, "llm kept": carry.kept}
    for name, own in zip(executor.encoders, carry.encoders, strict=True):
        slots |= {f"{name} {slot}": getattr(own, slot) for slot in own._fields}
    sums = Row("gradient sums", _bytes(carry.grads), _bytes(carry.grads))
    rows = [
        *arguments,
        Row("gathered weights", _gathered(executor, state.params, emulated), 0),
        sums,
        *(Row(name, _bytes(arrays), 0) for name, arrays in slots.items()),
    ]
    found = moments(traced.jaxpr.jaxpr, emulated)
    ticks, after = _parts(found)
    listed = sum(row.ticks for row in rows) - sum(row.ticks for row in arguments)
    rows += [
        Row("working set of a task", max(0, ticks.total - listed), 0),
        Row("reduced gradients and update", 0, max(0, after.total - sums.after)),
    ]
    return MemoryTable(tuple(rows))


def measured_bytes(compiled: Any) -> dict[str, int]:
    """What XLA says that the compiled step takes on one device (jax.stages.Compiled), by use.
    Outputs that take the place of arguments count once, in the arguments."""
    found = compiled.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }
    return {**parts, "total": sum(parts.values())}


def _parts(found: list[Moment]) -> tuple[Moment, Moment]:
    """The fullest moment up to the scan over the ticks, and the fullest after it."""
    scans = [t for t, m in enumerate(found) if m.primitive == "scan"]
    end = max(scans, key=lambda t: found[t].inside) + 1
    after = max(found[end:], key=lambda m: m.total, default=Moment("", 0, 0))
    return max(found[:end], key=lambda m: m.total), after


def _local_bytes(traced: Any) -> Iterator[int]:
    """Bytes on one device of each argument of the step, in order."""
    outer = traced.jaxpr.jaxpr
    (mapped,) = (e for e in outer.eqns if e.primitive.name == "shard_map")
    inner = mapped.params["jaxpr"].invars
    sizes = {v: array_bytes(x.aval) for v, x in zip(mapped.invars, inner, strict=True)}
    return (sizes[v] for v in outer.invars)


def _gathered(executor: Executor, masters: Any, emulated: bool) -> int:
    """Bytes of the weights that a device computes with, where they are not the master weights
    themselves: of those that are cut over replicas, or of another dtype."""
    dtype = jax.numpy.dtype(executor.model.config.dtype)
    grid = executor.meshes.grid

    def one(layout: Any, x: Any) -> int:
        if layout.zero is None and x.dtype == dtype:
            return 0
        shape = [n // grid.extent(axes) for n, axes in zip(x.shape, layout.cut, strict=True)]
        return array_bytes(jax.ShapeDtypeStruct(shape, dtype), emulated)

    found = jax.tree.map(one, executor.layouts, masters, is_leaf=is_layout)
    return sum(jax.tree.leaves(found))


def _bytes(tree: Any) -> int:
    return sum(array_bytes(x) for x in jax.tree.leaves(tree))
