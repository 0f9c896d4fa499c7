"""What no packing of encoder work can beat."""

from __future__ import annotations

from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task


def lower_bound(llm: Orders, pipe: Pipeline, durations: Durations) -> float:
    """Seconds that no packing on this LLM order can beat: no LLM task starts before the first
    microbatch is encoded by all devices at once, the last backward is spread likewise, and no
    device does more than all its time."""
    alone = event_driven(Schedule(pipe, llm), durations)
    forward = _at_once(Kind.EF, pipe, durations)
    backward = _at_once(Kind.EB, pipe, durations)
    work = sum(end - start for row in alone.intervals for start, end in row)
    work += pipe.microbatches * sum(
        _work(kind, k, pipe, durations)
        for kind in (Kind.EF, Kind.EB)
        for k in range(len(pipe.encoders))
    )
    around = durations.gather + durations.scatter
    if durations.overlap:
        forward, backward = (
            max(0.0, time - hidden)
            for time, hidden in ((forward, durations.gather), (backward, durations.scatter))
        )
        around = 0.0
    drained = alone.intervals[pipe.entry][-1][1] + backward
    if not durations.overlap:
        drained += durations.scatter
    return max(forward + max(alone.end, drained), work / pipe.stages + around)


def _work(kind: Kind, encoder: int, pipe: Pipeline, durations: Durations) -> float:
    """Seconds of one microbatch in an encoder, over all its stages."""
    task = Task(kind, 0, encoder=encoder)
    return sum(durations.of(task, d, pipe) for d in pipe.devices_of(encoder, 0))


def _at_once(kind: Kind, pipe: Pipeline, durations: Durations) -> float:
    """Seconds in which all devices together encode one microbatch: the pipeline with most of an
    encoder's units takes one unit through its stages, and each further one occupies the slowest."""
    longest, everything = 0.0, 0.0
    for k, encoder in enumerate(pipe.encoders):
        stages = [
            durations.of(Task(kind, 0, units=(0,), encoder=k), d, pipe)
            for d in pipe.devices_of(k, 0)
        ]
        most = -(-encoder.units // pipe.pipelines(k))
        longest = max(longest, sum(stages) + (most - 1) * max(stages))
        everything += encoder.units * sum(stages) / pipe.stages
    return max(longest, everything)
