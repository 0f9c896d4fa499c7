"""Realisation: the methods of a planner's answer as what the executor runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimus_jax.config import split_layers
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.fine import fine
from optimus_jax.fill.windows import SlotRule
from optimus_jax.plan.candidates import can_spread
from optimus_jax.plan.execution import Execution, written
from optimus_jax.plan.outcome import Answer, Outcome
from optimus_jax.plan.search import Search
from optimus_jax.plan.snapping import snapped
from optimus_jax.plan.times import Times
from optimus_jax.schedule.balanced import balanced
from optimus_jax.schedule.methods import encoder_first
from optimus_jax.schedule.phased import phased
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError

_OTHERS = ("fine", "filled")  # written beside the recommended method


def executed(answer: Answer, method: str) -> Execution:
    """A method of a planner's answer as the executor runs it.

    Raises ScheduleError, in words, if the executor does not run it: frozen modules, split
    backwards, or layers where it has none.
    """
    cluster, plan, o = answer.cluster, answer.llm.plan, answer.outcomes[method]
    if cluster.llm.frozen or any(spec.frozen for spec in cluster.encoders.values()):
        raise ScheduleError("the executor trains all modules, this plan has frozen ones")
    if not cluster.encoders:
        raise ScheduleError("the executor runs an encoder beside the LLM, this plan has none")
    if method == "text_only":
        raise ScheduleError("text_only says how fast the LLM alone is, it trains no encoder")
    make = _beside if o.filling else _phased if o.plans else _inside
    schedule, durations = make(answer, o)
    return Execution(
        method,
        plan.dp,
        plan.tp,
        cluster.parallel.microbatch,
        tuple((p.stages, plan.tp // p.copies) for p in o.plans.values())
        or tuple((e.stages, plan.tp) for e in schedule.pipeline.encoders),
        schedule,
        durations,
        o.step,
    )


def _beside(answer: Answer, o: Outcome) -> tuple[Schedule, Durations]:
    """A filling as a schedule. Kernels in tensor-parallel slots lose by becoming whole layers, so
    the same method's packing without slots is tried too, and what takes less time is kept."""
    best: tuple[float, Schedule, Durations] | None = None
    for filling in _fillings(answer, o):
        spread = any(part.unit for one in filling.placed for part in one.forward.parts)
        # only one unit goes into an LLM task, so units as large as microbatches may be better
        for units in (0, 1) if spread else (1,):
            pipe = _pipeline(answer, o, units)
            durations = _durations(answer, o, pipe)
            schedule = snapped(filling, pipe, durations)
            end = event_driven(schedule, durations).end
            if best is None or end < best[0]:
                best = end, schedule, durations
    assert best is not None
    return best[1], best[2]


def _fillings(answer: Answer, o: Outcome) -> Iterator[Filling]:
    filling = o.filling
    assert filling is not None
    yield filling
    if not any(piece.slot for piece in filling.pieces) or o.method not in _OTHERS:
        return
    plans, rule = list(o.plans.values()), SlotRule(use=False)
    if o.method == "fine":
        yield fine(filling.backbone, plans, rule)
        return
    search = Search(answer.cluster, answer.llm)
    spread = can_spread(answer.cluster, o.plans)

    def fits(found: Filling) -> bool:
        held = found.in_flight()
        caps = [spec.in_flight for spec in answer.cluster.encoders.values()]
        if any(c and h > c + 1e-9 for c, h in zip(caps, held, strict=True)):
            return False
        return search.memory(o.plans, held).fits(answer.cluster.capacity)

    without = filled(filling.backbone, plans, rule, spread, fits)
    if without:
        yield without


def _phased(answer: Answer, o: Outcome) -> tuple[Schedule, Durations]:
    pipe = _pipeline(answer, o, units=0)
    durations = _durations(answer, o, pipe)
    return phased(one_f_one_b(pipe), pipe, durations), durations


def _pipeline(answer: Answer, o: Outcome, units: int) -> Pipeline:
    """The LLM's layers and each encoder's shared out equally, as the planner does."""
    plan, cluster = answer.llm.plan, answer.cluster
    encoders = (
        EncoderPipeline(split_layers(spec.model.layers, own.stages), units)
        for spec, own in zip(cluster.encoders.values(), o.plans.values(), strict=True)
    )
    return Pipeline(
        plan.pp,
        cluster.microbatches(plan),
        plan.chunks,
        split_layers(cluster.llm.model.layers, plan.pp * plan.chunks),
        tuple(encoders),
    )


def _durations(answer: Answer, o: Outcome, pipe: Pipeline) -> Durations:
    """The planner's seconds: of passes; of encoder layers, a unit on all tensor lanes of a stage.
    A slot of w seconds hides kernels that compute so long and, with them, their share of the
    encoder's own collectives."""
    times, backbone = Times(answer.cluster, answer.llm.plan), answer.llm.backbone
    if o.filling:
        backbone = o.filling.backbone
    encoders, stretch = [], []
    for own, sizes in zip(o.plans.values(), pipe.encoders, strict=True):
        if own.backward is None:
            raise ScheduleError("the executor trains every encoder, a frozen one has no backward")
        layers = [w.seconds / sizes.total for w in (own.forward, own.backward)]
        unit = [(s / (own.copies * sizes.units),) * sizes.total for s in layers]
        # the planner counts no transfers of features and hidden states
        encoders.append(EncoderDurations(unit[0], unit[1], 0.0, 0.0))
        stretch.append([w.whole.full / w.whole.compute for w in (own.forward, own.backward)])
    a, window = answer.cluster.assume, []
    for k, kind in enumerate("FB"):
        slots = sum(end - start for start, end in times.llm_pass(kind).slots)
        window.append(slots * a.slot_usable / a.slot_contention * min(s[k] for s in stretch))
    forward, backward = (
        tuple(times.llm_pass(kind, n).seconds for n in pipe.llm_layers) for kind in "FB"
    )
    return Durations(
        forward,
        backward,
        tuple(encoders),
        transfer=times.latency(),
        gather=backbone.all_gather,
        scatter=backbone.reduce_scatter,
        overlap=True,
        window=(window[0], window[1]),
    )


def _inside(answer: Answer, o: Outcome) -> tuple[Schedule, Durations]:
    """Encoder layers in the LLM's own pipeline."""
    cluster, plan, b = answer.cluster, answer.llm.plan, o.baseline
    assert b is not None
    chained = o.method == "balanced" or not b.llm_layers[0]
    if chained and len(cluster.encoders) > 1:
        raise ScheduleError(f"{o.method} with {len(cluster.encoders)} encoders and no LLM layer")
    if any(b.encoder_layers[plan.pp :]):
        raise ScheduleError(
            f"the executor has encoder layers in the first {plan.pp} virtual stages only, not"
            f" {b.encoder_layers}"
        )
    first = next(v for v, n in enumerate(b.llm_layers) if n)
    if 0 in b.llm_layers[first:]:
        raise ScheduleError(f"the executor has no LLM stage without layers: {b.llm_layers}")
    if chained:
        sizes: tuple[EncoderPipeline, ...] = (EncoderPipeline(b.encoder_layers[: plan.pp], 1),)
    else:
        every = (spec.model.layers for spec in cluster.encoders.values())
        sizes = tuple(EncoderPipeline((n,), 1) for n in every)
    pipe = Pipeline(plan.pp, cluster.microbatches(plan), b.chunks, b.llm_layers, sizes)
    times = Times(cluster, plan)
    llm, busy = times.llm_layer(), cluster.assume.p2p_busy_s
    encoders = []
    for spec in cluster.encoders.values():
        s, n = times.encoder_seconds(spec, plan.tp), spec.model.layers
        encoders.append(EncoderDurations((s.forward,) * n, (s.backward,) * n))
    forward, backward = (
        tuple(n * layer + busy if n else 0.0 for n in b.llm_layers)
        for layer in (llm.forward, llm.backward)
    )
    durations = Durations(
        forward,
        backward,
        tuple(encoders),
        transfer=times.latency(),
        gather=b.backbone.all_gather,
        scatter=b.backbone.reduce_scatter,
    )
    make = balanced if chained else encoder_first
    return make(one_f_one_b(pipe), pipe, durations), durations


def execution_values(answer: Answer) -> dict[str, Any]:
    """The part of plan.json that `load_execution` reads: the recommended method, `fine` and
    `filled`; of a method that the executor does not run, why not."""
    names = dict.fromkeys((answer.recommended, *_OTHERS))
    methods: dict[str, Any] = {}
    for name in names:
        if name in answer.outcomes:
            try:
                methods[name] = written(executed(answer, name))
            except ScheduleError as error:
                methods[name] = {"refused": str(error)}
    return {"method": answer.recommended, "methods": methods}


def execution_text(values: dict[str, Any]) -> str:
    """What `execution_values` found, in words: whole layers beside the planner's kernels."""
    lines = []
    for name, one in values["methods"].items():
        if "refused" in one:
            lines.append(f"the executor does not run {name}: {one['refused']}")
            continue
        ratio = one["event_driven_s"] / one["planned_s"] - 1
        lines.append(
            f"the executor's {name}, in whole layers: {one['event_driven_s']:.3f} s,"
            f" {ratio:+.1%} on the step above"
        )
    return "\n".join(lines)
