"""What lies whole on devices because no dimension of a weight divides, by the executor's rules.

The planner's memory assumes that ZeRO-1 cuts everything evenly. The executor cuts a weight along
one of its dimensions, one that the number of replicas divides on the device (parallel/layout.py),
and saves it cut along one that the number of all devices divides (parallel/sharding.py:
storage_sharding). A weight that has no such dimension stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from optimus_jax.cost.transformer import Transformer
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.plan.cluster import Cluster, ParallelPlan

Shape = tuple[int, ...]
OPTIMISER = 12  # bytes of an entry: float32 master copy and two moments


def matrices(model: Transformer, tp: int = 1) -> Iterator[Shape]:
    """Shapes of one layer's matrices on a device, as models/ declares them."""
    heads, head, hidden = model.heads // tp, model.head_dim, model.hidden // tp
    if model.kv_heads == model.heads and not model.gated:
        yield model.width, 3, heads, head
    else:
        yield model.width, heads, head
        yield model.width, 2, max(1, model.kv_heads // tp), head
    yield heads, head, model.width
    yield (model.width, 2, hidden) if model.gated else (model.width, hidden)
    yield hidden, model.width


def is_cut(shape: Shape, parts: int) -> bool:
    """Whether a dimension divides into so many parts."""
    return any(n % parts == 0 for n in shape)


def whole_entries(model: Transformer, tp: int, stack: Shape, parts: int) -> int:
    """Entries of a stack of layers that stay whole on a device of `tp` that share them; `stack` has
    the dimensions before each matrix's own, such as chunks and layers of a chunk."""
    shapes = ((*stack, *shape) for shape in matrices(model, tp))
    return sum(math.prod(shape) for shape in shapes if not is_cut(shape, parts))


def uncut_bytes(
    cluster: Cluster, plan: ParallelPlan, encoders: Mapping[str, EncoderPlan]
) -> dict[str, float]:
    """By module ("llm" or an encoder's name), bytes of optimiser states of layers on a device
    beyond those that the planner counts, since weights stay whole. Frozen modules have none."""
    model, found = cluster.llm.model, {}
    if not cluster.llm.frozen:
        stack = plan.chunks, math.ceil(model.layers / (plan.pp * plan.chunks))
        found["llm"] = _beyond(whole_entries(model, plan.tp, stack, plan.dp), plan.dp)
    for name, placed in encoders.items():
        spec, replicas = cluster.encoders[name], plan.dp * placed.pipelines
        if not spec.frozen:
            layers = (math.ceil(spec.model.layers / placed.stages),)
            whole = whole_entries(spec.model, plan.tp // placed.copies, layers, replicas)
            found[name] = _beyond(whole, replicas)
    return found


def _beyond(whole: int, replicas: int) -> float:
    return OPTIMISER * whole * (replicas - 1) / replicas


def saved_whole_bytes(cluster: Cluster) -> float:
    """Bytes of weights and moments of layers that every device holds whole while a checkpoint is
    saved or restored, since no dimension divides among all devices."""
    models = [cluster.llm.model, *(spec.model for spec in cluster.encoders.values())]
    whole = sum(whole_entries(m, 1, (m.layers,), cluster.gpus) for m in models)
    return float(OPTIMISER * whole)


def checkpoint_bytes(cluster: Cluster) -> float:
    """Bytes of a checkpoint: float32 weights and two moments of everything."""
    models = [cluster.llm.model, *(spec.model for spec in cluster.encoders.values())]
    return float(OPTIMISER * sum(model.parameters for model in models))
