"""Pieces of encoder work as entries of the timeline page, by hand."""

from __future__ import annotations

import pytest

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.encoder import EncoderPlan, Work
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.packing import Packed, Part, Placed
from optimus_jax.fill.pieces import Piece
from optimus_jax.fill.windows import Kernel, SlotRule
from optimus_jax.plan.answer_views import of_filling, passes
from optimus_jax.schedule.actions import Action

ALONE = Backbone(  # one rank of two chunks
    passes=(
        (
            (0.0, 3.0, Action(0, "F", 0)),
            (3.0, 6.0, Action(1, "F", 0)),
            (6.0, 9.0, Action(1, "B", 0)),
            (10.0, 13.0, Action(0, "B", 0)),
        ),
    ),
    slots=(((0.5, 1.5), (2.0, 2.5), (3.5, 4.5), (5.0, 5.5), (6.5, 7.5)),),
    need=(0.0,),
    given=(13.0,),
    end=13.0,
    all_gather=0.0,
    reduce_scatter=0.0,
)
KERNEL = Kernel(0.5, 0.5)
WORK = Work(KERNEL, (4,), KERNEL, (4,))


def filling(copies: int, slots: tuple[tuple[int, float], ...]) -> Filling:
    """Two encoders, the first on all devices of the rank, the second's only pipeline used on the
    last of `copies` parts; each has one kernel in slots that start when `slots` says."""
    spans = [[at for which, at in slots if which == encoder] for encoder in (0, 1)]
    parts = [
        Part(0, pipeline, False, ((min(mine), max(mine) + 0.5),))
        for pipeline, mine in zip((0, copies - 1), spans, strict=True)
    ]
    plans = (EncoderPlan(1, 1, 1, WORK, None), EncoderPlan(1, 1, copies, WORK, None))
    placed = tuple(
        Placed(plan, Packed((part,), part.spans[0][1]), None)
        for plan, part in zip(plans, parts, strict=True)
    )
    found = Filling("filled", ALONE, SlotRule(), placed)
    pieces = tuple(Piece(e, "EF", parts[e], 0, at, at + 0.5, 1, True) for e, at in slots)
    found.__dict__["pieces"] = pieces
    return found


def entries(found: Filling) -> list[tuple[str, float, float, int]]:
    view = of_filling(found, ["one", "two"], 2)
    work = view["devices"][0]["encoder"]
    return [(x["encoder"], x["start"], x["end"], x["kernels"]) for x in work]


def test_slots_in_a_row_are_one_entry() -> None:
    found = filling(1, ((0, 0.5), (0, 2.0), (0, 3.5), (1, 5.0)))
    assert entries(found) == [("one", 0.5, 4.0, 3), ("two", 5.0, 5.5, 1)]


def test_other_work_between_slots_on_the_same_devices_ends_an_entry() -> None:
    order = ((1, 0.5), (0, 2.0), (1, 3.5), (1, 5.0))
    assert entries(filling(1, order)) == [
        ("two", 0.5, 1.0, 1),
        ("one", 2.0, 2.5, 1),
        ("two", 3.5, 5.5, 2),
    ]
    # the first encoder takes all parts of the rank's devices, the second one the last of them
    assert entries(filling(2, order)) == entries(filling(1, order))
    assert entries(filling(2, ((0, 0.5), (1, 2.0), (0, 3.5)))) == [
        ("one", 0.5, 1.0, 1),
        ("two", 2.0, 2.5, 1),
        ("one", 3.5, 4.0, 1),
    ]


def test_entries_name_their_part_of_the_devices() -> None:
    view = of_filling(filling(2, ((1, 0.5), (0, 2.0))), ["one", "two"], 2)
    second, first = view["devices"][0]["encoder"]
    assert view["slices"] == 2
    assert (second["lane"], second["lanes"]) == (1, 1)
    assert "lane" not in first


def test_passes_name_chunks_and_their_slots() -> None:
    found = passes(ALONE, 2)
    names = [(x["name"], x["start"], x["end"], x.get("slots")) for x in found["devices"][0]]
    assert names == [
        ("F0c0", 0.0, 3.0, 0),
        ("F0c1", 3.0, 6.0, 0),
        ("B0c1", 6.0, 9.0, 1),
        ("B0c0", 10.0, 13.0, None),
    ]
    assert found["tp_slots"] == [[[0.5, 1.5], [2.0, 2.5]], [[0.5, 1.5]]]
    assert [x["name"] for x in passes(ALONE, 1)["devices"][0]][:2] == ["F0", "F0"]


def test_slots_that_are_filled_are_no_idle_time() -> None:
    view = of_filling(filling(2, ((1, 0.5), (0, 2.0))), ["one", "two"], 2)
    spent = view["devices"][0]["spent"]
    assert spent["encoder_inside"] == pytest.approx(0.5 + 0.5 / 2)
    assert spent["tp"] == pytest.approx(4.0 - 0.75)
    assert (spent["llm"], spent["pp_other"]) == (8.0, 1.0)
