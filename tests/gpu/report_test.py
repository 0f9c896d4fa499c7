"""The report of a compile, on hand-written HLO."""

from __future__ import annotations

import json
import pathlib

from optimus_jax.gpu import report
from optimus_jax.gpu.compilation import Compiled
from optimus_jax.gpu.predicted import Timed
from optimus_jax.gpu.target import target
from optimus_jax.gpu.windows import collectives

HLO = (pathlib.Path(__file__).parent / "hlo" / "jax_0_10.txt").read_text()
MEMORY = {"arguments": 2**30, "outputs": 0, "temporaries": 2**29, "total": 2**30 + 2**29}
COMPILED = Compiled(
    HLO, 1.5, MEMORY, collectives(HLO), [Timed("body", 20.0, 5.0), Timed("main", 7.5, 0.0)]
)
PASSES = {
    "forward": {"layer": 3.0, "fused": 12.0, "embed": 0.25, "head": 0.25},
    "backward": {"layer": 7.0, "fused": 8.5, "embed": 0.25, "head": 0.25},
}
FOUND = {report.PLANNED: COMPILED, report.CONTROL: COMPILED}


def test_values_are_those_of_a_step_and_of_its_places() -> None:
    found = json.loads(json.dumps(report.values(target("h100x4"), FOUND, PASSES)))
    assert found["llm_collectives"] == {"forward": 12, "backward": 8.5}
    assert found["dp_collectives"] == {"gather": 1, "scatter": 0}
    planned = {"forward": 12, "backward": 8.5, "gather": 1, "scatter": 0}
    assert found["planned_windows"] == planned
    assert found["with_encoder_compute"] == {**planned, "backward": 0}
    assert found["places"]["llm_collectives"] == {"forward": 1, "backward": 1}
    assert (found["predicted_us"], found["synchronous"]) == (27.5, 1)
    assert found["memory"]["total"] == 1.5 * 2**30
    assert found["control"]["planned_windows"] == planned


def test_words_name_what_is_not_overlapped() -> None:
    text = report.text(target("h100x4"), FOUND, PASSES)
    lines = text.splitlines()
    assert "memory of a device: 1.50 GiB of 79.11 GiB" in text
    (row,) = [line for line in lines if line.startswith("as planned")]
    assert row.split()[-8:] == ["12", "(1)", "8.5", "(1)", "1", "(1)", "0", "(0)"]
    wanted = "2 fusion; the encoder's: 1, 1 with products"
    assert any("forward: paired all-reduce" in line and wanted in line for line in lines)
    assert any("1 while; the encoder's: 1, 1 with products" in line for line in lines)
    after = lines[lines.index("not overlapped:") + 1 :]
    assert after[:2] == [
        "     1 x backward: paired reduce-scatter of 2: no product of the encoder inside",
        "     1 x exchange between stages: collective-permute, nothing inside",
    ]
