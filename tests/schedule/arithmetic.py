"""A Program run on integers: one number modulo a prime stands in place of each array.

A layer with weight w is x -> x*x + w*x, so gradients need the saved inputs, and whatever goes
astray changes the loss or a gradient. Reads and writes are those of the real executor: only the
columns that a task of its kind needs, slot -1 is trash.
"""

from __future__ import annotations

import zlib
from collections import Counter
from itertools import zip_longest

import numpy as np

from optimus_jax.schedule.dataflow import LLM, Payload
from optimus_jax.schedule.program import KINDS, EncoderSlots, Program, alphabet
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
    encoders = [
        [*(Layer(grads, "encoder", k, n) for n in range(sizes.total)), Layer(grads, "projector", k)]
        for k, sizes in enumerate(pipe.encoders)
    ]
    everything = [(k, u) for k, sizes in enumerate(pipe.encoders) for u in range(sizes.units)]
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
        units = [up(encoders[k], number("image", k, i, u)) for k, u in everything]
        features = [inputs[-1] * (i in encoded) for inputs in units]
        inputs = up(llm, embedded(i, features))
        loss, dy = loss_of(i, inputs[-1])
        total = (total + loss) % PRIME
        dx = down(llm, inputs, dy)
        grads["tokens"] = (grads["tokens"] + i * dx + dx) % PRIME
        for n, (k, u) in enumerate(everything if i in encoded else ()):
            dx_unit = down(encoders[k], units[n], dx * (n + 2) % PRIME)
            name = "patches", k
            grads[name] = (grads[name] + number("image", k, i, u) * dx_unit) % PRIME
    return total, +grads


def run(program: Program) -> tuple[int, Gradients]:
    """Loss and gradients from the tables alone. Raises IndexError for a slot that is not there."""
    devices = [Device(program, d) for d in range(program.pipeline.stages)]

    def task(rows: np.ndarray) -> None:
        for device, row in zip(devices, rows, strict=True):
            device.read(row)
            device.run_task()

    for rows in program.prologue:
        task(rows)
    for rows, index in zip(program.table, program.pattern, strict=True):
        task(rows)
        pattern = alphabet(program.pipeline)[index]
        pairs = [pair for a, b in pattern.links for pair in ((a, b), (b, a))]
        sent = {receiver: devices[sender].sent(pattern.payload) for sender, receiver in pairs}
        for receiver, values in sent.items():
            devices[receiver].arrive(pattern.payload, values)
    for rows in program.epilogue:
        task(rows)
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
        padded = zip_longest(slots.encoders, self.pipe.encoders, fillvalue=EncoderSlots())
        of_encoders = [s for s, _ in padded]
        self.wire = Buffer(slots.wire)
        self.feature = [Buffer(s.feature) for s in of_encoders]
        self.hidden = [Buffer(s.hidden) for s in of_encoders]
        depth = max(self.pipe.llm_layers) + 1
        self.saved = [Buffer(depth - 1) for _ in range(slots.saved + 1)]
        self.encoder = [
            [Buffer(max(sizes.layers)) for _ in range(s.saved + 1)]
            for s, sizes in zip(of_encoders, self.pipe.encoders, strict=True)
        ]
        self.loss, self.grads = 0, Gradients()

    def read(self, row: np.ndarray) -> None:
        self.row = {name: row[where].tolist() for name, where in self.columns.at.items()}

    def run_task(self) -> None:
        """The encoder task first in forwards, last in backwards: a fused task has both."""
        row = self.row
        for part, kinds in (("e_kind", (Kind.EF,)), ("kind", (Kind.F, Kind.B))):
            for kind in kinds:
                if row[part] == KINDS[kind]:
                    {Kind.F: self._forward, Kind.B: self._backward, Kind.EF: self._encode}[kind]()
        if row["e_kind"] == KINDS[Kind.EB]:
            self._encode_backward()

    def sent(self, payload: Payload) -> list[int]:
        if payload == LLM:
            return [self.wire.get(self.row["send"])]
        buffer = getattr(self, payload.content)[payload.encoder]
        return [buffer.get(slot) for slot in self.row["e_send"]]

    def arrive(self, payload: Payload, values: list[int]) -> None:
        if payload == LLM:
            self.wire.put(self.row["receive"], values[0])
            return
        buffer = getattr(self, payload.content)[payload.encoder]
        for slot, value in zip(self.row["e_receive"], values, strict=True):
            buffer.put(slot, value)

    def _llm_layer(self, k: int) -> Layer:
        return Layer(self.grads, "llm", self.row["chunk"] * self.pipe.stages + self.device, k)

    def _features(self) -> list[tuple[Buffer, int]]:
        """Buffer and slot of every unit."""
        owners = [k for k, sizes in enumerate(self.pipe.encoders) for _ in range(sizes.units)]
        return [
            (self.feature[k], slot) for k, slot in zip(owners, self.row["feature"], strict=True)
        ]

    def _forward(self) -> None:
        row, saved = self.row, self.saved[max(self.row["saved"], -1)]
        if row["first"]:
            features = [buffer.get(slot) * (slot >= 0) for buffer, slot in self._features()]
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
        for u, (buffer, slot) in enumerate(self._features(), 2):
            buffer.put(slot, dx * u % PRIME)

    def _encoder_layer(self, k: int) -> Layer:
        """Layer `k` of the device's own stage."""
        first, _ = self.pipe.stage_layers(self.row["encoder"], self.device)
        return Layer(self.grads, "encoder", self.row["encoder"], first + k)

    def _is_top(self) -> bool:
        """Whether the task ends with its stage's last layer, of a stage that is not the last."""
        first, last = self.pipe.stage_layers(self.row["encoder"], self.device)
        return self.row["end"] == last - first and not self.row["projects"]

    def _is_bottom(self) -> bool:
        return self.row["begin"] == 0 and not self.row["embeds"]

    def _encode(self) -> None:
        row, k = self.row, self.row["encoder"]
        for n in range(row["count"]):
            state = self.encoder[k][max(row["e_saved"][n], -1)]
            if row["embeds"]:
                state[0] = number("image", k, row["e_microbatch"], row["unit"][n])
            elif self._is_bottom():
                state[0] = self.hidden[k].get(row["e_read"][n])
            for layer in range(row["begin"], row["end"]):
                state[layer + 1] = self._encoder_layer(layer)(state[layer])
            y = state[row["end"]]
            if row["projects"]:
                self.feature[k].put(row["e_write"][n], Layer(self.grads, "projector", k)(y))
            elif self._is_top():
                self.hidden[k].put(row["e_write"][n], y)

    def _encode_backward(self) -> None:
        row, k = self.row, self.row["encoder"]
        for n in range(row["count"]):
            state = self.encoder[k][max(row["e_saved"][n], -1)]
            dx = state[row["end"]]
            if row["projects"]:
                projector = Layer(self.grads, "projector", k)
                dx = projector.backward(dx, self.feature[k].get(row["e_read"][n]))
            elif self._is_top():
                dx = self.hidden[k].get(row["e_read"][n])
            for layer in reversed(range(row["begin"], row["end"])):
                dx = self._encoder_layer(layer).backward(state[layer], dx)
            if row["embeds"]:
                image = number("image", k, row["e_microbatch"], row["unit"][n])
                self.grads["patches", k] += image * dx
            elif self._is_bottom():
                self.hidden[k].put(row["e_write"][n], dx)
            else:
                state[row["begin"]] = dx
