"""MFU and HFU of a cluster's step."""

from __future__ import annotations

from optimus_jax.cost.flops import Images, Text, hfu, mfu, step_flops
from optimus_jax.plan.cluster import Cluster


def utilisation(cluster: Cluster, step: float, encoders: bool = True) -> tuple[float, float]:
    """MFU and HFU of a step of so many seconds, with the encoders' operations or without."""
    flops = step_flops(_text(cluster), _images(cluster)) if encoders else step_flops(_text(cluster))
    return (
        mfu(flops, step, cluster.gpus, cluster.chip),
        hfu(flops, step, cluster.gpus, cluster.chip),
    )


def _text(cluster: Cluster) -> Text:
    llm = cluster.llm
    return Text(llm.model, cluster.batch, llm.length, (), not llm.frozen, llm.recompute)


def _images(cluster: Cluster) -> list[Images]:
    found = []
    for spec in cluster.encoders.values():
        count = cluster.batch * (spec.tokens // spec.image_tokens)
        found.append(
            Images(
                spec.model,
                spec.image_tokens,
                count,
                count,
                trained=not spec.frozen,
                recompute=spec.recompute,
            )
        )
    return found
