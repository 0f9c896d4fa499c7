"""The LLM alone, here and in torch.distributed.pipelining: the same GPT, 1F1B, two processes.

    pip install torch==2.13.0
    python launch/local.py --processes=2 -- python benchmarks/torch_pipelining.py

One process for each stage on a core of its own, float32, whole training steps with gradient norm,
clipping and AdamW. Both systems live in the same processes and take turns, so that a machine whose
speed drifts is the same for both. Torch runs twice: keeping all activations (its default), and with
each layer's activations computed again in its backward, as the executor here does. Prints medians
and quartiles of the rounds, and of the ratio torch / optimus_jax within each round.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

from configs.bench import get_config
from optimus_jax import cluster
from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.analytic import analytic
from optimus_jax.measure.rounds import by_turns, ratio
from optimus_jax.plan.plan import make_plan

SIZES = {"small": (256, 12), "medium": (384, 8), "large": (512, 8)}  # width, rows of a microbatch
ROUNDS = int(os.environ.get("ROUNDS", "15"))


def configuration(width: int, rows: int) -> Config:
    c = get_config("pp2_m4")
    c.model.llm.width, c.model.llm.heads, c.model.llm.hidden = width, width // 64, 4 * width
    c.train.batch = rows * c.parallel.microbatches
    return from_config_dict(c.to_dict())


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Stage(nn.Module):
    """One pipeline stage of the GPT: embedding in the first, head in the last."""

    def __init__(self, config: Config, stage: int, recompute: bool):
        super().__init__()
        model, llm, stages = config.model, config.model.llm, config.parallel.pp
        self.recompute, self.first, self.last = recompute, stage == 0, stage == stages - 1
        if self.first:
            self.token = nn.Embedding(model.vocabulary, llm.width)
            self.position = nn.Parameter(torch.randn(model.sequence, llm.width))
        layers = llm.layers // stages
        self.layers = nn.ModuleList(Block(llm.width, llm.heads, llm.hidden) for _ in range(layers))
        if self.last:
            self.norm = nn.LayerNorm(llm.width)
            self.head = nn.Linear(llm.width, model.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.token(x) + self.position
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x)) if self.last else x


class Operation(NamedTuple):
    """One operation of a profiled step: its name and those of what it ran in, innermost first; the
    shapes of its arguments; and its seconds less those of operations in it."""

    within: tuple[str, ...]
    shapes: list[Any]
    seconds: float


class TorchPipeline:
    """A training step of torch.distributed.pipelining."""

    def __init__(self, config: Config, recompute: bool):
        self.rank, self.config = dist.get_rank(), config
        self.module = Stage(config, self.rank, recompute)
        stage = PipelineStage(self.module, self.rank, config.parallel.pp, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, config.parallel.microbatches, loss_fn=self.loss)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-5, fused=True)
        shape = config.train.batch, config.model.sequence
        self.tokens = torch.randint(0, config.model.vocabulary, shape)

    @staticmethod
    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def step(self) -> None:
        if self.rank == 0:
            self.schedule.step(self.tokens)
        else:
            self.schedule.step(target=self.tokens, losses=[])
        with record_function("gradient norm"):
            grads = [p.grad for p in self.module.parameters()]
            square = torch.stack(torch._foreach_norm(grads)).square().sum()
            dist.all_reduce(square)
            scale = (1.0 / square.sqrt().clamp(min=1e-12)).clamp(max=1.0)
            torch._foreach_mul_(grads, scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def profiled(self) -> tuple[list[Operation], float]:
        """The operations of one step on this thread, and its seconds. The processes begin it
        together, with their profilers running."""
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            dist.barrier()
            with record_function("step"):
                wall = self.seconds()
        found = []
        for event in profiler.events():
            within, around = [], event
            while around is not None:
                within.append(around.name)
                around = around.cpu_parent
            if within[-1] == "step" and len(within) > 1:
                own = event.self_cpu_time_total / 1e6
                found.append(Operation(tuple(within[:-1]), event.input_shapes, own))
        return found, wall


def compare(name: str, width: int, rows: int) -> None:
    from optimus_jax.measure.session import Session

    config = configuration(width, rows)
    plan = make_plan(config, analytic(config), "text_only")
    session = Session(config, plan.program.shape)
    tables = session.place(plan.program)
    kept, again = TorchPipeline(config, False), TorchPipeline(config, True)
    times = by_turns(
        {
            "optimus_jax": lambda: session.seconds(tables),
            "torch, recomputing": again.seconds,
            "torch, keeping": kept.seconds,
        },
        ROUNDS,
    )
    if dist.get_rank():
        return
    print(
        f"{name}: GPT of {config.model.llm.layers} layers, width {width}, {rows} rows x"
        f" {config.model.sequence} positions x {config.parallel.microbatches} microbatches"
    )
    for system, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        against = ratio(seconds, times["optimus_jax"])
        print(
            f"  {system:20s} {1e3 * median:8.1f} ms (quartiles {1e3 * low:.1f} to {1e3 * high:.1f})"
            f"  x {against.median:.3f} of optimus_jax (IQR {against.iqr:.3f})",
            flush=True,
        )


def join() -> None:
    """Both systems' processes, one thread each."""
    cluster.configure_cpu_devices(1)
    cluster.initialize()
    torch.set_num_threads(1)
    host, _, port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{int(port) + 1}",
        rank=int(os.environ["JAX_PROCESS_ID"]),
        world_size=int(os.environ["JAX_NUM_PROCESSES"]),
    )


def main() -> None:
    join()
    chosen = sys.argv[1:] or list(SIZES)
    for name in chosen:
        compare(name, *SIZES[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
