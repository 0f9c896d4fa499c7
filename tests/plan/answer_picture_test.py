"""What the picture of an answer shows: which methods, and bars of what is where in time."""

from __future__ import annotations

from typing import Any

import pytest

from optimus_jax.plan.answer_picture import bars, chosen


def timeline(*names: str, recommended: str) -> dict[str, Any]:
    return {"methods": [{"name": n} for n in names], "cluster": {"recommended": recommended}}


@pytest.mark.parametrize(
    ("names", "recommended", "shown"),
    [
        (["text_only", "phased", "filled"], "filled", ["phased", "filled"]),
        (["text_only", "phased"], "phased", ["phased"]),
        (["text_only", "fine"], "fine", ["text_only", "fine"]),
    ],
)
def test_the_recommended_method_stands_below_one_that_fills_nothing(
    names: list[str], recommended: str, shown: list[str]
) -> None:
    found = chosen(timeline(*names, recommended=recommended))
    assert [method["name"] for method in found] == shown


def test_bars_lie_where_the_view_has_them() -> None:
    passes = [{"kind": "F", "start": 0.0, "end": 2.0}, {"kind": "B", "start": 2.0, "end": 5.0}]
    encoder = [
        {"kind": "EF", "start": 0.5, "end": 1.0},
        # runs of 0.1 and 0.3 s with a wait of 0.2 s between them
        {"kind": "EB", "start": 4.0, "end": 4.6, "in_slots": [100_000, 200_000, 300_000]},
    ]
    view = {"backbone": 0, "shift_s": 1.0, "devices": [{"encoder": encoder}]}
    found = bars({"backbones": [{"devices": [passes]}]}, view, 0)
    assert found["F"] == [(1.0, 2.0)] and found["B"] == [(3.0, 3.0)]
    assert found["EF"] == [(0.5, 0.5)]
    assert [pytest.approx(span) for span in found["EB"]] == [(4.0, 0.1), (4.3, 0.3)]
