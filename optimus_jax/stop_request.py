"""A request to stop, by SIGTERM or Ctrl-C, that all processes of a run obey at the same step."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np


class StopRequest:
    """Remembers SIGINT and SIGTERM until the step is over; a second SIGINT ends at once.

    Of several processes each may be told alone: a scheduler warns one machine. A SIGTERM is then
    left to jax (cluster.initialize(watched=True)), whose coordination service makes all
    processes agree on a step, at no cost until one comes. Ctrl-C reaches all processes of a
    launcher; they compare notes at logged steps.
    """

    CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

    def __init__(self, processes: int = 1) -> None:
        self.code, self.processes, self.asked = 0, processes, 0
        numbers = self.CODES if processes == 1 else (signal.SIGINT,)
        self.before = {number: signal.signal(number, self._remember) for number in numbers}

    def restore(self) -> None:
        """Gives the signals back to whom they belonged."""
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, _: Any) -> None:
        if self.code and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.code = self.CODES[signal.Signals(number)]

    def agreed(self, step: int, logged: bool) -> int:
        """The exit code if this run is to stop after `step`, the same in all processes; each asks
        at every step, and all at the same ones with `logged`."""
        from jax.experimental import multihost_utils

        if self.processes == 1:
            return self.code
        # Of a SIGTERM before the first question jax makes "stop at number 1", and compares for
        # equality: a resumed run that asked with its steps' numbers would never stop.
        self.asked += 1
        if multihost_utils.reached_preemption_sync_point(self.asked):
            return self.CODES[signal.SIGTERM]
        if not logged:
            return 0
        return int(np.max(multihost_utils.process_allgather(np.int32(self.code))))
