"""The figures of gpu.py as tables: medians, quartiles, shares of the peak, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from optimus_jax.cost.flops import StepFlops, mfu
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.measure.rounds import ratio
from optimus_jax.tables import table_text

RATIO, MFU, WIDTH, OVERHEAD = 1.0, 0.55, 4096, 0.03  # goals: at least, at least, from, at most


def chip_of(device: str) -> str | None:
    """The entry of cost/hardware.py that a device's name holds, None where there is none."""
    return next((name for name in HARDWARE if name in device.lower()), None)


def text(figures: dict[str, Any]) -> list[str]:
    """A table for each part that was measured, and what the goals say."""
    place = figures["where"]
    chip = chip_of(place["device"])
    found = [", ".join(f"{name} {value}" for name, value in place.items() if value)]
    if chip is None:
        found.append("No peak is known of this device: no shares of it. A CPU's times say nothing.")
    if "blocks" in figures:
        found += _blocks(figures["blocks"], chip)
    if "loops" in figures:
        found.append(_loops(figures["loops"]))
    if "step" in figures:
        found += _step(figures["step"], chip)
    if "default" in figures:
        found.append(_default(figures["default"]))
    for one in figures.get("shards", ()):
        found += _shard(one, chip)
    return found


def _quartiles(values: Iterable[float], scale: float) -> tuple[str, str]:
    """Median, and the quartiles as a range."""
    low, median, high = (scale * x for x in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{median:.2f}", f"{low:.2f} to {high:.2f}"


def _share(flops: float | None, seconds: float, chip: str | None) -> str:
    if chip is None or not flops or seconds <= 0:
        return ""
    return f"{100 * mfu(StepFlops(flops, flops), seconds, 1, HARDWARE[chip]):.1f} %"


def best(seconds: dict[str, list[float]], of: str) -> str | None:
    """The system of least median among those whose names begin so."""
    medians = {name: statistics.median(x) for name, x in seconds.items() if name.startswith(of)}
    return min(medians, key=medians.__getitem__) if medians else None


def _blocks(cases: list[dict[str, Any]], chip: str | None) -> list[str]:
    rows, goals = [], []
    for one in cases:
        case, seconds = one["case"], one["seconds"]
        name, width = case["name"], case["part"]["width"]
        for system, values in seconds.items():
            median = statistics.median(values)
            rows.append(
                (
                    f"{name}, {case['rows']} x {case['length']}: {system}",
                    *_quartiles(values, 1e3),
                    _share(one["flops"], median, chip),
                    _share(one["flops_exact"], median, chip),
                    f"{one['difference'][system]:.1e}",
                )
            )
        ours, theirs = best(seconds, "jax"), best(seconds, "torch")
        if ours and theirs:
            against = ratio(seconds[theirs], seconds[ours])
            verdict = _verdict(chip, against.median >= RATIO)
            goals.append(
                f"{name}: {theirs} / {ours} {against.median:.3f} (IQR {against.iqr:.3f}), goal at"
                f" least {RATIO:.1f}{verdict}"
            )
        if ours and chip and width >= WIDTH:
            flops = StepFlops(one["flops"], one["flops"])
            share = mfu(flops, statistics.median(seconds[ours]), 1, HARDWARE[chip])
            goals.append(
                f"{name}: MFU {100 * share:.1f} % of {HARDWARE[chip].flops['bfloat16'] / 1e12:.0f}"
                f" TFLOP/s, goal at least {100 * MFU:.0f} %{_verdict(chip, share >= MFU)}"
            )
    header = "block, rows x positions", "median, ms", "quartiles", "MFU", "MFU, exact", "apart"
    return [table_text(header, rows), "\n".join(goals)]


def _verdict(chip: str | None, met: bool) -> str:
    if chip is None:
        return ""
    return ": met" if met else ": missed"


def _loops(found: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{one['loops']} loops, {one['trips']} each" if one["loops"] else one["what"],
            *_quartiles(one["tick_s"], 1e6),
            *_quartiles(one["beyond_scan_s"], 1e6),
        )
        for one in found
    ]
    header = "a tick with", "median, us", "quartiles", "beyond the scan, us", "quartiles"
    return table_text(header, rows)


def _step(found: dict[str, Any], chip: str | None) -> list[str]:
    tasks = [
        (
            one["task"],
            f"{1e3 * one['median_s']:.3f}",
            f"{1e3 * one['iqr_s']:.3f}",
            _share(one["flops"], one["median_s"], chip),
        )
        for one in found["tasks"]
    ]
    steps = found["steps"]
    over = ratio(steps["executor"], steps["plain"])
    rows = [(name, *_quartiles(values, 1e3)) for name, values in steps.items()]
    verdict = _verdict(chip, over.median <= 1 + OVERHEAD)
    return [
        table_text(("task of the stage", "median, ms", "IQR", "of the peak"), tasks),
        table_text(("whole step", "median, ms", "quartiles"), rows),
        f"executor / plain {over.median:.3f} (IQR {over.iqr:.3f}), goal at most"
        f" {1 + OVERHEAD:.2f}{verdict}",
    ]


def _default(found: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{one['dtype']}, {one['ticks']} ticks",
            *_quartiles(one["step_s"], 1e3),
            f"{1e3 * one['predicted_s']:.2f}",
            f"{1e3 * one['first_s']:.2f}",
            f"{one['compile_s']:.1f}",
        )
        for one in found
    ]
    header = "configs/digits.py, pp 1", "step, ms", "quartiles", "predicted", "first", "compile, s"
    return table_text(header, rows)


def _shard(one: dict[str, Any], chip: str | None) -> list[str]:
    rows = []
    for row in one["kernels"]:
        name = " ".join(filter(None, (row["pass"], row["kernel"], row["core"])))
        expected = row["predicted_s"][one["chip"]]
        rows.append(
            (
                name,
                *_quartiles(row["seconds"], 1e6),
                f"{row['flops'] / 1e9:.3g}" if row["flops"] else "",
                _share(row["flops"], statistics.median(row["seconds"]), chip),
                f"{1e6 * expected:.1f}",
                f"{row['ratio']:.2f}",
            )
        )
    memory = f", at most {one['peak_bytes'] / 1e9:.1f} GB held" if one["peak_bytes"] else ""
    (loop, _) = _quartiles(one["loop_s"], 1e6)
    header = "kernel", "median, us", "quartiles", "GFLOP", "of the peak", "predicted", "ratio"
    return [
        f"{one['model']}, a shard of tp {one['tp']}, {one['rows']} x {one['length']},"
        f" {one['dtype']}; {loop} us of the loop in each{memory}; ratio: predicted for"
        f" {one['chip']} / measured",
        table_text(header, rows),
    ]
