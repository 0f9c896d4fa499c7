"""Encoder layers spread evenly over the LLM's tasks."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.schedule.complete import check_complete, least_cap
from optimus_jax.schedule.filled import filled
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline, Schedule
from optimus_jax.schedule.validate import validate
from optimus_jax.schedule.woven import woven

PICTURE = """
    0: EF0.0 F0|EF1.0[0:1) EF1.0[1:2) F1|EF2.0[0:1) EF2.0[1:2) B0 F2|EF3.0[0:1) EF3.0[1:2) B1 F3 B2|EB0.0[1:2) EB0.0[0:1) B3|EB1.0[1:2) EB1.0[0:1) EB2.0 EB3.0
    1: EF0.1 F0|EF1.1[0:1) EF1.1[1:2) B0 F1|EF2.1[0:1) EF2.1[1:2) B1 F2|EF3.1[0:1) EF3.1[1:2) B2|EB0.1[1:2) EB0.1[0:1) F3 B3|EB1.1[1:2) EB1.1[0:1) EB2.1 EB3.1
"""  # noqa: E501


def durations(pipe: Pipeline, encoder: float = 0.5) -> Durations:
    return dataclasses.replace(Durations.uniform(pipe, encoder=encoder), window=(0.2, 0.4))


def test_layers_without_room_stand_behind_the_llm_task() -> None:
    pipe = Pipeline(2, 4, llm_layers=(1, 1), encoders=(EncoderPipeline((2,)),))
    found = woven(one_f_one_b(pipe), pipe, durations(pipe))
    assert found is not None and str(found) == str(Schedule.parse(PICTURE, pipe))


PIPELINES = [
    Pipeline(2, 5, llm_layers=(3, 3), encoders=(EncoderPipeline((4,)),)),
    Pipeline(4, 8, llm_layers=(4,) * 4, encoders=(EncoderPipeline((4, 4)),)),
    Pipeline(4, 8, llm_layers=(4,) * 4, encoders=(EncoderPipeline((4, 4, 4, 4)),)),
    Pipeline(2, 4, 2, llm_layers=(2,) * 4, encoders=(EncoderPipeline((4, 4)),)),
    Pipeline(
        4, 6, llm_layers=(2,) * 4, encoders=(EncoderPipeline((2, 2)), EncoderPipeline((1,) * 4))
    ),
]


@pytest.mark.parametrize("pipe", PIPELINES, ids=str)
def test_every_layer_runs_once_and_the_program_is_sound(pipe: Pipeline) -> None:
    some = durations(pipe)
    found = woven(one_f_one_b(pipe), pipe, some)
    assert found is not None
    check_complete(found)
    validate(lower(found, some), found)
    for order in found.orders:
        for task in order:
            if task.inside:
                assert (task.kind, task.inside.kind) in ((Kind.F, Kind.EF), (Kind.B, Kind.EB))
                assert len(pipe.units_of(task.inside)) == 1


def test_the_cap_holds_or_nothing_is_found() -> None:
    pipe = Pipeline(4, 12, llm_layers=(4,) * 4, encoders=(EncoderPipeline((4,) * 4),), cap=9)
    found = woven(one_f_one_b(pipe), pipe, durations(pipe))
    assert found is not None and least_cap(found) <= 9
    little = dataclasses.replace(pipe, cap=1)
    assert woven(one_f_one_b(little), little, durations(little)) is None


def test_filled_takes_it_where_bubbles_are_too_few() -> None:
    """Many microbatches: the encoder's work is far more than pipeline bubbles hold."""
    pipe = Pipeline(2, 16, llm_layers=(4, 4), encoders=(EncoderPipeline((4, 4)),))
    some, llm = durations(pipe, encoder=1.0), one_f_one_b(pipe)
    plain = dataclasses.replace(some, window=(0.0, 0.0))
    apart, together = filled(llm, pipe, plain), filled(llm, pipe, some)
    fused = [task for order in together.orders for task in order if task.inside]
    assert len(fused) > 0.5 * pipe.microbatches * 2 * pipe.stages
    assert event_driven(together, some).end < 0.9 * event_driven(apart, plain).end
