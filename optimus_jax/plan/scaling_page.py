"""docs/scaling.md: one job at each size from 8 to 98,304 GPUs, and what breaks first.

python -m optimus_jax.plan.scaling_page > docs/scaling.md

What people wrote, and what was measured by other commands, is in scaling.md.txt beside this file.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import re
import time
from collections.abc import Iterable, Mapping

from optimus_jax.errors import UserError
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.answer_report import encoder_words
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.outcome import Answer, Outcome
from optimus_jax.plan.paper_page import table
from optimus_jax.plan.traffic import Traffic, traffic
from optimus_jax.plan.zero_cuts import checkpoint_bytes, saved_whole_bytes, uncut_bytes

ROWS = ("h100_8", "h100_64", "h100_512", "h100_3072", "h100_98304")
BATCH = 1536  # of the rows where only the number of GPUs grows
FIXED = {gpus: f"h100_{BATCH}_{gpus}" for gpus in (3072, 6144, 12_288, 24_576, 49_152, 98_304)}
METHOD, BASELINE = "filled", "encoder_first_tuned"
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Row:
    """A job's answer, and the seconds that finding it took here."""

    answer: Answer
    seconds: float

    @property
    def best(self) -> Outcome:
        return self.answer.outcomes[METHOD]

    @property
    def traffic(self) -> Traffic:
        return traffic(self.answer.cluster, self.answer.llm.plan, self.best.plans)


def made(name: str) -> Row:
    """The row of a job of configs/clusters.py. Raises UserError if there is no plan."""
    from configs.clusters import get_config

    began = time.perf_counter()
    found = answer_to(from_config_dict(get_config(name).to_dict()))
    return Row(found, time.perf_counter() - began)


def size(row: Row) -> str:
    return f"{row.answer.cluster.gpus:,}"


def plans(rows: Iterable[Row]) -> str:
    """Models and parallel plans."""
    cells = []
    for row in rows:
        cluster, plan = row.answer.cluster, row.answer.llm.plan
        vits = " + ".join(spec.name for spec in cluster.encoders.values())
        cells.append(
            (
                size(row),
                f"{vits} + {cluster.llm.name}",
                str(plan),
                _encoder(row),
                f"{cluster.batch:,}",
                cluster.microbatches(plan),
                f"{row.seconds:.1f}",
            )
        )
    header = ("GPUs", "models", "LLM plan", "encoder plan, beside each LLM pipeline", "batch")
    return table((*header, "microbatches", "planning, s"), cells)


def _encoder(row: Row) -> str:
    words = encoder_words(row.answer, row.best)
    return words.removeprefix("image ").partition(" beside")[0]


def steps(rows: Iterable[Row]) -> str:
    """Simulated steps of methods, and idle time."""
    cells = []
    for row in rows:
        o = row.answer.outcomes
        shown = (f"{o[m].step:.3f}" if m in o else "-" for m in ("text_only", METHOD, "phased"))
        tuned = f"{o[BASELINE].step:.3f}" if BASELINE in o else "-"
        ratio = f"{o[BASELINE].step / row.best.step:.2f}" if BASELINE in o else "-"
        idle = f"{llm_idle(row):.1%}", f"{filled_idle(row):.1%}"
        cells.append((size(row), *shown, tuned, ratio, *idle, f"{row.best.mfu:.1%}"))
    header = ("GPUs", "LLM alone, s", "`filled`, s", "`phased`, s", "tuned, s", "tuned / `filled`")
    return table((*header, "idle, LLM alone", "idle, `filled`", "MFU, `filled`"), cells)


def llm_idle(row: Row) -> float:
    """Share of the LLM's own step in which a device does not compute."""
    backbone = row.answer.llm.backbone
    return sum(backbone.bubbles().values()) / backbone.step


def filled_idle(row: Row) -> float:
    """Share of the step in which a device works on neither LLM nor encoder."""
    backbone, filling = row.answer.llm.backbone, row.best.filling
    assert filling is not None
    busy = backbone.step - sum(backbone.bubbles().values()) + filling.encoder_seconds
    return 1 - busy / row.best.step


def memory(rows: Iterable[Row]) -> str:
    """Bytes on the fullest device, and what the executor's rules add."""
    cells, capacity = [], 0.0
    for row in rows:
        capacity = row.answer.cluster.capacity / GB
        m, cluster = row.best.memory, row.answer.cluster
        uncut = sum(uncut_bytes(cluster, row.answer.llm.plan, row.best.plans).values())
        parts = (
            m.llm_weights_gradients,
            m.encoder_weights_gradients,
            m.llm_optimiser + m.encoder_optimiser,
            m.llm_activations,
            m.encoder_activations,
            m.communication_buffers,
            m.total,
            uncut,
        )
        whole = saved_whole_bytes(cluster) / GB
        cells.append(
            (
                size(row),
                *(f"{count / GB:.1f}" for count in parts),
                f"{checkpoint_bytes(cluster) / GB:,.0f}",
                f"{whole:,.0f}",
            )
        )
    header = ("GPUs", "LLM weights and gradients", "encoder's", "optimiser", "LLM activations")
    more = (
        "encoder's",
        "buffers",
        f"together, of {capacity:.0f}",
        "+ not cut",
        "checkpoint",
        "saved whole",
    )
    return table((*header, *more), cells)


def links(rows: Iterable[Row]) -> str:
    """Bytes that a device sends, and the share of the step that its link is busy with them."""
    cells = []
    for row in rows:
        plan, chip = row.answer.llm.plan, row.answer.cluster.chip
        shown = []
        for count, link in row.traffic.rows(plan, chip).values():
            share = count / link.bandwidth / row.best.step
            shown.append(f"{count / GB:.2f} ({share:.1%})" if count else "0")
        hop = chip.group_link(row.answer.cluster.gpus).latency
        replicas = plan.dp, max(plan.dp * p.pipelines for p in row.best.plans.values())
        rings = (f"{1e3 * hop * (n - 1):.1f}" for n in replicas)
        cells.append((size(row), *shown, ends(row), " / ".join(rings)))
    header = ("GPUs", "tp", "pp", "dp, weights gathered", "dp, gradients scattered")
    return table((*header, "dp, s: all / counted", "a ring's latency, ms: LLM / encoder"), cells)


def ends(row: Row) -> str:
    """Seconds of all gathering and scattering at the link's bandwidth, which the executor does
    before the ticks and after them, and what the simulated step counts of the LLM's."""
    backbone, cluster = row.answer.llm.backbone, row.answer.cluster
    every = row.traffic.dp / cluster.chip.group_link(cluster.gpus).bandwidth
    return f"{every:.3f} / {backbone.all_gather + backbone.reduce_scatter:.3f}"


def fixed(found: Mapping[int, Row | str]) -> str:
    """The same batch on more and more GPUs."""
    cells: list[tuple[object, ...]] = []
    for gpus, row in found.items():
        if isinstance(row, str):
            cells.append((f"{gpus:,}", *["-"] * 6, row))
            continue
        plan, step = row.answer.llm.plan, row.best.step
        dp = row.traffic.dp / row.answer.cluster.chip.network.bandwidth / step
        cells.append(
            (
                f"{gpus:,}",
                row.answer.cluster.microbatches(plan),
                plan.chunks,
                f"{step:.3f}",
                f"{llm_idle(row):.1%}",
                f"{row.best.mfu:.1%}",
                f"{dp:.0%}",
                "",
            )
        )
    header = ("GPUs", "microbatches", "chunks", "`filled`, s", "idle, LLM alone", "MFU")
    return table((*header, "dp traffic, of the step", "why none"), cells)


def fixed_rows() -> dict[int, Row | str]:
    """Rows of one batch by GPUs, with the error's words where there is no plan."""
    found: dict[int, Row | str] = {}
    for gpus, name in FIXED.items():
        try:
            found[gpus] = made(name)
        except (UserError, ValueError) as error:
            found[gpus] = str(error).splitlines()[0].removeprefix("config.")
    return found


def tables(rows: list[Row], batch: Mapping[int, Row | str]) -> dict[str, str]:
    """The page's tables by their names in scaling.md.txt."""
    return {
        "plans": plans(rows),
        "steps": steps(rows),
        "memory": memory(rows),
        "links": links(rows),
        "fixed": fixed(batch),
    }


def page(fields: Mapping[str, str]) -> str:
    """The whole page, with these tables."""
    text = importlib.resources.files(__package__).joinpath("scaling.md.txt").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda m: fields[m[1]], text)


def main() -> None:
    print(page(tables([made(name) for name in ROWS], fixed_rows())), end="")


if __name__ == "__main__":
    main()
