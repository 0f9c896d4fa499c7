"""A schedule with the exchanges at which its values move."""

from __future__ import annotations

import dataclasses

from optimus_jax.schedule.dataflow import Dataflow
from optimus_jax.schedule.simulate import Durations, Exchange, Item, Timing, simulate
from optimus_jax.schedule.task import Schedule, ScheduleError, Task


@dataclasses.dataclass
class Placement:
    """A schedule whose moving values have their exchanges: what each device does, in order."""

    schedule: Schedule
    sequences: list[list[Item]]

    def timing(self, durations: Durations) -> Timing:
        """Its time when every exchange is a rendezvous.

        Raises ScheduleError, naming two tasks and their devices, if exchanges are placed in a
        cycle; and if a moving value has no exchange.
        """
        flow = Dataflow.of(self.schedule)
        moved = {v for s in self.sequences for x in s if isinstance(x, Exchange) for v in x.values}
        for value, (device, task) in flow.consumer.items():
            if flow.moves(value) and value not in moved:
                other, maker = flow.producer[value]
                raise ScheduleError(
                    f"{value} has no exchange: {maker} on device {other} makes it,"
                    f" {task} on device {device} reads it"
                )
        self._check_sides(flow)
        return simulate(self.sequences, flow, durations)

    def _check_sides(self, flow: Dataflow) -> None:
        """Every exchange stands after the task that makes what it moves and before its use."""
        for device, sequence in enumerate(self.sequences):
            at = {id(item): k for k, item in enumerate(sequence)}
            place = {item: k for k, item in enumerate(sequence) if isinstance(item, Task)}
            for item in sequence:
                for value in item.values if isinstance(item, Exchange) else ():
                    maker, user = flow.producer[value], flow.consumer[value]
                    late = maker[0] == device and place[maker[1]] > at[id(item)]
                    if late or (user[0] == device and place[user[1]] < at[id(item)]):
                        raise ScheduleError(
                            f"the {item} on device {device} stands"
                            f" {f'before {maker[1]} makes it' if late else f'after {user[1]}'}"
                        )
