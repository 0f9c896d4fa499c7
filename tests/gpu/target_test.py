"""Targets: names, hosts of eight, and what the compiler is told."""

from __future__ import annotations

import pytest

from optimus_jax.errors import UserError
from optimus_jax.gpu.target import GPUS, configuration, target


@pytest.mark.parametrize(
    ("text", "topology"),
    [("h100x64", "1x8x8"), ("h200x8", "1x1x8"), ("b200x2", "1x1x2"), ("a100x16", "1x2x8")],
)
def test_a_target_is_hosts_of_eight(text: str, topology: str) -> None:
    found = target(text)
    assert (str(found), found.topology) == (text, topology)
    partitions, hosts, gpus = map(int, topology.split("x"))
    assert partitions * hosts * gpus == found.count


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100", "--target=h100: expected a kind of GPU and how many, as in h100x64"),
        ("v100x8", "kinds: a100, h100, h200, b200"),
        (
            "h100x12",
            "12 GPUs make no whole hosts of 8; pass at most 8, or a multiple of it such as",
        ),
        ("h100x0", "--target=h100x0: 0 GPUs"),
    ],
)
def test_a_wrong_target_ends_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        target(text)


def test_the_configuration_names_the_architecture_and_the_memory() -> None:
    said = configuration(GPUS["h100"])
    assert 'platform_version: "Compute Capability 9.0a"' in said
    assert "device_memory_size: 84942979072" in said
    assert 'platform_version: "Compute Capability 8.0"' in configuration(GPUS["a100"])
    assert said.count("{") == said.count("}")
