"""The checks of a plan take what devices can share, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.digits import get_config
from optimus_jax.config import Config
from optimus_jax.models.mllm import Mllm
from optimus_jax.parallel.layout import module_of
from optimus_jax.parallel.mesh import Grid
from optimus_jax.parallel.sharding import is_axes, spec
from optimus_jax.settings import build
from tests.config_test import errors_of

small = st.sampled_from([1, 2, 3, 4])
heads = st.sampled_from([4, 6, 12])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_is_taken_if_and_only_if_the_devices_can_share_the_model(
    data: st.DataObject,
) -> None:
    def draw(strategy: st.SearchStrategy[int]) -> int:
        return data.draw(strategy)

    values = get_config().to_dict()
    values["model"] |= {
        "image_height": 8,
        "image_width": 4 * draw(st.integers(8, 9)),
        "text_length": draw(st.sampled_from([10, 12])),
        "vocabulary": draw(st.sampled_from([84, 86])),
        "projector_hidden": draw(heads),
        "encoder": {"layers": 4, "width": 12, "heads": draw(heads), "hidden": draw(heads)}
        | {"patch": 4},
        "more_encoders": {
            "two": {"layers": 4, "width": 12, "heads": draw(heads), "hidden": 12, "patch": 4}
        },
        "llm": {"layers": 12, "width": 24, "heads": 12, "hidden": draw(heads), "block": "llama"}
        | {"kv_heads": draw(heads)},
    }
    values["parallel"] |= {
        "pp": draw(st.sampled_from([4, 6])),
        "tp": draw(st.sampled_from([1, 2, 3, 4])),
        "encoder": {"pp": draw(small), "tp": draw(small)},
        "more_encoders": {
            "two": {"pp": draw(small), "tp": draw(small), "sequence_parallel": False}
        },
    }
    values["train"]["batch"] = 4 * 6 * 6 * 4 * 3  # divides however it is cut
    refused = bool(errors_of(values, {}))
    assert refused == (not can_share(values))


def can_share(values: dict[str, Any]) -> bool:
    """Whether all that is cut comes out even: the grid, every weight, the positions."""
    config = build(Config, values, "config", [])  # without checks
    try:
        grid = Grid.of(config)
    except ValueError:
        return False
    tp = {"llm": grid.tp, **{e.name: e.tp for e in grid.encoders}}
    model = Mllm(config.model)
    axes = jax.tree_util.tree_flatten_with_path(model.axes(), is_leaf=is_axes)[0]
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    for (path, names), leaf in zip(axes, shapes, strict=True):
        for cut, n in zip(spec(names), leaf.shape, strict=True):
            if cut == "tp" and n % tp[module_of(path)]:
                return False
    positions = {"llm": config.model.sequence, "vision": config.model.features_of("vision")}
    return all(n % tp[name] == 0 for name, n in positions.items())
