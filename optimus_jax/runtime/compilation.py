"""Options of the XLA compiler."""

from __future__ import annotations

import functools
from typing import Any

import jax


@functools.cache
def quick_compile() -> dict[str, Any]:
    """Options for code that runs once or in a check: XLA compiles it for the CPU in a quarter of
    the time, by the same passes but without optimising the machine code. Those that this jaxlib
    knows: newer ones have no second kind of emitters."""
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    return {name: value for name, value in options.items() if _known({name: value})}


def _known(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
