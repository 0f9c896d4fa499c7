"""The answer as table, JSON and plan.json."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from configs import clusters, paper
from optimus_jax.cost.memory import MemoryTable
from optimus_jax.plan import answer_report
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.outcome import Answer

ROOT = Path(__file__).resolve().parents[2]
METHODS = (
    "text_only",
    "encoder_first",
    "encoder_first_tuned",
    "balanced",
    "phased",
    "coarse",
    "fine",
    "filled",
    "filled_zb",
)


@functools.cache
def answer() -> Answer:
    return answer_to(from_config_dict(paper.get_config("weak_b").to_dict()))


@pytest.fixture
def values() -> dict[str, Any]:
    return answer_report.values(answer())


def test_the_json_line(values: dict[str, Any]) -> None:
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert set(values["methods"]) == set(METHODS)
    for name, method in values["methods"].items():
        wanted = {"step_s", "inside_share", "time_share", "time_bound_whole", "time_bound_spread"}
        assert wanted | {"mfu", "hfu", "memory_bytes", "encoder_plan"} <= method.keys(), name
        assert 0 < method["mfu"] <= method["hfu"] < 1
        assert method["memory_bytes"] == pytest.approx(sum(method["memory"].values()))
    filled = values["methods"]["filled"]
    assert filled["step_without_tp_s"] > filled["step_s"]
    plan = filled["encoder_plan"]["ViT-22B"]
    assert plan["dp"] * plan["pp"] * plan["tp"] == 128, "all devices hold encoder shards"
    assert values["recommended"] == "filled"
    assert set(values["constants"]) >= {"efficiency", "p2p_busy_s", "dp_exposed_s"}


def test_bubbles_are_shares_of_the_step(values: dict[str, Any]) -> None:
    backbone = answer().llm.backbone
    idle = sum(values["bubbles"].values()) * backbone.step
    compute = 0.0
    for rank, row in enumerate(backbone.passes):
        compute += sum(e - s for s, e, _ in row) - sum(e - s for s, e in backbone.slots[rank])
    assert idle + compute / backbone.ranks == pytest.approx(backbone.step)


def test_memory_overhead_is_that_of_more_replicas() -> None:
    o = answer().outcomes["filled"]
    (plan,) = o.plans.values()
    phi = 48 * answer().cluster.encoders["ViT-22B"].model.layer_parameters
    # k (DP_enc - DP_llm) Phi / n_gpu, beside what one replica for each LLM replica would take
    over = 6 * (plan.pipelines - 1) * answer().llm.plan.dp * phi / 128
    rest = o.memory.total - over
    assert answer_report.memory_overhead(answer(), o) == pytest.approx(over / rest)
    assert over > 0


def test_the_table_has_every_method_and_reason() -> None:
    text = answer_report.text(answer())
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    lines = {row[0]: row for row in rows if len(row) > 5}
    for name in METHODS:
        assert f"{answer().outcomes[name].step:.3f}" in lines[name]
    assert "all times are simulated" in text
    assert "recommended: filled: " in text
    assert "constants: efficiency" in text
    assert lines["method"][-1] == "fits"
    assert lines["coarse"][-1] == "over", "the paper counts no encoder activations"
    assert "over" not in lines["filled"]
    for column in ("without TP:", "phased /, tuned /:", "inside:", "by time:"):
        assert column in text


def test_the_memory_table_says_what_the_program_may_take() -> None:
    cluster = from_config_dict(clusters.get_config("text_only").to_dict())
    found = answer_report._memory(MemoryTable(), "filled", cluster)
    rows = [" ".join(line.split()) for line in found.splitlines()]
    assert "a device has 80.00" in rows
    assert "of which the program may take 72.00" in rows


def test_the_plan_holds_all_encoder_work_in_order() -> None:
    plan = json.loads(json.dumps(answer_report.plan_values(answer(), "filled")))
    o = answer().outcomes["filled"]
    (encoder,) = o.plans.values()
    assert len(plan["order"]) == 4
    assert len(plan["order"][0]) == 2 * 8 * 6
    kernels: Counter[str] = Counter()
    home: dict[str, set[int]] = {}
    for rank, row in enumerate(plan["encoder_work"]):
        position = 0
        for entry in row:
            where = entry.get("after", entry.get("inside"))
            assert where >= position - 1, "in order of time"
            position = max(position, where)
            kernels[entry["task"][:2]] += entry["kernels"]
            home.setdefault(entry["task"][2:], set()).add(entry["pipeline"])
            assert encoder.first(entry["pipeline"]) + entry["stage"] == rank
    assert any("." in name for name in home), "some microbatch is spread"
    assert all(len(where) == 1 for where in home.values()), "EB runs where its EF ran"
    assert o.filling is not None
    for kind, packed, work in (
        ("EF", o.filling.placed[0].forward, encoder.forward),
        ("EB", o.filling.placed[0].backward, encoder.backward),
    ):
        assert work is not None and packed is not None
        total = sum(sum(work.unit_counts if p.unit else work.counts) for p in packed.parts)
        assert kernels[kind] == total


def command(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"optimus_jax.{module}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_command_writes_its_folder(tmp_path: Path) -> None:
    run = command("plan", "--config=configs/paper.py:weak_a", f"--out={tmp_path}", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "answer.json").read_text()).keys() == found.keys()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["method"] == found["recommended"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"plan.json", "answer.json", "trace.json", "timeline.html", "timeline.png"}


def test_wrong_configurations_are_words() -> None:
    run = command(
        "plan", "--config=configs/paper.py:weak_a", "--config.gpus=65", "--config.batch=7"
    )
    assert run.returncode == 2
    assert "2 error(s) in the configuration" in run.stderr
    assert "dp 2 x pp 4 x tp 8 = 64 devices, config.gpus is 65" in run.stderr
    assert "Traceback" not in run.stderr


def test_other_commands_refuse_a_cluster() -> None:
    run = command("evaluate", "--config=configs/clusters.py")
    assert run.returncode == 2
    assert "describes a cluster's job (gpus)" in run.stderr


def test_examples_run_without_measurements() -> None:
    values = clusters.get_config("text_only").to_dict()
    found = answer_report.values(answer_to(from_config_dict(values)))
    assert found["recommended"] == "text_only"
    assert found["methods"]["text_only"]["encoder_plan"] == {}
