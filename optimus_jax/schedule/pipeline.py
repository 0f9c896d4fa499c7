"""Orders of the LLM's own tasks: GPipe, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Callable

from optimus_jax.schedule.task import Kind, Orders, Pipeline, ScheduleError, Task


def gpipe(pipe: Pipeline) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019).

        0: F0 F1 F2 B0 B1 B2
        1: F0 F1 F2 B0 B1 B2

    Raises ScheduleError if the pipeline has several chunks.
    """
    if pipe.chunks > 1:
        raise ScheduleError(f"gpipe runs one chunk for each stage, got {pipe.chunks}")
    forwards = [Task(Kind.F, i) for i in range(pipe.microbatches)]
    backwards = [Task(Kind.B, i) for i in range(pipe.microbatches)]
    return _held((tuple(forwards + backwards),) * pipe.stages, pipe)


def one_f_one_b(pipe: Pipeline) -> Orders:
    """1F1B; with several chunks, Megatron-LM's interleaved 1F1B (Narayanan et al. 2021, 2.2).

        0: F0 F1 B0 F2 B1 B2
        1: F0 B0 F1 B1 F2 B2

    Stage s runs a few warm-up forwards, alternates one forward and one backward, then drains.
    With chunks the k-th forward takes microbatches in groups of `stages`, chunk by chunk.
    Raises ScheduleError if there are several chunks and the microbatches do not fill their groups.
    """
    stages, chunks, total = pipe.stages, pipe.chunks, pipe.microbatches * pipe.chunks
    if chunks > 1 and pipe.microbatches % stages:
        below = pipe.microbatches // stages * stages
        near = " or ".join(str(n) for n in (below, below + stages) if n)
        raise ScheduleError(
            f"interleaved 1F1B on {stages} stages takes microbatches in multiples of {stages}:"
            f" got {pipe.microbatches}, near it is {near}"
        )

    def position(k: int) -> tuple[int, int]:
        """Microbatch and chunk of the k-th forward."""
        group, within = divmod(k, stages * chunks)
        return group * stages + within % stages, within // stages

    def forward(k: int) -> Task:
        return Task(Kind.F, *position(k)) if chunks > 1 else Task(Kind.F, k)

    def backward(k: int) -> Task:
        if chunks == 1:
            return Task(Kind.B, k)
        microbatch, chunk = position(k)
        return Task(Kind.B, microbatch, chunks - 1 - chunk)

    orders = []
    for stage in range(stages):
        below = stages - stage - 1
        warmup = min(total, 2 * below + (chunks - 1) * stages if chunks > 1 else below)
        order = [forward(k) for k in range(warmup)]
        for k in range(total - warmup):
            order += [forward(warmup + k), backward(k)]
        orders.append(tuple(order + [backward(k) for k in range(total - warmup, total)]))
    return _held(tuple(orders), pipe)


def _held(orders: Orders, pipe: Pipeline) -> Orders:
    """Without tasks of virtual stages that have no layers."""
    return tuple(
        tuple(task for task in order if pipe.runs(device, task.chunk))
        for device, order in enumerate(orders)
    )


ORDERS: dict[str, Callable[[Pipeline], Orders]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
