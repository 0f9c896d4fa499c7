"""Dependency points between encoder and LLM, and the paper's global ordering.

F_i is the time at which the LLM needs the features of microbatch i: the start of the first chunk's
forward on the first stage. B_i is the time at which their gradient is there: the end of the first
chunk's backward on the first stage. With EF_i and EB_i for the last end of encoder forwards and the
first start of encoder backwards of microbatch i, a schedule must keep EF_i <= F_i and EB_i >= B_i
(Optimus, arXiv 2408.03505, sections 3.1 and 4.3).
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
    for device, task, start, end in timing.log:
        if not isinstance(task, Task):
            continue
        i = task.microbatch
        if task.kind == Kind.EF:
            points.EF[i] = max(points.EF.get(i, end), end)
        elif task.kind == Kind.EB:
            points.EB[i] = min(points.EB.get(i, start), start)
        elif device == 0 and task.chunk == 0:
            if task.kind == Kind.F:
                points.F[i] = start
            else:
                points.B[i] = end
    return points


def order_globally(schedule: Schedule, timing: Timing) -> Schedule:
    """Renames the encoder's microbatches so that the i-th to finish forward feeds the i-th that the
    LLM takes: the encoder's finish order, not the data order, decides (section 4.3, figure 13).

    For schedules whose encoder backwards stand after the LLM's tasks: one between them could come
    to stand before the backward that it waits for."""
    points = dependency_points(timing)
    finished = sorted(points.EF, key=lambda i: (points.EF[i], i))
    needed = sorted(finished, key=lambda i: (points.F[i], i))
    name = dict(zip(finished, needed, strict=True))

    def rename(task: Task) -> Task:
        if not task.kind.is_encoder:
            return task
        return dataclasses.replace(task, microbatch=name[task.microbatch])

    orders: Orders = tuple(tuple(map(rename, order)) for order in schedule.orders)
    return Schedule(schedule.pipeline, orders)
