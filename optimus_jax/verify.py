"""python -m optimus_jax.verify: the executor against the sequential model, case by case.

Every case runs a method's Program on CPU devices, with NaN in every slot that nothing was written
to, and compares loss and every gradient with jax.grad of the plain model. Exit code 1 if a bound is
exceeded. --inject breaks the run on purpose, to show that the comparison notices.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from optimus_jax import cluster, command, processes
from optimus_jax.errors import UserError
from optimus_jax.schedule.methods import METHODS
from optimus_jax.schedule.pipeline import ORDERS

LOSS_BOUND, GRADIENT_BOUND = 1e-6, 1e-5
DEVICES = 8
INJECTIONS = ("drop_microbatch", "swap_slots", "skip_reduce")
INFINITE = sys.float_info.max  # JSON has no infinity; a non-finite error is reported as this


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one compilation serves."""

    pp: int
    dp: int
    chunks: int
    microbatches: int


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    order: str
    method: str

    def __str__(self) -> str:
        s = self.shape
        return f"{self.method}/{self.order} pp{s.pp} dp{s.dp} V{s.chunks} M{s.microbatches}"


@dataclasses.dataclass(frozen=True)
class Result:
    case: Case
    loss_rel_err: float
    grad_rel_err: float

    @property
    def passed(self) -> bool:
        return self.loss_rel_err <= LOSS_BOUND and self.grad_rel_err <= GRADIENT_BOUND


def all_shapes() -> Iterator[Shape]:
    """pp 1, 2, 4 x dp 1, 2 x V 1, 2 x M in {1, pp - 1, pp, 2 pp + 1}, where legal."""
    for pp in (1, 2, 4):
        for dp in (1, 2):
            for chunks in (1, 2):
                for microbatches in sorted({1, pp - 1, pp, 2 * pp + 1} - {0}):
                    if chunks == 1 or microbatches % pp == 0:
                        yield Shape(pp, dp, chunks, microbatches)


def cases_of(shape: Shape) -> list[Case]:
    orders = [name for name in ORDERS if shape.chunks == 1 or name == "1f1b"]
    return [Case(shape, order, method) for order in orders for method in METHODS]


def run(inject: str, match: str) -> list[Result]:
    """Runs all cases whose name has `match`, or with `inject` a few that it breaks."""
    from optimus_jax.runtime import comparison  # jax from here on

    shapes = [Shape(2, 2, 1, 5)] if inject else list(all_shapes())
    results: list[Result] = []
    for number, shape in enumerate(shapes):
        cases = [case for case in cases_of(shape) if match in str(case)]
        if not cases:
            continue
        pairs = [(case.order, case.method) for case in cases]
        errors = comparison.compare(
            **dataclasses.asdict(shape), cases=pairs, inject=inject, quick=not flags.FLAGS.optimize
        )
        found = [Result(case, *e) for case, e in zip(cases, errors, strict=True)]
        results += found
        worst = max(r.grad_rel_err for r in found)
        command.say(f"{number + 1}/{len(shapes)} {shape}: {len(found)} cases, worst {worst:.1e}")
    return [Result(r.case, *e) for r, e in zip(results, comparison.agree(results), strict=True)]


def report(results: list[Result]) -> dict[str, Any]:
    """The JSON object of a run."""

    def finite(x: float) -> float:
        return min(x, INFINITE)

    return {
        "cases": len(results),
        "worst_loss_rel_err": finite(max((r.loss_rel_err for r in results), default=0.0)),
        "worst_grad_rel_err": finite(max((r.grad_rel_err for r in results), default=0.0)),
        "list": [
            {
                "case": str(r.case),
                "loss_rel_err": finite(r.loss_rel_err),
                "grad_rel_err": finite(r.grad_rel_err),
            }
            for r in results
        ],
    }


flags.DEFINE_integer("processes", 1, "Processes to run in, on this machine.", lower_bound=1)
flags.DEFINE_enum("inject", "", ["", *INJECTIONS], "A fault to put into the run.")
flags.DEFINE_string("match", "", "Run only cases with this text in their names.")
flags.DEFINE_bool(
    "optimize", False, "Compile as for training: the same checks, four times as long."
)


def main() -> int:
    options = flags.FLAGS
    if DEVICES % options.processes:
        raise UserError(f"--processes={options.processes}: takes a divisor of {DEVICES}")
    if options.processes > 1 and cluster.count() == 1:
        line = [sys.executable, "-m", "optimus_jax.verify", *sys.argv[1:]]
        return processes.run_local(line, options.processes, DEVICES // options.processes)
    os.environ["JAX_PLATFORMS"] = "cpu"
    cluster.configure_cpu_devices(max(1, DEVICES // cluster.count()))
    cluster.initialize()
    results = run(options.inject, options.match)
    failed = [r for r in results if not r.passed]
    for r in failed:
        command.say(f"FAILED {r.case}: loss {r.loss_rel_err:.1e} gradient {r.grad_rel_err:.1e}")
    command.say(f"{len(results)} cases, {len(failed)} failed")
    if options.json:
        command.emit(report(results))
    return int(bool(failed) or not results)


if __name__ == "__main__":
    command.run(main)
