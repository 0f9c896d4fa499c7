"""The report of a bench, from a contest made by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from configs.bench import get_config
from optimus_jax import bench_report, report
from optimus_jax.config import from_config_dict
from optimus_jax.cost.costs import Costs, emulated
from optimus_jax.measure.contest import Contest, Marks
from optimus_jax.measure.profile import Profile
from optimus_jax.measure.rounds import Spread
from optimus_jax.plan.plan import make_plan

TIMES = {  # F = 0.1, B = 0.2, e = 0.05, e_b = 0.1: text_only 1.5 and phased 1.8 by formula
    "text_only": [1.5, 1.5, 3.0],
    "phased": [2.0, 1.0, 3.75],
    "filled": [1.0, 2.0, 3.0],
}


@functools.cache
def contest(emulate: bool = False) -> Contest:
    values = get_config("pp2_m4").to_dict()
    values["emulate"] = {"chunk_forward_s": 0.1, "encoder": 0.5, "encoder_backward": 1.0}
    config = from_config_dict(values)
    costs = dataclasses.replace(emulated(config), source="measured", exchange=0.001, epilogue=0.25)
    vision = dataclasses.replace(costs.encoders["vision"], feature_exchange=0.002)
    costs = dataclasses.replace(costs, encoders={"vision": vision})
    plans = {name: make_plan(config, costs, name) for name in TIMES}
    where = {"devices": 2, "processor": "A Chip", "device": "cpu", "jax": "1.2.3"}
    taken = Profile(costs, {"epilogue": Spread(0.25, 0.0, 3)}, where, Spread(0.5, 0.0, 3))
    return Contest(config, taken, plans, TIMES, [0.5, 1.0, 1.5], {}, emulate)


@pytest.fixture
def done() -> Contest:
    return contest()


@pytest.fixture
def values(done: Contest) -> dict[str, Any]:
    return bench_report.values(done)


def test_the_json_line_has_its_keys(done: Contest, values: dict[str, Any]) -> None:
    found = bench_report.summary(values)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["methods"].keys() == TIMES.keys()
    for name, method in found["methods"].items():
        assert method["predicted_s"] == done.plans[name].step_s > 0
        assert method["error"] == method["measured_s"] / method["predicted_s"] - 1
    measured = {name: m["measured_s"] for name, m in found["methods"].items()}
    assert measured == {"text_only": 1.5, "phased": 2.0, "filled": 2.0}
    iqrs = {name: m["iqr_s"] for name, m in found["methods"].items()}
    assert iqrs == pytest.approx({"text_only": 0.75, "phased": 1.375, "filled": 1.0})
    wanted = {"F": 0.1, "B": 0.2, "e": 0.05, "e_b": 0.1, "exchange": 0.001, "epilogue": 0.25}
    assert found["costs"] == pytest.approx({**wanted, "feature_exchange": 0.002})
    assert (found["rounds"], found["emulated"]) == (3, False)
    assert "times" not in found and not any("schedule" in m for m in found["methods"].values())


def test_bound_and_formula_are_those_of_the_costs(values: dict[str, Any]) -> None:
    shared = 4 * 0.15 / 2
    alone = values["phased_formula_s"] - shared - 0.25
    assert 1.5 < alone < 1.5 + 8 * 0.001 + 1e-9, "the LLM alone, some transfers included"
    assert values["bound_s"] == pytest.approx(alone + 0.15 / 2 + 0.25)


def test_ratios_are_medians_of_those_within_each_round(values: dict[str, Any]) -> None:
    ratios = bench_report.summary(values)["ratios"]
    assert ratios.keys() == {f"{a}/{b}" for a in TIMES for b in TIMES if a != b}
    # rounds: 2.0, 0.5, 1.25, while both medians are 2.0
    assert ratios["phased/filled"] == 1.25
    assert ratios["filled/phased"] == pytest.approx(0.8)
    assert ratios["phased/text_only"] == 1.25
    assert values["ratio_iqrs"]["phased/filled"] == pytest.approx(1.625 - 0.875)


def test_drift_since_the_profile_is_told_apart(values: dict[str, Any]) -> None:
    # the reference took 0.5 in the profile, and 1, 2 and 3 times as much in the rounds
    assert values["slower_than_profiled"] == 2.0
    filled = values["methods"]["filled"]
    assert filled["error_as_profiled"] == pytest.approx(1.0 / filled["predicted_s"] - 1)
    assert "took 2.000 of its" in bench_report.text(values)
    row = next(x for x in bench_report.text(values).splitlines() if x.startswith("  filled "))
    assert row.split()[5] == f"{filled['error_as_profiled']:+.1%}"


def test_text_has_a_line_for_each_method(values: dict[str, Any]) -> None:
    text = bench_report.text(values)
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    lines = {row[0]: row for row in rows if row}
    for name, measured in (("text_only", "1500.0"), ("phased", "2000.0"), ("filled", "2000.0")):
        assert lines[name][1] == measured
        assert lines[name][3] == f"{1e3 * values['methods'][name]['predicted_s']:.1f}"
    assert "1.250" in lines["filled"], "phased / it"
    assert f"{1e3 * values['bound_s']:.1f} ms (bound)" in text
    assert f"{1e3 * values['phased_formula_s']:.1f} ms" in text
    assert "2 x A Chip, jax 1.2.3" in text


def test_what_is_emulated_says_so() -> None:
    done = contest(emulate=True)
    values = bench_report.values(done)
    assert bench_report.summary(values)["emulated"] is True
    assert "emulated" in bench_report.text(values)
    assert "emulated" not in bench_report.text(bench_report.values(contest()))


def test_the_folder_holds_the_report_in_every_form(
    tmp_path: pathlib.Path, done: Contest, values: dict[str, Any]
) -> None:
    where = bench_report.write(tmp_path, done, values)
    assert where == report.folder(tmp_path)
    names = {"report.json", "report.txt", "profile.json", "trace.json", "timeline.html"}
    assert {path.name for path in where.iterdir()} == names
    assert json.loads((where / "report.json").read_text()) == json.loads(json.dumps(values))
    assert (where / "report.txt").read_text() == bench_report.text(values) + "\n"
    assert Costs.load(where / "profile.json") == done.profile.costs
    events = json.loads((where / "trace.json").read_text())["traceEvents"]
    shown = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert shown == {f"{name}, predicted" for name in TIMES}


def test_the_timeline_shows_what_was_measured_beside_what_was_predicted(
    done: Contest, values: dict[str, Any]
) -> None:
    program = done.plans["phased"].program
    marks = np.sort(np.random.default_rng(0).random((2, 3 * program.ticks))).reshape(2, -1, 3)
    clocked = dataclasses.replace(done, marks={"phased": Marks(list(marks), 1.5)})
    shown = bench_report.timeline("a run", clocked, values)
    methods = {method["name"]: method for method in shown["methods"]}
    assert list(methods) == list(TIMES)
    assert methods["phased"]["views"].keys() == {"predicted", "measured"}
    assert methods["phased"]["views"]["measured"]["end_s"] == 1.5
    assert methods["filled"]["views"].keys() == {"predicted"}
    assert (shown["devices"], shown["bound_s"]) == (2, values["bound_s"])
    for name, method in methods.items():
        assert method["measured_s"] == values["methods"][name]["measured_s"]
        assert method["views"]["predicted"]["end_s"] == method["predicted_s"]


def test_a_pipeline_of_its_own_is_told_and_judged_by_its_own_profile(done: Contest) -> None:
    costs = dataclasses.replace(done.profile.costs, epilogue=0.5)
    once = dataclasses.replace(done.profile, costs=costs, reference=Spread(1.0, 0.0, 3))
    plans = {**done.plans, "balanced": make_plan(done.config, costs, "balanced")}
    times = {**done.times, "balanced": [1.0, 2.0, 3.0]}
    with_it = dataclasses.replace(done, plans=plans, times=times, own={"balanced": once})
    values = bench_report.values(with_it)
    found = values["methods"]["balanced"]
    assert found["predicted_s"] == plans["balanced"].step_s
    # its reference took 1.0 when it was profiled, and 0.5, 1.0 and 1.5 in the rounds
    assert found["error_as_profiled"] == pytest.approx(2.0 / found["predicted_s"] - 1)
    assert found["encoder_layers"] == [plans["balanced"].pipeline.encoders[0].layers]
    assert "balanced has 3,0 encoder and 2,2 LLM layers in its stages" in bench_report.text(values)
    assert "encoder_layers" not in bench_report.summary(values)["methods"]["balanced"]


def test_exchanges_are_told_by_encoder() -> None:
    values = get_config("pp2_m4").to_dict()
    ears = {"layers": 2, "width": 30, "heads": 3, "hidden": 50, "patch": 4, "input": "audio"}
    values["model"] |= {"more_encoders": {"ears": ears}, "audio_frames": 16, "audio_bands": 5}
    values["parallel"]["more_encoders"] = {"ears": {"pp": 2}}
    config = from_config_dict(values)
    costs = dataclasses.replace(emulated(config), exchange=0.5)
    hidden = dataclasses.replace(costs.encoders["ears"], hidden_exchange=0.25)
    costs = dataclasses.replace(costs, encoders={**costs.encoders, "ears": hidden})
    found = bench_report._exchanges(config, costs.durations(config))
    assert found == {
        "feature_exchange": 0.5,
        "feature_exchange_ears": 0.5,
        "hidden_exchange_ears": 0.25,
    }


def test_without_text_only_nothing_is_a_share_of_it() -> None:
    done = contest()
    times = {name: times for name, times in done.times.items() if name != "text_only"}
    found = bench_report.values(dataclasses.replace(done, times=times))
    assert {m["share_of_text_only"] for m in found["methods"].values()} == {None}
    assert "text_only" not in found["methods"]
    bench_report.text(found)
