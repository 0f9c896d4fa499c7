"""A Program run on integers: one number modulo a prime stands in place of each array.

A layer with weight w is x -> x*x + w*x, so gradients need the saved inputs, and whatever goes
astray changes the loss or a gradient. Reads and writes are those of the real executor: only the
columns that a task of its kind needs, slot -1 is trash.
"""

from __future__ import annotations

import zlib
from collections import Counter

from optimus_jax.schedule.program import KINDS, Program, alphabet
from optimus_jax.schedule.task import Kind, Pipeline

PRIME = 2**31 - 1
Gradients = Counter[tuple]


def number(*name: object) -> int:
    """A fixed, haphazard value for a weight or an input."""
    return zlib.crc32(repr(name).encode()) % PRIME


def forward(x: int, weight: int) -> int:
    return (x * x + weight * x) % PRIME


class Layer:
    """A weight, and where its gradient is summed."""

    def __init__(self, grads: Gradients, *name: object):
        self.grads, self.name, self.weight = grads, name, number(*name)

    def __call__(self, x: int) -> int:
        return forward(x, self.weight)

    def backward(self, x: int, dy: int) -> int:
        self.grads[self.name] = (self.grads[self.name] + dy * x) % PRIME
        return dy * (2 * x + self.weight) % PRIME


def embedded(microbatch: int, features: list[int]) -> int:
    return (number("tokens", microbatch) + sum(u * f for u, f in enumerate(features, 2))) % PRIME


def loss_of(microbatch: int, x: int) -> tuple[int, int]:
    """Loss and its gradient."""
    target = number("target", microbatch)
    return target * x * x % PRIME, 2 * target * x % PRIME


def sequential(pipe: Pipeline, encoded: frozenset[int]) -> tuple[int, Gradients]:
    """Loss and gradients without any schedule."""
    total, grads = 0, Gradients()
    encoder = [Layer(grads, "encoder", k) for k in range(pipe.encoder_layers)]
    encoder.append(Layer(grads, "projector"))
    llm = [Layer(grads, "llm", v, k) for v, n in enumerate(pipe.llm_layers) for k in range(n)]

    def up(layers: list[Layer], x: int) -> list[int]:
        inputs = [x]
        for layer in layers:
            inputs.append(layer(inputs[-1]))
        return inputs

    def down(layers: list[Layer], inputs: list[int], dy: int) -> int:
        for layer, x in reversed(list(zip(layers, inputs, strict=False))):
            dy = layer.backward(x, dy)
        return dy

    for i in range(pipe.microbatches):
        units = [up(encoder, number("image", i, u)) for u in range(pipe.units)]
        features = [inputs[-1] * (i in encoded) for inputs in units]
        inputs = up(llm, embedded(i, features))
        loss, dy = loss_of(i, inputs[-1])
        total = (total + loss) % PRIME
        dx = down(llm, inputs, dy)
        grads["tokens"] = (grads["tokens"] + i * dx + dx) % PRIME
        for u in range(pipe.units) if i in encoded else ():
            dx_unit = down(encoder, units[u], dx * (u + 2) % PRIME)
            grads["patches"] = (grads["patches"] + number("image", i, u) * dx_unit) % PRIME
    return total, +grads


def run(program: Program) -> tuple[int, Gradients]:
    """Loss and gradients from the tables alone. Raises IndexError for a slot that is not there."""
    devices = [Device(program, d) for d in range(program.pipeline.stages)]
    for rows, index in zip(program.table, program.pattern, strict=True):
        for device, row in zip(devices, rows, strict=True):
            device.read(row)
            device.run_task()
        pattern = alphabet(program.pipeline)[index]
        pairs = [pair for a, b in pattern.links for pair in ((a, b), (b, a))]
        sent = {receiver: devices[sender].sent(pattern.features) for sender, receiver in pairs}
        for receiver, values in sent.items():
            devices[receiver].arrive(pattern.features, values)
    total = sum((device.grads for device in devices), Gradients())
    loss = sum(device.loss for device in devices) % PRIME
    return loss, +Gradients({name: value % PRIME for name, value in total.items()})


class Buffer(list[int]):
    """Slots, and one more for what slot -1 gets."""

    def __init__(self, slots: int):
        super().__init__(number("never written", k) for k in range(slots + 1))

    def get(self, slot: int) -> int:
        return self[max(slot, -1)]

    def put(self, slot: int, value: int) -> None:
        self[max(slot, -1)] = value


class Device:
    """The buffers and sums of one device."""

    def __init__(self, program: Program, device: int):
        self.pipe, self.device, self.columns = program.pipeline, device, program.columns
        slots = program.slots
        self.wire, self.feature = Buffer(slots.wire), Buffer(slots.feature)
        depth = max(self.pipe.llm_layers) + 1
        self.saved = [Buffer(depth - 1) for _ in range(slots.saved + 1)]
        self.encoder = [Buffer(self.pipe.encoder_layers) for _ in range(slots.encoder + 1)]
        self.loss, self.grads = 0, Gradients()

    def read(self, row: object) -> None:
        self.row = {name: row[where].tolist() for name, where in self.columns.at.items()}  # type: ignore[index]

    def run_task(self) -> None:
        kind = next((kind for kind, n in KINDS.items() if n == self.row["kind"]), None)
        if kind in (Kind.F, Kind.B):
            (self._forward if kind == Kind.F else self._backward)()
        elif kind is not None:
            for k in range(self.row["count"]):
                (self._encode if kind == Kind.EF else self._encode_backward)(k)

    def sent(self, features: bool) -> list[int]:
        if features:
            return [self.feature.get(slot) for slot in self.row["feature_send"]]
        return [self.wire.get(self.row["send"])]

    def arrive(self, features: bool, values: list[int]) -> None:
        slots = self.row["feature_receive"] if features else [self.row["receive"]]
        for slot, value in zip(slots, values, strict=True):
            (self.feature if features else self.wire).put(slot, value)

    def _llm_layer(self, k: int) -> Layer:
        return Layer(self.grads, "llm", self.row["chunk"] * self.pipe.stages + self.device, k)

    def _forward(self) -> None:
        row, saved = self.row, self.saved[max(self.row["saved"], -1)]
        if row["first"]:
            features = [self.feature.get(slot) * (slot >= 0) for slot in row["feature"]]
            saved[0] = embedded(row["microbatch"], features)
        else:
            saved[0] = self.wire.get(row["read"])
        for k in range(row["layers"]):
            saved[k + 1] = self._llm_layer(k)(saved[k])
        y = saved[row["layers"]]
        if row["last"]:
            loss, y = loss_of(row["microbatch"], y)
            self.loss += loss
        self.wire.put(row["write"], y)

    def _backward(self) -> None:
        row, saved = self.row, self.saved[max(self.row["saved"], -1)]
        dx = self.wire.get(row["read"])
        for k in reversed(range(row["layers"])):
            dx = self._llm_layer(k).backward(saved[k], dx)
        if not row["first"]:
            self.wire.put(row["write"], dx)
            return
        self.grads["tokens"] += (row["microbatch"] + 1) * dx
        for u, slot in enumerate(row["feature"], 2):
            self.feature.put(slot, dx * u % PRIME)

    def _encode(self, k: int) -> None:
        row, state = self.row, self.encoder[max(self.row["encoder"][k], -1)]
        if row["begin"] == 0:
            state[0] = number("image", row["microbatch"], row["unit"][k])
        for layer in range(row["begin"], row["end"]):
            state[layer + 1] = Layer(self.grads, "encoder", layer)(state[layer])
        if row["end"] == self.pipe.encoder_layers:
            self.feature.put(row["feature"][k], Layer(self.grads, "projector")(state[row["end"]]))

    def _encode_backward(self, k: int) -> None:
        row, state = self.row, self.encoder[max(self.row["encoder"][k], -1)]
        dx = state[row["end"]]
        if row["end"] == self.pipe.encoder_layers:
            projector = Layer(self.grads, "projector")
            dx = projector.backward(dx, self.feature.get(row["feature"][k]))
        for layer in reversed(range(row["begin"], row["end"])):
            dx = Layer(self.grads, "encoder", layer).backward(state[layer], dx)
        if row["begin"]:
            state[row["begin"]] = dx
        else:
            self.grads["patches"] += number("image", row["microbatch"], row["unit"][k]) * dx
