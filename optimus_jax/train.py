"""python -m optimus_jax.train: plan, compile, restore, train, save, report."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import time
from typing import Any

import numpy as np
from absl import flags

from optimus_jax import cluster, command, xla_flags
from optimus_jax.config import Config

command.define_config()
command.define_costs()
flags.DEFINE_string("plan", None, "A plan.json that python -m optimus_jax.plan --out=DIR wrote.")
flags.DEFINE_float(
    "hang_s",
    300.0,
    "Seconds after which a step hangs and the run ends (0: never).",
    lower_bound=0.0,
)
flags.DEFINE_string(
    "plan_method", "", "Which of its methods to run (default: the recommended one)."
)


def main() -> int:
    config, workdir = command.config(), command.workdir()
    execution = named_execution()
    if execution:
        from optimus_jax.plan.execution import configured

        config = configured(config, execution)
    require_senses(config)
    prepare_devices(config, watched=True)
    if settings := xla_flags.of_this_run():
        command.say(settings)
    return train(config, workdir, execution)


def prepare_devices(config: Config, watched: bool = False) -> None:
    """Joins the other processes, if any, and on a CPU makes the devices that the plan needs; for
    `watched` see cluster.initialize.

    Raises UserError if they do not come out even.
    """
    p, count = config.parallel, cluster.count()
    needed = p.devices
    if needed % count:
        raise command.UserError(
            f"{count} processes cannot share {needed} devices (dp {p.dp} x pp {p.pp} x tp {p.tp})"
            f" evenly: start a number of processes that divides {needed}"
        )
    cluster.configure_cpu_devices(needed // count)
    cluster.initialize(watched=watched)


def require_senses(config: Config) -> None:
    """Raises UserError if an encoder takes what no data set has."""
    for name, encoder in config.model.encoders.items():
        if encoder.input != "image":
            raise command.UserError(
                f"encoder {name!r} takes {encoder.input}, but the data set {config.data.name!r} has"
                " pictures only: plan, profile and bench, which need no data, can run it; to train,"
                " leave it out or give it input 'image'"
            )


def named_execution() -> Any:
    """What --plan names, None without it. Raises UserError if the file holds no plan."""
    options = flags.FLAGS
    if not options.plan:
        if options.plan_method:
            raise command.UserError("--plan_method: says which method of --plan, which is missing")
        return None
    from optimus_jax.plan.execution import load_execution

    return load_execution(options.plan, options.plan_method)


def train(config: Config, workdir: pathlib.Path, execution: Any = None) -> int:
    """Trains to the last step, from the newest checkpoint if there is one, by an execution of a
    plan.json or else by the configuration's own plan and the named costs, and returns the exit
    code: 0, or 130 or 143 if a signal ended it after a save."""
    import jax

    from optimus_jax import report
    from optimus_jax.checkpoint import Checkpoints
    from optimus_jax.data.batches import Prefetch
    from optimus_jax.metrics import MetricLog, Stopwatch, progress_line
    from optimus_jax.parallel import topology
    from optimus_jax.plan.execution import planned
    from optimus_jax.plan.plan import make_plan
    from optimus_jax.runtime.executor import Executor
    from optimus_jax.runtime.trainer import Trainer
    from optimus_jax.startup import Startup
    from optimus_jax.stop_request import StopRequest
    from optimus_jax.watchdog import Watchdog

    startup, hosts = Startup(), topology.machines()
    startup.done("packages and devices")
    costs = command.costs()
    plan = planned(config, execution, costs) if execution else make_plan(config, costs)
    agree(plan)
    startup.done("plan")
    devices = topology.by_machine(jax.devices(), hosts)
    executor = Executor.of(config, plan.program.slots, devices, plan.pipeline)
    topology.check(executor.meshes, hosts)
    trainer = Trainer(executor, config.train)
    checkpoints = Checkpoints(workdir, config)
    done = agreed_step(checkpoints.latest() or 0, workdir)
    if done >= config.train.steps:
        checkpoints.close()
        command.say(f"{workdir} holds a finished run of {done} steps: nothing to do")
        command.say("another --workdir trains anew, a larger --config.train.steps goes on")
        if flags.FLAGS.json:
            written = report.load(workdir) or report.predicted(config, plan)
            command.emit(report.summary(written, last_loss(workdir)))
        return 0
    batches, checkpoints.digest = agreed_examples(config)
    if done:
        state = trainer.stage(checkpoints.restore(done, trainer.abstract()))
        command.say(f"resumed after step {done} from {checkpoints.folder}")
    else:
        state = trainer.init()
    command.say(f"{config.parallel.method}: {topology.summary(executor.meshes, hosts)}")
    startup.done("data and weights")

    step = trainer.train_step()
    tables = executor.feed.tables(plan.program)
    load = functools.partial(_global_batch, executor, batches, config.train.batch)
    prefetch = Prefetch(load, done, 2)
    report.discard(workdir)
    log, watch, stop = MetricLog(workdir, done), Stopwatch(), StopRequest(jax.process_count())
    watchdog = Watchdog(workdir, jax.process_index(), jax.process_count(), flags.FLAGS.hang_s)
    tokens = config.train.batch * config.model.sequence
    metrics: Any = None
    clock = time.perf_counter()
    try:
        for n in range(done, config.train.steps):
            watchdog.enter("data", n)
            batch = prefetch.get(n)
            watchdog.enter("step", n)
            previous = metrics
            state, metrics = step(state, batch, *tables)
            if previous is not None:
                jax.block_until_ready(previous)  # step n runs while the host looks at step n - 1
            else:
                jax.block_until_ready(metrics)
                startup.done("compilation and step")
                startup.close()
                command.say(str(startup))
            now = time.perf_counter()
            watch.add(now - clock)
            clock = now
            last, at_log = n + 1 == config.train.steps, (n + 1) % config.train.log_every == 0
            save = last or (n + 1) % config.train.save_every == 0
            if at_log or save:  # what is saved is finite
                values = _values(metrics, n, workdir)
            code = 0 if last else stop.agreed(n, logged=at_log)
            if code and not (at_log or save):
                values = _values(metrics, n, workdir)
            if at_log or last:
                log.write(n, values)
                typical = watch.median() or watch.seconds[-1]
                left = typical * (config.train.steps - n - 1)
                command.say(
                    progress_line(n + 1, config.train.steps, values["loss"], typical, tokens, left)
                )
            if save or code:
                watchdog.enter("save", n)
                checkpoints.save(n + 1, trainer.unstage(state))
            if code:
                checkpoints.wait()
                command.say(f"stopped after step {n + 1}, saved; the same command resumes there")
                return code
        checkpoints.wait()
    finally:
        watchdog.close()
        stop.restore()
        prefetch.close()
        log.close()
        checkpoints.close()
    if command.is_first():
        written = report.write(workdir, config, plan, watch, startup.values())
        command.say(report.text(written))
        if flags.FLAGS.json:
            command.emit(report.summary(written, values["loss"]))
    return 0


def example_batches(config: Config, split: str, rows: int) -> Any:
    """The examples of a split in batches of `rows`, indexable by step and row.

    Raises UserError if the data is missing.
    """
    from optimus_jax.data.batches import Batches, examples

    model = config.model
    dataset = examples(
        _source(config),
        split,
        config.train.seed,
        (model.image_height, model.image_width),
        model.image_tokens,
        model.sequence,
        config.data.hide_text if split == "train" else 0.0,
    )
    return Batches(dataset, rows)


def agreed_examples(config: Config) -> tuple[Any, str]:
    """The train examples in batches, and the digest of their files, the same in every process.

    Raises UserError in all processes if the data is missing in any, or is not the same.
    """
    from optimus_jax.parallel.agreement import loaded_alike

    def load() -> tuple[Any, str]:
        batches = example_batches(config, "train", config.train.batch)
        return batches, _source(config).digest()

    return loaded_alike(load, "pictures or captions")


def _source(config: Config) -> Any:
    from optimus_jax.data import sources

    model = config.model
    # as the examples have it, so that pictures are read once
    canvas = model.image_height, model.image_width
    return sources.make(config.data).fitted(canvas, model.text_length - 2)


def agreed_step(step: int, workdir: pathlib.Path) -> int:
    """The step to resume from, the same in every process.

    Raises UserError in all of them if they see different folders.
    """
    from optimus_jax.parallel.agreement import gather

    steps = gather(step)
    if len(set(steps)) > 1:
        raise command.UserError(
            f"processes find different checkpoints in {workdir} (steps {steps}):"
            " --workdir must be one folder that all of them share"
        )
    return step


def agree(plan: Any) -> None:
    """Raises UserError in every process if they have different plans, such as from different
    files: each would wait for what no other sends."""
    from optimus_jax.parallel.agreement import gather

    program = plan.program
    tables = program.table, program.pattern, program.prologue, program.epilogue
    digest = hashlib.sha256(repr(program.slots).encode())
    for table in tables:
        digest.update(table.tobytes())
    if len(set(gather(digest.hexdigest()))) > 1:
        raise command.UserError(
            "processes have different plans: --config, --plan and --costs must name the same on all"
        )


def last_loss(workdir: pathlib.Path) -> float:
    """The loss of the last logged step."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["loss"])


def _global_batch(executor: Any, batches: Any, rows: int, step: int) -> Any:
    return executor.feed.batch(batches.rows(step, range(rows)))


def _values(metrics: Any, step: int, workdir: pathlib.Path) -> dict[str, float]:
    """The numbers of a step on the host. Raises UserError if the loss is no longer a number."""
    values = {name: float(np.asarray(metrics[name])) for name in ("loss", "grad_norm")}
    if not all(map(np.isfinite, values.values())):
        raise command.UserError(
            f"loss {values['loss']} and gradient norm {values['grad_norm']} at step {step}:"
            f" stopped; {workdir} keeps the last good checkpoint. A lower train.learning_rate or"
            " a longer train.warmup may help"
        )
    return values


if __name__ == "__main__":
    command.run(main)
