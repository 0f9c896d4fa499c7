"""Kernels of one transformer layer under tensor parallelism: what each computes, moves, takes."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from optimus_jax.cost.hardware import Chip
from optimus_jax.cost.transformer import Transformer
from optimus_jax.errors import UserError
from optimus_jax.files import replace_text

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
PASSES = ("forward", "backward", "recompute")

Profile = Mapping[tuple[str, str, str], float]  # (module, pass, kernel): seconds


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel on one device: operations of its matrix products (`flops`, 0 for elementwise
    work), `bytes` read from and written to memory, bytes `sent` over the tp link, `seconds`."""

    name: str
    flops: float
    bytes: float
    sent: float
    seconds: float

    @property
    def is_communication(self) -> bool:
        return self.sent > 0


@dataclasses.dataclass(frozen=True)
class LayerKernels:
    """One layer's kernels in order. `backward` needs the activations that flash attention leaves;
    under full recompute, `recompute` runs before it. Names are unique within a pass."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    recompute: tuple[Kernel, ...]

    @property
    def forward_s(self) -> float:
        return sum(kernel.seconds for kernel in self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward without recomputation."""
        return sum(kernel.seconds for kernel in self.backward)

    @property
    def recompute_s(self) -> float:
        return sum(kernel.seconds for kernel in self.recompute)

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward, without recomputation, that compute."""
        return self.forward_s + self.backward_s - self.communication_s

    @property
    def communication_s(self) -> float:
        """Seconds of forward and backward, without recomputation, spent in collectives."""
        both = self.forward + self.backward
        return sum(kernel.seconds for kernel in both if kernel.is_communication)

    def measured(self, profile: Profile, module: str) -> LayerKernels:
        """The same kernels with the profile's seconds of `module`; those that it does not name, as
        the collectives of a profile taken on one device, keep theirs.

        Raises UserError for a module that the profile lacks, or a pass or kernel that no layer has.
        """
        modules = sorted({key[0] for key in profile})
        if module not in modules:
            raise UserError(f"the profile has no module {module!r}, only {_listed(modules)}")
        names = {name: [k.name for k in getattr(self, name)] for name in PASSES}
        for of, name, kernel in profile:
            if of == module and name not in names:
                raise UserError(f"{module}: no pass {name!r} in a layer, only {_listed(PASSES)}")
            if of == module and kernel not in names[name]:
                raise UserError(
                    f"{module}: no kernel {kernel!r} in {name}, only {_listed(names[name])}"
                )
        return LayerKernels(
            *(
                tuple(
                    dataclasses.replace(k, seconds=profile.get((module, name, k.name), k.seconds))
                    for k in getattr(self, name)
                )
                for name in PASSES
            )
        )


def layer_kernels(
    model: Transformer,
    rows: int,
    length: int,
    tp: int,
    chip: Chip,
    dtype: str = "bfloat16",
    efficiency: float | None = None,
    sequence_parallel: bool = True,
    frozen: bool = False,
) -> LayerKernels:
    """The kernels of one layer for `rows` sequences of `length` positions.

    Compute takes the longer of operations at `efficiency` of the peak (None: the chip's own) and
    bytes at the memory's bandwidth; a collective takes its latency and (tp - 1) / tp of the array
    over the link, an all-reduce twice that. Counted as one kernel each:

    - a norm, with the residual's addition; attention, whose scores are not written (flash): its
      backward computes them again, 5 products for the forward's 2, and skips what a causal mask
      hides;
    - each matrix, in the backward once for its input's gradient and once for its own, which is
      added to float32 gradients in memory; `frozen` layers have none of the latter;
    - two all-gathers and two reduce-scatters in each pass, one of each in a parallel block; without
      `sequence_parallel` an all-reduce for each two (Korthikanti et al. 2022, arXiv 2205.05198,
      section 4.2). The backward's third all-gather, of the saved input, is left out: Megatron-LM
      runs it beside the product that gives the input's gradient. At tp 1 there are none.

    A length that tp does not divide is padded for sequence parallelism. Keys and values are on
    several devices each if tp exceeds their heads. Raises UserError if tp does not divide heads and
    hidden, or for a dtype that the chip has no rate for.
    """
    _check(model, rows, length, tp, chip, dtype)
    size, link, n = DTYPE_BYTES[dtype], chip.group_link(tp), rows * length
    peak = chip.flops[dtype] * (chip.efficiency if efficiency is None else efficiency)
    q, f = model.width // tp, model.hidden // tp
    kv = max(1, model.kv_heads // tp) * model.head_dim
    shard = rows * math.ceil(length / tp) if sequence_parallel else n
    whole = shard * tp if sequence_parallel else n
    inputs = 2 if model.gated else 1
    matrices = {
        "qkv": (model.width, q + 2 * kv),
        "out": (q, model.width),
        "up": (model.width, f),
        "gate": (model.width, f),
        "down": (f, model.width),
    }
    elementwise = {
        "qk_norm": (2, 3, n * (q + kv)),
        "activation": (inputs + 1, 2 * inputs + 1, n * f),
    }

    def compute(name: str, flops: float, values: float, other_bytes: float = 0.0) -> Kernel:
        moved = size * values + other_bytes
        return Kernel(name, flops, moved, 0.0, max(flops / peak, moved / chip.memory_bandwidth))

    def collective(name: str) -> Kernel:
        times = 2 if name.endswith("all_reduce") else 1
        sent = times * (tp - 1) / tp * size * whole * model.width
        return Kernel(name, 0.0, 2 * sent, sent, link.seconds(sent))  # sends reads, receives writes

    def attention(products: int, values: int) -> Kernel:
        pairs = n * length / (2 if model.causal else 1)
        return compute("attention", 2 * products * pairs * q, n * values * (q + kv))

    def forward(name: str) -> Kernel:
        if name in matrices:
            a, b = matrices[name]
            return compute(name, 2 * n * a * b, n * (a + b) + a * b)
        if name in elementwise:
            times, _, values = elementwise[name]
            return compute(name, 0, times * values)
        if name == "attention":
            return attention(2, 2)
        # reads the residual and what is added to it, writes the sum and its norm
        return compute(name, 0, 4 * shard * model.width) if "norm" in name else collective(name)

    def backward(name: str) -> Iterator[Kernel]:
        if name in matrices:
            a, b = matrices[name]
            yield compute(f"{name}_input_gradient", 2 * n * a * b, n * (a + b) + a * b)
            if not frozen:
                gradient = 2 * 4 * a * b  # float32, read and written
                yield compute(f"{name}_weight_gradient", 2 * n * a * b, n * (a + b), gradient)
        elif name in elementwise:
            _, times, values = elementwise[name]
            yield compute(name, 0, times * values)
        else:
            yield attention(5, 4) if name == "attention" else forward(name)

    gather, scatter, reduce = "all_gather", "reduce_scatter", "all_reduce"
    if tp == 1:
        there, back = _order(model, "", ""), _order(model, "", "")
    elif sequence_parallel:
        there, back = _order(model, gather, scatter), _order(model, scatter, gather)
    else:
        there, back = _order(model, "", reduce), _order(model, reduce, "")
    run = tuple(forward(name) for name in there)
    return LayerKernels(
        forward=run,
        backward=tuple(kernel for name in reversed(back) for kernel in backward(name)),
        recompute=run,
    )


def save_profile(path: str | pathlib.Path, profile: Profile) -> None:
    """Writes measured seconds as JSON: by module, by pass, by kernel."""
    tree: dict[str, dict[str, dict[str, float]]] = {}
    for (module, name, kernel), seconds in sorted(profile.items()):
        tree.setdefault(module, {}).setdefault(name, {})[kernel] = seconds
    replace_text(pathlib.Path(path), json.dumps(tree, indent=2) + "\n")


def load_profile(path: str | pathlib.Path) -> dict[tuple[str, str, str], float]:
    """The profile that `save_profile` wrote.

    Raises OSError if there is no such file, UserError if it does not hold seconds by module, pass
    and kernel.
    """
    form = f'{path} is no profile, such as {{"llm": {{"forward": {{"qkv": 0.001}}}}}} in seconds'
    profile: dict[tuple[str, str, str], float] = {}
    try:
        tree = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        for module, passes in tree.items():
            for name, kernels in passes.items():
                for kernel, seconds in kernels.items():
                    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
                        raise UserError(f"{form}; {module} {name} {kernel} is {seconds!r}")
                    profile[module, name, kernel] = float(seconds)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{form}; {error}") from None
    return profile


def _order(model: Transformer, enter: str, leave: str) -> list[str]:
    """A forward's kernels by name, with the collectives where attention and MLP begin and end."""

    def collective(prefix: str, name: str) -> list[str]:
        return [prefix + name] if name else []

    attention = ["qkv", *(["qk_norm"] if model.qk_norm else []), "attention", "out"]
    mlp = ["up", *(["gate"] if model.gated else []), "activation", "down"]
    parts = (
        {"": attention + mlp} if model.parallel_block else {"attention_": attention, "mlp_": mlp}
    )
    return [
        name
        for prefix, part in parts.items()
        for name in (
            f"{prefix}norm",
            *collective(prefix, enter),
            *part,
            *collective(prefix, leave),
        )
    ]


def _divides(model: Transformer, tp: int) -> bool:
    shared = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return shared and model.heads % tp == 0 and model.hidden % tp == 0


def _check(model: Transformer, rows: int, length: int, tp: int, chip: Chip, dtype: str) -> None:
    if min(rows, length, tp) < 1:
        raise UserError(f"rows, length and tp must be positive, got {rows}, {length} and {tp}")
    if not _divides(model, tp):
        valid = [t for t in range(1, model.heads + 1) if _divides(model, t)]
        raise UserError(
            f"{model.name}: tp {tp} does not share out {model.heads} heads, {model.kv_heads} heads"
            f" of keys and values and a hidden of {model.hidden}; tp can be {_listed(valid)}"
        )
    if dtype not in chip.flops or dtype not in DTYPE_BYTES:
        valid_dtypes = [name for name in chip.flops if name in DTYPE_BYTES]
        raise UserError(f"the chip has no rate for {dtype!r}, only for {_listed(valid_dtypes)}")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
