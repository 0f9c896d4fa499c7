"""Measured costs: each kind of task, exchange and the epilogue, timed alone."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax

from optimus_jax.config import Config
from optimus_jax.cost.costs import Costs, Pass
from optimus_jax.measure import probes
from optimus_jax.measure.rounds import Spread, by_turns
from optimus_jax.measure.session import Session
from optimus_jax.parallel.agreement import share
from optimus_jax.schedule.program import Slots
from optimus_jax.schedule.task import Pipeline
from optimus_jax.tables import table_text

REPEATS, ROUNDS = 2, 15
REFERENCE = "B layers"  # the probe that shows how fast the machine is from one moment to the next
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Costs with the measurements that they come from, by name: seconds of one task. `reference`
    are the seconds of a whole step of the REFERENCE probe."""

    costs: Costs
    measurements: dict[str, Spread]
    where: dict[str, Any]
    reference: Spread

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | pathlib.Path) -> None:
        """A file that `Costs.load` reads."""
        pathlib.Path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n")


def shape(pipe: Pipeline) -> tuple[Slots, int]:
    """Least slots and ticks of a session that a profile can be taken in."""
    slots = Slots(1, 1, min(REPEATS, pipe.microbatches), 2 * REPEATS)
    return slots, probes.ticks_needed(pipe, slots, REPEATS)


def take(session: Session, rounds: int = ROUNDS) -> Profile:
    """Times every probe on all devices at once, in rounds: a step with the task some times against
    the same step without it. Every process gets the figures of the first."""
    pipe = session.config.pipeline
    chosen = probes.probes(pipe, REPEATS)
    runs: dict[str, Callable[[], float]] = {}
    known: dict[tuple[object, ...], str] = {}  # probes of the same preparation share its time

    def add(name: str, probe: probes.Probe | None, run: bool) -> str:
        program = probes.program(probe, pipe, session.slots, session.ticks, run)
        apart = _apart(session) if probe is not None and probe.kind is not None else 0.0
        key = program.table.tobytes(), program.pattern.tobytes(), apart
        if key not in known:
            known[key] = name
            tables = session.place(program)
            runs[name] = lambda: session.seconds(tables, apart)
        return known[key]

    add("epilogue", None, False)
    pairs = {p: (add(p.name, p, True), add(f"{p.name}, without", p, False)) for p in chosen}
    times = by_turns(runs, rounds)
    found = {"epilogue": Spread.of(times["epilogue"])}
    for probe, (with_it, without) in pairs.items():
        both = zip(times[with_it], times[without], strict=True)
        found[probe.name] = Spread.of((a - b) / probe.repeats for a, b in both)
    reference = Spread.of(times[next(pairs[p][0] for p in chosen if p.name == REFERENCE)])
    found, reference = share((found, reference))
    costs = _costs(session.config, found)
    return Profile(costs, found, {**_where(session), "rounds": rounds}, reference)


def reference(session: Session) -> Callable[[], float]:
    """Times a step of the REFERENCE probe."""
    probe = next(p for p in probes.probes(session.config.pipeline, REPEATS) if p.name == REFERENCE)
    pipe = session.config.pipeline
    tables = session.place(probes.program(probe, pipe, session.slots, session.ticks, True))
    return lambda: session.seconds(tables, _apart(session))


def _apart(session: Session) -> float:
    """Seconds between the starts of processes that time a task. Sleeping tasks would all wake
    together and wait for cores that they have to themselves, or nearly so, in a pipeline, whose
    devices are not in step; so they wake one by one."""
    sleep = session.emulated_forward
    return sleep / jax.process_count() if sleep else 0.0


def _costs(config: Config, found: dict[str, Spread]) -> Costs:
    """Parts whose sums are the tasks measured: what a task without layers takes is its ends, the
    rest is shared out among the layers."""
    pipe = config.pipeline
    most, layers = max(pipe.llm_layers), pipe.encoder_layers

    def median(name: str) -> float:
        return max(found[name].median, 0.0)

    def beyond(name: str, part: str) -> float:
        return max(median(name) - median(part), 0.0)

    def both(function: Callable[[str], float]) -> Pass:
        return Pass(function("F"), function("B"))

    def encoder(function: Callable[[str], float]) -> Pass:
        return Pass(function("EF"), function("EB"))

    def encoder_layer(kind: str) -> float:
        ends = median(f"{kind} patches") + median(f"{kind} projector")
        return max(median(f"{kind} whole") - ends, 0.0) / layers

    return Costs(
        source="measured",
        llm_task=both(lambda kind: median(f"{kind} none")),
        llm_layer=both(lambda kind: beyond(f"{kind} layers", f"{kind} none") / most),
        llm_embedding=both(lambda kind: beyond(f"{kind} first", f"{kind} none")),
        head=beyond("F last", "F none"),
        encoder_layer=encoder(encoder_layer),
        patch_embedding=encoder(lambda kind: median(f"{kind} patches")),
        projector=encoder(lambda kind: median(f"{kind} projector")),
        exchange=median("exchange") if pipe.stages > 1 else 0.0,
        feature_exchange=median("feature exchange") if pipe.stages > 1 else None,
        epilogue=median("epilogue"),
    )


def _where(session: Session) -> dict[str, Any]:
    device = session.mesh.devices.flat[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": processor(),
        "devices": session.mesh.size,
        "processes": jax.process_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def processor() -> str:
    """The name of this machine's processor, as far as it tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def text(profile: Profile, config: Config) -> str:
    """The measurements as a person reads them on a terminal."""
    pipe = config.pipeline
    layers = {"layers": max(pipe.llm_layers), "encoder": pipe.encoder_layers}
    rows = []
    for name, spread in profile.measurements.items():
        figures = f"{1e3 * spread.median:.2f}", f"{1e3 * spread.iqr:.2f}", str(spread.count)
        rows.append((WORDS[name].format(**layers), *figures))
    table = table_text(("what, alone on every device", "median, ms", "IQR", "times"), rows)
    where = profile.where
    machine = f"{where['devices']} x {where['processor']} ({where['device']}), jax {where['jax']}"
    return f"{machine}\n\n{table}"


WORDS = {
    "F layers": "LLM forward, {layers} layers",
    "F none": "LLM forward without layers",
    "F first": "  with the embedding",
    "F last": "  with the head, its loss and gradient",
    "B layers": "LLM backward, {layers} layers",
    "B none": "LLM backward without layers",
    "B first": "  with the embedding",
    "EF whole": "encoder forward of a unit, {encoder} layers",
    "EF patches": "  patch embedding only",
    "EF projector": "  projector only",
    "EB whole": "encoder backward of a unit, {encoder} layers",
    "EB patches": "  patch embedding only",
    "EB projector": "  projector only",
    "exchange": "exchange of activations and gradients",
    "feature exchange": "exchange of features",
    "epilogue": "end of a step: reduction, norm, optimiser; start",
}
