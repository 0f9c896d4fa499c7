"""coarse at kernel resolution: by hand, and the paper's shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import encoder_seconds
from tests.fill import papers_size
from tests.fill.papers_size import vit
from tests.fill.random_fillings import Case, by_hand, cases, kernels


def test_by_hand() -> None:
    """EF1 fits before rank 1's first pass; EB0 waits for rank 0's last, though its gradient is
    there and the rank idles from 6 to 7."""
    plan = EncoderPlan(2, 1, 1, kernels(0.5, 2), kernels(1.0, 2))
    found = coarse(by_hand(), [plan])
    assert [(p.microbatch, p.pipeline, p.spans) for p in found.placed[0].forward.parts] == [
        (0, 0, ((-1.0, 0.0),)),
        (1, 1, ((0.0, 1.0),)),
    ]
    assert found.placed[0].backward is not None
    assert [(p.microbatch, p.pipeline, p.spans) for p in found.placed[0].backward.parts] == [
        (0, 0, ((9.0, 11.0),)),
        (1, 1, ((9.0, 11.0),)),
    ]
    assert (found.delay, found.tail, found.step) == (1.0, 2.0, 12.0)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_all_work_lies_outside_the_passes_of_its_rank(case: Case) -> None:
    found = coarse(case.backbone, case.plans)
    for one in found.placed:
        assert not one.crosses, "the paper's phases stay within a step"
        for kind, packed in one.directions:
            for part in packed.parts:
                first = one.plan.first(part.pipeline)
                for stage, (start, end) in enumerate(part.spans):
                    row = case.backbone.passes[first + stage]
                    if kind == "EF":
                        assert end <= row[0][0] + 1e-9
                    else:
                        assert start >= row[-1][1] - 1e-9


@pytest.mark.parametrize(
    ("microbatches", "step", "work", "share"),
    [(32, 9.488, 0.653, 34.3), (24, 7.193, 0.490, 45.8), (16, 4.898, 0.326, 68.7)],
)
def test_shares_that_the_paper_prints(
    microbatches: int, step: float, work: float, share: float
) -> None:
    """With 0.14 s of exposed collectives, which was fitted to the first share."""
    line = papers_size.line(microbatches, 0.3 * 0.14, 0.7 * 0.14, 0.293, 0.88e-3)
    found = coarse(line, [vit()])
    assert line.step == pytest.approx(step, abs=1e-3)
    assert encoder_seconds(line, [vit()]) == pytest.approx(work, abs=1e-3)
    assert 100 * found.inside_share == pytest.approx(share, abs=1.0)
    # the time share is far smaller: rank 0 overflows while others idle
    assert found.time_share < 0.66 * found.inside_share
