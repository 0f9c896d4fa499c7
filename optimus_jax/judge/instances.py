"""Small pipelines to judge a method by, and what a constraint solver found out about each."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import random
from collections.abc import Iterable
from fractions import Fraction

from optimus_jax import files
from optimus_jax.schedule.filled import filled
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Orders, Pipeline, Schedule

COUNT, SEED = 60, 0
STORED = pathlib.Path(__file__).with_name("optima.json")
MEAN_ABOVE, WORST_ABOVE = 2.0, 6.0  # per cent that `filled` may take longer than the reference


@dataclasses.dataclass(frozen=True)
class Instance:
    """Sizes of a pipeline and of its encoder; the LLM's order is 1F1B, interleaved with two chunks.

    A stage's forward of a microbatch takes 1, its backward `backward`; the encoder's take `encoder`
    and `encoder` * `backward`, cut into `units` equal units. Transfers take no time.
    """

    stages: int
    microbatches: int
    chunks: int
    units: int
    encoder: float
    backward: int

    def __str__(self) -> str:
        return (
            f"P{self.stages} M{self.microbatches} V{self.chunks} units {self.units}"
            f" e {self.encoder:g} B {self.backward}"
        )

    @property
    def pipe(self) -> Pipeline:
        encoders = (EncoderPipeline(units=self.units),)
        return Pipeline(self.stages, self.microbatches, self.chunks, encoders=encoders)

    @property
    def llm(self) -> Orders:
        return one_f_one_b(self.pipe)

    @property
    def durations(self) -> Durations:
        return Durations.uniform(self.pipe, 1.0, self.backward, self.encoder)

    @property
    def quantum(self) -> Fraction:
        """The longest time of which every duration is a multiple; so is then every start."""
        unit = Fraction(self.encoder) / self.units
        forward = Fraction(1, self.chunks)
        below = math.lcm(unit.denominator, forward.denominator)
        return Fraction(math.gcd(int(unit * below), int(forward * below)), below)


def draw(count: int = COUNT, seed: int = SEED) -> list[Instance]:
    """Different instances, each size at random: P 2 to 4, V 1 or 2, M 4 to 8 (multiples of P if
    interleaved), 1 to P units, e in quarters from 0.25 to 2, B 2 or 3."""
    chance = random.Random(seed)
    drawn: dict[Instance, None] = {}  # a set that keeps its order
    while len(drawn) < count:
        stages, chunks = chance.randint(2, 4), chance.randint(1, 2)
        fitting = [m for m in range(4, 9) if chunks == 1 or m % stages == 0]
        instance = Instance(
            stages,
            microbatches=chance.choice(fitting),
            chunks=chunks,
            units=chance.randint(1, stages),
            encoder=chance.randint(1, 8) / 4,
            backward=chance.randint(2, 3),
        )
        drawn[instance] = None
    return list(drawn)


@dataclasses.dataclass(frozen=True)
class Optimum:
    """What is known of an instance: a schedule that takes `best` (event-driven), that none takes
    less than `bound`, and how long the solver worked on it. Times are in forwards of a stage."""

    instance: Instance
    best: float
    bound: float
    solver_s: float
    schedule: Schedule

    @property
    def proven(self) -> bool:
        """Whether the schedule is an optimum."""
        return self.best <= self.bound + 1e-6

    @property
    def reference(self) -> float:
        """The optimum; the bound, which is harder to come near, where the optimum is not known."""
        return self.best if self.proven else self.bound

    def above(self, end: float) -> float:
        """Per cent that a schedule of the time `end` takes longer than the reference."""
        return 100 * (round(end, 9) / self.reference - 1)

    def combined(self, other: Optimum) -> Optimum:
        """What both searches together found out about an instance."""
        schedule = min(self, other, key=lambda o: o.best).schedule
        return Optimum(
            self.instance,
            min(self.best, other.best),
            max(self.bound, other.bound),
            max(self.solver_s, other.solver_s),
            schedule,
        )


def fill(instance: Instance) -> Schedule:
    """The schedule to judge."""
    return filled(instance.llm, instance.pipe, instance.durations)


def load(path: pathlib.Path = STORED) -> list[Optimum]:
    """The stored optima, in the order in which the instances are drawn; none without a file."""
    if not path.exists():
        return []
    optima = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        instance = Instance(**{f.name: entry[f.name] for f in dataclasses.fields(Instance)})
        schedule = Schedule.parse("\n".join(entry["schedule"]), instance.pipe)
        times = {name: entry[name] for name in ("best", "bound", "solver_s")}
        optima.append(Optimum(instance, schedule=schedule, **times))
    return optima


def store(optima: Iterable[Optimum], path: pathlib.Path = STORED) -> None:
    """Writes the file that `load` reads, whole or not at all."""
    entries = [
        {
            **dataclasses.asdict(optimum.instance),
            "best": round(optimum.best, 9),
            "bound": round(optimum.bound, 9),
            "status": "optimal" if optimum.proven else "feasible",
            "solver_s": round(optimum.solver_s, 2),
            "schedule": str(optimum.schedule).splitlines(),
        }
        for optimum in optima
    ]
    files.replace_text(path, json.dumps(entries, indent=1) + "\n")
