"""python -m optimus_jax.plan.calibrate: the three constants of configs/paper.py, from one row.

Found on strong_1536 alone: `efficiency` is what gives encoder_first_tuned Megatron-LM's printed
10.65 s, `p2p_busy_s` what gives fine Optimus's 9.80 s, `dp_exposed_s` what gives coarse the printed
share of 34.3 % (tables 5 and 7 of the paper).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from optimus_jax.fill.baselines import encoder_first_tuned
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.filling import Filling
from optimus_jax.plan.beside import fine_plans
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.inside import pipeline
from optimus_jax.plan.paper_page import SHARES, STEPS
from optimus_jax.plan.search import Search

ROW = "strong_1536"
_ROUNDS = 6


def calibrate(cluster: Cluster) -> dict[str, float]:
    """The constants under which the cluster's answer has the figures that the paper prints for ROW,
    each found by bisection with the others held, in turn until none moves."""
    values = {"efficiency": 0.3, "p2p_busy_s": 1e-3, "dp_exposed_s": 0.15}
    ranges = {"efficiency": (0.1, 0.9), "p2p_busy_s": (0.0, 5e-3), "dp_exposed_s": (0.0, 1.0)}
    probes: dict[str, tuple[Callable[[Search], float], float, int]] = {
        "dp_exposed_s": (lambda s: _both(s)[1].inside_share, SHARES[ROW][0] / 100, 1),
        "p2p_busy_s": (lambda s: _both(s)[0].step, STEPS[ROW]["fine"], 1),
        "efficiency": (_tuned, STEPS[ROW]["encoder_first_tuned"], -1),
    }
    for turn in range(_ROUNDS):
        for name, (measure, target, sign) in probes.items():
            low, high = ranges[name]
            for _ in range(9 if turn else 12):
                middle = (low + high) / 2
                tried = {**values, name: middle}
                assume = dataclasses.replace(cluster.assume, **tried)  # type: ignore[arg-type]
                got = measure(Search(dataclasses.replace(cluster, assume=assume)))
                if sign * (got - target) < 0:
                    low = middle
                else:
                    high = middle
            values[name] = (low + high) / 2
            width = (0.5, 0.3, 0.1, 0.05, 0.02)[min(turn, 4)] * values[name]
            ranges[name] = values[name] - width, values[name] + width
    return values


def _both(search: Search) -> tuple[Filling, Filling]:
    """fine with its best plans, and coarse with the same."""
    found = fine_plans(search)
    assert found is not None, "the row fits in memory"
    return found[0], coarse(search.backbone, list(found[1].values()))


def _tuned(search: Search) -> float:
    return encoder_first_tuned(pipeline(search), most_chunks=2).step  # three are no better


def main() -> None:
    from configs.paper import get_config

    cluster = from_config_dict(get_config(ROW).to_dict())
    for name, value in calibrate(cluster).items():
        print(f"{name} {value:.5g}")


if __name__ == "__main__":
    main()
