"""Bytes on one device: model states, activations, and whether a plan fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from optimus_jax.cost.transformer import Transformer
from optimus_jax.errors import UserError

POLICIES = ("none", "selective", "full")
ORDERS = ("1f1b", "1f1b_deferred", "gpipe")


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of a module's states on one device."""

    weights_gradients: float
    optimiser: float


def state_bytes(
    parameters_on_device: float, dp: int, trained: bool = True, sharded: bool = True
) -> StateBytes:
    """States of mixed-precision training with AdamW: bfloat16 weights (2 bytes for each parameter)
    and float32 gradients (4) stay on the device, which is the paper's k = 6 (Optimus, section 4.1);
    float32 master weights and two moments (12) are sharded over dp, or not if `sharded` is false.
    Frozen parts have weights only."""
    if not trained:
        return StateBytes(2.0 * parameters_on_device, 0.0)
    shards = dp if sharded else 1
    return StateBytes(6.0 * parameters_on_device, 12.0 * parameters_on_device / shards)


def memory_overhead(
    encoder_parameters: float, encoder_dp: int, llm_dp: int, gpus: int, k: float = 6.0
) -> float:
    """Bytes for each GPU that more encoder replicas than LLM replicas cost, `k` for each parameter:
    k (DP_enc - DP_llm) Phi_enc / n_gpu (Optimus, section 4.1)."""
    return k * (encoder_dp - llm_dp) * encoder_parameters / gpus


def layer_activation_bytes(
    model: Transformer,
    rows: int,
    length: int,
    tp: int,
    policy: str,
    sequence_parallel: bool = True,
) -> float:
    """Bytes that one layer keeps of one microbatch in 16-bit training.

    With s, b, h, a, t for length, rows, width, heads and tp, a plain layer (hidden 4h) keeps
    (Korthikanti et al. 2022, arXiv 2205.05198, table 2)

        none        sbh (34 + 5as/h) / t
        selective   sbh 34 / t                  flash attention keeps no scores either
        full        sbh 2 / t                   its input only

    and without sequence parallelism 10 of the 34, and all of full's 2, are not divided by t. The
    terms are written out below, so that gated MLPs, fewer heads of keys and values, parallel blocks
    and qk norm count what they keep. Two dropout masks of sbh each are among them, as in the
    source, though models without dropout have none. Under full, the one layer whose backward runs
    has its selective activations beside. Raises UserError for an unknown policy.
    """
    if policy not in POLICIES:
        raise UserError(f"no recompute policy {policy!r}, only {', '.join(POLICIES)}")
    h, kv = model.width, max(model.kv_width, tp * model.head_dim)
    branches = 1 if model.parallel_block else 2
    # of each branch: input of its norm, of its first matrix, dropout mask
    residual = 2 * h if policy == "full" else branches * (2 * h + 2 * h + h)
    inner = 0.0
    if policy != "full":
        inner += 2 * h + 4 * kv + 2 * h  # queries, keys and values, input of the out projection
        inner += (2 * h + 2 * kv) * model.qk_norm
        inner += (6 if model.gated else 4) * model.hidden  # before and after the activation
    if policy == "none":
        inner += 5 * model.heads * length  # scores, their softmax and its dropout mask
    return rows * length * (residual / (tp if sequence_parallel else 1) + inner / tp)


def embedding_activation_bytes(
    model: Transformer, rows: int, length: int, tp: int, sequence_parallel: bool = True
) -> float:
    """Bytes that the embedding keeps of one microbatch: the mask of its dropout, sbh / t
    (Korthikanti et al. 2022, section 4.3)."""
    return rows * length * model.width / (tp if sequence_parallel else 1)


def head_activation_bytes(
    model: Transformer, rows: int, length: int, tp: int, sequence_parallel: bool = True
) -> float:
    """Bytes that the head keeps of one microbatch: inputs of the last norm and of the head (2sbh
    each) and float32 logits (4sbv), 4sbh (1 + v/h) / t (Korthikanti et al. 2022, section 4.3)."""
    inputs = 4 * model.width / (tp if sequence_parallel else 1)
    return rows * length * (inputs + 4 * model.vocabulary / tp)


def in_flight(order: str, stages: int, rank: int, chunks: int, microbatches: int) -> int:
    """Chunk activations that a rank holds at most, each of one microbatch in one chunk.

    1F1B holds its warm-up's and one more: P - r - 1 forwards in the warm-up of rank r, or with V
    chunks 2(P - r - 1) + (V - 1)P (Megatron-LM). `1f1b_deferred` warms up with
    (P - r - 1) + (V - 1)P, the fewest that keep the pipeline's time where transfers cost nothing.
    `gpipe` holds everything. Raises UserError for an unknown order, or a rank that is none.
    """
    if order not in ORDERS:
        raise UserError(f"no order {order!r}, only {', '.join(ORDERS)}")
    if not 0 <= rank < stages:
        raise UserError(f"rank {rank} is not among {stages} stages; ranks are 0 to {stages - 1}")
    total, below = microbatches * chunks, stages - rank - 1
    if order == "gpipe":
        return total
    times = 2 if chunks > 1 and order == "1f1b" else 1
    return min(total, times * below + (chunks - 1) * stages + 1)


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """Bytes on the fullest device, by what they hold."""

    llm_weights_gradients: float = 0.0
    llm_optimiser: float = 0.0
    llm_activations: float = 0.0
    encoder_weights_gradients: float = 0.0
    encoder_optimiser: float = 0.0
    encoder_activations: float = 0.0
    communication_buffers: float = 0.0

    @property
    def rows(self) -> dict[str, float]:
        """Bytes by what they hold, in words."""
        return {
            _WORDS.get(field.name, field.name.replace("_", " ")): getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    @property
    def total(self) -> float:
        return sum(self.rows.values())

    def fits(self, capacity: float) -> bool:
        return self.total <= capacity

    def explain(self, capacity: float, changes: Mapping[str, MemoryTable] | None = None) -> str:
        """In words: whether it fits, what is largest, and which single changes would make it fit.

        `changes` are the tables of the same plan with one thing changed each, by a name such as
        "full recompute", "tp 16", "dp 8" or "2 encoder microbatches in flight".
        """
        spare = capacity - self.total
        needs = f"needs {_words(self.total)} of {_words(capacity)}"
        if spare >= 0:
            return f"{needs}: fits, {_words(spare)} to spare"
        largest = sorted(self.rows.items(), key=lambda row: -row[1])[:3]
        named = ", ".join(f"{name} {_words(value)}" for name, value in largest if value)
        text = f"{needs}, {_words(-spare)} too many; largest are {named}"
        if not changes:
            return text
        fitting = {name: t for name, t in changes.items() if t.fits(capacity)}
        if fitting:
            return f"{text}; would fit with {' or '.join(_named(fitting))}"
        return f"{text}; no single change fits: {', '.join(_named(changes))}"


_WORDS = {
    "llm_weights_gradients": "LLM weights and gradients",
    "llm_optimiser": "LLM optimiser",
    "llm_activations": "LLM activations",
    "encoder_weights_gradients": "encoder weights and gradients",
}


def _named(tables: Mapping[str, MemoryTable]) -> list[str]:
    """Names with their totals, the smallest first."""
    ordered = sorted(tables.items(), key=lambda item: item[1].total)
    return [f"{name} ({_words(table.total)})" for name, table in ordered]


def _words(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
