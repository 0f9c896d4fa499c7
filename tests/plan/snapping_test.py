"""Fillings become whole schedules, drawn at random and one worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.fill.backbone import ChunkPass, backbone
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.fine import fine
from optimus_jax.fill.windows import SlotRule
from optimus_jax.plan.merging import merged
from optimus_jax.plan.snapping import PATIENCE, snapped
from optimus_jax.schedule.action_orders import one_f_one_b
from optimus_jax.schedule.complete import check_complete
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Task
from tests.fill.random_fillings import Case, by_hand, cases, kernels


def pipeline(filling: Filling, units: int) -> Pipeline:
    """One layer in each virtual stage of the LLM, and an encoder layer for every kernel."""
    backbone = filling.backbone
    virtual = 1 + max(a.stage for row in backbone.passes for _, _, a in row)
    encoders = (EncoderPipeline(one.plan.forward.counts, units) for one in filling.placed)
    ranks = backbone.ranks
    return Pipeline(ranks, backbone.microbatches, virtual // ranks, encoders=tuple(encoders))


def seconds(filling: Filling, pipe: Pipeline, window: float = 0.0) -> Durations:
    """Those of the filling."""
    times = {a[:2]: e - s for row in filling.backbone.passes for s, e, a in row}
    encoders = []
    for one, sizes in zip(filling.placed, pipe.encoders, strict=True):
        works = one.plan.forward, one.plan.backward
        each = [w.seconds / sizes.total / sizes.units / one.plan.copies for w in works if w]
        encoders.append(EncoderDurations(*((s,) * sizes.total for s in each), 0.0, 0.0))
    return Durations(
        *(tuple(times[v, kind] for v in range(pipe.virtual_stages)) for kind in "FB"),
        tuple(encoders),
        gather=filling.backbone.all_gather,
        scatter=filling.backbone.reduce_scatter,
        overlap=True,
        window=(window, window),
    )


@settings(deadline=None, max_examples=40)
@given(cases(frozen=st.just(False)))
def test_every_filling_becomes_a_whole_schedule(case: Case) -> None:
    for filling in (
        coarse(case.backbone, case.plans),
        fine(case.backbone, case.plans, case.rule),
        filled(case.backbone, case.cut, case.rule),
    ):
        assert filling is not None
        for units, patience in itertools.product((0, 1), PATIENCE):
            pipe = pipeline(filling, units)
            durations = seconds(filling, pipe, window=0.25)
            schedule = snapped(filling, pipe, durations, [patience])
            check_complete(schedule)
            event_driven(schedule, durations)  # nobody waits for ever
            for row, order in zip(case.backbone.passes, schedule.orders, strict=True):
                llm = [part for task in order if (part := task.llm_part)]
                stages, k = pipe.stages, len(llm)
                assert k == len(row)
                wanted = [(a.kind, a.microbatch, a.stage // stages) for _, _, a in row]
                assert [(str(t.kind), t.microbatch, t.chunk) for t in llm] == wanted


def hand_made(method: str) -> tuple[Filling, Pipeline, Durations]:
    """The pipeline of `by_hand`, and an encoder of two layers on each rank that takes 0.5 forward
    and 1.5 backward for a microbatch."""
    plan = EncoderPlan(2, 1, 1, kernels(0.25, 2, pipelines=2), kernels(0.75, 2, pipelines=2))
    rule = SlotRule(use=False)
    found = coarse(by_hand(), [plan]) if method == "coarse" else filled(by_hand(), [plan], rule)
    assert found is not None
    pipe = pipeline(found, 0 if method == "filled" else 1)
    return found, pipe, seconds(found, pipe)


def test_coarse_by_hand() -> None:
    # EF0 and EB0, on rank 0, lie before 0 and after 9; EF1 and EB1, on rank 1, before 1 and after 9
    filling, pipe, durations = hand_made("coarse")
    schedule = snapped(filling, pipe, durations)
    assert str(schedule) == "0: EF0 F0 F1 B0 B1 EB0\n1: EF1 F0 B0 F1 B1 EB1"
    assert event_driven(schedule, durations).end == filling.step == 0.5 + 9 + 1.5


def test_filled_by_hand() -> None:
    # EB1 is spread: both ranks have half of it after 9
    filling, pipe, durations = hand_made("filled")
    schedule = snapped(filling, pipe, durations)
    assert str(schedule) == "0: EF1.0 F0 F1 B0 B1 EB1.0\n1: EF0 EF1.1 F0 B0 F1 B1 EB0 EB1.1"
    assert event_driven(schedule, durations).end == filling.step == 0.5 + 9 + 0.75


def slotted(layers: int) -> tuple[Filling, Pipeline, Durations]:
    """One rank and three microbatches; a pass has a slot of 2 behind 1 of compute. The encoder has
    three layers that take 1 forward and 1 backward, so that two fit into a slot."""
    one = [ChunkPass(((1.0, False), (2.0, True)))]
    base = backbone(one_f_one_b(1, 3), (0,), {"F": one, "B": one})
    plan = EncoderPlan(1, 1, 1, kernels(1.0, 3), kernels(1.0, 3))
    found = filled(base, [plan], SlotRule(), spread=False)
    assert found is not None and found.step == 3 + 18 + 4
    pipe = dataclasses.replace(pipeline(found, 1), llm_layers=(layers,))
    return found, pipe, seconds(found, pipe, window=2.0 / layers)


def test_slots_become_fused_tasks_by_hand() -> None:
    # of EF1 the first kernel lies in F0's slot and two in B0's: two layers go into F0, as many as
    # it has, the third stands behind B0; of EB0 one lies in F1's slot and two in F2's
    filling, pipe, durations = slotted(layers=2)
    for patience, wanted in (
        (
            0,
            "EF0 F0|EF1[0:2) B0 EF1[2:3) F1|EF2[0:2) EB0[2:3) B1 EF2[2:3) F2 EB0[0:2)"
            " B2|EB1[1:3) EB1[0:1) EB2",
        ),
        (
            1000,
            "EF0 F0|EF1[0:2) B0 EF1[2:3) F1|EF2[0:2) B1|EB0[2:3) EF2[2:3) F2 B2|EB0[0:2) EB1 EB2",
        ),
    ):
        assert str(snapped(filling, pipe, durations, [patience])) == f"0: {wanted}"


def test_layers_that_follow_one_another_become_one_task() -> None:
    pipe = Pipeline(1, 2, encoders=(EncoderPipeline((4,), 1),))
    order = [Task.parse(f"EF0[{n}:{n + 1})") for n in range(4)]
    order += [Task.parse(f"EF1[{n}:{n + 1})") for n in range(3)]
    free = Durations.uniform(pipe, encoder=4.0)
    assert list(map(str, merged((tuple(order),), pipe, free)[0])) == ["EF0", "EF1[0:3)"]
    apart = tuple(map(Task.parse, ("EF0[0:1)", "EF0[2:4)")))
    assert merged((apart,), pipe, free) == (apart,)
