"""Where all pieces lie: random fillings stand the check, and each kind of fault does not."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.fine import fine
from optimus_jax.fill.packing import Packed, Part
from optimus_jax.fill.pieces import Piece
from optimus_jax.fill.placement import check
from optimus_jax.fill.windows import SlotRule
from optimus_jax.schedule.task import ScheduleError
from tests.fill.random_fillings import Case, by_hand, cases, kernels


def fillings(case: Case) -> list[Filling]:
    made = [
        coarse(case.backbone, case.plans),
        fine(case.backbone, case.plans, case.rule),
        filled(case.backbone, case.plans, case.rule, spread=False),
        filled(case.backbone, case.cut, case.rule),
    ]
    return [filling for filling in made if filling is not None]


def real(filling: Filling, piece: Piece, step: int) -> tuple[float, float]:
    """When a piece of the `step`-th of consecutive steps runs."""
    one, low = filling.placed[piece.encoder], filling.backbone.frame[0]
    shift = step * filling.step
    if one.crosses and piece.start < low - 1e-9:
        shift += filling.backbone.step - filling.step  # in the step before
    return piece.start + shift, piece.end + shift


def three_steps(filling: Filling) -> None:
    """No device runs two things at once in three consecutive steps, each `step` apart, and no step
    runs work before it has begun; seen without the code of the check."""
    line = filling.backbone
    every = [one.plan.copies for one in filling.placed]
    parts = 6  # all copies drawn divide it
    assert all(parts % copies == 0 for copies in every)
    lanes: dict[tuple[int, int], list[tuple[float, float, bool]]] = defaultdict(list)
    for step, (rank, row) in itertools.product(range(3), enumerate(line.passes)):
        slots = line.slots[rank]
        for start, end, _ in row:
            at, holes = start, [s for s in slots if start - 1e-9 <= s[0] and s[1] <= end + 1e-9]
            for s, e in [*holes, (end, end)]:
                for lane in range(parts):
                    lanes[rank, lane].append(
                        (at + step * filling.step, s + step * filling.step, True)
                    )
                at = e
    for step, piece in itertools.product(range(3), filling.pieces):
        plan = filling.placed[piece.encoder].plan
        rank = plan.first(piece.part.pipeline) + piece.stage
        each = parts // plan.copies
        copy = piece.part.pipeline % plan.copies
        start, end = real(filling, piece, step)
        assert end - start <= piece.kernels * longest(filling, piece) + 1e-6
        if not filling.placed[piece.encoder].crosses:
            begin = step * filling.step + line.frame[0] - filling.delay
            assert begin - 1e-6 <= start and end <= begin + filling.step + 1e-6
        for lane in range(copy * each, (copy + 1) * each):
            lanes[rank, lane].append((start, end, False))
    for found in lanes.values():
        found.sort()
        for (_, a, _), (b, _, _) in itertools.pairwise(x for x in found if x[1] > x[0]):
            assert a <= b + 1e-6


def longest(filling: Filling, piece: Piece) -> float:
    plan = filling.placed[piece.encoder].plan
    work = plan.forward if piece.kind == "EF" else plan.backward
    assert work is not None
    kernel = work.unit if piece.part.unit else work.whole
    return kernel.compute * filling.rule.contention if piece.slot else kernel.full


@settings(max_examples=120, deadline=None)
@given(cases() | cases(split=True))
def test_random_fillings_stand_the_check(case: Case) -> None:
    for filling in fillings(case):
        check(filling)
        three_steps(filling)
        assert -1e-9 <= filling.inside_share <= 1 + 1e-9
        assert filling.time_share <= filling.inside_share + 1e-9


@settings(max_examples=60, deadline=None)
@given(cases(frozen=st.just(True)))
def test_frozen_encoders_of_consecutive_steps_never_collide(case: Case) -> None:
    found = filled(case.backbone, case.plans, case.rule)
    assert found is not None
    check(found)
    three_steps(found)
    if all(one.crosses for one in found.placed):
        assert found.step == case.backbone.step


ONE_STAGE = EncoderPlan(2, 1, 1, kernels(0.5, 2, pipelines=2), kernels(1.0, 2, pipelines=2))
TWO_STAGES = EncoderPlan(2, 2, 1, kernels(0.5, 1, 1), kernels(1.0, 1, 1))


def example(plan: EncoderPlan) -> Filling:
    """ONE_STAGE: EF0 -1 to 0 on rank 0, EF1 0 to 1 on rank 1; EB0 6 to 7 and 9 to 10 on rank 0, EB1
    9 to 11 on rank 1."""
    found = fine(by_hand(), [plan], SlotRule())
    check(found)
    return found


Change = Callable[[tuple[Part, ...]], tuple[Part, ...]]


def changed(filling: Filling, kind: str, change: Change) -> Filling:
    one = filling.placed[0]
    packed = one.forward if kind == "EF" else one.backward
    assert packed is not None
    parts = change(tuple(sorted(packed.parts, key=lambda p: p.microbatch)))
    made = Packed(parts, packed.last)
    if kind == "EF":
        one = dataclasses.replace(one, forward=made)
    else:
        one = dataclasses.replace(one, backward=made)
    return dataclasses.replace(filling, placed=(one,))


def moved(part: Part, *spans: tuple[float, float], pipeline: int | None = None) -> Part:
    if pipeline is None:
        pipeline = part.pipeline
    return dataclasses.replace(part, spans=spans, pipeline=pipeline)


FAULTS: dict[str, tuple[str, Change, str]] = {
    "lost": ("EF", lambda p: p[1:], "EF0 is there 0 times"),
    "doubled": ("EB", lambda p: (*p, p[0]), "EB0 is there 2 times"),
    "doubled elsewhere": (
        "EF",
        lambda p: (*p, moved(p[0], (-9.0, -8.0), pipeline=1)),
        "EF0 is there 2 times",
    ),
    "after its deadline": (
        "EF",
        lambda p: (moved(p[0], (2.0, 3.0)), p[1]),
        "EF0 ends at 3, F needs it at 0",
    ),
    "before its release": (
        "EB",
        lambda p: (moved(p[0], (2.0, 4.0)), p[1]),
        "EB0 starts at 2, B ends at 6",
    ),
    "over another": (
        "EF",
        lambda p: (p[0], moved(p[1], (-1.5, -0.5), pipeline=p[0].pipeline)),
        "overlap at",
    ),
    "outside idle time": (
        "EF",
        lambda p: (p[0], moved(p[1], (1.0, 2.0))),
        r"EF1 lies at \(1.0, 2.0\) in stage 0, its kernels from -?0 to 1 s",
    ),
    "half outside": (
        "EB",
        lambda p: (p[0], moved(p[1], (6.0, 8.0))),
        r"EB1 lies at \(6.0, 8.0\) in stage 0, its kernels from 7 to 9 s",
    ),
    "too long": (
        "EB",
        lambda p: (p[0], moved(p[1], (9.0, 12.0))),
        r"EB1 lies at \(9.0, 12.0\) in stage 0, its kernels from 9 to 11 s",
    ),
    "on another pipeline": (
        "EB",
        lambda p: (p[0], moved(p[1], (10.0, 12.0), pipeline=0)),
        r"EF1 runs on encoder pipelines \[1\], EB1 on \[0\]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_one_stage(name: str) -> None:
    kind, change, words = FAULTS[name]
    with pytest.raises(ScheduleError, match=words):
        check(changed(example(ONE_STAGE), kind, change))


@pytest.mark.parametrize(
    ("kind", "spans"),
    [("EF", ((-0.5, 0.0), (-0.5, 0.0))), ("EB", ((9.0, 10.0), (9.5, 10.5)))],
)
def test_stages_out_of_order(kind: str, spans: tuple[tuple[float, float], ...]) -> None:
    wrong = changed(example(TWO_STAGES), kind, lambda p: (moved(p[0], *spans), p[1]))
    with pytest.raises(ScheduleError, match=f"{kind}0: a stage starts before the one it needs"):
        check(wrong)


def forged(filling: Filling, change: Callable[[Piece], Piece]) -> Filling:
    """With other pieces than the parts say."""
    made = dataclasses.replace(filling)
    made.__dict__["pieces"] = tuple(map(change, filling.pieces))
    return made


def test_pieces_while_the_llm_computes() -> None:
    def into_a_pass(piece: Piece) -> Piece:
        if (piece.kind, piece.part.microbatch) != ("EF", 1):
            return piece
        return dataclasses.replace(piece, start=0.5, end=1.5)

    with pytest.raises(ScheduleError, match=r"EF1 runs on rank 1 from 0.5 to 1.5 s, while the LLM"):
        check(forged(example(ONE_STAGE), into_a_pass))


def test_kernels_that_are_missing() -> None:
    def one_less(piece: Piece) -> Piece:
        return dataclasses.replace(piece, kernels=1) if piece.kernels == 2 else piece

    words = "EF0 has 1 kernels in stage 0 of encoder pipeline 0, not 2"
    with pytest.raises(ScheduleError, match=words):
        check(forged(example(ONE_STAGE), one_less))
    none = dataclasses.replace(example(ONE_STAGE))
    none.__dict__["pieces"] = ()
    with pytest.raises(ScheduleError, match="EB1 has 0 kernels in stage 0 of encoder pipeline 1"):
        check(none)


def test_crossing_work_is_checked_in_the_step_in_which_it_runs() -> None:
    """EF0 from -9 to -8 runs from 0 to 1 in the step before, where EF1 does."""
    line = by_hand()
    crossing = EncoderPlan(2, 1, 1, kernels(1.0, 1, pipelines=2), None, True)
    found = filled(line, [crossing], SlotRule())
    assert found is not None and found.placed[0].crosses
    spans = {p.microbatch: (p.pipeline, p.spans[0]) for p in found.placed[0].forward.parts}
    assert spans == {0: (1, (-1.0, 0.0)), 1: (1, (0.0, 1.0))}

    def earlier(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return moved(parts[0], (-9.0, -8.0)), parts[1]

    with pytest.raises(ScheduleError, match="EF0 and EF1 overlap at -?0 s on rank 1"):
        check(changed(found, "EF", earlier))
