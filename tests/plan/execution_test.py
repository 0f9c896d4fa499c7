"""Plans from plan.json on the executor: written, read, proved, run, and refused in words."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from optimus_jax.config import Config, from_config_dict
from optimus_jax.config_checks import ConfigError
from optimus_jax.errors import UserError
from optimus_jax.plan import __main__ as command
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster import Assumptions, Cluster, EncoderSpec, LlmPlan, LlmSpec
from optimus_jax.plan.execution import (
    KEY,
    Execution,
    configured,
    load_execution,
    of_plan,
    planned,
    written,
)
from optimus_jax.plan.outcome import Answer
from optimus_jax.plan.plan import make_plan
from optimus_jax.plan.realisation import executed
from optimus_jax.schedule.complete import check_complete
from optimus_jax.schedule.task import ScheduleError

LLM = LlmSpec("own", 128, layers=4, width=64, heads=4, hidden=256)
VIT = EncoderSpec("image", 64, 16, layers=4, width=64, heads=4, hidden=256)
# An LLM layer takes about 1 ms forward, a collective beside it 0.4 ms
ASSUME = Assumptions(efficiency=5e-6, tp_collective_s=50.0, dp_exposed_s=1e-3)


def job(encoder: EncoderSpec, chunks: int = 1, dp: int = 1, **changes: Any) -> Cluster:
    """Two ranks of two devices, four microbatches of 8 samples."""
    plan = LlmPlan(dp=dp, pp=2, tp=2, chunks=chunks, microbatch=8)
    batch = 32 * dp
    return Cluster("h100", 4 * dp, batch, LLM, {"image": encoder}, plan, ASSUME, **changes)


def test_figures() -> None:
    for stages, tp, chunks, tokens, mb in ((1, 2, 1, 64,4), (1, 2, 1, 256,4), (1, 2, 2,256, 4), (1,1,1,256,4), (2,2,1,256,4), (2,1,1,256,4),(1,2,1,512,4), (1,2,2,512,4)):
        a = answer_to(job(dataclasses.replace(VIT, stages=stages, tp=tp, tokens=tokens), chunks))
        b = a.llm.backbone
        print("JOB", stages, tp, chunks, tokens, mb, b.step)
        for n in ("fine", "filled"):
            e = executed(a, n)
            f = a.outcomes[n].filling
            print(n, e.planned_s, a.outcomes[n].step_without_tp, e.event_driven_s / e.planned_s, e.durations.window, "slot", sum(p.kernels for p in f.pieces if p.slot), "of", sum(p.kernels for p in f.pieces), a.outcomes[n].plans["image"].forward.whole)
            print(e.schedule)
