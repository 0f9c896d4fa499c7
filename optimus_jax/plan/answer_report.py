"""A planner's answer for people and for programs: table, JSON, plan.json."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from typing import Any

from optimus_jax.cost.memory import MemoryTable, state_bytes
from optimus_jax.cost.memory import memory_overhead as memory_overhead_bytes
from optimus_jax.fill.backbone import BUBBLES
from optimus_jax.fill.filling import Filling
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.outcome import Answer, Outcome
from optimus_jax.plan.rank_views import CAUSES
from optimus_jax.plan.traffic import traffic
from optimus_jax.tables import table_text

_COLUMNS = """\
without TP: step if no encoder work runs beside tensor-parallel collectives; phased /, tuned /: the
step of phased, and of encoder_first_tuned, divided by this one; inside: share of encoder work that
lies within the LLM's own step; by time: share of encoder time by which the step grows no longer;
GB: on the fullest device, over if that is more than the program may take"""


def values(answer: Answer) -> dict[str, Any]:
    """All figures as JSON values: seconds, bytes, shares. Bubbles are those of the LLM alone."""
    backbone = answer.llm.backbone
    bubbles = backbone.bubbles()
    return {
        "methods": {name: _method(answer, o) for name, o in answer.outcomes.items()},
        "bubbles": {name: bubbles[name] / backbone.step for name in BUBBLES},
        "recommended": answer.recommended,
        "reason": answer.reason,
        "refused": answer.refused,
        "constants": dict(answer.constants),
        "scheduling_s": answer.scheduling_s,
        "llm_plan": _llm_plan(answer),
        "orders": {
            name: {"step_s": o.step, "idle": o.idle, "held": o.held, "chunks": o.chunks}
            for name, o in answer.orders.items()
        },
        "simulated": True,
    }


def _llm_plan(answer: Answer) -> dict[str, Any]:
    plan, cluster = answer.llm.plan, answer.cluster
    return {
        "dp": plan.dp,
        "pp": plan.pp,
        "tp": plan.tp,
        "chunks": plan.chunks,
        "microbatches": cluster.microbatches(plan),
        "microbatch": cluster.parallel.microbatch,
        "deferred_warmup": answer.llm.deferred,
        "deferral_s": answer.llm.deferral_s,
    }


def _method(answer: Answer, o: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {
        "step_s": o.step,
        "step_without_tp_s": o.step if o.step_without_tp is None else o.step_without_tp,
        "inside_share": o.inside_share,
        "time_share": o.time_share,
        "time_bound_whole": o.bounds[0] if o.bounds else None,
        "time_bound_spread": o.bounds[1] if o.bounds else None,
        "mfu": o.mfu,
        "hfu": o.hfu,
        "memory_bytes": o.memory.total,
        "fits": o.fits,
        "memory": dict(o.memory.rows),
        "memory_overhead": memory_overhead(answer, o),
        "encoder_plan": {
            name: {
                "dp": answer.llm.plan.dp * plan.pipelines,
                "pp": plan.stages,
                "tp": answer.llm.plan.tp // plan.copies,
                "pipelines": plan.pipelines,
            }
            for name, plan in o.plans.items()
        },
    }
    if o.plans or o.method == "text_only":
        counted = traffic(answer.cluster, answer.llm.plan, o.plans)
        found["traffic_bytes"] = dataclasses.asdict(counted)
    if o.baseline is not None:
        b = o.baseline
        found["layers"] = {
            "chunks": b.chunks,
            "encoder": list(b.encoder_layers),
            "llm": list(b.llm_layers),
        }
    return found


def memory_overhead(answer: Answer, o: Outcome) -> float:
    """Encoder weights and gradients beyond one replica for each LLM replica, as a share of the rest
    of the device's bytes (Optimus, section 4.1)."""
    plan, over = answer.llm.plan, 0.0
    for name, encoder in o.plans.items():
        spec = answer.cluster.encoders[name]
        over += memory_overhead_bytes(
            spec.model.layers * spec.model.layer_parameters,
            plan.dp * encoder.pipelines,
            plan.dp,
            plan.dp * plan.pp * plan.tp,
            k=state_bytes(1.0, 1, trained=not spec.frozen).weights_gradients,
        )
    return over / (o.memory.total - over)


def text(answer: Answer) -> str:
    """The answer as a person reads it on a terminal."""
    cluster, plan, backbone = answer.cluster, answer.llm.plan, answer.llm.backbone
    encoders = " + ".join(spec.name for spec in cluster.encoders.values()) or "no encoder"
    lines = [
        f"{encoders} and {cluster.llm.name} on {cluster.gpus:,} x {cluster.hardware}: {plan},"
        f" {cluster.microbatches(plan)} microbatches of {cluster.parallel.microbatch}",
        "all times are simulated",
        "",
        _table(answer),
        _COLUMNS,
        "",
    ]
    bubbles = backbone.bubbles()
    rows = [
        (CAUSES[name][1], f"{1e3 * bubbles[name]:.1f}", f"{bubbles[name] / backbone.step:.1%}")
        for name in BUBBLES
    ]
    total = sum(bubbles.values())
    rows.append(("together", f"{1e3 * total:.1f}", f"{total / backbone.step:.1%}"))
    lines.append(table_text(("idle time of the LLM alone, by device", "ms", "of its step"), rows))
    lines += ["", _orders(answer)]
    best = answer.outcomes[answer.recommended]
    lines += ["", f"recommended: {answer.recommended}: {answer.reason}"]
    lines += [f"encoder plan: {encoder_words(answer, best)}"] if best.plans else []
    lines += ["", _memory(best.memory, answer.recommended, cluster)]
    if best.plans or best.method == "text_only":
        lines += ["", _traffic(answer, best)]
    lines += [f"{name} is left out: {why}" for name, why in answer.refused.items()]
    constants = ", ".join(f"{name} {value:.4g}" for name, value in answer.constants.items())
    lines += ["", f"constants: {constants}", f"scheduling took {answer.scheduling_s:.1f} s"]
    return "\n".join(lines)


def encoder_words(answer: Answer, o: Outcome) -> str:
    """A method's encoder plans in words."""
    return "; ".join(
        f"{name} {plan.pipelines} pipeline{'s' if plan.pipelines > 1 else ''} of pp {plan.stages}"
        f" x tp {answer.llm.plan.tp // plan.copies} beside each LLM pipeline"
        for name, plan in o.plans.items()
    )


def _table(answer: Answer) -> str:
    header = ("method", "step, s", "without TP", "phased /", "tuned /")
    more = ("inside", "by time", "MFU", "HFU", "GB", "fits")
    others = [answer.outcomes.get(name) for name in ("phased", "encoder_first_tuned")]
    rows = []
    for name, o in answer.outcomes.items():
        ratios = [f"{other.step / o.step:.3f}" if other else "" for other in others]
        shares = [f"{x:.1%}" if x is not None else "" for x in (o.inside_share, o.time_share)]
        without = f"{o.step_without_tp:.3f}" if o.step_without_tp is not None else ""
        rows.append(
            (
                name,
                f"{o.step:.3f}",
                without,
                *ratios,
                *shares,
                f"{o.mfu:.1%}",
                f"{o.hfu:.1%}",
                f"{o.memory.total / 1e9:.1f}",
                "" if o.fits else "over",
            )
        )
    return table_text((*header, *more), rows)


def _orders(answer: Answer) -> str:
    rows = [
        (name, str(o.chunks), f"{o.step:.3f}", f"{o.idle:.1%}", f"{o.held:.1f}")
        for name, o in answer.orders.items()
    ]
    header = ("the LLM alone, by order", "chunks", "step, s", "idle", "microbatches held")
    return table_text(header, rows)


def _memory(table: MemoryTable, name: str, cluster: Cluster) -> str:
    rows = [(what, f"{count / 1e9:.2f}") for what, count in table.rows.items()]
    rows.append(("together", f"{table.total / 1e9:.2f}"))
    rows.append(("a device has", f"{cluster.memory / 1e9:.2f}"))
    rows.append(("of which the program may take", f"{cluster.capacity / 1e9:.2f}"))
    return table_text((f"memory of {name}, on the fullest device", "GB"), rows)


def _traffic(answer: Answer, o: Outcome) -> str:
    plan, found = answer.llm.plan, traffic(answer.cluster, answer.llm.plan, o.plans)
    rows = [
        (what, f"{count / 1e9:.2f}", f"{count / link.bandwidth / o.step:.1%}")
        for what, (count, link) in found.rows(plan, answer.cluster.chip).items()
    ]
    header = f"traffic of {o.method}, sent by a device in a step, over", "GB", "link busy"
    return table_text(header, rows)


def plan_values(answer: Answer, method: str) -> dict[str, Any]:
    """What an executor needs of one method: parallel plans, the LLM's order, and for every rank the
    encoder work between and inside the LLM's passes, in order."""
    o = answer.outcomes[method]
    found = _method(answer, o)
    backbone = o.filling.backbone if o.filling else answer.llm.backbone
    if o.baseline is not None:
        backbone = o.baseline.backbone
    return {
        "method": method,
        "llm": _llm_plan(answer),
        "encoders": found["encoder_plan"],
        "layers": found.get("layers"),
        "order": [[str(action) for _, _, action in row] for row in backbone.passes],
        "encoder_work": encoder_work(o.filling, list(o.plans)) if o.filling else None,
        "step_s": o.step,
        "memory_bytes": o.memory.total,
        "simulated": True,
    }


def encoder_work(filling: Filling, names: list[str]) -> list[list[dict[str, Any]]]:
    """By rank, encoder work in order of time: `task` as EF2.1 (microbatch 2 of the LLM's order,
    unit 1), its encoder, pipeline and stage, and where: `after` so many passes of the rank, or
    `inside` the pass of that number, in its tensor-parallel slots; how many kernels in each."""
    backbone = filling.backbone
    starts = [[start for start, _, _ in row] for row in backbone.passes]
    units: dict[tuple[int, str, int], dict[int, int]] = defaultdict(dict)
    found: list[list[tuple[float, dict[str, Any]]]] = [[] for _ in backbone.passes]
    for piece in filling.pieces:
        plan = filling.placed[piece.encoder].plan
        rank = plan.first(piece.part.pipeline) + piece.stage
        name = f"{piece.kind}{piece.part.microbatch}"
        if piece.part.unit:
            known = units[piece.encoder, piece.kind, piece.part.microbatch]
            name += f".{known.setdefault(id(piece.part), len(known))}"
        before = bisect_right(starts[rank], piece.start + 1e-9)
        where = {"inside": before - 1} if piece.slot else {"after": before}
        entry = {
            "task": name,
            "encoder": names[piece.encoder],
            "pipeline": piece.part.pipeline,
            "stage": piece.stage,
            "kernels": piece.kernels,
            **where,
        }
        last = found[rank][-1][1] if found[rank] else None
        if last and {**last, "kernels": 0} == {**entry, "kernels": 0}:
            last["kernels"] += piece.kernels
        else:
            found[rank].append((piece.start, entry))
    return [[entry for _, entry in sorted(row, key=lambda pair: pair[0])] for row in found]
