"""Orders of actions are those of torch: as tables, as its steps run them, as its CSV files."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimus_jax.schedule.action_orders import (
    ACTION_ORDERS,
    one_f_one_b,
    rank_of_stage,
)
from optimus_jax.schedule.actions import (
    Action,
    ActionTable,
    from_csv,
    to_csv,
)
from optimus_jax.schedule.task import ScheduleError

TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
}
GOLDEN = Path(__file__).parent / "golden" / "torch_orders.json"
GRID = list(itertools.product((2, 3, 4), (1, 2, 3), range(2, 10)))  # stages, chunks, microbatches


def torch_schedule(name: str, stages: int, microbatches: int, chunks: int) -> Any:
    """torch's schedule on rank 0, of stages that hold nothing."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    cls = getattr(schedules, TORCH_CLASSES[name])
    held = [
        SimpleNamespace(num_stages=stages * chunks, group_size=stages, group_rank=0, submod=None)
        for _ in range(chunks)
    ]
    single = issubclass(cls, schedules.PipelineScheduleSingle)
    if single and chunks > 1:
        raise ValueError(f"{cls.__name__} takes one stage for each rank")
    return cls(held[0] if single else held, microbatches)


def torch_table(name: str, stages: int, microbatches: int, chunks: int) -> ActionTable | None:
    """The computation in torch's own order, idle cells left out; None for sizes that it refuses."""
    try:
        schedule = torch_schedule(name, stages, microbatches, chunks)
    except ValueError:
        return None
    return tuple(
        tuple(
            Action(a.stage_index, a.computation_type.value, a.microbatch_index)
            for a in schedule.pipeline_order[rank]
            if a is not None and a.is_compute_op
        )
        for rank in range(stages)
    )


def torch_run(name: str, stages: int, microbatches: int) -> ActionTable | None:
    """What the step of a schedule with one stage for each rank runs; None for sizes that it
    refuses."""
    try:
        schedule = torch_schedule(name, stages, microbatches, 1)
    except ValueError:
        return None
    ran: list[list[Action]] = []
    for rank in range(stages):
        ran.append([])

        def record(kind: str, rank: int = rank) -> Any:
            return lambda i, *args, **kwargs: ran[rank].append(Action(rank, kind, i))

        schedule._stage = SimpleNamespace(
            stage_index=rank,
            is_last=rank == stages - 1,
            forward_one_chunk=record("F"),
            backward_one_chunk=record("B"),
            perform_reduce_grad=lambda scale: None,
            **{f"get_{p}_{o}_ops": lambda i: [] for p in ("fwd", "bwd") for o in ("recv", "send")},
        )
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * microbatches)
    return tuple(map(tuple, ran))


def own_table(name: str, stages: int, microbatches: int, chunks: int) -> ActionTable | None:
    try:
        return ACTION_ORDERS[name](stages, microbatches, chunks)
    except ScheduleError:
        return None


def digests(tables: Callable[[str, int, int, int], ActionTable | None]) -> dict[str, str | None]:
    """By name and sizes, the beginning of the SHA-256 of a table's CSV."""
    found = {}
    for name, (stages, chunks, microbatches) in itertools.product(TORCH_CLASSES, GRID):
        table = tables(name, stages, microbatches, chunks)
        text = to_csv(table).encode() if table is not None else None
        key = f"{name} P{stages} V{chunks} M{microbatches}"
        found[key] = hashlib.sha256(text).hexdigest()[:16] if text is not None else None
    return found


def torch_truth(name: str, stages: int, microbatches: int, chunks: int) -> ActionTable | None:
    """What torch runs; 1F1B is drawn otherwise (below)."""
    if name == "1f1b":
        return torch_run(name, stages, microbatches) if chunks == 1 else None
    return torch_table(name, stages, microbatches, chunks)


def test_equal_to_the_tables_that_torch_made() -> None:
    """The file holds what torch 2.13 made, so that this needs no torch. Write it again with
    python -m tests.schedule.torch_orders_test."""
    stored = json.loads(GOLDEN.read_text())
    made = digests(own_table)
    assert stored.keys() == made.keys()
    wrong = [key for key, value in stored.items() if value is not None and made[key] != value]
    assert not wrong
    assert sum(value is not None for value in stored.values()) >= 200


def test_the_file_is_that_of_torch() -> None:
    pytest.importorskip("torch.distributed.pipelining.schedules")
    assert json.loads(GOLDEN.read_text()) == digests(torch_truth)


@pytest.mark.parametrize("name", [n for n in TORCH_CLASSES if n != "1f1b"])
def test_equal_to_the_tables_of_torch(name: str) -> None:
    compared = 0
    for stages, chunks, microbatches in GRID:
        wanted = torch_table(name, stages, microbatches, chunks)
        one_chunk = name.startswith("interleaved") and chunks == 1  # needs no equal groups
        if wanted is not None or not one_chunk:
            assert own_table(name, stages, microbatches, chunks) == wanted
        compared += wanted is not None
    assert compared >= 24


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_to_what_the_steps_of_torch_run(name: str) -> None:
    """torch 2.13 draws 1F1B with the last rank's forwards numbered from 1, and runs them from 0."""
    compared = 0
    for stages, microbatches in itertools.product((2, 3, 4), range(2, 10)):
        wanted = torch_run(name, stages, microbatches)
        if wanted is not None:
            assert own_table(name, stages, microbatches, 1) == wanted
            compared += 1
    assert compared >= 21


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (3, 5), (4, 8)])
def test_the_picture_of_torch_1f1b_differs_on_the_last_rank_only(
    stages: int, microbatches: int
) -> None:
    table = torch_table("1f1b", stages, microbatches, 1)
    assert table is not None
    assert table[:-1] == one_f_one_b(stages, microbatches)[:-1]


@pytest.mark.parametrize(
    ("name", "chunks"), [("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zb_v", 2)]
)
def test_csv_files_go_to_torch_and_back(name: str, chunks: int, tmp_path: Any) -> None:
    stages, microbatches = 4, 8
    theirs = torch_schedule(name, stages, microbatches, chunks)
    path = str(tmp_path / "order.csv")
    theirs._dump_csv(path, format="compute_only")
    with open(path, newline="") as file:
        text = file.read()
    table = own_table(name, stages, microbatches, chunks)
    assert ",," in text and from_csv(text) == table

    with open(path, "w", newline="") as file:
        file.write(to_csv(table))
    theirs.pipeline_order = {}
    theirs._load_csv(path, format="compute_only")
    read = [[str(action) for action in theirs.pipeline_order[rank]] for rank in range(stages)]
    assert read == [[str(action) for action in actions] for actions in table]
    placed = tuple(theirs.stage_index_to_group_rank[v] for v in range(stages * chunks))
    assert placed == rank_of_stage(name, stages, chunks)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(digests(torch_truth), indent=1) + "\n")
