"""Layers split over one pipeline of encoder and LLM: the split by hand, and its schedule."""

from __future__ import annotations

import itertools
import random
import textwrap

import pytest

from optimus_jax.schedule.balanced import balanced_pipeline
from optimus_jax.schedule.complete import least_cap
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, ScheduleError
from optimus_jax.schedule.validate import validate
from tests.schedule import arithmetic

# stages, chunks, costs of encoder and LLM layers -> layers of both by virtual stage
SPLITS = {
    (2, 1, (1, 1), (2, 2, 2)): ((2, 0), (1, 2)),
    (3, 1, (3, 3), (3, 3)): ((2, 0, 0), (0, 1, 1)),  # 6 is needed anyway: early stages take more
    (2, 1, (1,), (1,)): ((1, 0), (0, 1)),
    (4, 1, (2, 2, 2, 2), (2, 2, 2, 2)): ((2, 2, 0, 0), (0, 0, 2, 2)),
    (4, 1, (1, 1), (4, 4, 4, 1)): ((2, 0, 0, 0), (0, 1, 1, 2)),
    (2, 2, (1, 1), (1, 1, 1, 1)): ((2, 0), (0, 2, 1, 1)),
    (2, 2, (5, 1), (2, 2, 2)): ((1, 1), (0, 1, 1, 1)),
    (1, 1, (1, 1), (1,)): ((2,), (1,)),
}


@pytest.mark.parametrize(("case", "expected"), SPLITS.items(), ids=str)
def test_splits_by_hand(case: tuple, expected: tuple) -> None:
    stages, chunks, encoder, llm = case
    pipe = balanced_pipeline(stages, 4, chunks, encoder, llm)
    assert (pipe.encoders[0].layers, pipe.llm_layers) == expected
    assert (pipe.encoders[0].units, pipe.microbatches, pipe.chunks) == (1, 4, chunks)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_smaller_bottleneck(seed: int) -> None:
    rng = random.Random(seed)
    stages, chunks = rng.choice([(2, 1), (3, 1), (2, 2)])
    encoder = [rng.choice([1.0, 2.0, 3.5]) for _ in range(rng.randint(1, 3))]
    llm = [rng.choice([1.0, 2.0, 3.5]) for _ in range(rng.randint(3, 5))]
    costs, count = encoder + llm, stages * chunks

    def bottleneck(bounds: tuple[int, ...]) -> float:
        ends = (0, *bounds, len(costs))
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    allowed = [c for c in cuts if count == stages or c[stages - 1] >= len(encoder)]
    least = min(map(bottleneck, allowed))
    pipe = balanced_pipeline(stages, 2, chunks, encoder, llm)
    of_encoder = [*pipe.encoders[0].layers, *[0] * (count - stages)]
    sizes = [a + b for a, b in zip(of_encoder, pipe.llm_layers, strict=True)]
    found = tuple(itertools.accumulate(sizes))[:-1]
    assert bottleneck(found) == pytest.approx(least)
    # of all that are as good it is the one whose early stages have most layers
    best = [c for c in allowed if bottleneck(c) <= least + 1e-9]
    assert found == max(best)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"1 encoder and 2 LLM layers over 4 virtual stages"):
        balanced_pipeline(2, 2, 2, [1.0], [1.0, 1.0])
    with pytest.raises(ScheduleError, match="no split of 3 encoder layers over the first 2 of 4"):
        balanced_pipeline(2, 2, 2, [1.0] * 3, [1.0])
    with pytest.raises(ScheduleError, match="each needs one, and both parts some"):
        balanced_pipeline(2, 2, 1, [], [1.0] * 4)


PICTURES = {
    "1f1b": """
        0: EF0 EF1 EF2 EB0 EB1 EB2
        1: EF0 F0 EF1 F1 B0 EB0 EF2 F2 B1 EB1 B2 EB2
        2: F0 B0 F1 B1 F2 B2
    """,
    "gpipe": """
        0: EF0 EF1 EF2 EB0 EB1 EB2
        1: EF0 F0 EF1 F1 EF2 F2 B0 EB0 B1 EB1 B2 EB2
        2: F0 F1 F2 B0 B1 B2
    """,
}


@pytest.mark.parametrize(("order", "expected"), PICTURES.items())
def test_schedules_look_like_their_pictures(order: str, expected: str) -> None:
    pipe = balanced_pipeline(3, 3, 1, [1.0] * 3, [1.0] * 3)
    assert (pipe.encoders[0].layers, pipe.llm_layers) == ((2, 1, 0), (0, 1, 2))
    found = schedule("balanced", order, pipe, Durations.uniform(pipe))
    assert str(found) == textwrap.dedent(expected).strip()


def test_equal_stages_take_the_time_of_1f1b() -> None:
    """Two stages of encoder, two of LLM, F = 1 and B = 2 each: (M + P - 1) (F + B)."""
    pipe = balanced_pipeline(4, 6, 1, [3.0] * 2, [3.0] * 2)
    encoder = EncoderDurations((1.0,) * 2, (2.0,) * 2)
    durations = Durations((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 2.0, 2.0), (encoder,))
    found = schedule("balanced", "1f1b", pipe, durations)
    assert event_driven(found, durations).end == (6 + 4 - 1) * 3
    assert lower(found, durations).end(durations) == (6 + 4 - 1) * 3
    assert least_cap(found) == 4


@pytest.mark.parametrize(
    "case",
    [
        *((2, 4, 1, 1, 5), (4, 5, 1, 5, 6), (4, 4, 2, 2, 9), (4, 4, 2, 4, 4), (2, 4, 3, 3, 6)),
        (1, 2, 1, 2, 2),
    ],
    ids=str,
)
def test_programs_compute_the_sequential_result(case: tuple[int, int, int, int, int]) -> None:
    stages, microbatches, chunks, encoder, llm = case
    rng = random.Random(1)
    pipe = balanced_pipeline(
        *(stages, microbatches, chunks),
        *([rng.uniform(1, 3) for _ in range(n)] for n in (encoder, llm)),
    )
    durations = Durations.uniform(pipe)
    found = schedule("balanced", "1f1b", pipe, durations)
    program = lower(found, durations, bucket=1)
    validate(program, found)
    assert arithmetic.run(program) == arithmetic.sequential(pipe, found.encoded)
    assert program.end(durations) <= 1.05 * event_driven(found, durations).end


@pytest.mark.parametrize(
    "pipe",
    [
        Pipeline(2, 2),
        Pipeline(2, 2, encoders=(EncoderPipeline((1, 1)), EncoderPipeline((1, 1)))),
        Pipeline(2, 2, encoders=(EncoderPipeline((1, 1), units=2),)),
        Pipeline(2, 2, encoders=(EncoderPipeline((1, 1), units=1),)),
        Pipeline(2, 2, encoders=()),
    ],
    ids=str,
)
def test_other_pipelines_are_refused(pipe: Pipeline) -> None:
    with pytest.raises(ScheduleError, match="balanced runs one encoder of as many stages as"):
        schedule("balanced", "1f1b", pipe, Durations.uniform(pipe))


def test_the_cap_is_kept_or_refused() -> None:
    pipe = balanced_pipeline(4, 8, 1, [1.0] * 2, [1.0] * 6, cap=3)
    with pytest.raises(ScheduleError, match="than a cap of 3 microbatches .* a cap of at least 4"):
        schedule("balanced", "1f1b", pipe, Durations.uniform(pipe))
    pipe = balanced_pipeline(4, 8, 1, [1.0] * 2, [1.0] * 6, cap=4)
    schedule("balanced", "1f1b", pipe, Durations.uniform(pipe))
