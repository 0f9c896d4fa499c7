"""Chips: rates that make sense beside each other, and what a group of devices talks over."""

from __future__ import annotations

import pytest

from optimus_jax.cost.hardware import HARDWARE, Link

GPUS = [name for name in HARDWARE if name != "cpu_core"]


def test_a_link_takes_its_latency_and_then_its_bytes() -> None:
    assert Link(bandwidth=100.0, latency=0.5).seconds(300) == 3.5
    assert Link(bandwidth=100.0, latency=0.5).seconds(0) == 0.5


def test_the_table_has_a_core_and_four_gpus() -> None:
    assert list(HARDWARE) == ["cpu_core", "a100", "h100", "h200", "b200"]


@pytest.mark.parametrize(
    ("name", "tflops", "gigabytes", "terabytes_s", "nvlink_total", "network_gbit"),
    [  # as the data sheets print them: NVLink both ways, the network in bits
        ("a100", 312, 80, 2.039, 600, 200),
        ("h100", 1979 / 2, 80, 3.35, 900, 400),
        ("h200", 1979 / 2, 141, 4.8, 900, 400),
        ("b200", 4500 / 2, 1440 / 8, 64 / 8, 1800, 400),
    ],
)
def test_gpus_have_their_vendors_figures(
    name: str,
    tflops: float,
    gigabytes: float,
    terabytes_s: float,
    nvlink_total: float,
    network_gbit: float,
) -> None:
    chip = HARDWARE[name]
    assert chip.flops["bfloat16"] == pytest.approx(tflops * 1e12, rel=1e-3)
    assert chip.memory == pytest.approx(gigabytes * 1e9)
    assert chip.memory_bandwidth == pytest.approx(terabytes_s * 1e12)
    assert chip.nvlink.bandwidth == pytest.approx(nvlink_total * 1e9 / 2)
    assert chip.network.bandwidth == pytest.approx(network_gbit * 1e9 / 8)
    assert chip.node == 8


@pytest.mark.parametrize("name", GPUS)
def test_a_group_uses_nvlink_until_it_leaves_the_node(name: str) -> None:
    chip = HARDWARE[name]
    assert chip.group_link(2) is chip.group_link(8) is chip.nvlink
    assert chip.group_link(9) is chip.group_link(16) is chip.network
    assert chip.link == chip.nvlink.bandwidth > chip.network.bandwidth
    assert chip.nvlink.latency < chip.network.latency


def test_a_core_is_a_node_of_its_own() -> None:
    core = HARDWARE["cpu_core"]
    assert core.node == 1
    assert core.nvlink == core.network, "processes of one machine and of two use sockets alike"
    assert core.link == 2e9
