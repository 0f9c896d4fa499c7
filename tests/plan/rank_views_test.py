"""What ranks do when, by hand: encoder work around two ranks' passes of one microbatch."""

from __future__ import annotations

from typing import Any

import pytest

from optimus_jax.fill.backbone import Backbone
from optimus_jax.plan.rank_views import Work, view
from optimus_jax.schedule.actions import Action

ALONE = Backbone(
    passes=(
        ((0.0, 2.0, Action(0, "F", 0)), (6.0, 9.0, Action(0, "B", 0))),
        ((2.0, 4.0, Action(1, "F", 0)), (4.0, 6.0, Action(1, "B", 0))),
    ),
    slots=(((0.5, 1.0), (7.0, 7.5)), ((3.0, 3.5),)),
    need=(0.0,),
    given=(9.0,),
    end=9.0,
    all_gather=1.0,
    reduce_scatter=2.0,
)
WORK = (
    (
        Work("EF", ((-1.5, -0.25),), lane=0, lanes=1, about={"name": "EF0"}),
        Work(
            "EF",
            ((0.5, 0.75), (7.0, 7.25)),
            lane=1,
            lanes=1,
            inside=True,
            about={"name": "EF1", "kernels": 2},
        ),
    ),
    (Work("EB", ((6.5, 8.0),), lanes=2, about={"name": "EB0"}),),
)


@pytest.fixture
def found() -> dict[str, Any]:
    return view(ALONE, 1, 0.5, 0.0, 2, WORK)


def test_times_run_from_the_begin_of_the_step(found: dict[str, Any]) -> None:
    assert (found["end_s"], found["llm_s"], found["shift_s"]) == (12.5, [0.5, 12.5], 1.5)
    assert found["collectives"] == [
        {"cause": "dp_all_gather", "start": 0.5, "end": 1.5},
        {"cause": "dp_reduce_scatter", "start": 10.5, "end": 12.5},
    ]


def test_encoder_work_names_its_slices_and_runs(found: dict[str, Any]) -> None:
    first, second = (device["encoder"] for device in found["devices"])
    whole, slots = first
    assert whole == {"kind": "EF", "name": "EF0", "start": 0.0, "end": 1.25, "lane": 0, "lanes": 1}
    assert (slots["start"], slots["end"], slots["lane"], slots["lanes"]) == (2.0, 8.75, 1, 1)
    assert slots["in_slots"] == [250_000, 6_250_000, 250_000]
    assert second == [{"kind": "EB", "name": "EB0", "start": 8.0, "end": 9.5}]


def test_idle_time_by_hand(found: dict[str, Any]) -> None:
    def entry(cause: str, start: float, end: float, *lanes: int, waits: Any = None) -> Any:
        x = {"start": start, "end": end, "cause": cause, "waits_for": waits}
        return {**x, "lane": lanes[0], "lanes": lanes[1]} if lanes else x

    first, second = (device["idle"] for device in found["devices"])
    assert first == [
        entry("encoder_delay", 0.0, 0.5, 1, 1),
        entry("dp_all_gather", 0.5, 1.5, 1, 1),
        entry("dp_all_gather", 1.25, 1.5, 0, 1),
        entry("pp_other", 3.5, 7.5, waits="B0 on rank 1"),
        entry("dp_reduce_scatter", 10.5, 12.5),
    ]
    assert second == [
        entry("encoder_delay", 0.0, 0.5),
        entry("dp_all_gather", 0.5, 1.5),
        entry("pp_warmup", 1.5, 3.5, waits="F0 on rank 0"),
        entry("pp_cooldown", 7.5, 8.0),
        entry("pp_cooldown", 9.5, 10.5),
        entry("dp_reduce_scatter", 10.5, 12.5),
    ]


def test_what_time_is_spent_on_by_hand(found: dict[str, Any]) -> None:
    first, second = (device["spent"] for device in found["devices"])
    assert first == {
        "llm": 4.0,
        "encoder": 0.625,  # on one of two slices
        "encoder_inside": 0.25,
        "encoder_delay": 0.25,
        "dp_all_gather": 0.625,
        "pp_warmup": 0.0,
        "pp_other": 4.0,
        "tp": 0.75,
        "pp_cooldown": 0.0,
        "dp_reduce_scatter": 2.0,
        "encoder_tail": 0.0,
    }
    assert (second["llm"], second["tp"], second["encoder"]) == (3.5, 0.5, 1.5)
    assert sum(first.values()) == sum(second.values()) == 12.5


def test_encoder_layers_in_the_llms_passes_are_no_idle_time() -> None:
    """A forward of 2 s of which the encoder takes 0.75 s and collectives of the LLM 0.5 s."""
    work = Work("EF", ((0.0, 0.75),), inside=True, about={"name": "EF0"})
    found = view(ALONE, 1, 0.0, 0.0, 1, ((work,), ()), slots=(0.5, 0.0))
    first = found["devices"][0]
    assert "in_slots" not in first["encoder"][0]
    spent = first["spent"]
    assert (spent["llm"], spent["encoder_inside"], spent["tp"]) == (3.75, 0.75, 0.5)
    assert sum(spent.values()) == 12.0 == found["end_s"]


def test_a_tail_is_idle_time_of_who_does_not_work_in_it() -> None:
    work = Work("EB", ((9.0, 11.5),), about={"name": "EB0"})
    found = view(ALONE, 1, 0.0, 0.5, 1, ((work,), ()))
    assert (found["end_s"], found["llm_s"]) == (12.5, [0.0, 12.0])
    first, second = (device["spent"] for device in found["devices"])
    assert (first["encoder"], first["dp_reduce_scatter"], first["encoder_tail"]) == (2.5, 0.0, 0.0)
    assert (second["pp_cooldown"], second["encoder_tail"]) == (3.0, 0.5)
