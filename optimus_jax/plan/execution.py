"""Execution: a planner's method as the executor runs it, as plan.json holds it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from optimus_jax import config_checks, parallel_checks
from optimus_jax.config import Config, EncoderParallel
from optimus_jax.config_checks import ConfigError
from optimus_jax.cost.analytic import analytic
from optimus_jax.cost.costs import Costs
from optimus_jax.errors import UserError
from optimus_jax.plan.plan import Plan, predicted
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import METHODS
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate

KEY = "execution"  # of plan.json


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """One method of a plan as the executor runs it. `encoders` are the (pp, tp) of each encoder in
    the model's order, `rows` the samples of a microbatch. `planned_s` is the step that the planner
    simulated kernel by kernel; `durations` are its seconds for layers of whole units."""

    method: str
    dp: int
    tp: int
    rows: int
    encoders: tuple[tuple[int, int], ...]
    schedule: Schedule
    durations: Durations
    planned_s: float

    @property
    def pipeline(self) -> Pipeline:
        return self.schedule.pipeline

    @property
    def devices(self) -> int:
        return self.dp * self.pipeline.stages * self.tp

    @property
    def fused(self) -> bool:
        """Whether encoder tasks run inside LLM tasks."""
        return any(task.inside for order in self.schedule.orders for task in order)

    @property
    def event_driven_s(self) -> float:
        """Seconds of the schedule with asynchronous transfers."""
        return event_driven(self.schedule, self.durations).end

    def program(self) -> Program:
        """The schedule's program, proved to do what the schedule says."""
        program = lower(self.schedule, self.durations)
        validate(program, self.schedule)
        return program


def of_plan(config: Config, plan: Plan) -> Execution:
    """The plan of a training configuration."""
    p = config.parallel
    sizes = zip(plan.pipeline.encoders, config.encoder_plans.values(), strict=True)
    return Execution(
        p.method,
        p.dp,
        p.tp,
        config.microbatch_rows,
        tuple((one.stages, own.tp) for one, own in sizes),
        plan.schedule,
        plan.durations,
        plan.step_s,
    )


def written(execution: Execution) -> dict[str, Any]:
    """An execution as JSON values."""
    pipe = dataclasses.asdict(execution.pipeline)
    return {
        "dp": execution.dp,
        "tp": execution.tp,
        "rows": execution.rows,
        "encoders": [{"pp": pp, "tp": tp} for pp, tp in execution.encoders],
        "pipeline": pipe,
        "schedule": str(execution.schedule).splitlines(),
        "durations": dataclasses.asdict(execution.durations),
        "planned_s": execution.planned_s,
        "event_driven_s": execution.event_driven_s,
    }


def load_execution(path: str | pathlib.Path, method: str = "") -> Execution:
    """What a plan.json says of its own method or of another one that it holds.

    Raises UserError, in words, if there is no such file or it holds no sound execution.
    """
    try:
        values = json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    part = values.get(KEY) if isinstance(values, dict) else None
    if not isinstance(part, dict) or not isinstance(part.get("methods"), dict):
        raise UserError(f"{path}: no {KEY!r}; python -m optimus_jax.plan --out=DIR writes one")
    method = method or str(part.get("method"))
    found = part["methods"].get(method)
    if not isinstance(found, dict):
        raise UserError(f"{path}: no method {method!r}, only {', '.join(part['methods'])}")
    if "refused" in found:
        able = [name for name, one in part["methods"].items() if "refused" not in one]
        other = f"; it could run {', '.join(able)}" if able else ""
        raise UserError(f"{path}: the executor does not run {method}: {found['refused']}{other}")
    try:
        return _read(method, found)
    except ScheduleError as error:
        raise UserError(f"{path}: {method}: {error}") from None
    except KeyError as error:
        raise UserError(f"{path}: {method}: {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {method}: {error}") from None


def _read(method: str, found: Mapping[str, Any]) -> Execution:
    sizes = dict(found["pipeline"])
    encoders = tuple(EncoderPipeline(tuple(e["layers"]), e["units"]) for e in sizes["encoders"])
    pipe = Pipeline(**{**sizes, "llm_layers": tuple(sizes["llm_layers"]), "encoders": encoders})
    times = dict(found["durations"])
    times["encoders"] = tuple(
        EncoderDurations(
            **{**one, "forward": tuple(one["forward"]), "backward": tuple(one["backward"])}
        )
        for one in times["encoders"]
    )
    for name in ("forward", "backward", "window"):
        times[name] = tuple(times[name])
    execution = Execution(
        method,
        int(found["dp"]),
        int(found["tp"]),
        int(found["rows"]),
        tuple((int(e["pp"]), int(e["tp"])) for e in found["encoders"]),
        Schedule.parse("\n".join(found["schedule"]), pipe),
        Durations(**times),
        float(found["planned_s"]),
    )
    _check(execution)
    return execution


def _check(execution: Execution) -> None:
    """Raises ScheduleError for sizes and times that do not belong together."""
    pipe, times = execution.pipeline, execution.durations
    for name, have, of in (
        ("encoder plans", len(execution.encoders), len(pipe.encoders)),
        ("encoder durations", len(times.encoders), len(pipe.encoders)),
        ("forward durations", len(times.forward), pipe.virtual_stages),
        ("backward durations", len(times.backward), pipe.virtual_stages),
        ("lines of schedule", len(execution.schedule.orders), pipe.stages),
    ):
        if have != of:
            raise ScheduleError(f"{have} {name}, the pipeline has {of}")
    for name, size in (("dp", execution.dp), ("tp", execution.tp), ("rows", execution.rows)):
        if size < 1:
            raise ScheduleError(f"{name} must be positive, got {size}")
    for k, ((pp, tp), sizes) in enumerate(zip(execution.encoders, pipe.encoders, strict=True)):
        if pp != sizes.stages:
            raise ScheduleError(f"encoder {k} has pp {pp} and {sizes.stages} stages of layers")
        if tp < 1 or execution.tp % tp:
            raise ScheduleError(f"encoder {k}: tp {tp} does not divide the LLM's {execution.tp}")


def configured(config: Config, execution: Execution, devices: int | None = None) -> Config:
    """A training configuration with the plan's parallel sizes in place of its own; what they do not
    say (recomputation, ZeRO, sequence parallelism) stays as it is.

    Raises UserError, naming both values, if layers, encoders or `devices` are others than the
    plan's, and ConfigError if the configuration cannot have its sizes.
    """
    pipe, model = execution.pipeline, config.model
    wrong = []
    if sum(pipe.llm_layers) != model.llm.layers:
        wrong.append(
            f"its LLM has {sum(pipe.llm_layers)} layers, config.model.llm.layers is"
            f" {model.llm.layers}"
        )
    if len(pipe.encoders) != len(model.encoders):
        wrong.append(
            f"it has {len(pipe.encoders)} encoders, the model {len(model.encoders)}"
            f" ({', '.join(model.encoders)})"
        )
    else:
        for (name, own), sizes in zip(model.encoders.items(), pipe.encoders, strict=True):
            if own.layers != sizes.total:
                wrong.append(f"it has {sizes.total} layers of encoder {name!r}, not {own.layers}")
    parts = execution.dp * pipe.microbatches
    if config.train.batch % parts:
        near = config_checks.multiples(config.train.batch, parts)
        wrong.append(
            f"config.train.batch of {config.train.batch} rows does not divide into its dp"
            f" {execution.dp} x {pipe.microbatches} microbatches = {parts} parts; {near} would"
        )
    if devices is not None and devices < execution.devices:
        wrong.append(
            f"it runs on {execution.devices} devices (dp {execution.dp} x pp {pipe.stages} x tp"
            f" {execution.tp}), here are {devices}"
        )
    if wrong:
        raise UserError("\n  ".join(["the plan does not fit the configuration:", *wrong]))
    encoders = []
    for (pp, tp), plan in zip(execution.encoders, config.encoder_plans.values(), strict=True):
        encoders.append(dataclasses.replace(plan, pp=pp, tp=tp))
    return _with(config, execution, encoders)


def _with(config: Config, execution: Execution, encoders: Sequence[EncoderParallel]) -> Config:
    pipe = execution.pipeline
    parallel = dataclasses.replace(
        config.parallel,
        dp=execution.dp,
        pp=pipe.stages,
        tp=execution.tp,
        chunks=pipe.chunks,
        microbatches=pipe.microbatches,
        order="1f1b",
        method=execution.method,
        encoder=encoders[0],
        more_encoders=dict(zip(config.model.more_encoders, encoders[1:], strict=True)),
        encoder_cap=pipe.cap,
        fuse=execution.fused,
    )
    found = dataclasses.replace(config, parallel=parallel)
    # its checks know the methods that a configuration can name, and count units by pipelines
    known = "filled" if execution.fused or execution.method not in METHODS else execution.method
    checked = dataclasses.replace(parallel, method=known)
    if known == "balanced":  # which may leave the encoder's last stages empty
        checked = dataclasses.replace(checked, encoder=dataclasses.replace(encoders[0], pp=1))
    own: list[str] = []
    for check in (*config_checks.CHECKS, *parallel_checks.CHECKS):
        own += check(dataclasses.replace(config, parallel=checked))
    if own:
        raise ConfigError(["with the sizes of the plan:", *own])
    return found


def planned(config: Config, execution: Execution, costs: Costs | None = None) -> Plan:
    """The plan of a configuration that `configured` has made: its schedule and the program; times
    from the plan's own seconds, or from given costs.

    Raises ScheduleError if the schedule cannot run.
    """
    pipe = execution.pipeline
    if costs is None:
        costs = dataclasses.replace(analytic(config), source=f"the plan of {execution.method}")
    else:
        execution = dataclasses.replace(execution, durations=costs.durations(config, pipe))
    llm = tuple(
        tuple(part for task in order if (part := task.llm_part))
        for order in execution.schedule.orders
    )
    alone = Schedule(pipe, llm), execution.durations
    return predicted(costs, execution.schedule, execution.durations, alone)
