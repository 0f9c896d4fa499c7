"""XLA's schedule dump, on a shortened one."""

from __future__ import annotations

import pathlib

from optimus_jax.gpu.predicted import read, timed_computations

DUMP = """\
hlo_module {
  name: "jit_step"
  computations {
    name: "body"
    instructions {
      name: "gemm"
      metadata {
        op_name: "jit(step)/encoder/dot_general"
      }
      id: 11
    }
    instructions {
      name: "all-reduce-start"
      metadata {
        op_name: "jit(step)/llm_forward/psum"
      }
      id: 12
    }
    instructions {
      name: "parameter"
      id: 10
    }
    id: 1
  }
  computations {
    name: "other"
    id: 2
  }
}
computation_schedules {
  computation_id: 1
  instructions {
    id: 10
  }
  instructions {
    id: 12
    start_timestamp_cycles: 4
    end_timestamp_cycles: 20
  }
  instructions {
    id: 10
    start_timestamp_cycles: 5
    end_timestamp_cycles: 10
  }
  instructions {
    id: 11
    start_timestamp_cycles: 20
    end_timestamp_cycles: 25.5
  }
  scheduler_statistics {
    total_cycles: 99
  }
  cycles_per_microsecond: 2
}
"""


def test_times_of_a_computation() -> None:
    (timed,) = timed_computations(DUMP)
    assert (timed.name, timed.us, timed.idle_us) == ("body", 12.75, 2.0)


def test_a_module_with_nothing_asynchronous_has_no_times(tmp_path: pathlib.Path) -> None:
    assert read(tmp_path) == []
    (tmp_path / "jit_step.schedule.txt").write_text(DUMP)
    assert [t.us for t in read(tmp_path)] == [12.75]
