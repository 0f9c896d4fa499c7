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
from optimus_jax.cost.costs import NOTHING, Costs, EncoderCosts, Pass
from optimus_jax.measure import probes
from optimus_jax.measure.rounds import Spread, by_turns
from optimus_jax.measure.session import Session
from optimus_jax.parallel.agreement import share
from optimus_jax.schedule.program import Payload, Shape
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


def shape(config: Config, pipe: Pipeline | None = None) -> Shape:
    """Least shape of a session that a profile can be taken in."""
    return probes.shape(pipe or config.pipeline, REPEATS, config.parallel.fuse)


def take(
    session: Session, rounds: int = ROUNDS, reference: Callable[[], float] | None = None
) -> Profile:
    """Times every probe on all devices at once, in rounds: a step with the task some times against
    the same step without it. Every process gets the figures of the first. `reference` is run by
    turns with them, instead of this session's own."""
    pipe, fuse = session.pipe, session.config.parallel.fuse
    chosen = probes.probes(pipe, REPEATS, fuse)
    runs: dict[str, Callable[[], float]] = {}
    known: dict[tuple[object, ...], str] = {}  # probes of the same preparation share its time

    def add(name: str, probe: probes.Probe | None, run: bool) -> str:
        program = probes.program(probe, pipe, session.shape, run)
        apart = _apart(session) if probe is not None and probe.kind is not None else 0.0
        key = program.table.tobytes(), program.pattern.tobytes(), apart
        if key not in known:
            known[key] = name
            tables = session.place(program)
            runs[name] = lambda: session.seconds(tables, apart)
        return known[key]

    add("epilogue", None, False)
    pairs = {p: (add(p.name, p, True), add(f"{p.name}, without", p, False)) for p in chosen}
    own = next(pairs[p][0] for p in chosen if p.name == REFERENCE)
    if reference is not None:
        runs["reference"], own = reference, "reference"
    times = by_turns(runs, rounds)
    found = {"epilogue": Spread.of(times["epilogue"])}
    for probe, (with_it, without) in pairs.items():
        both = zip(times[with_it], times[without], strict=True)
        found[probe.name] = Spread.of((a - b) / probe.repeats for a, b in both)
    found, seen = share((found, Spread.of(times[own])))
    costs = _costs(session.config, pipe, found, session.emulated_forward is not None)
    return Profile(costs, found, {**_where(session), "rounds": rounds}, seen)


def reference(session: Session) -> Callable[[], float]:
    """Times a step of the REFERENCE probe."""
    probe = next(p for p in probes.probes(session.pipe, REPEATS) if p.name == REFERENCE)
    tables = session.place(probes.program(probe, session.pipe, session.shape, True))
    return lambda: session.seconds(tables, _apart(session))


def _apart(session: Session) -> float:
    """Seconds between the starts of processes that time a task. Sleeping tasks would all wake
    together and wait for cores that they have to themselves, or nearly so, in a pipeline, whose
    devices are not in step; so they wake one by one."""
    sleep = session.emulated_forward
    return sleep / jax.process_count() if sleep else 0.0


def _costs(
    config: Config, pipe: Pipeline, found: dict[str, Spread], emulated: bool = False
) -> Costs:
    """Parts whose sums are the tasks measured: what a task without layers takes is its ends, the
    rest is shared out among the layers.

    Collectives over replicas are part of the epilogue that is measured, as nothing runs beside them
    there; on CPUs nothing gains by it, so `gather` and `scatter` are 0. Of `emulated` tasks all
    time is that of layers.
    """
    most = max(pipe.llm_layers)

    def median(name: str) -> float:
        return max(found[name].median, 0.0)

    def beyond(name: str, part: str) -> float:
        return max(median(name) - median(part), 0.0)

    def both(function: Callable[[str], float]) -> Pass:
        return Pass(function("F"), function("B"))

    def moved(content: str, encoder: int) -> float | None:
        name = probes.exchange(Payload(content, encoder))
        return median(name) if name in found else None

    def encoder(k: int, larger: float) -> EncoderCosts:
        layers = probes.encoder_layers(pipe, k)

        def name(kind: str, part: str) -> str:
            return probes.named(f"{kind} {part}", k)

        def one(kind: str) -> float:
            ends = median(name(kind, "patches")) + median(name(kind, "projector"))
            return max(median(name(kind, "whole")) - ends, 0.0) / layers

        def parts(function: Callable[[str], float]) -> Pass:
            return Pass(larger * function("EF"), larger * function("EB"))

        return EncoderCosts(
            layer=parts(one),
            input_embedding=parts(lambda kind: median(name(kind, "patches"))),
            projector=parts(lambda kind: median(name(kind, "projector"))),
            feature_exchange=moved("feature", k),
            hidden_exchange=moved("hidden", k),
        )

    def hidden_in_layer(kind: str) -> float:
        """What a fused layer saves of its two layers apart."""
        if f"{kind} fused" not in found:
            return 0.0
        inside, way = probes.fused_layers(pipe), "forward" if kind == "F" else "backward"
        apart = median(f"{kind} layers") + inside * getattr(encoder(0, 1.0).layer, way)
        return max(apart - median(f"{kind} fused"), 0.0) / inside

    if emulated:  # a sleeping task has all layers of its stage, whatever its row says
        stage = pipe.llm_layers[:: pipe.stages]
        layers = sum(stage) / len(stage)
        task, layer = NOTHING, both(lambda kind: median(f"{kind} none") / layers)
    else:
        task = both(lambda kind: median(f"{kind} none"))
        layer = both(lambda kind: beyond(f"{kind} layers", f"{kind} none") / most)
    # a unit of the configuration's own pipeline may be larger
    units = zip(pipe.encoders, config.pipeline.encoders, strict=True)
    larger = [measured.units / own.units for measured, own in units]
    return Costs(
        source="measured",
        llm_task=task,
        llm_layer=layer,
        llm_embedding=both(lambda kind: beyond(f"{kind} first", f"{kind} none")),
        head=beyond("F last", "F none"),
        encoders={n: encoder(k, larger[k]) for k, n in enumerate(config.model.encoders)},
        exchange=median("exchange") if pipe.stages > 1 else 0.0,
        epilogue=median("epilogue"),
        window=both(hidden_in_layer),
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
    rows = []
    for name, spread in profile.measurements.items():
        figures = f"{1e3 * spread.median:.2f}", f"{1e3 * spread.iqr:.2f}", str(spread.count)
        rows.append((words(name, config), *figures))
    table = table_text(("what, alone on every device", "median, ms", "IQR", "times"), rows)
    where = profile.where
    machine = f"{where['devices']} x {where['processor']} ({where['device']}), jax {where['jax']}"
    return f"{machine}\n\n{table}"


def words(name: str, config: Config) -> str:
    """What a measurement is of, in words."""
    what, _, number = name.rpartition(" ")
    if not number.isdigit():
        what, number = name, "0"
    pipe, k = config.pipeline, int(number)
    text = WORDS[what].format(
        layers=max(pipe.llm_layers),
        encoder=probes.encoder_layers(pipe, k),
        inside=probes.fused_layers(pipe),
    )
    if len(pipe.encoders) > 1 and (what[0] == "E" or what.split()[0] in ("feature", "hidden")):
        text += f", {list(config.model.encoders)[k]}"
    return text


WORDS = {
    "F layers": "LLM forward, {layers} layers",
    "F none": "LLM forward without layers",
    "F first": "  with the embedding",
    "F last": "  with the head, its loss and gradient",
    "F fused": "  {inside} of the layers fused with encoder layers",
    "B layers": "LLM backward, {layers} layers",
    "B none": "LLM backward without layers",
    "B first": "  with the embedding",
    "B fused": "  {inside} of the layers fused with encoder layers",
    "EF whole": "encoder forward of a unit, {encoder} layers",
    "EF patches": "  patch embedding only",
    "EF projector": "  projector only",
    "EB whole": "encoder backward of a unit, {encoder} layers",
    "EB patches": "  patch embedding only",
    "EB projector": "  projector only",
    "exchange": "exchange of activations and gradients",
    "feature exchange": "exchange of features",
    "hidden exchange": "exchange between encoder stages",
    "epilogue": "start and end of a step: reductions over replicas, norm, optimiser",
}
