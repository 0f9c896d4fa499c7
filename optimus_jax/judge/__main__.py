"""python -m optimus_jax.judge: how far `filled` is from the shortest schedules of small pipelines.

Compares it with stored optima, on sizes drawn at random. Times are event-driven, in forwards of a
stage. With --solve, the constraint solver CP-SAT looks for the optima anew and writes the file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from absl import flags

from optimus_jax import command, tables
from optimus_jax.judge.instances import (
    MEAN_ABOVE,
    STORED,
    WORST_ABOVE,
    Instance,
    Optimum,
    draw,
    fill,
    load,
    store,
)
from optimus_jax.schedule.simulate import event_driven

flags.DEFINE_bool("solve", False, "Find the optima that the file lacks, by CP-SAT, and write it.")
flags.DEFINE_float("seconds", 20.0, "Solver's time for each instance.", lower_bound=0.1)


def main() -> int:
    if flags.FLAGS.solve:
        for line in solved(flags.FLAGS.seconds):
            command.say(line)
    optima = load()
    if not optima:
        raise command.UserError(f"no optima are stored in {STORED}; --solve finds them")
    rows, above = [], []
    began = time.process_time()
    for optimum in optima:
        end = event_driven(fill(optimum.instance), optimum.instance.durations).end
        above.append(optimum.above(end))
        rows.append(
            (
                str(optimum.instance),
                *(f"{seconds:.3f}" for seconds in (end, optimum.best, optimum.bound)),
                f"{above[-1]:.2f} %",
                "optimum" if optimum.proven else "bound",
            )
        )
    seconds = (time.process_time() - began) / len(optima)
    mean, worst = statistics.mean(above), max(above)
    proven = sum(optimum.proven for optimum in optima)
    command.say(tables.table_text(HEADER, rows))
    command.say(
        f"\n{len(optima)} instances, {proven} optima proven; where none is, `filled` is compared"
        f" with the proven bound.\nAbove it: mean {mean:.2f} % (at most {MEAN_ABOVE:g} wanted),"
        f" worst {worst:.2f} % (at most {WORST_ABOVE:g}); {seconds:.2f} s of planning each."
    )
    if flags.FLAGS.json:
        command.emit(
            {"mean_above": mean, "worst_above": worst, "instances": len(optima), "proven": proven}
        )
    return int(mean > MEAN_ABOVE or worst > WORST_ABOVE)


HEADER = ("instance", "filled", "best found", "proven bound", "above", "compared with")


def solved(seconds: float) -> Iterator[str]:
    """Solves what is not proven and got less time, writes the file after each, and says how it
    went. The file may be deleted to begin anew."""
    from optimus_jax.judge.solver import solve

    drawn = draw()
    known: dict[Instance, Optimum] = {o.instance: o for o in load() if o.instance in drawn}
    for instance in drawn:
        old = known.get(instance)
        if old and (old.proven or old.solver_s > 0.9 * seconds):
            continue
        found = solve(instance, old.schedule if old else fill(instance), seconds)
        known[instance] = found.combined(old) if old else found
        store(known[i] for i in drawn if i in known)
        yield f"{instance}: best {found.best:.3f}, bound {found.bound:.3f}, {found.solver_s:.1f} s"


if __name__ == "__main__":
    command.run(main)
