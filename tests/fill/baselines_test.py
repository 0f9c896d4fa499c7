"""Encoder layers inside the LLM's pipeline: by hand, and cuts against all cuts there are."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.fill.baselines import (
    Inside,
    LayerSeconds,
    _cuts,
    balanced,
    encoder_first,
    encoder_first_tuned,
)
from optimus_jax.schedule.task import ScheduleError

TWO = Inside(2, 2, ((1, LayerSeconds(0.5, 1.0)),), 2, LayerSeconds(1.0, 2.0))


def test_encoder_first_by_hand() -> None:
    """0: F0 F1 until 3, B0 from 4.5 to 7.5, B1 to 10.5      1: F0 from 1.5, B0 to 4.5, F1, B1 to
    7.5."""
    found = encoder_first(TWO)
    assert (found.encoder_layers, found.llm_layers, found.chunks) == ((1, 0), (1, 1), 1)
    assert found.step == 10.5
    assert [(s, e) for s, e, _ in found.backbone.passes[0]] == [
        (0, 1.5),
        (1.5, 3),
        (4.5, 7.5),
        (7.5, 10.5),
    ]


def test_what_surrounds_the_pipeline() -> None:
    """A transfer occupies every pass for 0.25; gathering, scattering and the way come on top."""
    inside = Inside(
        2, 1, ((1, LayerSeconds(0.5, 1.0)),), 2, LayerSeconds(1.0, 2.0), 0.25, 0.125, 0.5, 1.5
    )
    assert encoder_first(inside).step == 0.5 + (1.75 + 1.25 + 2.25 + 3.25) + 2 * 0.125 + 1.5


def test_remaining_layers_go_to_the_first_stages() -> None:
    inside = Inside(4, 2, (), 6, LayerSeconds(1.0, 2.0))
    assert encoder_first(inside).llm_layers == (2, 2, 1, 1)
    assert encoder_first(Inside(2, 4, (), 7, LayerSeconds(1.0, 2.0)), 2).llm_layers == (2, 2, 2, 1)


def test_the_tuned_split_spares_the_first_stage() -> None:
    """An encoder as long as two of six layers: loads of 4, and N + P - 1 of them in a row."""
    inside = Inside(2, 4, ((2, LayerSeconds(1.0, 2.0)),), 6, LayerSeconds(1.0, 2.0))
    found = encoder_first_tuned(inside, most_chunks=1)
    assert found.llm_layers == (2, 4)
    assert found.step == 5 * 4 * 3
    assert encoder_first(inside).step > found.step


def test_layers_move_one_by_one() -> None:
    """Loads of (0, 3) are nearest to each other, and the step is 26; of (1, 2) it is 23."""
    inside = Inside(2, 2, ((2, LayerSeconds(2.0, 2.0)),), 3, LayerSeconds(2.0, 1.0))
    found = encoder_first_tuned(inside, most_chunks=1)
    assert (found.llm_layers, found.step) == ((1, 2), 23.0)


def test_equal_shares_where_moves_lead_to_worse() -> None:
    """Moves end at (3, 1, 1, 2) with 31.5."""
    layer = LayerSeconds(0.875, 1.25)
    inside = Inside(4, 4, ((2, LayerSeconds(0.5, 0.0)),), 7, layer, 0.125, 0.25)
    found = encoder_first_tuned(inside, most_chunks=1)
    assert found.llm_layers == (2, 2, 2, 1)
    assert found.step == encoder_first(inside).step == 30.75


NUMBERS = st.integers(1, 16).map(lambda n: n / 8)
LAYERS = st.builds(LayerSeconds, NUMBERS, NUMBERS)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 3), LAYERS), min_size=1, max_size=2),
    st.integers(4, 9),
    LAYERS,
)
def test_tuned_is_never_longer(
    ranks: int,
    microbatches: int,
    encoders: list[tuple[int, LayerSeconds]],
    layers: int,
    llm: LayerSeconds,
) -> None:
    inside = Inside(ranks, microbatches, tuple(encoders), layers, llm, 0.125, 0.25)
    found = encoder_first_tuned(inside)
    assert found.step <= encoder_first(inside).step + 1e-9
    assert sum(found.llm_layers) == layers
    assert sum(found.encoder_layers) == sum(n for n, _ in encoders)


def least_cuts(costs: list[Fraction], parts: int) -> list[int]:
    """By trying all: each part, from the last one back, begins as early as the least largest sum of
    the layers before its end allows."""

    def least(end: int, count: int) -> Fraction:
        inner = itertools.combinations(range(1, end), count - 1)
        return min(
            max(sum(costs[a:b], Fraction()) for a, b in itertools.pairwise((0, *c, end)))
            for c in inner
        )

    found = [len(costs)]
    for count in range(parts, 1, -1):
        end = found[-1]
        goal = least(end, count)
        found.append(
            next(
                j
                for j in range(count - 1, end)
                if max(least(j, count - 1), sum(costs[j:end])) == goal
            )
        )
    return [0, *reversed(found)]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, min(n, 5)))
    ),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from((1.0, 1e13 / 7, 1e-4 / 3)),
)
def test_cuts_are_the_least_of_all(
    sizes: tuple[int, int, int], weights: tuple[int, int], scale: float
) -> None:
    """Whatever the unit of the costs: operations of a layer are of the order of 1e13."""
    count, encoder, parts = sizes
    costs = [Fraction(weights[k >= encoder], 10) for k in range(count)]
    assert _cuts([float(c) * scale for c in costs], parts) == least_cuts(costs, parts)


def test_ties_begin_early() -> None:
    assert _cuts([1.0] * 5, 3) == [0, 1, 3, 5]
    # the first four are best halved, though 3 + 1 would be no more than the last one's 4
    assert _cuts([1.0, 1.0, 1.0, 1.0, 4.0], 3) == [0, 2, 4, 5]


def test_balanced_by_hand() -> None:
    """Four encoder layers of half an LLM layer's cost and two LLM layers, on two ranks."""
    inside = Inside(2, 2, ((4, LayerSeconds(0.5, 1.0)),), 2, LayerSeconds(1.0, 2.0))
    found = balanced(inside, 1, (0.5, 1.0))
    assert (found.encoder_layers, found.llm_layers) == ((4, 0), (0, 2))
    assert found.step == 3 * (2 + 4)
    chunked = balanced(inside, 2, (0.5, 1.0))
    assert (chunked.encoder_layers, chunked.llm_layers) == ((2, 2, 0, 0), (0, 0, 1, 1))
    assert chunked.chunks == 2


def test_what_does_not_fit() -> None:
    with pytest.raises(ScheduleError, match="3 layers cannot fill 4 virtual stages"):
        balanced(TWO, 2, (1.0, 1.0))
    with pytest.raises(ScheduleError, match="balanced has one encoder, not 0"):
        balanced(Inside(2, 2, (), 2, LayerSeconds(1.0, 2.0)), 1, (1.0, 1.0))
    with pytest.raises(ScheduleError, match="1 LLM layers cannot fill 2 stages"):
        encoder_first_tuned(Inside(2, 2, (), 1, LayerSeconds(1.0, 2.0)))
