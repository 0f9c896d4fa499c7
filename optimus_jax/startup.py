"""What a run's start takes: from the start of the process to the end of its first step."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

# what jax reports of itself while it compiles (jax/_src/dispatch.py, compiler.py), summed by part
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "trace_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
    "/jax/compilation_cache/cache_retrieval_time_sec": "cache_s",
}


class Startup:
    """Parts of a start, in order: seconds between one `done` and the next, the first from the start
    of the process. To be made once jax may be imported; listens to what jax compiles until
    `close`."""

    def __init__(self) -> None:
        import jax

        self.parts: dict[str, float] = {}
        self.compiling: dict[str, float] = {}
        self._age, self._clock = age(), time.perf_counter()
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def done(self, part: str) -> None:
        """A part has ended now."""
        now = time.perf_counter()
        self.parts[part] = now - self._clock + self._age
        self._clock, self._age = now, 0.0

    def close(self) -> None:
        import jax

        jax.monitoring.unregister_event_duration_listener(self._hear)

    @property
    def seconds(self) -> float:
        """From the start of the process to the end of the last part."""
        return sum(self.parts.values())

    def values(self) -> dict[str, Any]:
        """As JSON: `seconds` together, of each of the `parts`, and of what jax did to compile:
        `trace_s`, `compile_s` (of which `cache_s` was reading the persistent cache)."""
        return {"seconds": self.seconds, "parts": dict(self.parts), **self.compiling}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"first step after {self.seconds:.1f} s: {parts}"

    def _hear(self, event: str, seconds: float, **_: Any) -> None:
        if event in EVENTS:
            part = EVENTS[event]
            self.compiling[part] = self.compiling.get(part, 0.0) + seconds


def age() -> float:
    """Seconds since the process began; 0 where the system does not say, or says nonsense: in some
    containers the uptime is the container's and the process's start the machine's."""
    try:
        # the 22nd field, and the 2nd, in brackets, may hold spaces (man 5 proc)
        after = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(after[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
