"""Chips: what one device can do at best, for analytic costs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """`bandwidth` in bytes per second of one device one way, `latency` in seconds of a transfer."""

    bandwidth: float
    latency: float

    def seconds(self, sent: float) -> float:
        """Seconds in which one device sends `sent` bytes."""
        return self.latency + sent / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one device. `flops` by compute dtype in operations per second, `efficiency` the
    share of it that dense layers reach, `latency` seconds of one task launch or of one transfer
    beside it, `memory` in bytes, `memory_bandwidth` in bytes per second. NVLink joins `node`
    devices, which send to each other over `nvlink` and to all others over `network`."""

    flops: dict[str, float]
    efficiency: float
    latency: float
    memory: float
    memory_bandwidth: float
    node: int
    nvlink: Link
    network: Link

    @property
    def link(self) -> float:
        """Bytes per second to another device of the node."""
        return self.nvlink.bandwidth

    def group_link(self, devices: int) -> Link:
        """What a collective of so many neighbouring devices runs over: one that does not stay
        within a node is as slow as the network."""
        return self.nvlink if devices <= self.node else self.network


# Seconds of one hop of a ring in NCCL's own model, `Simple` protocol: 8.4 us at the base, then 3.4
# over NVLink or 9.6 over a network (NVIDIA/nccl, src/graph/tuning.cc at 01afd20a).
_NVLINK_HOP, _NETWORK_HOP = 11.8e-6, 18.0e-6

# Rates of the GPUs are the vendor's, for SXM boards in servers of eight: matrix products are dense
# (half of what is printed with sparsity), NVLink is one way (half of what is printed), the network
# is one adapter for each GPU. They are peaks: NCCL counts on 235 of an A100's 300 GB/s, and 300 us
# for a collective of GPT-175B at tp 8 (Optimus, section 2.3) are 294 of 450 GB/s.
#   a100  A100 80GB datasheet; DGX A100: HDR InfiniBand, 200 Gb/s
#   h100  H100 datasheet; DGX H100: NDR InfiniBand, 400 Gb/s
#   h200  H200 datasheet; DGX H200: NDR InfiniBand, 400 Gb/s
#   b200  Blackwell architecture brief, HGX B200; DGX B200: 1,440 GB and 64 TB/s in eight, 400 Gb/s
# The CPU core stands for one core of a server: 25 GFLOP/s in small float32 matrix products,
# bfloat16 emulated; 19 GB/s measured as a copy of 256 MB by one core of a Xeon with 12 GB for each
# core. Processes on one machine send over the same sockets as others do.
_SOCKET = Link(2e9, 50e-6)
HARDWARE: dict[str, Chip] = {
    "cpu_core": Chip(
        flops={"float32": 50e9, "bfloat16": 25e9},
        efficiency=0.5,
        latency=50e-6,
        memory=12e9,
        memory_bandwidth=19e9,
        node=1,
        nvlink=_SOCKET,
        network=_SOCKET,
    ),
    "a100": Chip(
        flops={"float32": 19.5e12, "bfloat16": 312e12},
        efficiency=0.5,
        latency=10e-6,
        memory=80e9,
        memory_bandwidth=2.039e12,
        node=8,
        nvlink=Link(300e9, _NVLINK_HOP),
        network=Link(25e9, _NETWORK_HOP),
    ),
    "h100": Chip(
        flops={"float32": 67e12, "bfloat16": 989e12},
        efficiency=0.5,
        latency=10e-6,
        memory=80e9,
        memory_bandwidth=3.35e12,
        node=8,
        nvlink=Link(450e9, _NVLINK_HOP),
        network=Link(50e9, _NETWORK_HOP),
    ),
    "h200": Chip(
        flops={"float32": 67e12, "bfloat16": 989e12},
        efficiency=0.5,
        latency=10e-6,
        memory=141e9,
        memory_bandwidth=4.8e12,
        node=8,
        nvlink=Link(450e9, _NVLINK_HOP),
        network=Link(50e9, _NETWORK_HOP),
    ),
    "b200": Chip(
        flops={"float32": 80e12, "bfloat16": 2250e12},
        efficiency=0.5,
        latency=10e-6,
        memory=180e9,
        memory_bandwidth=8e12,
        node=8,
        nvlink=Link(900e9, _NVLINK_HOP),
        network=Link(50e9, _NETWORK_HOP),
    ),
}
