"""docs/scaling.md: its tables are those of the code."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest

from optimus_jax.plan import answer_report, scaling_page
from optimus_jax.plan.scaling_page import Row, made
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "scaling.md"


def steady(text: str) -> list[str]:
    """All but the seconds of planning, which differ from machine to machine."""
    lines = text.splitlines()
    return [re.sub(r"[\d.]+ \|$", "|", x) if " of pp " in x else x for x in lines]


@functools.cache
def smallest() -> Row:
    return made("h100_8")


def test_the_smallest_job_is_on_the_page_as_it_is_planned() -> None:
    printed = steady(PAGE.read_text())
    for part in (
        scaling_page.plans,
        scaling_page.steps,
        scaling_page.memory,
        scaling_page.links,
    ):
        for line in steady(part([smallest()])):
            assert line in printed, part.__name__


def test_idle_time() -> None:
    row = smallest()
    assert 0 < scaling_page.filled_idle(row) < scaling_page.llm_idle(row) < 1
    backbone = row.answer.llm.backbone
    assert row.best.filling is not None
    # what is busy in the LLM's own step stays busy, and the encoder's work is added to it
    busy = (1 - scaling_page.llm_idle(row)) * backbone.step + row.best.filling.encoder_seconds
    assert (1 - scaling_page.filled_idle(row)) * row.best.step == pytest.approx(busy)


def test_what_has_no_plan_is_on_the_page_with_its_reason() -> None:
    (line,) = [x for x in PAGE.read_text().splitlines() if x.startswith("| 98,304 | - |")]
    assert "1536 is no multiple of dp 1536 x microbatch 2 = 3072" in line


def test_every_row_is_a_command() -> None:
    from configs import clusters

    assert set(scaling_page.ROWS) <= clusters.SIZES.keys()
    assert clusters.get_config("h100_1536_6144").parallel.dp == 96
    for name in ("h100_1536", "h100_1536_100"):
        with pytest.raises(ValueError, match=f"no job '{name}'; there is h100_8, "):
            clusters.get_config(name)


def test_plan_prints_the_same_traffic() -> None:
    answer, counted = smallest().answer, smallest().traffic
    assert answer.recommended == scaling_page.METHOD
    values = answer_report.values(answer)["methods"][answer.recommended]
    assert values["traffic_bytes"] == dataclasses.asdict(counted)
    (line,) = [x for x in answer_report.text(answer).splitlines() if "tensor shards " in x]
    assert f"{counted.tp / 1e9:.2f}" in line.split()


@pytest.mark.slow
def test_the_page_is_that_of_the_code() -> None:
    rows = [made(name) for name in scaling_page.ROWS]
    made_now = scaling_page.page(scaling_page.tables(rows, scaling_page.fixed_rows()))
    assert steady(PAGE.read_text()) == steady(made_now)
