"""Environments with XLA's compiler for GPUs, for tests that compile or ask its jaxlib."""

from __future__ import annotations

import subprocess

import pytest

from optimus_jax.errors import UserError
from optimus_jax.gpu import environment
from optimus_jax.gpu.environment import Environment
from tests.conftest import ROOT


def built(version: str = "") -> Environment:
    """The environment for the tests, made if need be. Skips them where there is no Python for it,
    or no package index; packages that it lacks are a failure."""
    try:
        wanted = environment.environment(version)
    except UserError as error:
        pytest.skip(f"no compiler for GPUs here: {error}")
    try:
        environment.build(wanted, print)
    except UserError as error:
        if environment.NO_INDEX not in str(error):
            raise
        pytest.skip(f"no compiler for GPUs here: {error}")
    return wanted


def run(wanted: Environment, module: str, *words: str) -> str:
    """The last line that a module prints in the environment."""
    line = [str(wanted.python), "-m", module, *words]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, env=environment.variables(wanted)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
