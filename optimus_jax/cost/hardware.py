"""Chips: what one device can do at best, for analytic costs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one device. `flops` by compute dtype in operations per second, `efficiency` the
    share of it that dense layers reach, `link` bytes per second to another device, `latency`
    seconds of one transfer or task launch."""

    flops: dict[str, float]
    efficiency: float
    link: float
    latency: float


# Peak rates of the GPUs are the vendor's dense figures. The CPU core stands for one core of a
# server: 25 GFLOP/s in small float32 matrix products, bfloat16 emulated.
HARDWARE: dict[str, Chip] = {
    "cpu_core": Chip({"float32": 50e9, "bfloat16": 25e9}, 0.5, 2e9, 50e-6),
    "a100": Chip({"float32": 19.5e12, "bfloat16": 312e12}, 0.5, 300e9, 10e-6),
    "h100": Chip({"float32": 67e12, "bfloat16": 989e12}, 0.5, 450e9, 10e-6),
    "h200": Chip({"float32": 67e12, "bfloat16": 989e12}, 0.5, 450e9, 10e-6),
}
