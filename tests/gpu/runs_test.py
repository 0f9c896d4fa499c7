"""Passes through loop bodies, on a small table."""

from __future__ import annotations

import dataclasses

import numpy as np

from optimus_jax.gpu.runs import passes, runs
from optimus_jax.gpu.windows import Collective
from optimus_jax.schedule.columns import KINDS, Columns
from optimus_jax.schedule.program import Program, Slots
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline

PIPE = Pipeline(2, 2, llm_layers=(3, 2), encoders=(EncoderPipeline((4,), 2),))


def program() -> Program:
    """Two stages: F alone and fused over two layers, B fused over one, and an EF alone."""
    at = Columns(PIPE)
    table = np.stack([at.idle_row()] * 8).reshape(4, 2, -1)

    def row(tick: int, device: int, **values: int) -> None:
        for name, value in values.items():
            table[tick, device, at[name]] = value

    row(0, 0, kind=KINDS[Kind.F], layers=3, first=1)
    row(1, 0, kind=KINDS[Kind.F], layers=3, first=1, e_kind=KINDS[Kind.EF], begin=1, end=3)
    row(1, 1, kind=KINDS[Kind.F], layers=2, last=1)
    row(2, 1, kind=KINDS[Kind.B], layers=2, last=1, e_kind=KINDS[Kind.EB], begin=3, end=4)
    row(3, 1, e_kind=KINDS[Kind.EF], begin=0, end=4)
    return Program(PIPE, Slots(), table, np.zeros(4, np.int32))


def test_passes_are_those_of_the_table() -> None:
    assert passes(program()) == {
        "forward": {"layer": 3.0, "fused": 1.0, "embed": 1.0, "head": 0.5},
        "backward": {"layer": 0.5, "fused": 0.5, "embed": 0.0, "head": 0.5},
    }


def collective(computation: str, op_name: str) -> Collective:
    return Collective((), computation, "c", "all-reduce", op_name, 1, False, ())


def test_each_collective_counts_as_often_as_its_loop_runs() -> None:
    every = [
        collective("a", "llm_forward/paired/psum"),
        collective("a", "llm_forward/psum"),
        collective("b", "llm_forward/psum"),
        collective("c", "llm_forward/head/psum"),
        collective("d", "llm_backward/transpose(jvp(paired))/psum"),
        collective("e", "scatter_llm/psum"),
    ]
    times = runs(every, passes(program()))
    assert [times(c) for c in every] == [1.0, 1.0, 3.0, 0.5, 0.5, 1.0]
    assert times(dataclasses.replace(every[2], op_name="llm_backward/embed/psum")) == 0.0
