"""The report of a run: what is predicted, what was measured, as JSON and as text."""

from __future__ import annotations

import gc
import json
import pathlib
import warnings
from typing import Any

import pytest
from PIL import Image

from optimus_jax import report
from optimus_jax.config import Config, from_config_dict
from optimus_jax.metrics import Stopwatch
from optimus_jax.plan.plan import Plan, make_plan
from optimus_jax.schedule.bubbles import CAUSES

VALUES: dict[str, Any] = {
    "method": "phased",
    "order": "1f1b",
    "costs": "analytic (cpu_core)",
    "predicted_step_s": 0.0125,
    "text_only_step_s": 0.01,
    "bubbles": {
        "pp_warmup": {"alone": 0.001, "encoder": 0.002, "filled": 0.0005, "left": 0.01},
        "pp_other": {"alone": 0.002, "encoder": 0.003, "filled": 0.0015, "left": 0.02},
        "pp_cooldown": {"alone": 0.004, "encoder": 0.005, "filled": 0.0025, "left": 0.03},
    },
    "share_filled": 0.25,
    "inside_share": 0.5,
    "time_share": -0.125,
    "timeline": "device 0 llm |F0|\n         enc |..|",
}


@pytest.fixture
def planned(values: dict[str, Any]) -> tuple[Config, Plan]:
    values["parallel"].update(method="phased", microbatches=2)
    config = from_config_dict(values)
    return config, make_plan(config)


def lines_of(values: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in report.text(values).splitlines()]


def test_text_gives_every_cause_and_their_sum_in_milliseconds() -> None:
    lines = lines_of(VALUES)
    assert "pipeline warm-up 1.00 2.00 0.50 10.00" in lines
    assert "between LLM tasks 2.00 3.00 1.50 20.00" in lines
    assert "pipeline cool-down 4.00 5.00 2.50 30.00" in lines
    assert "together 7.00 10.00 4.50 60.00" in lines


def test_text_says_what_is_predicted_from_what() -> None:
    lines = lines_of(VALUES)
    assert lines[0] == (
        "Method phased on 1f1b; predictions from analytic (cpu_core) costs, simulated, not measured"
    )
    shares = {"share of": "25.0%", "encoder work": "50.0%", "encoder time": "-12.5%"}
    for start, share in shares.items():
        assert [line.split()[-1] for line in lines if line.startswith(start)] == [share]
    assert "predicted step 12.50 ms (LLM alone 10.00 ms)" in lines
    assert report.text(VALUES).endswith("\n\n" + VALUES["timeline"])
    assert not any("measured step" in line or "held-out" in line for line in lines)


def test_text_adds_what_was_measured_and_evaluated() -> None:
    measured = {"measured_step_s": 0.02, "measured_quartiles_s": [0.019, 0.022], "steps_timed": 6}
    scores = {"digit_accuracy": 0.875, "shuffled_accuracy": 0.1}
    lines = lines_of({**VALUES, **measured, **scores})
    assert "measured step 20.00 ms (quartiles 19.00 to 22.00 ms, 6 steps)" in lines
    assert "held-out digits read right 87.5%" in lines
    assert "with pictures shuffled 10.0%" in lines


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        (
            {"caption_accuracy": 0.875, "shuffled_accuracy": 0.1},
            ["held-out captions read right 87.5%", "with pictures shuffled 10.0%"],
        ),
        (
            {"heldout_loss": 1.25, "shuffled_loss": 1.5, "loss_gap_error": 0.03, "samples": []},
            [
                "loss of held-out captions 1.250 nats for each character",
                "with pictures shuffled 1.500 (standard error of the difference 0.030)",
            ],
        ),
    ],
)
def test_text_says_the_scores_that_there_are(scores: dict[str, Any], wanted: list[str]) -> None:
    found = lines_of({**VALUES, **scores})
    start = found.index(wanted[0])
    assert found[start : start + 2] == wanted
    assert sum("held-out" in line for line in found) == 1


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ({}, "2 pipeline stages, 4 microbatches"),
        ({"chunks": 3}, "2 pipeline stages, 3 chunks each, 4 microbatches"),
        ({"dp": 2, "tp": 4}, "2 replicas of 2 pipeline stages x 4 tensor shards, 4 microbatches"),
        (
            {"encoder": {"pp": 2, "tp": 1}, "more_encoders": {"ears": {"pp": 2, "tp": 4}}},
            "2 pipeline stages, encoder of 2 stages, ears of 2 stages x 4 tensor shards,"
            " 4 microbatches",
        ),
    ],
)
def test_a_plan_in_a_few_words(plan: dict[str, Any], wanted: str) -> None:
    bare = {"dp": 1, "pp": 2, "tp": 1, "chunks": 1, "microbatches": 4, "more_encoders": {}}
    assert report.plan_words({**bare, "encoder": {"pp": 1, "tp": 1}, **plan}) == wanted


def test_text_leaves_no_file_open() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report.text(VALUES)
        gc.collect()
    assert not [w for w in caught if issubclass(w.category, ResourceWarning)]


def test_predicted_values_are_the_plans(planned: tuple[Config, Plan]) -> None:
    config, plan = planned
    found = report.predicted(config, plan)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["method"], found["order"]) == ("phased", "1f1b")
    assert found["costs"] == "analytic (cpu_core)"
    assert found["predicted_step_s"] == plan.step_s == found["program_s"] + found["epilogue_s"]
    assert found["event_driven_s"] == plan.event_driven_s
    alone = plan.bubbles.alone_step + plan.durations.epilogue
    assert found["text_only_step_s"] == alone < found["predicted_step_s"]
    assert 0 < found["ticks"] <= plan.program.ticks
    counts = found["slots"]["wire"], found["slots"]["saved"]
    assert set(counts) <= set(range(20))
    assert tuple(found["bubbles"]) == CAUSES
    for cause, bubble in found["bubbles"].items():
        assert bubble == vars(plan.bubbles.causes[cause])
    assert found["share_filled"] == plan.bubbles.share_filled


def test_the_folder_holds_the_report_in_every_form(
    tmp_path: pathlib.Path, planned: tuple[Config, Plan]
) -> None:
    watch = Stopwatch()
    for seconds in (9.0, 9.0, 0.02, 0.04, 0.06, 0.08):
        watch.add(seconds)
    written = report.write(tmp_path, *planned, watch)
    assert (written["measured_step_s"], written["steps_timed"]) == (0.05, 4)
    found = report.load(tmp_path)
    assert found == json.loads(json.dumps(written))
    folder = report.folder(tmp_path)
    assert (folder / "timeline.txt").read_text() == written["timeline"] + "\n"
    assert (folder / "report.txt").read_text() == report.text(written) + "\n"
    with Image.open(folder / "timeline.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 5


def test_a_run_too_short_to_time_is_reported_without_a_measurement(
    tmp_path: pathlib.Path, planned: tuple[Config, Plan]
) -> None:
    watch = Stopwatch()
    watch.add(3.0)
    written = report.write(tmp_path, *planned, watch)
    assert (written["measured_step_s"], written["steps_timed"]) == (None, 0)
    assert "measured step" not in report.text(written)


def test_there_is_no_report_before_a_run(tmp_path: pathlib.Path) -> None:
    assert report.load(tmp_path) is None


def test_saved_values_replace_those_before(tmp_path: pathlib.Path) -> None:
    report.folder(tmp_path).mkdir()
    report.save(tmp_path, VALUES)
    report.save(tmp_path, {**VALUES, "digit_accuracy": 0.5, "shuffled_accuracy": 0.25})
    found = report.load(tmp_path)
    assert found is not None
    assert found["digit_accuracy"] == 0.5
    assert found["bubbles"] == VALUES["bubbles"]


def test_the_summary_of_a_run_is_its_loss_and_shares() -> None:
    values = {**VALUES, "measured_step_s": None}
    assert report.summary(values, 1.5) == {
        "loss": 1.5,
        "measured_step_s": None,
        "predicted_step_s": 0.0125,
        "share_filled": 0.25,
        "inside_share": 0.5,
        "time_share": -0.125,
    }
