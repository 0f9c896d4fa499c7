"""The carry as a step starts with it: empty slots, and sums of zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optimus_jax.models.region import POLICIES, Recording
from optimus_jax.models.weights import Params
from optimus_jax.parallel.layout import Layout, is_layout
from optimus_jax.parallel.tensor import TensorRegion
from optimus_jax.runtime import buffers
from optimus_jax.runtime.carry import Carry, EncoderCarry, Kept
from optimus_jax.schedule.program import EncoderSlots

if TYPE_CHECKING:
    from optimus_jax.runtime.executor import Executor


def make(executor: Executor, masters: Params) -> Carry:
    """One device's carry; runs inside shard_map. `masters` are its shards of the weights."""
    config, pipe, slots = executor.model.config, executor.pipe, executor.slots
    dtype, rows = config.dtype, executor.rows
    weights = _shapes(masters, executor)
    own = positions(executor, "llm")
    state = rows, own, config.llm.width

    def llm_layer(p: Params, x: jax.Array, region: Any) -> jax.Array:
        return executor.model.llm_layer(p, x, region)

    layers = max(pipe.llm_layers)
    llm = jax.tree.map(lambda w: _inner(w, 3), weights["llm"]["layers"])
    encoders = []
    for k, name in enumerate(executor.encoders):
        sizes, own_slots = pipe.encoders[k], _encoder_slots(executor, k)
        _, lanes = executor.lanes(k)
        part = rows // (sizes.units * lanes)
        width = config.encoders[name].width
        inner = part, positions(executor, name), width
        features = part, config.features_of(name), config.llm.width
        shapes = jax.tree.map(lambda w: _inner(w, 2), weights["encoders"][name]["layers"])

        def layer(p: Params, x: jax.Array, region: Any, name: str = name) -> jax.Array:
            return executor.model.encoder_layer(name, p, x, region)

        most = max(sizes.layers)
        encoders.append(
            EncoderCarry(
                buffers.make(own_slots.feature, features, dtype),
                # only an encoder of several stages has values on their way between them
                buffers.make(own_slots.hidden, inner if sizes.stages > 1 else (0,), dtype),
                buffers.make(own_slots.saved, (most + 1, *inner), dtype),
                _kept(executor, name, layer, shapes, inner, own_slots.saved, most),
            )
        )

    def zeros(path: tuple[Any, ...], w: jax.ShapeDtypeStruct) -> jax.Array:
        # the dimension of stages, of which a device has one, is left out
        keys = [key.key for key in path]
        shape = list(w.shape)
        if "layers" in keys:
            del shape[1 if keys[0] == "llm" else 0]
        return buffers.store(jnp.zeros(shape, executor.gradients))

    return Carry(
        wire=buffers.make(slots.wire, state, dtype),
        saved=buffers.make(slots.saved, (layers + 1, *state), dtype),
        kept=_kept(executor, "llm", llm_layer, llm, state, slots.saved, layers),
        encoders=tuple(encoders),
        grads=jax.tree_util.tree_map_with_path(zeros, weights),
        loss=jnp.zeros((), jnp.float32),
        nans=jnp.zeros((), jnp.int32),
    )


def positions(executor: Executor, module: str) -> int:
    """Positions of a module's sequence that one device has between layers.

    Raises ValueError if they do not divide among tensor shards.
    """
    config, region = executor.model.config, executor.region(module)
    whole = config.sequence if module == "llm" else config.features_of(module)
    if not isinstance(region, TensorRegion) or not region.sequence:
        return whole
    if whole % region.size:
        raise ValueError(
            f"{module}: {whole} positions do not divide among {region.size} tensor shards;"
            " without sequence parallelism they need not"
        )
    return whole // region.size


def _encoder_slots(executor: Executor, k: int) -> EncoderSlots:
    slots = executor.slots.encoders
    return slots[k] if k < len(slots) else EncoderSlots()


def _shapes(masters: Params, executor: Executor) -> Params:
    """Shapes of the weights that a device computes with: whole along their replicas."""
    grid = executor.meshes.grid

    def one(layout: Layout, x: jax.Array) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if layout.zero is not None:
            shape[layout.zero] *= grid.extent(layout.replicas)
        return jax.ShapeDtypeStruct(tuple(shape), executor.model.config.dtype)

    return jax.tree.map(one, executor.layouts, masters, is_leaf=is_layout)


def _inner(w: jax.ShapeDtypeStruct, leading: int) -> jax.ShapeDtypeStruct:
    """One layer of a stack."""
    return jax.ShapeDtypeStruct(w.shape[leading:], w.dtype)


def _kept(
    executor: Executor,
    module: str,
    layer: Any,
    weights: Params,
    state: tuple[int, ...],
    slots: int,
    layers: int,
) -> Kept:
    """Buffers for what a module's layers keep for their backward."""
    names = POLICIES[executor.plan(module).recompute]
    if not names:
        return {}

    def run(p: Params, x: jax.Array) -> Any:
        region = Recording(executor.region(module), names)
        layer(p, x, region)
        return region.saved

    x = jax.ShapeDtypeStruct(state, executor.model.config.dtype)
    made = jax.eval_shape(run, weights, x)
    return jax.tree.map(lambda v: buffers.make(slots, (layers, *v.shape), v.dtype), made)


def shapes(executor: Executor, params: Params) -> Carry:
    """Shapes and dtypes of one device's carry, for staged weights `params`."""
    found: list[Carry] = []

    def run(masters: Params) -> jax.Array:
        c = make(executor, masters)
        found.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), c))
        return c.loss

    mapped = jax.shard_map(
        run,
        mesh=executor.meshes.mesh,
        in_specs=(executor.param_specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    jax.eval_shape(mapped, params)
    return found[0]
