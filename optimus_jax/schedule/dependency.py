"""Dependency points between encoder and LLM, and the paper's global ordering.

F_i is the time at which the LLM needs the features of microbatch i: the start of its first forward,
on the first stage. B_i is the time at which their gradient is there: the end of its last backward.
With EF_i and EB_i for the last end of encoder forwards and the first start of encoder backwards of
microbatch i, a schedule must keep EF_i <= F_i and EB_i >= B_i (Optimus, arXiv 2408.03505, sections
3.1 and 4.3).
"""

from __future__ import annotations

import dataclasses

from optimus_jax.schedule.simulate import Timing
from optimus_jax.schedule.task import Kind, Orders, Schedule, Task


@dataclasses.dataclass(frozen=True)
class DependencyPoints:
    """Times by microbatch; EF and EB only for microbatches with images."""

    F: dict[int, float]
    B: dict[int, float]
    EF: dict[int, float]
    EB: dict[int, float]

    def violations(self, tolerance: float = 1e-9) -> list[str]:
        """In words, every microbatch that breaks EF_i <= F_i or EB_i >= B_i."""
        late = [
            f"EF{i} ends at {t:g}, after F{i} starts at {self.F[i]:g}"
            for i, t in self.EF.items()
            if t > self.F[i] + tolerance
        ]
        early = [
            f"EB{i} starts at {t:g}, before B{i} ends at {self.B[i]:g}"
            for i, t in self.EB.items()
            if t < self.B[i] - tolerance
        ]
        return late + early


def dependency_points(timing: Timing) -> DependencyPoints:
    points = DependencyPoints({}, {}, {}, {})
    for _, item, start, end in timing.log:
        if not isinstance(item, Task):
            continue
        for task in (item.llm_part, item.encoder_part):
            if task is None:
                continue
            i = task.microbatch
            starts, ends = {Kind.F: points.F, Kind.EB: points.EB}, {Kind.B: points.B}
            if task.kind in starts:
                earliest = starts[task.kind]
                earliest[i] = min(earliest.get(i, start), start)
            else:
                latest = ends.get(task.kind, points.EF)
                latest[i] = max(latest.get(i, end), end)
    return points


def order_globally(schedule: Schedule, timing: Timing) -> Schedule:
    """Renames an encoder's microbatches so that the i-th to finish forward feeds the i-th that the
    LLM takes: the encoder's finish order, not the data order, decides (section 4.3, figure 13).

    For schedules whose encoder backwards stand after the LLM's tasks: one between them could come
    to stand before the backward that it waits for."""
    needs = dependency_points(timing).F
    ends: dict[int, dict[int, float]] = {}
    for _, item, _, end in timing.log:
        if isinstance(item, Task) and item.kind == Kind.EF:
            of_encoder = ends.setdefault(item.encoder, {})
            of_encoder[item.microbatch] = max(of_encoder.get(item.microbatch, end), end)
    name: dict[tuple[int, int], int] = {}
    for encoder, times in ends.items():
        finished = sorted(times, key=lambda i: (times[i], i))
        needed = sorted(finished, key=lambda i: (needs[i], i))
        name |= {(encoder, i): j for i, j in zip(finished, needed, strict=True)}

    def rename(task: Task) -> Task:
        if not task.kind.is_encoder:
            return task
        return dataclasses.replace(task, microbatch=name[task.encoder, task.microbatch])

    orders: Orders = tuple(tuple(map(rename, order)) for order in schedule.orders)
    return Schedule(schedule.pipeline, orders)
