"""Requests to stop, with real processes; of training runs see train_test.py and launch/."""

from __future__ import annotations

import pytest

from optimus_jax import processes
from tests.processes_test import ROOT, python


def test_sigterm_before_the_first_step_stops_a_resumed_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a job is cancelled while it compiles. Steps go on from 12, and all processes stop
    after the same one."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = """
        from optimus_jax import cluster
        cluster.initialize(watched=True)
        from optimus_jax.stop_request import StopRequest
        stop = StopRequest(2)
        if rank:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(4)  # jax looks for a signal every second, and then asks all processes
        for step in range(12, 40):
            if code := stop.agreed(step, logged=False):
                break
            time.sleep(0.1)
        print("stopped", step, code, flush=True)
    """
    assert processes.run_local(python(program), 2) == 0
    out, err = capfd.readouterr()
    (said,) = [line for line in out.splitlines() if line.startswith("stopped")]
    assert said.endswith(" 143")
    assert f"[1] {said}" in err.splitlines()
