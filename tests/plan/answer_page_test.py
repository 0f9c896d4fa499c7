"""The timeline page of a planner's answer: it adds up, nothing overlaps, a browser draws it."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from bisect import bisect_right
from collections import Counter
from typing import Any

import pytest

from configs.paper import get_config
from optimus_jax.plan import answer_page
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.inside import pipeline
from optimus_jax.plan.outcome import Answer
from optimus_jax.plan.search import Search
from tests.timeline.browser import answers, needs_browser

ONE = {"name": "ViT-11B", "tokens": 2048}
JOBS = {
    "one": {"image": ONE},
    "frozen": {"image": {"name": "ViT-22B", "tokens": 4096, "frozen": True}},
    "two": {"image": ONE, "small": {"name": "ViT-3B", "tokens": 2048}},  # on slices of a rank
    "none": {},
}
MICRO = 2e-6  # both ends of an interval are rounded


@functools.cache
def job(name: str) -> Answer:
    values = get_config("weak_a").to_dict()
    values["encoders"] = JOBS[name]
    return answer_to(from_config_dict(values))


@functools.cache
def values(name: str) -> dict[str, Any]:
    return answer_page.timeline(job(name))


def views(name: str) -> list[tuple[str, dict[str, Any]]]:
    return [(m["name"], m["views"]["simulated"]) for m in values(name)["methods"]]


def passes(name: str, view: dict[str, Any], rank: int) -> list[tuple[int, int, dict[str, Any]]]:
    """LLM passes of a rank in microseconds of the view."""
    llm = values(name)["backbones"][view["backbone"]]["devices"][rank]
    shift = view["shift_s"]
    return [(micro(t["start"] + shift), micro(t["end"] + shift), t) for t in llm]


def micro(seconds: float) -> int:
    return round(1e6 * seconds)


def on(entry: dict[str, Any], lane: int) -> bool:
    return "lane" not in entry or entry["lane"] <= lane < entry["lane"] + entry["lanes"]


@pytest.mark.parametrize("name", JOBS)
def test_values_are_json_and_steps_are_the_answers(name: str) -> None:
    found, answer = values(name), job(name)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [m["name"] for m in found["methods"]] == list(answer.outcomes)
    for method, outcome in zip(found["methods"], answer.outcomes.values(), strict=True):
        view = method["views"]["simulated"]
        assert method["predicted_s"] == outcome.step
        assert view["end_s"] == pytest.approx(outcome.step, abs=MICRO)
        begin, end = view["llm_s"]
        if outcome.filling:
            assert begin == pytest.approx(outcome.filling.delay, abs=MICRO)
            assert view["end_s"] - end == pytest.approx(outcome.filling.tail, abs=MICRO)
            assert end - begin == pytest.approx(outcome.filling.backbone.step, abs=MICRO)


@pytest.mark.parametrize("name", JOBS)
def test_each_ranks_time_adds_up_to_the_step(name: str) -> None:
    for method, view in views(name):
        for device in view["devices"]:
            assert min(device["spent"].values()) > -1e-9, method
            total = sum(device["spent"].values())
            assert total == pytest.approx(job(name).outcomes[method].step, abs=1e-7), method


@pytest.mark.parametrize("name", JOBS)
def test_idle_time_of_the_llm_alone_is_the_answers(name: str) -> None:
    view = dict(views(name))["text_only"]
    for cause, seconds in job(name).llm.backbone.bubbles().items():
        mean = sum(d["spent"][cause] for d in view["devices"]) / len(view["devices"])
        assert mean == pytest.approx(seconds, abs=1e-7), cause


@pytest.mark.parametrize("name", JOBS)
def test_nothing_overlaps_on_a_lane(name: str) -> None:
    for method, view in views(name):
        for rank, device in enumerate(view["devices"]):
            llm = [(start, end) for start, end, _ in passes(name, view, rank)]
            llm += [(micro(x["start"]), micro(x["end"])) for x in view["collectives"]]
            for lane in range(view["slices"]):
                idle, beside, work = [], [], []
                for x in device["idle"]:
                    if on(x, lane):
                        row = beside if x["cause"].startswith("dp") else idle
                        row.append((micro(x["start"]), micro(x["end"])))
                for x in device["encoder"]:
                    if on(x, lane):
                        work.append((micro(x["start"]), micro(x["end"])))
                for row in (llm + idle, work + idle + beside):
                    for a, b in itertools.pairwise(sorted(row)):
                        assert a[1] <= b[0], (method, rank, lane, a, b)


@pytest.mark.parametrize("name", ["one", "frozen", "two"])
def test_encoder_work_is_all_of_the_answers(name: str) -> None:
    for method, view in views(name):
        filling = job(name).outcomes[method].filling
        if filling is None:
            continue
        names = list(job(name).outcomes[method].plans)
        placed = dict(zip(names, filling.placed, strict=True))
        found: Counter[tuple[str, str, int]] = Counter()
        total = 0.0
        for device in view["devices"]:
            for x in device["encoder"]:
                one = placed[x.get("encoder", names[0])]
                work = one.plan.forward if x["kind"] == "EF" else one.plan.backward
                assert work is not None
                kernel = work.unit if "." in x["name"] else work.whole
                total += x["kernels"] * kernel.full / one.plan.copies
                found[x.get("encoder", names[0]), x["name"], x["pipeline"]] += x["kernels"]
        assert total / len(view["devices"]) == pytest.approx(filling.encoder_seconds)
        parts = sum(len(p.parts) for one in filling.placed for _, p in one.directions)
        assert len(found) == parts, "each part has a name of its own"


def test_work_in_slots_lies_in_the_slots_of_passes() -> None:
    patterns = [b["tp_slots"] for b in values("two")["backbones"]]
    seen = 0
    for method, view in views("two"):
        for rank, device in enumerate(view["devices"]):
            llm = passes("two", view, rank)
            starts = [start for start, _, _ in llm]
            for x in device["encoder"]:
                if "in_slots" not in x:
                    continue
                now = micro(x["start"])
                for k, length in enumerate(x["in_slots"]):
                    if k % 2 == 0:
                        start, _, task = llm[bisect_right(starts, now + 2) - 1]
                        slots = patterns[view["backbone"]][task["slots"]]
                        spans = [(start + micro(a) - 2, start + micro(b) + 2) for a, b in slots]
                        inside = [s <= now and now + length <= e for s, e in spans]
                        assert any(inside), (method, rank, x["name"], now)
                        seen += 1
                    now += length
                assert now == micro(x["end"])
    assert seen > 100
    merged = [x for _, v in views("two") for d in v["devices"] for x in d["encoder"]]
    assert max(len(x.get("in_slots", ())) for x in merged) > 40, "slots in a row are one entry"


def test_work_of_the_step_before_is_drawn_in_this_one() -> None:
    view = dict(views("frozen"))["filled"]
    work = [x for device in view["devices"] for x in device["encoder"]]
    early = [x for x in work if x.get("next")]
    assert early and len(early) < len(work)
    assert all(x["kind"] == "EF" and 0 <= x["start"] < x["end"] <= view["end_s"] for x in work)


def test_encoder_layers_in_the_llms_pipeline_are_told_apart() -> None:
    """encoder_first: every microbatch's encoder, forward and backward, on rank 0, LLM after it."""
    answer, view = job("one"), dict(views("one"))["encoder_first"]
    layers, seconds = pipeline(Search(answer.cluster, answer.llm)).encoders[0]
    n = answer.cluster.microbatches(answer.llm.plan)
    first, *others = (device["encoder"] for device in view["devices"])
    assert not any(others)
    names = [f"E{kind}{i}" for kind in "FB" for i in range(n)]
    assert sorted(x["name"] for x in first) == sorted(names)
    for kind, one in (("EF", seconds.forward), ("EB", seconds.backward)):
        lengths = [x["end"] - x["start"] for x in first if x["kind"] == kind]
        assert lengths == pytest.approx([layers * one] * n, abs=MICRO)
    llm = {t["name"]: (start, end) for start, end, t in passes("one", view, 0)}
    work = {x["name"]: (micro(x["start"]), micro(x["end"])) for x in first}
    assert all(work[f"EF{i}"][1] == llm[f"F{i}"][0] for i in range(n))
    assert all(work[f"EB{i}"][0] == llm[f"B{i}"][1] for i in range(n))


def test_passes_are_named_by_microbatch_and_chunk() -> None:
    answer = job("one")
    plan, n = answer.llm.plan, answer.cluster.microbatches(answer.llm.plan)
    for method, kinds in (("text_only", "FB"), ("filled_zb", "FIW")):
        view = dict(views("one"))[method]
        wanted = {f"{k}{i}c{c}" for k in kinds for i in range(n) for c in range(plan.chunks)}
        for rank in range(plan.pp):
            names = [task["name"] for *_, task in passes("one", view, rank)]
            assert len(names) == len(wanted) and set(names) == wanted


def test_methods_beside_the_same_passes_share_them() -> None:
    numbers = {method: view["backbone"] for method, view in views("one")}
    same = {numbers[m] for m in ("text_only", "phased", "coarse", "fine", "filled")}
    assert len(same) == 1
    assert len(values("one")["backbones"]) == len(set(numbers.values())) == 5


def test_words_say_what_is_drawn() -> None:
    found = values("one")
    drawn = found["cluster"]["drawn"]
    assert "One LLM pipeline is drawn of 2 that do alike" in drawn
    assert "8 tensor-parallel devices" in drawn and "8 microbatches of 2 samples" in drawn
    assert any("64 devices = 4 ranks of 16 devices alike" in note for note in found["notes"])
    assert any("simulated" in note for note in found["notes"])
    assert found["cluster"]["alike"] == 16
    refused = job("two").refused
    assert refused and all(
        any(why in n for n in values("two")["notes"]) for why in refused.values()
    )
    plans = {m["name"]: " ".join(m["plan"]) for m in found["methods"]}
    assert "formula" in plans["phased"]
    assert "virtual stages in turn: 48 + 20, 3 stages of 0 + 20" in plans["encoder_first"]


@needs_browser
def test_a_browser_draws_every_method(tmp_path: pathlib.Path) -> None:
    answer_page.write(job("two"), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "timeline.html",
        "timeline.png",
        "trace.json",
    ]
    questions = """
      METHODS.forEach((m, k) => {
        at(`method_${k}`).click();
        const drawn = panels[0].div.querySelectorAll("path").length;
        found.push([m.name, panels[0].boxes.length, drawn > 10]);
      });
    """
    told = answers(tmp_path / "timeline.html", questions, "#filled.simulated")
    for (method, boxes, drawn), (name, view) in zip(told, views("two"), strict=True):
        assert method == name and drawn
        things = sum(len(passes("two", view, rank)) for rank in range(len(view["devices"])))
        things += sum(len(d["encoder"]) + len(d["idle"]) for d in view["devices"])
        things += len(view["collectives"]) * len(view["devices"])
        assert boxes >= things, "all of them, and kernels where there is room"


@pytest.mark.slow
def test_the_page_of_6144_passes_is_below_5_megabytes(tmp_path: pathlib.Path) -> None:
    answer = answer_to(from_config_dict(get_config("strong_1536").to_dict()))
    assert sum(map(len, answer.llm.backbone.passes)) == 6144
    answer_page.write(answer, tmp_path)
    assert (tmp_path / "timeline.html").stat().st_size < 5e6
    assert (tmp_path / "trace.json").stat().st_size < 12e6
