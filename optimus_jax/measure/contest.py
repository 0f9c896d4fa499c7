"""Methods against one another: planned from frozen costs, then timed by turns in one step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from optimus_jax.config import Config
from optimus_jax.cost.costs import Costs, analytic, emulated
from optimus_jax.measure import profile
from optimus_jax.measure.fsdp import Fsdp
from optimus_jax.measure.rounds import Timings, by_turns
from optimus_jax.measure.session import Session
from optimus_jax.parallel.agreement import gather, share
from optimus_jax.plan.plan import Plan, make_plan
from optimus_jax.runtime.clock import Clock
from optimus_jax.schedule.methods import FSDP, schedule
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Schedule, Task

CLOCKED = 4  # steps of each method that note their times


@dataclasses.dataclass(frozen=True)
class Marks:
    """When the parts of one step ran: by device [ticks, MARKS] seconds (runtime/clock.py), and the
    whole step's, since its first process began."""

    devices: list[np.ndarray]
    end: float


@dataclasses.dataclass(frozen=True)
class Contest:
    """What was planned and what was measured; the same in every process but for `times`, which are
    each process's own. `reference` are the seconds of a probe in each round: how fast the machine
    was then, against when the profile was taken."""

    config: Config
    profile: profile.Profile
    plans: dict[str, Plan]
    times: Timings
    reference: list[float]
    marks: dict[str, Marks]  # of one step of each method, slowed a little by the clock
    emulated: bool

    @property
    def durations(self) -> Durations:
        return self.profile.costs.durations(self.config)


def run(
    config: Config,
    methods: list[str],
    rounds: int,
    emulate: bool,
    clocked: bool,
    say: Callable[[str], None],
) -> Contest:
    """Profiles, plans and times; every process of the run calls it alike. `say` tells people how
    far it is."""
    if emulate:
        config = hollow(config)
    before = emulated(config) if emulate else analytic(config)
    say("planning from " + before.source + " costs, compiling")
    plans = share(_plans(config, methods, before))
    session = _session(config, plans, emulate)
    say("timing single tasks")
    taken = profile.take(session)
    say("planning from the costs measured")
    plans = share(_plans(config, methods, taken.costs))
    if not all(session.fits(plan.program) for plan in plans.values()):
        say("compiling once more: the plans need more ticks or slots")
        session = _session(config, plans, emulate)
    runs = {name: partial(session.seconds, session.place(p.program)) for name, p in plans.items()}
    if FSDP in methods:
        say(f"compiling {FSDP}")
        runs[FSDP] = Fsdp(config).seconds
    say(f"{rounds} rounds of {len(runs)} methods")
    times = by_turns({**runs, profile.REFERENCE: profile.reference(session)}, rounds)
    reference = times.pop(profile.REFERENCE)
    marks: dict[str, Marks] = {}
    if clocked:
        say("a few more steps of each, with a clock")
        del session, runs
        marks = _marks(config, plans, emulate, times)
    return Contest(config, taken, plans, times, reference, marks, emulate)


def hollow(config: Config) -> Config:
    """The same plan with a tiny model: where tasks are sleeps, what is computed has no part in it,
    and many processes on few cores must not be kept busy by weights and payloads."""
    model = config.model
    tiny = {"width": 8, "heads": 1, "hidden": 8}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            image_height=model.encoder.patch,
            image_width=model.encoder.patch,
            text_length=7,
            projector_hidden=8,
            encoder=dataclasses.replace(model.encoder, **tiny),
            llm=dataclasses.replace(model.llm, **tiny),
        ),
    )


def _plans(config: Config, methods: list[str], costs: Costs) -> dict[str, Plan]:
    """Only the first process plans; the others get its plans."""
    import jax

    if jax.process_index():
        return {}
    return {name: make_plan(config, costs, name) for name in methods if name != FSDP}


def _session(
    config: Config, plans: dict[str, Plan], emulate: bool, clock: Clock | None = None
) -> Session:
    """A session that all the plans and a profile fit in."""
    slots, ticks = profile.shape(config.pipeline)
    for plan in plans.values():
        slots, ticks = slots.covering(plan.program.slots), max(ticks, plan.program.ticks)
    durations = emulated(config).durations(config) if emulate else None
    return Session(config, slots, ticks, durations, clock)


def _marks(
    config: Config, plans: dict[str, Plan], emulate: bool, times: Timings
) -> dict[str, Marks]:
    """When each part of each method's Program ran, in the step of a few that took most nearly the
    median of `times`."""
    clock = Clock()
    session = _session(config, plans, emulate, clock)
    found = {}
    for name, plan in plans.items():
        tables, target = session.place(plan.program), share(statistics.median(times[name]))
        session.run(tables)
        steps = []
        for _ in range(CLOCKED):
            clock.take()
            begin = time.monotonic()
            session.run(tables)
            end = time.monotonic()
            steps.append(_together(gather((clock.take(), begin, end))))
        found[name] = min(steps, key=lambda marks, target=target: abs(marks.end - target))  # type: ignore[misc]
    return found


def _together(every: list[tuple[dict[int, np.ndarray], float, float]]) -> Marks:
    """One step's marks from those of each process, with its begin and end of the step."""
    start = min(begin for _, begin, _ in every)
    by_device = {d: times - start for own, _, _ in every for d, times in own.items()}
    last = max(end for *_, end in every) - start
    return Marks([by_device[d] for d in sorted(by_device)], last)


def work(durations: Durations, config: Config) -> dict[str, float]:
    """Seconds of a stage's forward and backward (F, B; the mean of the stages, all chunks) and of
    the encoder's forward and backward of one microbatch (e, e_b)."""
    pipe = config.pipeline
    return {
        "F": sum(durations.forward) / pipe.stages,
        "B": sum(durations.backward) / pipe.stages,
        "e": durations.of(Task(Kind.EF, 0), 0, pipe),
        "e_b": durations.of(Task(Kind.EB, 0), 0, pipe),
    }


def text_only_s(config: Config, durations: Durations) -> float:
    """Seconds of the LLM alone with asynchronous transfers, without the epilogue."""
    alone: Schedule = schedule("text_only", config.parallel.order, config.pipeline, durations)
    return event_driven(alone, durations).end


def bound_s(config: Config, durations: Durations) -> float:
    """Seconds that no placement of the encoder's work can beat: the LLM alone, and before and after
    it one microbatch's encoder work on all devices at once; or all work evenly shared."""
    pipe, w = config.pipeline, work(durations, config)
    encoder = w["e"] + w["e_b"]
    even = pipe.microbatches * (w["F"] + w["B"] + encoder / pipe.stages)
    alone = text_only_s(config, durations)
    return max(alone + encoder / pipe.units, even) + durations.epilogue


def phased_s(config: Config, durations: Durations) -> float | None:
    """Seconds that `phased` should take: the LLM alone, and the encoder's work evenly shared before
    and after it. None where the microbatches do not divide among the devices."""
    pipe, w = config.pipeline, work(durations, config)
    if pipe.microbatches % pipe.units:
        return None
    shared = pipe.microbatches * (w["e"] + w["e_b"]) / pipe.units
    return text_only_s(config, durations) + shared + durations.epilogue
