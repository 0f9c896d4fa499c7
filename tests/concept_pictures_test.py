"""The pictures of docs/concepts.md: what they show, and that those in docs/ are the script's."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from optimus_jax import concept_pictures as pictures
from optimus_jax.schedule.task import Task
from tests.conftest import ROOT


def seconds(row: list[tuple[str, float, float]], kind: str) -> float:
    return sum(end - start for name, start, end in row if name == kind)


def test_bubbles_of_the_llm_alone() -> None:
    """Forward 1 and backward 2 of compute, with four collectives in each: a step is N + P - 1 of
    both, and on each stage P - 1 of them are idle."""
    rows = pictures.idle(encoder=False)
    both = 3 + 8 * pictures.COLLECTIVE
    around = pictures.GATHER + pictures.SCATTER
    assert pictures.step(encoder=False)[0].step == pytest.approx(7 * both + around)
    for row in rows:
        assert seconds(row, "dp") == pytest.approx(around)
        assert seconds(row, "pp") == pytest.approx(3 * both)
        assert seconds(row, "tp") == pytest.approx(4 * 8 * pictures.COLLECTIVE)
        assert seconds(row, "encoder") == 0


def test_other_stages_wait_for_the_encoder_in_the_first() -> None:
    first, *others = pictures.idle(encoder=True)
    assert seconds(first, "encoder") == 0
    for row in others:
        assert seconds(row, "encoder") > pictures.ENCODER["F"]
        gaps = [(start, end) for kind, start, end in row if kind == "pp"]
        for kind, start, end in row:
            if kind == "encoder":
                assert any(a - 1e-6 <= start and end <= b + 1e-6 for a, b in gaps)
    alone, with_it = (pictures.step(encoder)[0].step for encoder in (False, True))
    assert with_it > alone


def test_ranks_of_both_plans() -> None:
    """dp 1, pp 4, tp 2 and dp 4, pp 2, tp 1 on the same eight devices."""
    ranks = pictures.ranks(pictures.GRID)
    for own, sizes in zip(zip(*ranks, strict=True), ((1, 4, 2), (4, 2, 1)), strict=True):
        assert len(set(own)) == 8
        assert tuple(max(rank[k] for rank in own) + 1 for k in range(3)) == sizes
    llm, encoder = ranks[5]
    assert (llm.stage, llm.shard) == (2, 1)
    assert (encoder.stage, encoder.replica) == (0, 3)


def test_ticks_hold_the_schedule_in_its_order() -> None:
    made, rows = pictures.tick_rows()
    for device, column in ((0, 0), (1, 2)):
        tasks = tuple(Task.parse(row[column]) for row in rows if row[column])
        assert tasks == made.orders[device]
    moved = [words for _, words, _ in rows]
    assert sum("activation" in words and "→" in words for words in moved) == 4
    assert sum(words.count("gradient") - words.count("features'") for words in moved) == 4


def test_the_pictures_in_docs_are_those_that_the_script_draws(tmp_path: pathlib.Path) -> None:
    """Made anew by python -m optimus_jax.concept_pictures. Other versions of matplotlib may place
    letters otherwise, by less than the bound."""
    from matplotlib.image import imread

    for drawn in pictures.draw(tmp_path):
        there, here = imread(ROOT / "docs" / drawn.name), imread(drawn)
        assert there.shape == here.shape
        assert here.shape[1] == pictures.WIDTH * pictures.DPI
        assert np.abs(there - here).mean() < 0.01, f"docs/{drawn.name} is another picture"
        assert there[0, 0].tolist() == [1, 1, 1, 1]  # white, whatever the page is
