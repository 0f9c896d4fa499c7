"""Where a run's numbers go: a progress line, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import pathlib
import statistics

from optimus_jax import command
from optimus_jax.files import replace_text


class MetricLog:
    """Writes from the first process only. On a resume at `step`, lines of later steps, which will
    be made again, are dropped from the file; everything before them stays."""

    def __init__(self, workdir: pathlib.Path, step: int):
        self.writer = None
        if not command.is_first():
            return
        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / "metrics.jsonl"
        self._keep_before(step)
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=step)

    def _keep_before(self, step: int) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if _step_of(line) < step]
        replace_text(self.path, "".join(line + "\n" for line in kept))

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line for `step`, in full precision."""
        if self.writer is None:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _step_of(line: str) -> float:
    """The step of a line, infinite if a crash left it torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Stopwatch:
    """Seconds of each step. The first two, which compile and warm up, do not count."""

    SKIPPED = 2

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def median(self) -> float | None:
        """None before any step counts."""
        counted = self.seconds[self.SKIPPED :]
        return statistics.median(counted) if counted else None

    def quartiles(self) -> tuple[float, float] | None:
        counted = self.seconds[self.SKIPPED :]
        if len(counted) < 4:
            return None
        low, _, high = statistics.quantiles(counted, n=4)
        return low, high


def progress_line(
    step: int, steps: int, loss: float, step_s: float, tokens: int, left_s: float
) -> str:
    """`tokens` in a step, image and text positions alike; `left_s` seconds to the end."""
    minutes, seconds = divmod(round(left_s), 60)
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {loss:7.4f}  {1e3 * step_s:7.1f} ms/step"
        f"  {tokens / step_s:9,.0f} tokens/s  left {minutes}:{seconds:02d}"
    )
