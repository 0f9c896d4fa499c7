"""The paper's rows: how near the planner comes, and what `filled` promises on every one."""

from __future__ import annotations

import functools

import pytest

from configs import paper
from optimus_jax.fill.placement import check
from optimus_jax.plan import paper_page
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.answer_report import memory_overhead
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.outcome import Answer

STRONG = ("strong_1536", "strong_2048", "strong_3072")
OTHERS = [row for row in paper.ROWS if row not in STRONG]


@functools.cache
def answer(row: str, memory_gb: float = 80.0) -> Answer:
    values = paper.get_config(row).to_dict()
    values["memory_gb"] = memory_gb
    return answer_to(from_config_dict(values))


@functools.cache
def strong() -> dict[str, Answer]:
    return {row: answer(row) for row in STRONG}


@pytest.mark.slow
def test_printed_steps() -> None:
    off = paper_page.errors(strong())
    assert abs(off["strong_1536", "encoder_first_tuned"]) < 0.002, "calibrated on"
    assert abs(off["strong_1536", "fine"]) < 0.002, "calibrated on"
    free = sorted(abs(e) for (row, _), e in off.items() if row != "strong_1536")
    assert len(free) == 6
    assert free[-1] < 0.07
    assert free[-2] < 0.04
    assert sum(free) / 6 < 0.035


def test_one_set_of_constants() -> None:
    every = [a.constants for a in strong().values()]
    assert every[0] == every[1] == every[2]
    for name, value in paper.CALIBRATED.items():
        assert every[0][name] == value
    given = {"tp_collective_s": 300e-6, "vit_forward_s": 1.4e-3, "vit_backward_s": 2.0e-3}
    assert given.items() <= every[0].items()


@pytest.mark.parametrize("row", STRONG)
def test_printed_shares(row: str) -> None:
    coarse, fine, seconds = paper_page.SHARES[row]
    o = strong()[row].outcomes
    assert 100 * (o["coarse"].inside_share or 0) == pytest.approx(coarse, abs=1.0)
    assert 100 * (o["fine"].inside_share or 0) == pytest.approx(fine, abs=7.0)
    assert memory_overhead(strong()[row], o["fine"]) <= 0.12
    assert strong()[row].scheduling_s < seconds


def promises(found: Answer) -> None:
    """What `filled` promises on every row."""
    o = found.outcomes
    fine, filled = o["fine"], o["filled"]
    assert filled.filling is not None
    check(filled.filling)
    assert filled.step <= fine.step + 1e-9
    if fine.step > o["text_only"].step + 1e-6:
        assert filled.step < fine.step, "fine leaves encoder work exposed"
    assert filled.fits


@pytest.mark.parametrize(
    ("row", "memory_gb"),
    [
        *((row, 80.0) for row in STRONG),
        (STRONG[2], 1e6),
        *(pytest.param(row, 1e6, marks=pytest.mark.slow) for row in STRONG[:2]),
    ],
)
def test_filled_meets_its_bound(row: str, memory_gb: float) -> None:
    found = answer(row, memory_gb)
    promises(found)
    filled = found.outcomes["filled"]
    assert filled.bounds is not None and filled.time_share is not None
    whole, spread = filled.bounds
    assert filled.time_share >= spread - 0.005
    assert filled.time_share > whole
    assert filled.inside_share is not None and filled.inside_share >= 0.9


def test_printed_bubbles() -> None:
    found = answer("bubbles")
    step, bubbles = found.llm.backbone.step, found.llm.backbone.bubbles()
    assert step == pytest.approx(paper_page.BUBBLES_STEP, rel=0.02)
    shares = {name: 100 * seconds / step for name, seconds in bubbles.items()}
    assert shares == pytest.approx(paper_page.PERCENT, abs=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHERS)
def test_filled_on_the_other_rows(row: str) -> None:
    promises(answer(row))


@pytest.mark.slow
def test_the_page_is_that_of_the_code() -> None:
    from pathlib import Path

    page = Path(__file__).resolve().parents[2] / "docs" / "paper.md"
    made = paper_page.page(paper_page.answers([*paper.ROWS, "bubbles"]))

    def steady(text: str) -> list[str]:
        """All but the seconds that our search takes, which differ from machine to machine."""
        rows = (line.rpartition("|")[0].rpartition("|") for line in text.splitlines())
        return [cells[0] if cells[0].startswith("| strong") else "|".join(cells) for cells in rows]

    assert steady(page.read_text()) == steady(made)
