"""Timelines as text, against pictures."""

from __future__ import annotations

import textwrap

import pytest

from optimus_jax.schedule.bubbles import Lane
from optimus_jax.schedule.task import Task
from optimus_jax.schedule.visualize import WIDTH, text_grid
from tests.schedule.planned import planned


def picture(text: str) -> str:
    return textwrap.dedent(text).strip()


def lane(*tasks: tuple[str, float, float]) -> Lane:
    return [(Task.parse(name), start, end) for name, start, end in tasks]


def test_a_schedule_to_scale() -> None:
    """F = 1 and B = 2 take 4 and 8 columns, the encoder of a microbatch 1 and 2."""
    found = planned("phased", "1f1b", 2, 2, 1, 1.0)
    assert text_grid(found.program.time(found.durations), unit=0.25) == picture(
        """
        device 0 llm |....F0  F1  ........B0      ....B1      ........|
                 enc |EF0 ....................................EB0     |
        device 1 llm |........F0  B0      F1  B1      ................|
                 enc |EF1 ....................................EB1     |
        """
    )


def test_names_are_cut_and_a_short_task_keeps_one_column() -> None:
    lanes = [
        lane(("F10", 0, 2), ("F0c1", 2, 6), ("B0", 6, 6.1), ("B1", 8, 10)),
        lane(("EF2.0+1", 0, 5), ("EB0[0:4)", 5, 10)),
    ]
    assert text_grid(lanes, unit=1) == picture(
        """
        device 0 llm |F1F0c1B.B1|
                 enc |..........|
        device 1 llm |..........|
                 enc |EF2.0EB0[0|
        """
    )


def test_a_step_fills_the_width() -> None:
    lanes = [lane(("F0", 0, 0.25), ("B0", 0.5, 1))]
    assert text_grid(lanes, width=8) == picture(
        """
        device 0 llm |F0..B0  |
                 enc |........|
        """
    )
    assert {len(line) for line in text_grid(lanes).splitlines()} == {len("device 0 llm ||") + WIDTH}


def test_a_task_at_the_very_end_stays_inside() -> None:
    lanes = [lane(("F0", 0, 9), ("B0", 9.9, 10), ("EB0", 10, 10))]
    assert text_grid(lanes, unit=1) == picture(
        """
        device 0 llm |F0       B|
                 enc |.........E|
        """
    )


@pytest.mark.parametrize("width", [1, 20])
def test_no_tasks_at_all(width: int) -> None:
    assert text_grid([[]], width) == picture(
        """
        device 0 llm |.|
                 enc |.|
        """
    )


def test_lanes_of_many_devices_stand_below_one_another() -> None:
    lines = text_grid([lane(("F0", d, d + 1)) for d in range(11)], unit=1).splitlines()
    assert {line.index("|") for line in lines} == {len("device 10 llm ")}
    assert lines[0] == "device 0  llm |F..........|"
    assert lines[20] == "device 10 llm |..........F|"
