"""Layer stacks cut into stages and put together again."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from optimus_jax.parallel.stages import stage_axes, stage_tree, unstage_tree
from optimus_jax.schedule.task import EncoderPipeline, Pipeline
from tests.models.small import small_model

ONE = (EncoderPipeline((2,)),)
CASES = {
    "one stage": Pipeline(1, 1, llm_layers=(3,), encoders=ONE),
    "even": Pipeline(2, 1, llm_layers=(2, 2), encoders=ONE),
    "uneven": Pipeline(3, 1, llm_layers=(3, 1, 2), encoders=ONE),
    "two chunks": Pipeline(2, 2, chunks=2, llm_layers=(2, 2, 2, 2), encoders=ONE),
    "two chunks, uneven": Pipeline(2, 2, chunks=2, llm_layers=(3, 2, 1, 2), encoders=ONE),
    "two chunks of one stage": Pipeline(1, 1, chunks=2, llm_layers=(1, 2), encoders=ONE),
    "three chunks": Pipeline(2, 2, chunks=3, llm_layers=(1, 2, 1, 1, 3, 1), encoders=ONE),
    "stages without LLM layers": Pipeline(2, 2, chunks=2, llm_layers=(0, 1, 2, 1), encoders=ONE),
    "encoder of two stages": Pipeline(
        4, 1, llm_layers=(1, 1, 1, 1), encoders=(EncoderPipeline((3, 2)),)
    ),
    "encoder with empty stages": Pipeline(
        4, 1, llm_layers=(0, 0, 1, 2), encoders=(EncoderPipeline((2, 1, 0, 0)),)
    ),
    "two encoders": Pipeline(
        2, 1, llm_layers=(1, 1), encoders=(EncoderPipeline((2, 1)), EncoderPipeline((3,)))
    ),
}
WHOLE = pytest.mark.parametrize("pipe", CASES.values(), ids=CASES.keys())


def names(pipe: Pipeline) -> list[str]:
    return ["vision", "sound"][: len(pipe.encoders)]


def stack(layers: int) -> dict[str, Any]:
    """Entry k holds layer k + 1 everywhere."""
    number = np.arange(1.0, layers + 1, dtype=np.float32)
    return {
        "w": number[:, None, None] * np.ones((1, 2, 3), np.float32),
        "inner": {"bias": number.copy()},
    }


def tree_of(pipe: Pipeline) -> dict[str, Any]:
    """Weights' structure with other weights."""
    return {
        "encoders": {
            name: {
                "embed": {"kernel": np.full((2, 2), 4.0, np.float32)},
                "layers": stack(encoder.total),
                "projector": {"w": np.full(3, 5.0, np.float32)},
            }
            for name, encoder in zip(names(pipe), pipe.encoders, strict=True)
        },
        "llm": {
            "embed": {"token": np.full((4, 2), 6.0, np.float32)},
            "layers": stack(sum(pipe.llm_layers)),
            "head": {"kernel": np.full((2, 4), 7.0, np.float32)},
        },
    }


@functools.cache
def staged_of(pipe: Pipeline) -> dict[str, Any]:
    return stage_tree(tree_of(pipe), pipe, names(pipe))


def check_layers(held: list[Any], counts: tuple[int, ...]) -> None:
    """`held` by virtual stage, [longest, ...] each: the next layers, then zeros."""
    layer = 1
    for stage, count in zip(held, counts, strict=True):
        wanted = [*range(layer, layer + count), *[0] * (max(counts) - count)]
        assert stage["inner"]["bias"].tolist() == wanted
        assert [np.unique(w).tolist() for w in stage["w"]] == [[value] for value in wanted]
        layer += count


@WHOLE
def test_virtual_stages_hold_the_llms_layers_in_their_order(pipe: Pipeline) -> None:
    staged = staged_of(pipe)["llm"]["layers"]
    longest = max(pipe.llm_layers)
    assert staged["w"].shape == (pipe.chunks, pipe.stages, longest, 2, 3)
    assert staged["inner"]["bias"].shape == (pipe.chunks, pipe.stages, longest)
    order = itertools.product(range(pipe.chunks), range(pipe.stages))
    held = [jax.tree.map(lambda x, at=at: np.asarray(x[at]), staged) for at in order]
    check_layers(held, pipe.llm_layers)


@WHOLE
def test_an_encoders_stages_hold_its_layers_in_their_order(pipe: Pipeline) -> None:
    for name, encoder in zip(names(pipe), pipe.encoders, strict=True):
        staged = staged_of(pipe)["encoders"][name]["layers"]
        assert staged["w"].shape == (encoder.stages, max(encoder.layers), 2, 3)
        held = [
            jax.tree.map(lambda x, s=s: np.asarray(x[s]), staged) for s in range(encoder.stages)
        ]
        check_layers(held, encoder.layers)


@WHOLE
def test_unstaging_is_the_inverse(pipe: Pipeline) -> None:
    tree = tree_of(pipe)
    back = unstage_tree(stage_tree(tree, pipe, names(pipe)), pipe, names(pipe))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@WHOLE
def test_staging_is_the_inverse_but_for_the_padding(pipe: Pipeline) -> None:
    random = np.random.default_rng(0)
    junk = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), staged_of(pipe))
    again = stage_tree(unstage_tree(junk, pipe, names(pipe)), pipe, names(pipe))
    stacks = [(junk["llm"], again["llm"], pipe.llm_layers)]
    for name, encoder in zip(names(pipe), pipe.encoders, strict=True):
        stacks.append((junk["encoders"][name], again["encoders"][name], encoder.layers))
    for old, new, counts in stacks:
        old, new = (np.reshape(x["layers"]["w"], (-1, max(counts), 2, 3)) for x in (old, new))
        for stage, count in enumerate(counts):
            np.testing.assert_array_equal(new[stage, :count], old[stage, :count])
            assert not np.any(new[stage, count:])


@WHOLE
def test_everything_but_the_layers_is_left_as_it_is(pipe: Pipeline) -> None:
    tree = tree_of(pipe)
    before = jax.tree.map(np.copy, tree)
    staged = stage_tree(tree, pipe, names(pipe))
    for other in (staged, unstage_tree(staged, pipe, names(pipe))):
        for name in names(pipe):
            for part in ("embed", "projector"):
                assert other["encoders"][name][part] is tree["encoders"][name][part]
        assert other["llm"]["embed"] is tree["llm"]["embed"]
        assert other["llm"]["head"] is tree["llm"]["head"]
    jax.tree.map(np.testing.assert_array_equal, tree, before)  # the argument is not changed


def test_padding_holds_no_infinity_and_no_nan_of_other_layers() -> None:
    pipe = Pipeline(2, 1, llm_layers=(1, 2), encoders=ONE)
    tree = tree_of(pipe)
    tree["llm"]["layers"]["w"][0] = np.nan
    staged = stage_tree(tree, pipe, names(pipe))["llm"]["layers"]["w"]
    assert np.isnan(staged[0, 0, 0]).all()
    assert not np.any(staged[0, 0, 1])


def test_axes_are_those_of_the_staged_arrays() -> None:
    model = small_model()
    pipe = Pipeline(2, 1, llm_layers=(1, 1), encoders=(EncoderPipeline((2, 1)),))
    axes, shapes = model.axes(), jax.eval_shape(model.init, jax.random.key(0))
    staged = jax.eval_shape(lambda w: stage_tree(w, pipe, ["vision"]), shapes)

    def check(names: tuple[str | None, ...], leaf: Any) -> tuple[str | None, ...]:
        assert len(names) == leaf.ndim
        return names

    named = jax.tree.map(
        check, stage_axes(axes, pipe, ["vision"]), staged, is_leaf=lambda x: isinstance(x, tuple)
    )
    before = axes["llm"]["layers"]["mlp"]["up"]
    assert before == ("layers", "width", "hidden")
    assert named["llm"]["layers"]["mlp"]["up"] == (None, "stages", *before)
    vision = named["encoders"]["vision"]
    assert vision["layers"]["mlp"]["up"] == ("stages", *before)
    for part in ("embed", "projector"):
        assert vision[part] == axes["encoders"]["vision"][part]
