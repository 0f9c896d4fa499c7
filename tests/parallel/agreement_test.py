"""Values that all processes share; with one process, its own."""

from __future__ import annotations

from typing import Any

import pytest

from optimus_jax.parallel.agreement import gather, share


@pytest.mark.parametrize(
    "value", [None, 3, "text", {"a": [1.5, None]}, object()], ids=lambda value: type(value).__name__
)
def test_one_process_agrees_with_itself(value: Any) -> None:
    assert share(value) is value
    (only,) = gather(value)
    assert only is value
