"""The timeline page and the trace of a planner's answer: all methods, on one LLM pipeline."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.baselines import Baseline
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.windows import SlotRule
from optimus_jax.plan import answer_picture
from optimus_jax.plan.answer_views import (
    Layers,
    layers_of,
    of_baseline,
    of_filling,
    of_phased,
    passes,
)
from optimus_jax.plan.beside import phased_seconds
from optimus_jax.plan.inside import pipeline
from optimus_jax.plan.outcome import Answer, Outcome
from optimus_jax.plan.rank_views import CAUSES, View
from optimus_jax.plan.search import Search
from optimus_jax.schedule.actions import Action
from optimus_jax.timeline import chrome, page

MEANINGS = {
    "text_only": "the LLM alone, its encoders' features being ready",
    "encoder_first": "all encoder layers in the first stage, LLM layers shared out equally",
    "encoder_first_tuned": "the same with the best chunks and LLM layers of each stage",
    "balanced": "encoder and LLM layers in one pipeline, cut into stages of equal cost",
    "phased": "encoder on its own plan, all forwards before the LLM's step, all backwards after it",
    "coarse": "encoder work before and after the LLM's passes of its rank",
    "fine": "from coarse, whole kernels moved between the LLM's passes and into TP slots",
    "filled": "encoder kernels packed into every idle interval",
    "filled_zb": "the same beside LLM backwards split in two, those of the weights put off",
}


def write(answer: Answer, folder: pathlib.Path) -> None:
    """Writes timeline.html, timeline.png and trace.json into a folder that is there."""
    values = timeline(answer)
    answer_picture.write(values, folder / "timeline.png")
    page.write(values, folder / "timeline.html")
    chrome.write(values, folder / "trace.json")


def timeline(answer: Answer) -> dict[str, Any]:
    """What the timeline page shows of a cluster's answer. `backbones` are the LLM's passes, which a
    view names by number in `backbone`. Shares and bytes are the answer's own."""
    views = _Views(answer)
    methods = [
        {
            "name": name,
            "meaning": MEANINGS.get(name, ""),
            "predicted_s": outcome.step,
            "measured_s": None,
            "iqr_s": None,
            "views": {"simulated": views.of(outcome)},
            "figures": _figures(answer, outcome),
            "plan": _plan_words(answer, outcome),
        }
        for name, outcome in answer.outcomes.items()
    ]
    cluster, plan = answer.cluster, answer.llm.plan
    return {
        "title": f"{_models(answer)} on {cluster.gpus:,} x {cluster.hardware}: {plan}",
        "notes": _notes(answer),
        "emulated": False,
        "devices": plan.pp,
        "bound_s": None,
        "methods": methods,
        "backbones": views.backbones,
        "causes": {cause: list(words) for cause, words in CAUSES.items()},
        "cluster": {
            "drawn": _drawn(answer),
            "alike": plan.dp * plan.tp,
            "capacity": cluster.capacity,
            "recommended": answer.recommended,
            "reason": answer.reason,
        },
    }


class _Views:
    """Views of an answer's methods, with each backbone written once."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self.backbones: list[View] = []
        self._known: dict[int, int] = {}

    def of(self, o: Outcome) -> View:
        answer, alone = self.answer, self.answer.llm.backbone
        chunks = answer.llm.plan.chunks
        if o.baseline is not None:
            search = Search(answer.cluster, answer.llm)
            layers = layers_of(o.baseline, pipeline(search), search.times)
            backbone = o.baseline.backbone
            found = of_baseline(o.baseline, layers)
            return self._on(backbone, found, o.baseline.chunks, layers)
        if o.filling is not None:
            backbone = o.filling.backbone
            found = of_filling(o.filling, list(o.plans), chunks)
            return self._on(backbone, found, chunks)
        if o.method == "phased":
            found = of_phased(alone, chunks, *phased_seconds(alone.microbatches, o.plans.values()))
        else:
            empty = Filling(o.method, alone, SlotRule(use=False), ())
            found = of_filling(empty, [], chunks)
        return self._on(alone, found, chunks)

    def _on(
        self,
        backbone: Backbone,
        found: View,
        chunks: int,
        layers: Mapping[Action, Layers] | None = None,
    ) -> View:
        if id(backbone) not in self._known:
            self._known[id(backbone)] = len(self.backbones)
            self.backbones.append(passes(backbone, chunks, layers))
        return {**found, "backbone": self._known[id(backbone)]}


def _figures(answer: Answer, o: Outcome) -> dict[str, Any]:
    """A method's line of the table: steps in seconds, ratios, shares, bytes."""
    ratios = {}
    for other in ("phased", "encoder_first_tuned"):
        found = answer.outcomes.get(other)
        ratios[other] = found.step / o.step if found else None
    return {
        "against": ratios,
        "without_tp_s": o.step_without_tp,
        "inside_share": o.inside_share,
        "time_share": o.time_share,
        "mfu": o.mfu,
        "memory": o.memory.total,
        "fits": o.fits,
    }


def _models(answer: Answer) -> str:
    encoders = [spec.name for spec in answer.cluster.encoders.values()]
    return " + ".join([*encoders, answer.cluster.llm.name])


def _plan_words(answer: Answer, o: Outcome) -> list[str]:
    """The parallel plans that a method has beside the LLM's, in words."""
    tp = answer.llm.plan.tp
    words = []
    for name, plan in o.plans.items():
        many = f"{plan.pipelines} pipelines" if plan.pipelines > 1 else "1 pipeline"
        copies = f", {plan.copies} on the same ranks" if plan.copies > 1 else ""
        words.append(
            f"encoder {name}: {many} of pp {plan.stages} x tp {tp // plan.copies} beside each LLM"
            f" pipeline{copies}"
        )
    if o.baseline is not None:
        b = o.baseline
        chunks = f" x {b.chunks} chunks" if b.chunks > 1 else ""
        words.append(
            f"one pipeline, pp {answer.llm.plan.pp}{chunks}; encoder + LLM layers of its virtual"
            f" stages in turn: {_layer_words(b)}"
        )
    if o.method == "phased":
        words.append(
            "a formula: every device is busy with its share of encoder work; no single microbatch"
            " is placed, and filling encoder pipelines costs nothing"
        )
    return words


def _layer_words(baseline: Baseline) -> str:
    """Such as "48 + 0, 3 stages of 0 + 7, 0 + 6"."""
    words = []
    both = zip(baseline.encoder_layers, baseline.llm_layers, strict=True)
    for (encoder, llm), group in itertools.groupby(both):
        many = len(list(group))
        words.append((f"{many} stages of " if many > 1 else "") + f"{encoder} + {llm}")
    return ", ".join(words)


def _drawn(answer: Answer) -> str:
    plan, n = answer.llm.plan, answer.cluster.microbatches(answer.llm.plan)
    rows = answer.cluster.parallel.microbatch
    pipelines = (
        f"One LLM pipeline is drawn of {plan.dp:,} that do alike" if plan.dp > 1 else "One pipeline"
    )
    devices = (
        f"{plan.tp} tensor-parallel devices, which do alike unless an encoder has fewer"
        if plan.tp > 1
        else "one device"
    )
    each = f"{n} microbatches of {rows} sample{'s' if rows > 1 else ''} each"
    return f"{pipelines}, {each}: its {plan.pp} ranks are the bands. A rank is {devices}."


def _notes(answer: Answer) -> list[str]:
    plan, constants = answer.llm.plan, answer.constants
    alike = plan.dp * plan.tp
    found = [
        "Everything on this page is simulated; nothing was measured."
        f" {plan.dp * plan.tp * plan.pp:,} devices = {plan.pp} ranks of {alike:,} devices alike"
        f" ({plan.dp} pipelines x {plan.tp} tensor-parallel devices).",
        "Constants: " + ", ".join(f"{name} {value:.4g}" for name, value in constants.items()) + ".",
        "Methods with all layers in one pipeline: collectives of LLM layers are TP idle time, those"
        " of encoder layers count as encoder work. A pass ends with the transfer that occupies its"
        " devices.",
    ]
    if answer.llm.deferred:
        found.append("Warm-up counts are those that put off the LLM's need of features.")
    fillings = [o.filling for o in answer.outcomes.values() if o.filling]
    if any(one.crosses for filling in fillings for one in filling.placed):
        found.append("Forwards of a frozen encoder for the next step may run in this one.")
    found += [f"{name} is left out: {why}" for name, why in answer.refused.items()]
    return found
