"""What the parts of a model that are cut over devices send, keep and leave in part."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from optimus_jax.models.region import POLICIES, Kept, Recording, Region
from optimus_jax.parallel.tensor import Collective, TensorRegion, is_partial
from tests.models.small import quick_jit
from tests.parallel.tensor_test import (
    AXES,
    CONFIG,
    PARTS,
    assert_close,
    mesh,
    on_one_device,
    sharded,
    value_and_gradients,
    weight_specs,
)


@pytest.mark.parametrize("sequence", [False, True])
def test_scores_are_never_gathered(sequence: bool) -> None:
    part, tp = PARTS["head"], 4
    inputs = part.weights, part.x, np.float32(1)
    text = jax.jit(sharded(part, tp, sequence)).lower(*inputs).compile().as_text()
    results = re.findall(r"= \(?f32\[([\d,]*)\]\S* (?:all-gather|all-reduce|reduce-scatter)", text)
    assert results  # the pattern finds what there is
    sizes = [[int(n) for n in shape.split(",") if n] for shape in results]
    own = CONFIG.vocabulary // tp
    assert not any({CONFIG.vocabulary, own} & set(shape) for shape in sizes), sizes
    assert ("all-gather" in text) == sequence  # of the head's input alone


class Silent(TensorRegion):
    """Counts every collective and leaves it out."""

    count = 0

    def around(self, collective: Collective, x: jax.Array) -> jax.Array:
        Silent.count += 1
        return jnp.resize(x, jax.eval_shape(collective, x).shape)


@pytest.mark.parametrize(
    ("name", "sequence", "count"),
    [
        # each pair of products has one collective each way; with the sequence cut, at both ends
        ("gpt", False, 2 * 2),
        ("gpt", True, 2 * 2 * 2),
        ("vit22b", False, 2),
        ("vit22b", True, 2 * 2),
        # the product's backward or both ways, and three of the loss
        ("head", False, 1 + 3),
        ("head", True, 2 + 3),
    ],
)
def test_every_collective_goes_through_around(name: str, sequence: bool, count: int) -> None:
    part, (inputs, _) = PARTS[name], on_one_device(name)

    def local(p: Any, x: jax.Array, dy: jax.Array) -> Any:
        return value_and_gradients(part, p, x, dy, Silent(AXES, 4, sequence))

    along = Spec(None, AXES if sequence else None)
    specs = weight_specs(part.axes), along, along if part.y_cut else Spec()
    run = jax.shard_map(local, mesh=mesh(4), in_specs=specs, out_specs=Spec(), check_vma=False)
    Silent.count = 0
    text = str(jax.make_jaxpr(run)(*inputs))
    assert Silent.count == count
    assert not re.search(r"\b(psum|all_gather|reduce_scatter|pmax)\[", text)


def test_a_forward_alone_may_keep_state_of_its_callers_trace() -> None:
    """What `around` sees is usable after the layer, as pairing needs."""
    seen = []

    class Noting(TensorRegion):
        def around(self, collective: Collective, x: jax.Array) -> jax.Array:
            seen.append(x)
            return collective(x)

    def local(x: jax.Array) -> jax.Array:
        y = Noting(AXES, 2, False, forward_only=True).leave(x + 1)
        return y + sum(seen)

    run = jax.shard_map(local, mesh=mesh(2), in_specs=Spec(), out_specs=Spec(), check_vma=False)
    # two ranks' parts of the sum, and what went in
    np.testing.assert_array_equal(jax.jit(run)(np.ones((1, 2, 3))), np.full((1, 2, 3), 4 + 2))
    assert len(seen) == 1


@pytest.mark.parametrize("sequence", [False, True])
def test_saved_activations_give_the_same_gradients(sequence: bool) -> None:
    part, names = PARTS["llama"], POLICIES["none"]

    def with_saved(p: Any, x: jax.Array, region: Region) -> jax.Array:
        # of a run that is not differentiated
        recording = Recording(region, names)
        part.run(*jax.lax.stop_gradient((p, x)), recording)
        assert set(recording.saved) == set(names)
        return part.run(p, x, Kept(region, recording.saved))

    inputs, _ = on_one_device("llama")
    kept = dataclasses.replace(part, run=with_saved)
    wanted = quick_jit(sharded(part, 4, sequence))(*inputs)
    found = quick_jit(sharded(kept, 4, sequence))(*inputs)
    jax.tree.map(assert_close, found, wanted)


def test_which_gradients_are_parts() -> None:
    norm = ("encoders", "vision", "projector", "norm", "scale")
    bias = ("encoders", "vision", "projector", "mlp", "down_bias")
    layer = ("llm", "layers", "mlp_norm", "scale")
    head = ("llm", "head", "norm", "bias")
    qk = ("llm", "layers", "attention", "qk_norm", "key_scale")
    found = {
        path: (is_partial(path, False, sequence=False), is_partial(path, False, sequence=True))
        for path in (norm, bias, layer, qk, head, ("llm", "embed", "position"))
    }
    assert found == {
        norm: (False, True),
        bias: (False, False),
        layer: (False, True),
        qk: (True, True),
        head: (False, True),
        ("llm", "embed", "position"): (False, False),
    }
    assert not is_partial(("llm", "layers", "attention", "q"), True, sequence=True)
