"""python -m optimus_jax.verify: the executor against the sequential model, case by case.

Every case runs a method's Program on CPU devices, with NaN in every slot that nothing was written
to, and compares loss and every gradient with jax.grad of the plain model. Exit code 1 if a bound is
exceeded. --inject breaks the run on purpose, to show that the comparison notices.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from absl import flags

from optimus_jax import cluster, command, processes, verified
from optimus_jax.errors import UserError
from optimus_jax.runtime.small_plan import SmallPlan
from optimus_jax.verified import BOUNDS, INJECTIONS, Case

INFINITE = sys.float_info.max  # JSON has no infinity; a non-finite error is reported as this


@dataclasses.dataclass(frozen=True)
class Result:
    case: Case
    loss_rel_err: float
    grad_rel_err: float

    @property
    def passed(self) -> bool:
        loss, gradient = BOUNDS[self.case.plan.dtype]
        return self.loss_rel_err <= loss and self.grad_rel_err <= gradient


def run(inject: str, match: str) -> list[Result]:
    """Runs all cases whose name has `match`, or with `inject` a few that it breaks."""
    from optimus_jax.runtime import comparison  # jax from here on

    plans = [verified.grid_cases(SmallPlan(2, 2, 1, 5))] if inject else list(verified.all_cases())
    plans = [kept for cases in plans if (kept := [c for c in cases if match in str(c)])]
    results: list[Result] = []
    for number, cases in enumerate(plans):
        plan, pairs = cases[0].plan, [(case.order, case.method) for case in cases]
        errors = comparison.compare(plan, pairs, inject, quick=not flags.FLAGS.optimize)
        found = [Result(case, *e) for case, e in zip(cases, errors, strict=True)]
        results += found
        worst = max(r.grad_rel_err for r in found)
        command.say(f"{number + 1}/{len(plans)} {plan}: {len(found)} cases, worst {worst:.1e}")
    return results


def report(results: list[Result]) -> dict[str, Any]:
    """The JSON object of a run. The worst errors are those in float32; in bfloat16 stand apart."""

    def finite(x: float) -> float:
        return min(x, INFINITE)

    def worst(dtype: str) -> tuple[float, float]:
        found = [r for r in results if r.case.plan.dtype == dtype]
        loss = max((r.loss_rel_err for r in found), default=0.0)
        return finite(loss), finite(max((r.grad_rel_err for r in found), default=0.0))

    exact, rough = worst("float32"), worst("bfloat16")
    return {
        "cases": len(results),
        "plans": len({r.case.plan for r in results}),
        "worst_loss_rel_err": exact[0],
        "worst_grad_rel_err": exact[1],
        "bfloat16_worst_loss_rel_err": rough[0],
        "bfloat16_worst_grad_rel_err": rough[1],
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
    if verified.DEVICES % options.processes:
        raise UserError(f"--processes={options.processes}: takes a divisor of {verified.DEVICES}")
    if options.processes > 1 and cluster.count() == 1:
        line = [sys.executable, "-m", "optimus_jax.verify", *sys.argv[1:]]
        return processes.run_local(line, options.processes, verified.DEVICES // options.processes)
    os.environ["JAX_PLATFORMS"] = "cpu"
    cluster.configure_cpu_devices(max(1, verified.DEVICES // cluster.count()))
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
