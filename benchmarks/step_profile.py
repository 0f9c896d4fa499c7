"""Where the time of one step goes, here and in torch.distributed.pipelining, by kind of work.

    pip install torch==2.13.0
    python launch/local.py --processes=2 -- python benchmarks/step_profile.py small

The systems, sizes and processes of torch_pipelining.py. Each step is profiled by the system's own
profiler (an XLA trace, torch.profiler); a kind's time is the time of its operations less that of
operations inside them. Systems take turns of three steps: one to warm up, one timed without a
profiler, one profiled. Prints, for each process, medians of the rounds by kind; then, since the
machine's noise only slows, times by kind and GFLOP/s of products from the first quartile of all
runs of each operation. ROUNDS in the environment sets the rounds; OPERATIONS=1 also lists the
longest operations of each kind.

Ours are told apart by the compiled step: a product by its shape, other operations by the functions
that their source lies in, that of the last arithmetic where XLA fused several. So a bias counts
with what it is fused into: GELU, the splitting of heads, or the residual. Torch's one kernel for
attention counts as products; ours are products and softmax.
"""

from __future__ import annotations

import functools
import glob
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

os.environ["KINETO_LOG_LEVEL"] = "99"  # else torch's profiler prints lines of its own

import torch.distributed as dist
from compiled_step import CompiledStep
from torch.profiler import record_function
from torch_operations import WAIT, torch_work
from torch_pipelining import SIZES, TorchPipeline, configuration, join
from work_kinds import (
    AGAIN,
    EXCHANGE,
    FORWARD,
    GRADIENT,
    INPUT,
    KINDS,
    REDUCTION,
    REST,
    WEIGHT,
    Shapes,
    Spent,
    Work,
    self_times,
)

from optimus_jax.config import Config
from optimus_jax.cost.analytic import analytic
from optimus_jax.measure.rounds import by_turns
from optimus_jax.parallel.agreement import gather
from optimus_jax.plan.plan import make_plan
from optimus_jax.tables import table_text

ROUNDS = int(os.environ.get("ROUNDS", "5"))


class Ours:
    """Steps of the executor, one by one, with or without a trace."""

    def __init__(self, config: Config):
        from optimus_jax.measure.session import Session
        from optimus_jax.runtime.trainer import Trainer

        plan = make_plan(config, analytic(config), "text_only")
        session = Session(config, plan.program.shape)
        self.rest = session.batch, *session.place(plan.program)
        self.state = session.state
        lowered = Trainer(session.executor, config.train).train_step().lower(self.state, *self.rest)
        self.step = lowered.compile()
        self.compiled = CompiledStep(self.step.as_text(), Shapes.of(config))

    def seconds(self) -> float:
        import jax

        start = time.perf_counter()
        self.state, _ = self.step(self.state, *self.rest)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def profiled(self) -> Spent:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.enable_hlo_proto = 0, False
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                dist.barrier()
                wall = self.seconds()
            (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            data = jax.profiler.ProfileData.from_file(path)
        spent = Spent(wall)
        for line in (line for plane in data.planes for line in plane.lines):
            spans = [
                (event.start_ns, event.end_ns, event.name)
                for event in line.events
                if any(key == "hlo_op" for key, _ in event.stats)
            ]
            for name, own in self_times(spans):
                spent.add(name, self.compiled.work(name), own / 1e9)
        return spent


def torch_profiled(pipeline: TorchPipeline, shapes: Shapes) -> Spent:
    operations, wall = pipeline.profiled()
    spent = Spent(wall)
    for operation in operations:
        spent.add(operation.within[0], torch_work(operation, shapes), operation.seconds)
    return spent


# Both.


def milliseconds(values: Iterable[float]) -> float:
    return 1e3 * statistics.median(values)


Steps = dict[str, list[Spent]]  # by system, those of the rounds


def kind_table(steps: Steps, plain: dict[str, list[float]]) -> str:
    """Rows: kinds; columns: systems, and the first less each other within the same round."""
    rows = {kind: [[s.of(kind) for s in of] for of in steps.values()] for kind in KINDS}
    rows["step, profiled"] = [[s.wall for s in of] for of in steps.values()]
    rows["step, not profiled"] = [plain[system] for system in steps]
    cells = []
    for kind, columns in rows.items():
        less = ([a - b for a, b in zip(columns[0], x, strict=True)] for x in columns[1:])
        figures = [f"{milliseconds(x):.1f}" for x in columns]
        cells.append((kind, *figures, *(f"{milliseconds(x):+.1f}" for x in less)))
        if kind == REST:
            totals = (sum(float(row[k]) for row in cells) for k in range(1, len(steps) + 1))
            cells.append(("sum", *(f"{total:.1f}" for total in totals), *[""] * (len(steps) - 1)))
    header = [*steps, *(f"ours less {name.split()[-1]}" for name in list(steps)[1:])]
    return table_text(("ms", *header), cells)


def pooled(ranks: list[Steps]) -> dict[str, dict[tuple[str, Work], list[float]]]:
    """By system and operation, the seconds of its runs in all rounds and processes."""
    found: dict[str, dict[tuple[str, Work], list[float]]] = {system: {} for system in ranks[0]}
    for system, spent in ((system, x) for rank in ranks for system, of in rank.items() for x in of):
        for key, seconds in spent.runs.items():
            found[system].setdefault(key, []).extend(seconds)
    return found


def quiet(runs: Mapping[tuple[str, Work], list[float]], steps: int) -> float:
    """ms of a step from each operation's first quartile: the machine's noise only slows."""

    def quartile(seconds: list[float]) -> float:
        return statistics.quantiles(seconds, n=4, method="inclusive")[0]

    return 1e3 * sum(quartile(x) * len(x) for x in runs.values() if len(x) > 1) / steps


def quiet_table(ranks: list[Steps]) -> str:
    """As kind_table, of the mean process, without what waits."""
    runs, rows = pooled(ranks), {}
    for kind in (kind for kind in KINDS if kind not in (EXCHANGE, REDUCTION)):
        by_system = ({k: x for k, x in of.items() if k[1].kind == kind} for of in runs.values())
        rows[kind] = [quiet(of, ROUNDS * len(ranks)) for of in by_system]
    rows["sum"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    return table_text(
        ("ms", *runs, *(f"ours less {name.split()[-1]}" for name in list(runs)[1:])),
        [
            (kind, *(f"{x:.1f}" for x in row), *(f"{row[0] - x:+.1f}" for x in row[1:]))
            for kind, row in rows.items()
        ],
    )


def product_table(ranks: list[Steps]) -> str:
    """Rows: products by pass, in a step of the mean process; columns by system: ms and GFLOP/s."""
    runs, rows, steps = pooled(ranks), [], ROUNDS * len(ranks)
    order = FORWARD, AGAIN, INPUT, WEIGHT, GRADIENT
    named = {(w.product, w.part) for of in runs.values() for _, w in of if w.product}
    for row in sorted(named, key=lambda row: (row[0], order.index(row[1]))):
        cells, most = [], 0.0
        for of in runs.values():
            found = {k: x for k, x in of.items() if (k[1].product, k[1].part) == row}
            flops, ms = (
                sum(k[1].flops * len(x) for k, x in found.items()) / steps,
                quiet(found, steps),
            )
            cells += [f"{ms:.1f}", f"{flops / ms / 1e6:.0f}"] if found else ["", ""]
            most = max(most, flops)
        rows.append((", ".join(row), f"{most / 1e9:.2f}", *cells))
    header = [x for name in runs for x in (f"{name.split()[-1]}, ms", "GFLOP/s")]
    return table_text(("product, pass", "GFLOP", *header), rows)


def operation_lines(ranks: list[Steps], most: int = 12) -> Iterator[str]:
    """The longest operations of each kind, in a step of the mean process."""
    steps = ROUNDS * len(ranks)
    for system, of in pooled(ranks).items():
        for kind in KINDS:
            times = {k: quiet({k: x}, steps) for k, x in of.items() if k[1].kind == kind}
            for key in sorted(times, key=lambda key: -times[key])[:most]:
                what = f"{key[0]} {key[1].product}".strip()
                count = len(of[key]) / steps
                yield f"{system}: {kind}: {times[key]:.2f} ms, {count:g} of {what}"


def compare(name: str, width: int, rows: int) -> None:
    config = configuration(width, rows)
    shapes, ours = Shapes.of(config), Ours(config)
    kept, again = TorchPipeline(config, False), TorchPipeline(config, True)
    systems: dict[str, tuple[Callable[[], float], Callable[[], Spent]]] = {
        "ours": (ours.seconds, ours.profiled),
        "torch recomputing": (again.seconds, lambda: torch_profiled(again, shapes)),
        "torch keeping": (kept.seconds, lambda: torch_profiled(kept, shapes)),
    }
    steps: Steps = {system: [] for system in systems}
    plain: dict[str, list[float]] = {system: [] for system in systems}

    def turn(system: str) -> float:
        seconds, profiled = systems[system]
        for _ in range(2):  # the first finds memory as the other systems left it
            dist.barrier()
            unprofiled = seconds()
        plain[system].append(unprofiled)
        steps[system].append(profiled())
        return unprofiled

    turns = {system: functools.partial(turn, system) for system in systems}
    for run in turns.values():
        run()
    by_turns(turns, ROUNDS)
    steps = {system: of[-ROUNDS:] for system, of in steps.items()}
    times = {system: of[-ROUNDS:] for system, of in plain.items()}
    found = gather((steps, times))
    if dist.get_rank():
        return
    llm = config.model.llm
    print(
        f"{name}: GPT of {llm.layers} layers, width {width}, {rows} rows x"
        f" {config.model.sequence} positions x {config.parallel.microbatches} microbatches;"
        f" medians of {ROUNDS} rounds"
    )
    for rank, (of, plainly) in enumerate(found):
        print(f"\nProcess {rank}, ms of a step\n{kind_table(of, plainly)}", flush=True)
    ranks = [of for of, _ in found]
    print(f"\nMean process, from first quartiles of operations' runs\n{quiet_table(ranks)}")
    print(f"\nProducts, likewise\n{product_table(ranks)}", flush=True)
    if os.environ.get("OPERATIONS"):
        print("\n".join(operation_lines(ranks)), flush=True)


def main() -> None:
    join()
    wait = dist.Work.wait

    def recorded(work: dist.Work, *arguments: Any) -> Any:
        with record_function(WAIT):
            return wait(work, *arguments)

    dist.Work.wait = recorded  # type: ignore[assignment, method-assign]
    for name in sys.argv[1:] or ["small"]:
        compare(name, *SIZES[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
