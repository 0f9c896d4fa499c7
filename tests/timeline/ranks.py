"""Values of a timeline page for a cluster, by hand: two ranks, two slices, two methods."""

from __future__ import annotations

from typing import Any

CAUSES = {
    "dp_all_gather": ["DP all-gather", "gathering parameters"],
    "pp_other": ["PP between", "between LLM passes"],
    "tp": ["TP", "collectives inside LLM passes"],
    "dp_reduce_scatter": ["DP reduce-scatter", "scattering gradients"],
}


def spent(**seconds: float) -> dict[str, float]:
    names = ("llm", "encoder", "encoder_inside", *CAUSES)
    return {**dict.fromkeys(names, 0.0), **seconds}


def values() -> dict[str, Any]:
    """A step of 1 s: all-gather until 0.1, a forward until 0.5, a backward from 0.6 to 0.9."""
    passes = [
        {"name": "F0c0", "kind": "F", "start": 0.0, "end": 0.4, "slots": 0},
        {"name": "B0c0", "kind": "B", "start": 0.5, "end": 0.8},
    ]
    work = [
        {"name": "EF0.1", "kind": "EF", "start": 0.02, "end": 0.1, "kernels": 8, "pipeline": 1},
        {
            "name": "EF1",
            "kind": "EF",
            "start": 0.15,
            "end": 0.26,
            "kernels": 3,
            "pipeline": 0,
            "stage": 1,
            "in_slots": [20_000, 80_000, 10_000],
        },
    ]
    work[0].update(lane=1, lanes=1)
    gap = {"start": 0.5, "end": 0.6, "cause": "pp_other", "waits_for": "B0c1 on rank 1"}
    idle = [
        {"start": 0.0, "end": 0.1, "cause": "dp_all_gather", "waits_for": None, "lane": 0},
        {"start": 0.0, "end": 0.02, "cause": "dp_all_gather", "waits_for": None, "lane": 1},
        gap,
        {"start": 0.9, "end": 1.0, "cause": "dp_reduce_scatter", "waits_for": None},
    ]
    for x in idle[:2]:
        x["lanes"] = 1
    first = {
        "encoder": work,
        "idle": idle,
        "spent": spent(
            llm=0.65,
            encoder=0.04,
            encoder_inside=0.03,
            dp_all_gather=0.06,
            pp_other=0.1,
            tp=0.02,
            dp_reduce_scatter=0.1,
        ),
    }
    whole = [{**idle[0], "lanes": 2}, gap, idle[3]]
    bare = spent(llm=0.65, dp_all_gather=0.1, pp_other=0.1, tp=0.05, dp_reduce_scatter=0.1)
    second = {"encoder": [], "idle": whole, "spent": bare}
    view = {
        "end_s": 1.0,
        "llm_s": [0.0, 1.0],
        "shift_s": 0.1,
        "slices": 2,
        "backbone": 0,
        "collectives": [
            {"cause": "dp_all_gather", "start": 0.0, "end": 0.1},
            {"cause": "dp_reduce_scatter", "start": 0.9, "end": 1.0},
        ],
        "devices": [first, second],
    }
    alone = {**view, "devices": [second, second]}
    figures = {
        "against": {"phased": None, "encoder_first_tuned": 1.25},
        "without_tp_s": None,
        "inside_share": 1.0,
        "time_share": 1.0,
        "mfu": 0.4,
        "memory": 5e10,
        "fits": False,
    }
    methods = [
        {
            "name": name,
            "meaning": f"{name} in words",
            "predicted_s": 1.0,
            "measured_s": None,
            "iqr_s": None,
            "views": {"simulated": shown},
            "figures": figures,
            "plan": ["1 pipeline of pp 2"],
        }
        for name, shown in (("filled", view), ("text_only", alone))
    ]
    return {
        "title": "a ViT and a GPT on 64 devices",
        "notes": ["simulated throughout"],
        "emulated": False,
        "devices": 2,
        "bound_s": None,
        "methods": methods,
        "backbones": [
            {"tp_slots": [[[0.05, 0.1], [0.15, 0.17]]], "devices": [passes, passes]},
        ],
        "causes": CAUSES,
        "cluster": {
            "drawn": "One LLM pipeline is drawn of 4 that do alike.",
            "alike": 32,
            "capacity": 4e10,
            "recommended": "filled",
            "reason": "the fastest",
        },
    }
