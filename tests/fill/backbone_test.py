"""The timed LLM step: passes, idle time by cause, dependency points, and the known lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from optimus_jax.fill.backbone import BUBBLES, Backbone, ChunkPass, backbone
from optimus_jax.schedule.action_orders import deferred_warmup, interleaved_1f1b
from optimus_jax.schedule.actions import from_csv
from optimus_jax.schedule.zero_bubble import zb_h1
from tests.fill.random_fillings import Case, by_hand, cases, one_kind


def test_a_pass_of_compute_and_collectives() -> None:
    one = ChunkPass(
        ((1.0, False), (0.25, True), (0.0, True), (2.0, False), (0.5, True)), busy=0.125
    )
    assert one.seconds == 3.875
    assert one.slots == ((1.0, 1.25), (3.25, 3.75))


def test_by_hand() -> None:
    line = by_hand(all_gather=0.5, reduce_scatter=0.25)
    rows = [[(s, e, str(a)) for s, e, a in row] for row in line.passes]
    assert rows == [
        [(0, 1, "0F0"), (1, 2, "0F1"), (4, 6, "0B0"), (7, 9, "0B1")],
        [(1, 2, "1F0"), (2, 4, "1B0"), (4, 5, "1F1"), (5, 7, "1B1")],
    ]
    assert line.gaps == (((2, 4), (6, 7)), ())
    assert (line.need, line.given) == ((0, 1), (6, 9))
    assert (line.ranks, line.microbatches, line.end) == (2, 2, 9)
    assert line.step == 9.75
    assert line.frame == (-0.5, 9.25)
    assert line.bubbles() == {
        "dp_all_gather": 0.5,
        "dp_reduce_scatter": 0.25,
        "pp_warmup": 0.5,
        "pp_cooldown": 1.0,
        "pp_other": 1.5,
        "tp": 0.0,
    }


def test_slots_and_transfers_by_hand() -> None:
    """F is 0.5 of compute and 0.5 of a collective, B the same twice; half a second on the way."""
    halves = ((0.5, False), (0.5, True))
    line = backbone(
        from_csv("0F0,0B0\n1F0,1B0"),
        (0, 1),
        {"F": [ChunkPass(halves)] * 2, "B": [ChunkPass(halves * 2)] * 2},
        latency=0.5,
    )
    assert line.slots == (
        ((0.5, 1.0), (5.5, 6.0), (6.5, 7.0)),
        ((2.0, 2.5), (3.0, 3.5), (4.0, 4.5)),
    )
    assert line.gaps == (((1.0, 5.0),), ())
    assert line.bubbles()["tp"] == 1.5


def test_microbatches_are_numbered_as_the_llm_takes_them() -> None:
    seconds = {"F": one_kind(1, 1.0), "B": one_kind(1, 2.0)}
    line = backbone(from_csv("0F1,0F0,0B0,0B1"), (0,), seconds)
    assert (line.need, line.given) == ((0, 1), (6, 4))


def test_a_gradient_is_there_before_those_of_the_weights() -> None:
    """0: F0 F1 .. I0 W0 I1 W1, all of length 1."""
    seconds = {kind: one_kind(2, 1.0) for kind in "FIW"}
    line = backbone(zb_h1(2, 2), (0, 1), seconds)
    assert line.given[-1] == line.end - 1


POINTS = {
    False: ((0, 1, 2, 3, 8, 9, 10, 16), (29, 32, 34, 37, 51, 53, 55, 57)),
    True: ((0, 1, 2, 3, 16, 19, 22, 25), (28, 31, 34, 37, 51, 53, 55, 57)),
}


def chunked(ranks: int, chunks: int, microbatches: int, deferred: bool) -> Backbone:
    warmup = deferred_warmup(ranks, chunks) if deferred else None
    count = ranks * chunks
    return backbone(
        interleaved_1f1b(ranks, microbatches, chunks, warmup),
        [v % ranks for v in range(count)],
        {"F": one_kind(count, 1.0), "B": one_kind(count, 2.0)},
    )


@pytest.mark.parametrize("deferred", [False, True])
def test_dependency_points_of_the_papers_example(deferred: bool) -> None:
    line = chunked(4, 2, 8, deferred)
    assert line.step == 57
    assert (line.need, line.given) == POINTS[deferred]


@pytest.mark.parametrize(("microbatches", "step"), [(16, 597), (24, 885), (32, 1173)])
def test_lengths_at_the_papers_size(microbatches: int, step: float) -> None:
    """(N + (P - 1) / V) V (f + b); rank r idles r f before its passes and r b after them."""
    line = chunked(8, 12, microbatches, deferred=True)
    assert line.step == step == (microbatches + 7 / 12) * 12 * 3
    assert [row[0][0] for row in line.passes] == list(range(8))
    assert [line.end - row[-1][1] for row in line.passes] == [2 * r for r in range(8)]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_passes_and_bubbles_tile_the_step(case: Case) -> None:
    line = case.backbone
    busy = []
    for row, gaps in zip(line.passes, line.gaps, strict=True):
        edges = [line.frame[0], row[0][0], *(t for s, e, _ in row for t in (s, e)), line.frame[1]]
        assert edges[1:] == sorted(edges[1:])
        passes = sum(e - s for s, e, _ in row)
        open_ends = row[0][0] - line.frame[0] + line.frame[1] - row[-1][1]
        assert passes + sum(e - s for s, e in gaps) + open_ends == pytest.approx(line.step)
        busy.append(passes)
    idle = sum(v for name, v in line.bubbles().items() if name != "tp")
    assert set(line.bubbles()) == set(BUBBLES)
    assert idle + sum(busy) / line.ranks == pytest.approx(line.step)
    for row, slots in zip(line.passes, line.slots, strict=True):
        assert all(any(s <= a and b <= e + 1e-9 for s, e, _ in row) for a, b in slots)
