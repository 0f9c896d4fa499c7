"""Layer stacks cut into stages and put together again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from optimus_jax.parallel.stages import stage_axes, stage_tree, unstage_tree
from optimus_jax.schedule.task import Pipeline
from tests.models.small import small_model

CASES = {
    "one stage": Pipeline(1, 1, llm_layers=(3,)),
    "even": Pipeline(2, 1, llm_layers=(2, 2)),
    "uneven": Pipeline(3, 1, llm_layers=(3, 1, 2)),
    "two chunks": Pipeline(2, 2, chunks=2, llm_layers=(2, 2, 2, 2)),
    "two chunks, uneven": Pipeline(2, 2, chunks=2, llm_layers=(3, 2, 1, 2)),
    "two chunks of one stage": Pipeline(1, 1, chunks=2, llm_layers=(1, 2)),
    "three chunks": Pipeline(2, 2, chunks=3, llm_layers=(1, 2, 1, 1, 3, 1)),
}


def tree_of(layers: int) -> dict[str, Any]:
    """Weights' structure with other weights; entry k of a stack holds layer k + 1 everywhere."""
    number = np.arange(1.0, layers + 1, dtype=np.float32)
    return {
        "encoder": {"layers": {"w": np.ones((2, 3), np.float32)}},
        "projector": {"w": np.full(3, 5.0, np.float32)},
        "llm": {
            "embed": {"token": np.full((4, 2), 6.0, np.float32)},
            "layers": {
                "w": number[:, None, None] * np.ones((1, 2, 3), np.float32),
                "inner": {"bias": number.copy()},
            },
            "head": {"kernel": np.full((2, 4), 7.0, np.float32)},
        },
    }


@pytest.mark.parametrize("pipe", CASES.values(), ids=CASES.keys())
def test_virtual_stages_hold_the_layers_in_their_order(pipe: Pipeline) -> None:
    tree = tree_of(sum(pipe.llm_layers))
    staged = stage_tree(tree, pipe)["llm"]["layers"]
    longest = max(pipe.llm_layers)
    assert staged["w"].shape == (pipe.chunks, pipe.stages, longest, 2, 3)
    assert staged["inner"]["bias"].shape == (pipe.chunks, pipe.stages, longest)
    layer = 1
    for v, count in enumerate(pipe.llm_layers):
        chunk, stage = divmod(v, pipe.stages)
        wanted = [*range(layer, layer + count), *[0] * (longest - count)]
        assert staged["inner"]["bias"][chunk, stage].tolist() == wanted
        for place, value in enumerate(wanted):
            assert (np.asarray(staged["w"][chunk, stage, place]) == value).all()
        layer += count


@pytest.mark.parametrize("pipe", CASES.values(), ids=CASES.keys())
def test_unstaging_is_the_inverse(pipe: Pipeline) -> None:
    tree = tree_of(sum(pipe.llm_layers))
    back = unstage_tree(stage_tree(tree, pipe), pipe)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize("pipe", CASES.values(), ids=CASES.keys())
def test_staging_is_the_inverse_but_for_the_padding(pipe: Pipeline) -> None:
    shapes = stage_tree(tree_of(sum(pipe.llm_layers)), pipe)
    junk = jax.tree.map(lambda x: np.random.default_rng(0).normal(size=x.shape), shapes)
    again = stage_tree(unstage_tree(junk, pipe), pipe)["llm"]["layers"]["w"]
    for v, count in enumerate(pipe.llm_layers):
        chunk, stage = divmod(v, pipe.stages)
        kept = np.float32(junk["llm"]["layers"]["w"][chunk, stage, :count])
        np.testing.assert_array_equal(again[chunk, stage, :count], kept)
        assert not np.any(again[chunk, stage, count:])


def test_everything_but_the_llms_layers_is_left_as_it_is() -> None:
    pipe = CASES["uneven"]
    tree = tree_of(6)
    before = {name: dict(part) for name, part in tree.items()}
    staged = stage_tree(tree, pipe)
    for other in (staged, unstage_tree(staged, pipe)):
        assert other["encoder"] is tree["encoder"]
        assert other["projector"] is tree["projector"]
        assert other["llm"]["embed"] is tree["llm"]["embed"]
        assert other["llm"]["head"] is tree["llm"]["head"]
    assert tree == before  # the argument itself is not changed


def test_padding_holds_no_infinity_and_no_nan_of_other_layers() -> None:
    tree = tree_of(3)
    tree["llm"]["layers"]["w"][0] = np.nan
    staged = stage_tree(tree, Pipeline(2, 1, llm_layers=(1, 2)))["llm"]["layers"]["w"]
    assert np.isnan(staged[0, 0, 0]).all()
    assert not np.any(staged[0, 0, 1])


def test_axes_are_those_of_the_staged_arrays() -> None:
    model = small_model()
    axes, shapes = model.axes(), jax.eval_shape(model.init, jax.random.key(0))
    staged = jax.eval_shape(lambda w: stage_tree(w, Pipeline(2, 1, llm_layers=(1, 1))), shapes)

    def check(names: tuple[str | None, ...], leaf: Any) -> tuple[str | None, ...]:
        assert len(names) == leaf.ndim
        return names

    named = jax.tree.map(check, stage_axes(axes), staged, is_leaf=lambda x: isinstance(x, tuple))
    before, after = axes["llm"]["layers"]["mlp"]["up"], named["llm"]["layers"]["mlp"]["up"]
    assert before == ("layers", "width", "hidden")
    assert after == (None, "stages", "layers", "width", "hidden")
    assert named["encoder"] == axes["encoder"]
