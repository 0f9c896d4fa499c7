"""Methods against one another: planned from frozen costs, then timed by turns in one step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from optimus_jax.config import Config
from optimus_jax.cost.analytic import analytic
from optimus_jax.cost.costs import Costs, emulated
from optimus_jax.measure import profile
from optimus_jax.measure.fsdp import Fsdp
from optimus_jax.measure.profile import Profile
from optimus_jax.measure.rounds import Timings, by_turns
from optimus_jax.measure.session import Session, covering
from optimus_jax.parallel.agreement import gather, share
from optimus_jax.plan.plan import BALANCED, Plan, make_plan
from optimus_jax.runtime.clock import Clock
from optimus_jax.schedule.bounds import lower_bound
from optimus_jax.schedule.methods import FSDP, schedule
from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, Task

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
    was then, against when the profile was taken. `own` are profiles of methods that run on a
    pipeline of their own; there too `reference` is that probe."""

    config: Config
    profile: Profile
    plans: dict[str, Plan]
    times: Timings
    reference: list[float]
    marks: dict[str, Marks]  # of one step of each method, slowed a little by the clock
    emulated: bool
    own: dict[str, Profile] = dataclasses.field(default_factory=dict)

    @property
    def durations(self) -> Durations:
        return self.profile.costs.durations(self.config)

    def profile_of(self, method: str) -> Profile:
        """The profile that a method was planned from."""
        return self.own.get(method, self.profile)


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
    shared = [name for name in methods if name not in (BALANCED, FSDP)]
    session = _session(config, _plans(config, shared, before), emulate)
    say("timing single tasks")
    taken = profile.take(session)
    say("planning from the costs measured")
    plans = _plans(config, shared, taken.costs)
    if not all(session.fits(plan.program) for plan in plans.values()):
        say("compiling once more: the plans need more ticks or slots")
        session = _session(config, plans, emulate)
    runs: dict[str, Callable[[], float]] = {
        name: partial(session.seconds, session.place(p.program)) for name, p in plans.items()
    }
    reference = profile.reference(session)
    own = {}
    if BALANCED in methods:
        # its stages have other layers, and other arrays pass between them: a step of its own, whose
        # costs are measured in it too
        plan = _plans(config, [BALANCED], taken.costs)
        say(f"compiling {BALANCED}, which cuts a pipeline of its own")
        theirs = _session(config, plan, emulate)
        if not emulate:
            say(f"timing single tasks of {BALANCED}")
            own[BALANCED] = profile.take(theirs, reference=reference)
            plan = _plans(config, [BALANCED], own[BALANCED].costs, theirs.pipe)
            if not theirs.fits(plan[BALANCED].program):
                theirs = _session(config, plan, emulate)
        plans |= plan
        runs[BALANCED] = partial(theirs.seconds, theirs.place(plan[BALANCED].program))
        del theirs
    if FSDP in methods:
        say(f"compiling {FSDP}")
        runs[FSDP] = Fsdp(config).seconds
    runs = {name: runs[name] for name in methods}
    plans = {name: plans[name] for name in methods if name in plans}
    say(f"{rounds} rounds of {len(runs)} methods")
    times = by_turns({**runs, profile.REFERENCE: reference}, rounds)
    seen = times.pop(profile.REFERENCE)
    marks: dict[str, Marks] = {}
    if clocked:
        say("a few more steps of each, with a clock")
        del session, runs, reference
        for some in (shared, [BALANCED]):
            some_plans = {name: plans[name] for name in some if name in plans}
            marks |= _marks(config, some_plans, emulate, times)
    return Contest(config, taken, plans, times, seen, marks, emulate, own)


def hollow(config: Config) -> Config:
    """The same plan with a tiny model: where tasks are sleeps, what is computed has no part in it,
    and many processes on few cores must not be kept busy by weights and payloads."""
    model = config.model
    p, plans = config.parallel, config.encoder_plans
    tiny: dict[str, Any] = {"heads": 1, "width": 8, "hidden": 8, "patch": 1}
    encoders = {
        name: dataclasses.replace(
            e, **{**tiny, "heads": plans[name].tp, "width": 8 * plans[name].tp}
        )
        for name, e in model.encoders.items()
    }
    first, *_ = encoders.values()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            # one token each, more where tensor shards have to share them
            image_height=1,
            image_width=p.tp,
            audio_frames=p.tp if model.audio_frames else 0,
            text_length=8 * p.tp - len(encoders) * p.tp,
            projector_hidden=8 * p.tp,
            encoder=first,
            more_encoders={name: encoders[name] for name in model.more_encoders},
            llm=dataclasses.replace(
                model.llm, heads=p.tp, kv_heads=0, width=8 * p.tp, hidden=8 * p.tp
            ),
        ),
    )


def _plans(
    config: Config, methods: list[str], costs: Costs, pipe: Pipeline | None = None
) -> dict[str, Plan]:
    """The methods' plans, on this pipeline if it is given. Only the first process plans; the others
    get its plans."""
    made = {}
    if not jax.process_index():
        made = {name: make_plan(config, costs, name, pipe) for name in methods}
    return share(made)


def _session(
    config: Config, plans: dict[str, Plan], emulate: bool, clock: Clock | None = None
) -> Session:
    """A session that all the plans, which are of one pipeline, and a profile fit in."""
    pipe = next((plan.pipeline for plan in plans.values()), config.pipeline)
    shape = profile.shape(config, pipe)
    for plan in plans.values():
        shape = covering(shape, plan.program.shape)
    durations = emulated(config).durations(config, pipe) if emulate else None
    return Session(config, shape, durations, clock, pipe)


def _marks(
    config: Config, plans: dict[str, Plan], emulate: bool, times: Timings
) -> dict[str, Marks]:
    """When each part of each method's Program ran, in the step of a few that took most nearly the
    median of `times`."""
    if not plans:
        return {}
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
    the forward and backward of one microbatch in all encoders (e, e_b)."""
    pipe = config.pipeline

    def encoders(kind: Kind) -> float:
        return sum(
            durations.of(Task(kind, 0, encoder=k), device, pipe)
            for k in range(len(pipe.encoders))
            for device in pipe.devices_of(k, 0)
        )

    return {
        "F": sum(durations.forward) / pipe.stages,
        "B": sum(durations.backward) / pipe.stages,
        "e": encoders(Kind.EF),
        "e_b": encoders(Kind.EB),
    }


def text_only_s(config: Config, durations: Durations) -> float:
    """Seconds of the LLM alone with asynchronous transfers, without the epilogue."""
    alone: Schedule = schedule("text_only", config.parallel.order, config.pipeline, durations)
    return event_driven(alone, durations).end


def bound_s(config: Config, durations: Durations) -> float:
    """Seconds that no placement of the encoders' work on this LLM pipeline can beat unless some of
    it hides inside LLM tasks: the LLM alone, and before and after it one microbatch's encoder work
    on all devices at once; or all work evenly shared."""
    pipe = config.pipeline
    llm = ORDERS[config.parallel.order](pipe)
    return lower_bound(llm, pipe, durations) + durations.epilogue


def phased_s(config: Config, durations: Durations) -> float | None:
    """Seconds that `phased` should take: the LLM alone, and the encoders' work evenly shared before
    and after it. None where the microbatches do not divide among the devices, or an encoder has
    several stages, which wait for one another."""
    pipe, w = config.pipeline, work(durations, config)
    if pipe.microbatches % pipe.stages or any(e.stages > 1 for e in pipe.encoders):
        return None
    shared = pipe.microbatches * (w["e"] + w["e_b"]) / pipe.stages
    return text_only_s(config, durations) + shared + durations.epilogue
