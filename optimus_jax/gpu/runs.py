"""How often a step runs through each collective of the LLM.

HLO has each loop body once. How often it runs, the Program's table says: layers alone or fused with
an encoder's, the embedding in the first virtual stage, the head in the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from optimus_jax.gpu.tally import DATA, TENSOR, Runs, direction, is_planned
from optimus_jax.gpu.windows import Collective, within
from optimus_jax.schedule.columns import KINDS
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.task import Kind

PARTS = ("embed", "head")  # the executor's scopes around both ends of the LLM
KIND = {"forward": (Kind.F, Kind.EF), "backward": (Kind.B, Kind.EB)}


def passes(program: Program) -> dict[str, dict[str, float]]:
    """By direction, passes through `layer`, a layer alone, `fused`, a layer with an encoder's,
    `embed` and `head`, in one step of one device: the mean of the stages."""
    table, at = program.table, program.columns
    found = {}
    for key, (llm, encoder) in KIND.items():
        rows = table[table[:, :, at["kind"]] == KINDS[llm]]
        fuses = rows[:, at["e_kind"]] == KINDS[encoder]
        fused = np.sum((rows[:, at["end"]] - rows[:, at["begin"]])[fuses])
        sums = {
            "layer": np.sum(rows[:, at["layers"]]) - fused,
            "fused": fused,
            "embed": np.sum(rows[:, at["first"]]),
            "head": np.sum(rows[:, at["last"]]),
        }
        found[key] = {name: float(n) / program.pipeline.stages for name, n in sums.items()}
    return found


def runs(collectives: Iterable[Collective], counts: Mapping[str, Mapping[str, float]]) -> Runs:
    """Passes through each of the LLM's collectives, from what `passes` gives. A layer's loop is
    that of fused layers if any of its collectives is planned to have encoder work beside it."""
    fused = {c.computation for c in collectives if direction(c) in TENSOR and is_planned(c)}

    def times(c: Collective) -> float:
        key = direction(c)
        if key is None or key in DATA:
            return 1.0
        for part in PARTS:
            if within(c.op_name, part):
                return counts[key][part]
        return counts[key]["fused" if c.computation in fused else "layer"]

    return times
