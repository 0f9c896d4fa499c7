"""What a run leaves in metrics.jsonl, also after a crash, and how it times its steps."""

from __future__ import annotations

import json
import pathlib

import pytest

from optimus_jax.metrics import MetricLog, Stopwatch, progress_line


def write(workdir: pathlib.Path, start: int, steps: range, loss: float) -> None:
    log = MetricLog(workdir, start)
    for step in steps:
        log.write(step, {"loss": loss + step})
    log.close()


def read(workdir: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_lines_hold_every_bit_of_a_number(tmp_path: pathlib.Path) -> None:
    log = MetricLog(tmp_path / "new" / "run", 0)
    log.write(0, {"loss": 0.1 + 0.2, "grad_norm": 1e-300})
    log.close()
    assert read(tmp_path / "new" / "run") == [
        {"step": 0, "loss": 0.30000000000000004, "grad_norm": 1e-300}
    ]
    assert list((tmp_path / "new" / "run" / "tensorboard").iterdir())


def test_a_resume_drops_later_lines_and_keeps_earlier_ones(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, range(6), loss=10)
    write(tmp_path, 4, range(4, 8), loss=20)
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [
        *((step, 10 + step) for step in range(4)),
        *((step, 20 + step) for step in range(4, 8)),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


@pytest.mark.parametrize(
    "torn", ['{"step": 2, "lo', "{", "", "null", "[2]", '"step"', '{"loss": 1}', '{"step": null}']
)
def test_a_resume_drops_lines_that_a_crash_left_torn(tmp_path: pathlib.Path, torn: str) -> None:
    write(tmp_path, 0, range(2), loss=10)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)  # and no end of line
    write(tmp_path, 5, range(5, 6), loss=20)
    assert [line["step"] for line in read(tmp_path)] == [0, 1, 5]


def test_a_new_run_in_an_old_folder_starts_its_file_anew(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, range(3), loss=10)
    write(tmp_path, 0, range(2), loss=20)
    assert [line["loss"] for line in read(tmp_path)] == [20, 21]


def test_only_the_first_process_writes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", 0, range(2), loss=10)
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    write(tmp_path / "run", 0, range(1), loss=20)
    write(tmp_path / "other", 0, range(1), loss=20)
    assert len(read(tmp_path / "run")) == 2
    assert not (tmp_path / "other").exists()


def watch_of(*seconds: float) -> Stopwatch:
    watch = Stopwatch()
    for second in seconds:
        watch.add(second)
    return watch


def test_the_first_two_steps_are_not_timed() -> None:
    assert watch_of().median() is None
    assert watch_of(100, 100).median() is None
    assert watch_of(100, 100, 3).median() == 3
    assert watch_of(100, 100, 3, 5, 1).median() == 3
    assert watch_of(100, 100, 3, 5).median() == 4


def test_quartiles_need_four_timed_steps() -> None:
    assert watch_of(100, 100, 1, 2, 3).quartiles() is None
    assert watch_of(100, 100, 1, 2, 3, 4, 5, 6, 7).quartiles() == (2, 6)
    low, high = watch_of(100, 100, 5, 5, 5, 5).quartiles()
    assert (low, high) == (5, 5)


def test_the_progress_line_in_full() -> None:
    line = progress_line(50, 1750, 2.34567, 0.0125, tokens=1568, left_s=125.4)
    assert line == ("step   50/1750  loss  2.3457     12.5 ms/step    125,440 tokens/s  left 2:05")
