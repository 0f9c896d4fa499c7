"""Rules that say which dimension of a weight is cut over which axis."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from optimus_jax.parallel.mesh import EncoderGrid, Grid, make_meshes
from optimus_jax.parallel.sharding import RULES, cut_axes, is_axes, spec, storage_sharding
from optimus_jax.parallel.stages import stage_axes
from optimus_jax.schedule.task import EncoderPipeline, Pipeline
from tests.models.small import modern_model, small_model


def test_dimensions_are_cut_by_name() -> None:
    assert spec(("layers", "width", None, "heads", None)) == Spec(None, None, None, "tp", None)
    assert spec((None, "stages", "layers", "hidden", "width")) == Spec(None, "pp", None, "tp", None)
    assert spec(("vocabulary", "width")) == Spec("tp", None)


def test_two_cuts_over_one_axis_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'heads', 'hidden'.*same mesh axis.*'tp', 'tp'"):
        spec(("heads", "hidden"))


def test_every_axis_that_the_models_name_has_a_rule() -> None:
    named = set()
    for model in (small_model(), modern_model()):
        encoders = [EncoderPipeline((e.layers,)) for e in model.config.encoders.values()]
        pipe = Pipeline(2, 2, llm_layers=(1, 1), encoders=tuple(encoders))
        axes = stage_axes(model.axes(), pipe, list(model.config.encoders))
        named |= {name for leaf in jax.tree.leaves(axes, is_leaf=is_axes) for name in leaf}
    assert named == set(RULES)


def test_the_axes_of_a_cut_are_listed_flat() -> None:
    assert cut_axes(Spec(None, ("po", "pi"), None, "ti")) == ("po", "pi", "ti")
    assert cut_axes(Spec()) == cut_axes(Spec(None)) == ()


def test_stored_arrays_are_cut_along_the_first_dimension_that_divides() -> None:
    mesh = make_meshes(Grid(1, 2, 2, (EncoderGrid("vision", 2),)), jax.devices()).mesh
    cases = {
        (8, 4): (2, 4),
        (3, 8): (3, 2),
        (2, 3, 12): (2, 3, 3),
        (3, 5): (3, 5),
        (): (),
        (0, 4): (0, 1),
    }
    for shape, piece in cases.items():
        sharding = storage_sharding(shape, mesh)
        assert sharding.shard_shape(shape) == piece, shape
        assert sharding.device_set == set(mesh.devices.flat)
    pieces = storage_sharding((8, 4), mesh).devices_indices_map((8, 4)).values()
    covered = np.zeros((8, 4), int)
    for piece in pieces:
        covered[piece] += 1
    assert (covered == 1).all()
