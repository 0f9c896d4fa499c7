"""Timelines as text: two lanes for each device, the LLM's tasks above the encoder's."""

from __future__ import annotations

from collections.abc import Sequence

from optimus_jax.schedule.bubbles import Lane

WIDTH = 120


def text_grid(lanes: Sequence[Lane], width: int = WIDTH, unit: float | None = None) -> str:
    """A picture of tasks to scale, `unit` seconds a column (default: the whole step in `width`).

        device 0 llm |F0  F1  ........B0      F2  B1      ...
                 enc |....EF2.............................EB0 ...

    A task begins with its name, cut where it is too short for it, and goes on in spaces; dots are
    idle time.
    """
    step = max((end for lane in lanes for *_, end in lane), default=0.0)
    if unit is None:
        unit = step / width or 1.0
    columns = max(1, round(step / unit))
    lines = []
    for device, lane in enumerate(lanes):
        rows = {False: ["."] * columns, True: ["."] * columns}
        for task, start, end in lane:
            first = min(round(start / unit), columns - 1)
            last = max(first + 1, min(round(end / unit), columns))
            name = str(task)[: last - first].ljust(last - first)
            rows[task.kind.is_encoder][first:last] = name
        head = f"device {device:<{len(str(len(lanes) - 1))}}"
        lines.append(f"{head} llm |{''.join(rows[False])}|")
        lines.append(f"{' ' * len(head)} enc |{''.join(rows[True])}|")
    return "\n".join(lines)
