"""GPUs to compile for that are not there: `h100x64` is 64 of them, in hosts of eight."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from optimus_jax.errors import UserError

if TYPE_CHECKING:
    import jax

HOST = 8  # GPUs that NVLink joins


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler asks of a GPU. `capability` is the major version of its architecture, whose
    accelerated features (90a, 100a) are used from 9 on. Memory in bytes, bandwidths in bytes per
    second, shared memory in bytes for each core or block, `links` of NVLink."""

    name: str
    capability: int
    cores: int
    fpus: int
    clock_ghz: float
    memory: int
    memory_bandwidth: int
    l2: int
    shared_core: int
    shared_block: int
    pcie_bandwidth: int
    links: int


# Memory is what a driver shows, a little more than the vendor's round figure, with which the
# planner counts (cost/hardware.py). From openxla/xla,
# xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb. The
# A100's has no links and no PCIe bandwidth: NVLink 3 has 12 links, PCIe 4.0 x16 31.5 GB/s.
GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus=64,
        clock_ghz=1.41,
        memory=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2=41_943_040,
        shared_core=167_936,
        shared_block=166_912,
        pcie_bandwidth=31_500_000_000,
        links=12,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=9,
        cores=132,
        fpus=128,
        clock_ghz=1.98,
        memory=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        l2=52_428_800,
        shared_core=233_472,
        shared_block=232_448,
        pcie_bandwidth=34_359_738_368,
        links=18,
    ),
    "h200": Gpu(
        name="NVIDIA H200 141GB HBM3e",
        capability=9,
        cores=132,
        fpus=128,
        clock_ghz=1.98,
        memory=151_397_597_184,
        memory_bandwidth=4_800_000_000_000,
        l2=52_428_800,
        shared_core=233_472,
        shared_block=232_448,
        pcie_bandwidth=34_359_738_368,
        links=18,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=10,
        cores=148,
        fpus=128,
        clock_ghz=1.965,
        memory=191_514_411_008,
        memory_bandwidth=7_672_320_000_000,
        l2=132_644_864,
        shared_core=233_472,
        shared_block=232_448,
        pcie_bandwidth=68_719_476_736,
        links=18,
    ),
}

# What XLA's specs say of the software; they change what the compiler takes for granted, and no
# fields that only newer versions know may stand here.
_DRIVER, _RUNTIME = "13.0.0", "12.8.0"


@dataclasses.dataclass(frozen=True)
class Target:
    """`count` GPUs of one kind."""

    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind}x{self.count}"

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.kind]

    @property
    def topology(self) -> str:
        """Partitions x hosts x GPUs of a host, as jax wants it."""
        hosts = max(1, self.count // HOST)
        return f"1x{hosts}x{self.count // hosts}"

    def devices(self) -> list[jax.Device]:
        """The GPUs, to compile for; nothing can be put on them."""
        from jax.experimental import topologies

        description = topologies.get_topology_desc(
            platform="cuda", target_config=configuration(self.gpu), topology=self.topology
        )
        return list(description.devices)


def target(text: str) -> Target:
    """`h100x64` as a Target. Raises UserError saying what would be valid."""
    match = re.fullmatch(r"([a-z0-9]+?)x(\d+)", text)
    if not match or match[1] not in GPUS:
        raise UserError(
            f"--target={text}: expected a kind of GPU and how many, as in h100x64"
            f" (kinds: {', '.join(GPUS)})"
        )
    count = int(match[2])
    if count < 1 or (count > HOST and count % HOST):
        raise UserError(
            f"--target={text}: {count} GPUs make no whole hosts of {HOST}; pass at most {HOST}, or"
            f" a multiple of it such as {match[1]}x{max(HOST, count // HOST * HOST)}"
        )
    return Target(match[1], count)


def configuration(gpu: Gpu) -> str:
    """The text of XLA's GpuTargetConfigProto, with no field that only some versions know."""
    accelerated = "a" if gpu.capability >= 9 else ""
    return f"""\
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {gpu.capability}.0{accelerated}"
  cuda_compute_capability {{ major: {gpu.capability} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.memory_bandwidth}
  l2_cache_size: {gpu.l2}
  shared_memory_per_core: {gpu.shared_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  pcie_bandwidth: {gpu.pcie_bandwidth}
  ecc_enabled: true
  driver_version: "{_DRIVER}"
  runtime_version: "{_RUNTIME}"
  compile_time_toolkit_version: "{_RUNTIME}"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
