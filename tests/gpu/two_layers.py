"""Two tensor-parallel layers with encoder work tied to their collectives, compiled for absent GPUs.

Runs in the environment of the compiler: python -m tests.gpu.two_layers h100x8. Prints a JSON object
with the counts of the program as it is, without ties, and with synchronous collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax import xla_flags
from optimus_jax.gpu.compilation import Compiled, compile_step, compile_synchronous
from optimus_jax.gpu.tally import tally
from optimus_jax.gpu.target import target

TENSOR, LAYERS = 4, 2
TOKENS, WIDTH, HIDDEN = 4096, 4096, 8192
ENCODER, WIDER = 1024, 4096


@jax.custom_vjp
def enter(x: jax.Array) -> jax.Array:
    """Before a product whose weight is cut by columns."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tensor"),))


@jax.custom_vjp
def leave(x: jax.Array) -> jax.Array:
    """After a product whose weight is cut by rows."""
    return lax.psum(x, "tensor")


leave.defvjp(lambda x: (lax.psum(x, "tensor"), None), lambda _, g: (g,))


def beside(
    tied: bool, collective: Callable[[Any], Any], x: Any, piece: Callable[..., Any], *own: Any
) -> tuple[Any, Any]:
    """collective(x) and piece(*own); `tied`, the piece is to run within the collective."""
    if tied:
        x, own = lax.optimization_barrier((x, own))
    with jax.named_scope("paired"):
        x = collective(x)
    with jax.named_scope("encoder"):
        made = piece(*own)
    return lax.optimization_barrier((x, made)) if tied else (x, made)


def layer(tied: bool, weights: Any, x: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
    (up, down), (encoder_up, encoder_down) = weights
    h, f = beside(tied, enter, x, lambda e, w: jax.nn.gelu(e @ w), e, encoder_up)
    y = jax.nn.silu(h @ up) @ down.T
    y, f = beside(tied, leave, y, lambda f, w: f @ w, f, encoder_down)
    return x + y, e + f


def step(tied: bool, shard: jax.Array, encoder: Any, x: jax.Array, e: jax.Array) -> Any:
    """Weights gathered from `shard`, one pass forward and back, gradients scattered."""
    (up, down), hold = encoder, lax.optimization_barrier if tied else lambda x: x

    def loop(e: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, e: e + jax.nn.gelu(e @ up[0]) @ down[0], e)

    def gather(w: jax.Array) -> jax.Array:
        return lax.all_gather(w, "data", axis=2, tiled=True)

    def scatter(g: jax.Array) -> jax.Array:
        return lax.psum_scatter(g, "data", scatter_dimension=2, tiled=True)

    with jax.named_scope("gather_llm"):
        llm, e = beside(tied, gather, shard, loop, e)
    weights = [(tuple(llm[k]), (up[k], down[k])) for k in range(LAYERS)]
    states = [(x, e)]
    with jax.named_scope("llm_forward"):
        for w in weights:
            states.append(layer(tied, w, *states[-1]))
    out = hold(states.pop())
    llm_grads, encoder_grads = [], []
    with jax.named_scope("llm_backward"):
        for w in reversed(weights):
            # held, or a backward would take what its forward made
            vjp = jax.vjp(functools.partial(layer, tied), w, *hold(states.pop()))[1]
            (dw, de), *out = vjp(tuple(out))
            llm_grads.insert(0, jnp.stack(dw))
            encoder_grads.insert(0, de)
    with jax.named_scope("scatter_llm"):
        grads, e = beside(tied, scatter, jnp.stack(llm_grads), loop, out[1])
    return grads, encoder_grads, out[0], e


def lowered(name: str, tied: bool) -> Any:
    devices = target(name).devices()
    shape, axes = (len(devices) // TENSOR, TENSOR), ("data", "tensor")
    mesh = Mesh(np.array(devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * 2)

    def array(spec: Spec, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    arguments = (
        array(Spec(None, None, "data", "tensor"), LAYERS, 2, WIDTH, HIDDEN),
        (array(Spec(), LAYERS, ENCODER, WIDER), array(Spec(), LAYERS, WIDER, ENCODER)),
        array(Spec("data"), shape[0] * TOKENS, WIDTH),
        array(Spec(axes), len(devices) * TOKENS, ENCODER),
    )
    specs = jax.tree.map(lambda a: a.sharding.spec, arguments)
    mapped = jax.shard_map(
        functools.partial(step, tied),
        mesh=mesh,
        in_specs=specs,
        out_specs=(specs[0], Spec(), *specs[2:]),
        check_vma=False,
    )
    return jax.jit(mapped).lower(*arguments)


def seen(compiled: Compiled) -> dict[str, Any]:
    return {
        **dataclasses.asdict(tally(compiled.collectives)),
        "synchronous": sum(c.is_sync for c in compiled.collectives),
        "us": [t.us for t in compiled.timed],
        "memory": compiled.memory,
    }


def main(name: str) -> None:
    # those of a run on such GPUs; XLA reads them when it first compiles
    gpu = target(name).gpu.name
    os.environ[xla_flags.VARIABLE] = xla_flags.merged("gpu", xla_flags.generation(gpu))
    tied = lowered(name, True)
    found = {
        "tied": seen(compile_step(tied)),
        "loose": seen(compile_step(lowered(name, False))),
        "synchronous": seen(compile_synchronous(tied)),
    }
    print(json.dumps({"jax": jax.__version__, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
