"""Idle time by cause, on timelines whose idle time is known, and its balance on any timeline."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.schedule.bubbles import CAUSES, Bubble, Lane, bubble_report, cause_at
from optimus_jax.schedule.methods import ON_ANY_PIPELINE
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Task
from tests.schedule.planned import planned


def lane(text: str) -> Lane:
    """A device's tasks, written `F0 0-1  EF1 2-3.5`."""
    words = text.split()
    spans = [tuple(map(float, span.split("-"))) for span in words[1::2]]
    return [(Task.parse(name), *span) for name, span in zip(words[::2], spans, strict=True)]


# Two stages, one microbatch; F = 1, B = 2, with a wait before B0 on device 0.
ALONE = [lane("F0 0-1  B0 4-6"), lane("F0 1-2  B0 2-4")]
WITH_ENCODER = [
    lane("EF0.0 0-1  F0 1-2  EF1 2-4  B0 5-7  EB0 7-9"),
    lane("EF0.1 0-1.5  F0 2-3  B0 3-5  EB1 5-8"),
]


def test_idle_time_and_encoder_work_by_cause() -> None:
    report = bubble_report(WITH_ENCODER, ALONE)
    assert report.causes == {
        # before F0: device 0 has no idle time alone, device 1 has 1 and gets 1.5 of work
        "pp_warmup": Bubble(alone=1, encoder=2.5, filled=1, left=0.5),
        # device 0 waits from 1 to 4 alone; now it works for 2 and waits for 1
        "pp_other": Bubble(alone=3, encoder=2, filled=2, left=1),
        # device 1 waits from 4 to 6 alone; now it works for 3 and waits for 1
        "pp_cooldown": Bubble(alone=2, encoder=5, filled=2, left=1),
    }
    assert (report.step, report.alone_step) == (9, 6)


@pytest.mark.parametrize(
    ("moment", "cause"),
    [
        *((0.5, "pp_warmup"), (1.5, "pp_warmup"), (1.999, "pp_warmup"), (2.5, "pp_other")),
        *((3.5, "pp_other"), (5.5, "pp_other"), (7.5, "pp_cooldown"), (99, "pp_cooldown")),
    ],
)
def test_the_cause_of_a_moment_is_where_it_lies_among_llm_tasks(moment: float, cause: str) -> None:
    tasks = lane("EF0 0-1  F0 2-3  EF1 4-5  B0 6-7  EB0 8-9")
    assert cause_at(moment, tasks) == cause


def test_a_device_without_llm_tasks_only_warms_up() -> None:
    assert cause_at(3, lane("EF0 0-1  EB0 8-9")) == cause_at(3, []) == "pp_warmup"


def test_collectives_around_all_tasks_are_causes_of_their_own() -> None:
    """Weights are gathered until 1, gradients scattered from 8 to 10; an encoder task runs beside
    each on device 0."""
    pipe = Pipeline(2, 1)
    durations = dataclasses.replace(Durations.uniform(pipe), gather=1.0, scatter=2.0)
    alone = [lane("F0 1-2  B0 5-7"), lane("F0 2-3  B0 3-5")]
    with_it = [
        lane("EF0 0-0.75  F0 1.5-2.5  B0 5.5-7.5  EB0 8-9.5"),
        lane("F0 2.5-3.5  B0 3.5-5.5"),
    ]
    report = bubble_report(with_it, alone, (durations, pipe), (10.0, 9.0))
    assert (report.step, report.alone_step) == (10.0, 9.0)
    assert report.causes == {
        "pp_warmup": Bubble(alone=1, encoder=0, filled=0, left=0.5 + 1.5),
        "pp_other": Bubble(alone=3, encoder=0, filled=0, left=3),
        "pp_cooldown": Bubble(alone=2, encoder=0, filled=0, left=0.5 + 2.5),
        "dp_gather": Bubble(alone=2, encoder=0.75, filled=0.75, left=1.25),
        "dp_scatter": Bubble(alone=4, encoder=1.5, filled=1.5, left=2.5),
    }
    assert report.inside_share == 1
    assert report.time_share == pytest.approx(1 - 1 * 2 / 2.25)


def test_encoder_work_in_llm_tasks_fills_what_these_wait_for() -> None:
    """F of two layers with one encoder layer inside: of 1 + 0.25 it takes 1.125."""
    pipe = Pipeline(1, 2, llm_layers=(2,), encoders=(EncoderPipeline((4,)),))
    durations = dataclasses.replace(Durations.uniform(pipe), window=(0.125, 0.0625))
    alone = [lane("F0 0-1  B0 1-3")]
    fused = [lane("F0|EF1[0:1) 0-1.125  B0 1.125-3.125")]
    report = bubble_report(fused, alone, (durations, pipe))
    # two layers wait 0.125 each in F, and half of that in B
    assert report.causes["tp"] == Bubble(alone=0.375, encoder=0.25, filled=0.125, left=0.25)
    assert report.inside_share == 0.5
    assert report.time_share == pytest.approx(0.5)


def test_shares() -> None:
    report = bubble_report(WITH_ENCODER, ALONE)
    assert report.share_filled == pytest.approx(5 / 6)  # of the LLM's idle time
    assert report.inside_share == pytest.approx(5 / 9.5)  # of the encoder's work
    # 4.75 of work for each device, and the step is longer by 3
    assert report.time_share == pytest.approx(1 - 3 / 4.75)


def test_filling_counts_device_by_device() -> None:
    """Work on a busy device does not fill the idle time of another."""
    alone = [lane("F0 0-4"), lane("F0 3-4")]
    report = bubble_report([lane("EF0 0-3  F0 3-7"), lane("F0 6-7")], alone)
    assert report.causes["pp_warmup"] == Bubble(alone=3, encoder=3, filled=0, left=6)
    assert report.inside_share == 0


def test_without_encoder_work_nothing_is_filled_and_nothing_is_outside() -> None:
    report = bubble_report(ALONE, ALONE)
    for bubble in report.causes.values():
        assert (bubble.encoder, bubble.filled, bubble.left) == (0, 0, bubble.alone)
    assert (report.share_filled, report.inside_share, report.time_share) == (0, 1, 1)


def test_without_idle_time_no_share_of_it_is_filled() -> None:
    report = bubble_report([lane("EF0 0-1  F0 1-2  B0 2-4")], [lane("F0 0-1  B0 1-3")])
    assert (report.share_filled, report.inside_share, report.time_share) == (0, 0, 0)


def test_work_hidden_whole_costs_no_time() -> None:
    alone = [lane("F0 0-1  B0 3-5")]
    report = bubble_report([lane("F0 0-1  EF1 1-2  B0 3-5")], alone)
    assert (report.share_filled, report.inside_share, report.time_share) == (0.5, 1, 1)


def test_timelines_of_different_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        bubble_report(WITH_ENCODER, ALONE[:1])


def test_no_tasks_at_all() -> None:
    report = bubble_report([[], []], [[], []])
    assert report.step == report.alone_step == report.share_filled == 0
    assert set(report.causes.values()) == {Bubble(0, 0, 0, 0)}


NAMES = st.sampled_from(["F0", "B0", "EF0", "EB1"])
ITEM = st.tuples(st.integers(0, 3), NAMES, st.integers(0, 4))  # wait, name, seconds


@given(items=st.lists(ITEM, max_size=12), longer=st.integers(0, 5))
def test_tasks_and_idle_time_tile_a_devices_step_exactly(
    items: list[tuple[int, str, int]], longer: int
) -> None:
    tasks: list[tuple[Task, float, float]] = []
    clock = 0
    for wait, name, seconds in items:
        tasks.append((Task.parse(name), clock + wait, clock + wait + seconds))
        clock += wait + seconds
    step = clock + longer
    end = lane(f"EF9 {step}-{step}")  # gives the step its length and no device any work
    report = bubble_report([[*tasks, *end]], [[]])

    llm = [t for t in tasks if not t[0].kind.is_encoder]
    first, last = (llm[0][1], llm[-1][2]) if llm else (step, step)
    bounds = {"pp_warmup": (0, first), "pp_other": (first, last), "pp_cooldown": (last, step)}
    assert report.step == step
    assert tuple(report.causes) == CAUSES
    for cause, (begin, until) in bounds.items():
        busy = [{s for s in range(a, b) if begin <= s < until} for _, a, b in tasks]
        encoder = [b for b, (t, *_) in zip(busy, tasks, strict=True) if t.kind.is_encoder]
        bubble = report.causes[cause]
        assert bubble.left == until - begin - len(set().union(*busy))
        assert bubble.encoder == len(set().union(*encoder))
    idle = sum(b.left for b in report.causes.values())
    assert idle + sum(end - start for _, start, end in tasks) == step


@pytest.mark.parametrize("method", ON_ANY_PIPELINE)
def test_times_of_every_method_balance(method: str) -> None:
    found, alone = (planned(m, "1f1b", 3, 4, 1, 0.5) for m in (method, "text_only"))
    lanes, own = (p.program.time(p.durations) for p in (found, alone))
    report = bubble_report(lanes, own)
    llm = 3 * 4 * (1 + 2)
    total = {
        name: sum(getattr(b, name) for b in report.causes.values())
        for name in ("alone", "encoder", "filled", "left")
    }
    assert total["alone"] + llm == pytest.approx(3 * report.alone_step)
    assert total["left"] + total["encoder"] + llm == pytest.approx(3 * report.step)
    assert total["encoder"] == pytest.approx(0 if method == "text_only" else 4 * 0.5 * 3)
    assert 0 <= total["filled"] <= min(total["encoder"], total["alone"]) + 1e-9
