"""Tasks of one pipeline stage, and what the executor adds to a plain jitted step.

Everything that knows the executor is in `measure`: one call that profiles each task, then times
whole training steps of a plan with one stage against the sequential model's by turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optimus_jax.config import (
    Config,
    DataConfig,
    EncoderConfig,
    LlmConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from optimus_jax.cost.analytic import transformer
from optimus_jax.cost.flops import layer_flops_forward

METHOD, PLAIN = "filled", "fsdp"  # on one device, `fsdp` is the sequential model under plain jit
BACKWARD = 3  # forwards that a backward takes: it computes its layer again


def configuration(hardware: str, small: bool) -> Config:
    """One stage: an LLM of width 4096 with a ViT of width 2048, or, `small`, of width 32."""
    if small:
        encoder = EncoderConfig(layers=1, width=32, heads=2, hidden=64, patch=4)
        llm = LlmConfig(layers=1, width=32, heads=2, hidden=64)
        dtype, side, text, rows = "float32", 8, 12, 2
    else:
        encoder = EncoderConfig(layers=6, width=2048, heads=16, hidden=8192, patch=16)
        llm = LlmConfig(layers=4, width=4096, heads=32, hidden=16384)
        dtype, side, text, rows = "bfloat16", 256, 768, 4
    microbatches = 2 if small else 4
    return Config(
        hardware=hardware,
        model=ModelConfig(
            dtype=dtype,
            image_height=side,
            image_width=side,
            text_length=text,
            encoder=encoder,
            projector_hidden=llm.width,
            llm=llm,
        ),
        data=DataConfig("digits"),
        parallel=ParallelConfig(
            dp=1, pp=1, chunks=1, microbatches=microbatches, order="1f1b", method=METHOD
        ),
        train=TrainConfig(
            seed=0,
            batch=rows * microbatches,
            steps=1000,
            learning_rate=1e-5,
            warmup=10,
            weight_decay=0.0,
            clip=1.0,
            log_every=10,
            save_every=1000,
            keep=1,
        ),
        evaluate_examples=1,
    )


def measure(config: Config, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Median and IQR of each task, with the operations of those that are whole layers, and the
    seconds of whole steps by round: `executor`, of the plan, and `plain`, of the same model, batch
    and optimiser as one jitted function with each layer computed again in its backward."""
    from optimus_jax.measure import contest

    result = contest.run(config, [METHOD, PLAIN], rounds, False, False, say)
    operations = task_flops(config)
    tasks = [
        {
            "task": name,
            "median_s": spread.median,
            "iqr_s": spread.iqr,
            "flops": operations.get(name),
        }
        for name, spread in result.profile.measurements.items()
    ]
    steps = {"executor": result.times[METHOD], "plain": result.times[PLAIN]}
    return {"tasks": tasks, "steps": steps}


def task_flops(config: Config) -> dict[str, float]:
    """Operations that the tasks of whole layers run, ends left out: all pairs of positions, since
    the plain attention computes them all, and in a backward each layer once more."""
    rows, model = config.microbatch_rows, config.model

    def layers(part: EncoderConfig | LlmConfig, length: int) -> float:
        return rows * part.layers * layer_flops_forward(transformer(part), length)

    llm, encoder = layers(model.llm, model.sequence), layers(model.encoder, model.image_tokens)
    return {
        "F layers": llm,
        "B layers": BACKWARD * llm,
        "EF whole": encoder,
        "EB whole": BACKWARD * encoder,
    }
