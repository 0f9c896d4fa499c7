"""Where the time of one step goes, here and in torch.distributed.pipelining, by kind of work.

    pip install torch==2.13.0
    python launch/local.py --processes=2 -- python benchmarks/step_profile.py small

The systems, sizes and processes of torch_pipelining.py. Each step is profiled by the system's own
profiler (an XLA trace, torch.profiler); a kind's time is the time of its operations less that of
operations inside them. Systems take turns of three steps: one to warm up, one timed without a
profiler, one profiled. Prints, for each process, medians of the rounds by kind; then, since the
machine's noise only slows, times by kind and GFLOP/s of products from the first quartile of all
runs of each operation. ROUNDS in the environment sets the rounds; OPERATIONS=1 also lists the
longest operations of each kind.

Ours are told apart by the compiled step: a product by its shape, other operations by the functions
that their source lies in, that of the last arithmetic where XLA fused several. So a bias counts
with what it is fused into: GELU, the splitting of heads, or the residual. Torch's one kernel for
attention counts as products; ours are products and softmax.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

os.environ["KINETO_LOG_LEVEL"] = "99"  # else torch's profiler prints lines of its own

import torch.distributed as dist
from torch.profiler import record_function
from torch_pipelining import SIZES, Operation, TorchPipeline, configuration, join

from optimus_jax.config import Config
from optimus_jax.cost.costs import analytic
from optimus_jax.measure.rounds import by_turns
from optimus_jax.parallel.agreement import gather
from optimus_jax.plan.plan import make_plan
from optimus_jax.tables import table_text

ROUNDS = int(os.environ.get("ROUNDS", "5"))
DENSE = "products: {}"
FORWARD, AGAIN, INPUT, WEIGHT, GRADIENT = (
    "forward",
    "forward again",
    "gradient of inputs",
    "gradient of weights",
    "gradient",
)
ATTENTION, SOFTMAX = "attention: products", "attention: scale, mask, softmax"
HEADS, NORMS, GELU = "attention: heads split and joined", "layer norms", "GELU"
RESIDUAL, ENDS = "residuals, biases", "embedding, loss"
SUMS, SLOTS = "gradients added to their sums", "slots, slices of weights, copies"
ZEROS, ASTRAY = "buffers filled at the start", "encoder work outside its loop"
CLIPPING, OPTIMISER = "gradient norm, scaling", "AdamW"
EXCHANGE, REDUCTION = "exchanges, with waiting", "sums over processes, with waiting"
REST = "dispatch and the rest"
KINDS = (
    *(DENSE.format(p) for p in (FORWARD, AGAIN, INPUT, WEIGHT)),
    *(ATTENTION, SOFTMAX, HEADS, NORMS, GELU, RESIDUAL, ENDS, SUMS, SLOTS, ZEROS, ASTRAY),
    *(CLIPPING, OPTIMISER, REDUCTION, EXCHANGE, REST),
)
CORE = "attention"  # a product's name for all of attention between the dense ones


@dataclasses.dataclass(frozen=True)
class Work:
    """What an operation is: its kind; of products also which (`qkv`) and in which pass."""

    kind: str
    product: str = ""
    part: str = ""
    flops: float = 0.0


@dataclasses.dataclass
class Spent:
    """Seconds of each run of each operation in one step, and of the whole step."""

    wall: float
    runs: dict[tuple[str, Work], list[float]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, work: Work, seconds: float) -> None:
        self.runs.setdefault((name, work), []).append(seconds)

    def of(self, kind: str) -> float:
        """Seconds of a kind of work; of the rest, what no other kind took."""
        if kind == REST:
            return self.wall - sum(self.of(other) for other in KINDS if other != REST)
        return sum(sum(runs) for (_, work), runs in self.runs.items() if work.kind == kind)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that tell products apart."""

    positions: int  # rows of a microbatch times their positions
    sequence: int
    products: dict[tuple[int, int], str]  # by (inputs, outputs)

    @classmethod
    def of(cls, config: Config) -> Shapes:
        llm = config.model.llm
        d, f, rows = llm.width, llm.hidden, config.train.batch // config.parallel.microbatches
        names = {(d, 3 * d): "qkv", (d, d): "out", (d, f): "up", (f, d): "down"}
        names[d, config.model.vocabulary] = "head"
        return cls(rows * config.model.sequence, config.model.sequence, names)

    def dense(self, m: int, k: int, n: int, backward: bool, part: str) -> Work:
        """The product of [m, k] and [k, n]; `part` is what it is if it is not a gradient."""
        pairs = [(k, n)]
        if backward and k == self.positions:
            part, pairs = WEIGHT, [(m, n), (n, m)]
        elif backward:
            part, pairs = INPUT, [(n, k)]
        name = next((self.products[pair] for pair in pairs if pair in self.products), "other")
        return Work(DENSE.format(part), name, part, 2.0 * m * k * n)


def self_times(spans: Iterable[tuple[float, float, Any]]) -> Iterator[tuple[Any, float]]:
    """(key, own time) of nested spans (start, end, key) of one thread."""
    open_: list[list[Any]] = []
    for start, end, key in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ and open_[-1][0] <= start:
            yield open_[-1][1], open_.pop()[2]
        if open_:
            open_[-1][2] -= end - start
        open_.append([end, key, end - start])
    for _, key, own in open_:
        yield key, own


# Ours: instructions of the compiled step.

_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+) ", re.M)
_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
_MOVES = {
    *("parameter", "constant", "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice"),
    *("dynamic-update-slice", "pad", "concatenate", "broadcast", "select", "compare", "iota"),
    *("convert", "tuple", "get-tuple-element"),
}
_COLLECTIVES = "collective-permute", "all-reduce"
_FUNCTIONS = {  # innermost first decides
    "layer_norm": NORMS,
    "attention": HEADS,
    "mlp": GELU,
    "block": RESIDUAL,
    "add_at": SUMS,
    **dict.fromkeys(("get", "put", "Tasks._llm_layer", "Executor._exchange"), SLOTS),
    **dict.fromkeys(("embed", "summed_loss", "logits", "Tasks._head", "Tasks._embed"), ENDS),
    "Tasks._embed_backward": ENDS,
    **dict.fromkeys(("make", "Executor._carry"), ZEROS),
    **dict.fromkeys(("reduce_gradients", "Executor._reduce"), REDUCTION),
    **dict.fromkeys(("global_norm", "clip"), CLIPPING),
    **dict.fromkeys(("scale_by_adam", "tree_update_moment", "apply_updates"), OPTIMISER),
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str
    dims: tuple[int, ...]  # () of tuples too
    real: bool
    operands: list[str]
    rest: str

    def named(self, what: str, otherwise: str = "") -> str:
        found = re.search(rf"\b{what}=%?([\w.\-]+)", self.rest)
        return found[1] if found else otherwise

    def sizes(self, what: str) -> list[int]:
        found = re.search(rf"\b{what}=\{{([\d,]*)\}}", self.rest)
        return [int(x) for x in found[1].split(",") if x] if found else []


class CompiledStep:
    """What each instruction of a compiled step is, from its text."""

    def __init__(self, hlo: str, shapes: Shapes):
        self.shapes = shapes
        self.bodies: dict[str, list[Instruction]] = {}
        self.by_name: dict[str, Instruction] = {}
        names = hlo[hlo.index("FunctionNames") : hlo.index("FileLocations")]
        functions = dict(re.findall(r'^(\d+) "(.*)"', names, re.M))
        locations = {a: functions[b] for a, b in _LOCATION.findall(hlo)}
        self.frames = {int(a): (locations[b], int(p) - 1) for a, b, p in _FRAME.findall(hlo)}
        body: list[Instruction] = []
        for line in hlo.splitlines():
            if head := _HEAD.match(line):
                body = self.bodies[head[1]] = []
            elif found := _INSTRUCTION.match(line):
                name, shape, opcode, operands, rest = found.groups()
                array = re.match(r"(\w+)\[([\d,]*)\]", shape)
                dims = tuple(int(x) for x in array[2].split(",") if x) if array else ()
                real = array is not None and array[1][0] in "fb"  # floats and bfloat16
                made = Instruction(opcode, dims, real, re.findall(r"%([\w.\-]+)", operands), rest)
                body.append(made)
                self.by_name[name] = made

    def functions(self, i: Instruction) -> list[str]:
        """The functions that an instruction's source stands in, innermost first."""
        names, frame = [], int(i.named("stack_frame_id", "0"))
        while frame in self.frames:
            name, frame = self.frames[frame]
            names.append(name)
        return names

    @functools.cache  # noqa: B019
    def work(self, name: str) -> Work:
        i = self.by_name.get(name)
        if i is None or i.opcode in ("while", "conditional", "call"):
            return Work(REST)
        inside = self.bodies.get(i.named("calls"), [])
        around = self.functions(i)
        backward = "transpose(jvp" in i.rest
        again = not backward and any(f.startswith("Tasks.backward") for f in around)
        part = AGAIN if again else FORWARD
        if i.opcode in _COLLECTIVES:
            return Work(EXCHANGE if "Executor._exchange" in "".join(around) else REDUCTION)
        if any(f.startswith("Tasks.encoder") for f in around):
            return Work(ASTRAY)
        for dot in (x for x in (i, *inside) if x.opcode == "dot"):
            left = self.by_name[dot.operands[0]].dims
            k = math.prod(left[d] for d in dot.sizes("lhs_contracting_dims"))
            if dot.sizes("lhs_batch_dims"):
                flops = 2.0 * k * math.prod(dot.dims)
                return Work(ATTENTION, CORE, GRADIENT if backward else part, flops)
            m = math.prod(left) // k
            return self.shapes.dense(m, k, math.prod(dot.dims) // m, backward, part)
        sums = [x for x in inside or [i] if x.real and x.dims and x.opcode not in _MOVES]
        kinds = [k for x in reversed(sums) if (k := self._by_function(self.functions(x)))]
        own = self._by_function(around)
        kind = kinds[0] if kinds else own or (SLOTS if i.opcode == "copy" else REST)
        if kind == REST and any(x.opcode.startswith("reduce") for x in sums):
            return Work(RESIDUAL)  # a bias gradient that XLA cut in two, which lost its source
        if kind in (HEADS, GELU) and backward and len(i.dims) == 1:
            return Work(RESIDUAL)
        if kind == HEADS:
            near = [i, *(self.by_name[x] for x in i.operands if x in self.by_name)]
            if any(x.dims[-2:] == (self.shapes.sequence,) * 2 for x in near):
                return Work(SOFTMAX, CORE, GRADIENT if backward else part)
        return Work(kind)

    @staticmethod
    def _by_function(names: list[str]) -> str:
        for name in names:
            for function, kind in _FUNCTIONS.items():
                if name == function or name.startswith(function + "."):
                    return kind
            if "update_fn" in name:  # optax
                return OPTIMISER
        return ""


class Ours:
    """Steps of the executor, one by one, with or without a trace."""

    def __init__(self, config: Config):
        from optimus_jax.measure.session import Session
        from optimus_jax.runtime.trainer import Trainer

        plan = make_plan(config, analytic(config), "text_only")
        session = Session(config, plan.program.slots, plan.program.ticks)
        self.rest = session.batch, *session.place(plan.program)
        self.state = session.state
        lowered = Trainer(session.executor, config.train).train_step().lower(self.state, *self.rest)
        self.step = lowered.compile()
        self.compiled = CompiledStep(self.step.as_text(), Shapes.of(config))

    def seconds(self) -> float:
        import jax

        start = time.perf_counter()
        self.state, _ = self.step(self.state, *self.rest)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def profiled(self) -> Spent:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.enable_hlo_proto = 0, False
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                dist.barrier()
                wall = self.seconds()
            (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            data = jax.profiler.ProfileData.from_file(path)
        spent = Spent(wall)
        for line in (line for plane in data.planes for line in plane.lines):
            spans = [
                (event.start_ns, event.end_ns, event.name)
                for event in line.events
                if any(key == "hlo_op" for key, _ in event.stats)
            ]
            for name, own in self_times(spans):
                spent.add(name, self.compiled.work(name), own / 1e9)
        return spent


# Torch's: operations, each with those that it ran in.

_NORM, _WAIT = "gradient norm", "wait"
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_OPERATIONS = {  # the first that an operation is or ran in decides
    _NORM: CLIPPING,
    "torch::autograd::AccumulateGrad": SUMS,
    "Optimizer.step#AdamW.step": OPTIMISER,
    **dict.fromkeys((_WAIT, "c10d::send", "c10d::recv_"), EXCHANGE),
    **dict.fromkeys(("aten::native_layer_norm", "aten::native_layer_norm_backward"), NORMS),
    **dict.fromkeys(("aten::gelu", "aten::gelu_backward"), GELU),
    **dict.fromkeys(("aten::embedding", "aten::embedding_dense_backward"), ENDS),
    **dict.fromkeys(("aten::cross_entropy_loss", "aten::nll_loss_backward"), ENDS),
    "aten::_log_softmax_backward_data": ENDS,
    **dict.fromkeys(("aten::add", "aten::add_", "aten::sum"), RESIDUAL),
    **dict.fromkeys(("aten::clone", "aten::stack", "aten::contiguous"), HEADS),
    **dict.fromkeys(("aten::zeros", "aten::zero_"), ZEROS),
    **dict.fromkeys(("aten::div_", "aten::mul_"), CLIPPING),
    "aten::copy_": SLOTS,
}


def torch_work(operation: Operation, shapes: Shapes) -> Work:
    name, within, sizes = operation.within[0], operation.within, operation.shapes
    inner = next((x for x in within if x == "aten::linear" or x.endswith("Backward0")), "")
    backward = inner.endswith("Backward0")
    again = any(x.startswith("autograd::engine") for x in within)
    part = AGAIN if again else FORWARD
    if name in ("aten::mm", "aten::addmm"):
        (m, k), (_, n) = sizes[-2:] if name == "aten::mm" else sizes[1:3]
        work = shapes.dense(m, k, n, backward, part)
        last = (work.product, part) == ("down", AGAIN) and not backward
        return Work(REST) if last else work  # a checkpoint stops short of its last product
    if "aten::addmm" in within:
        return Work(RESIDUAL if name == "aten::copy_" else REST)  # the bias
    for flash in (x for x in within if x.startswith(_FLASH)):
        if flash != name:
            return Work(ATTENTION, CORE, GRADIENT if backward else part)
        rows, heads, length, width = sizes[1]
        product = 2.0 * rows * heads * length**2 * width
        if flash == _FLASH:
            return Work(ATTENTION, CORE, part, 2 * product)
        return Work(ATTENTION, CORE, GRADIENT, 4 * product)
    if _NORM in within and (name == _WAIT or name.startswith("c10d")):
        return Work(REDUCTION)
    return Work(next((kind for key, kind in _OPERATIONS.items() if key in within), REST))


def torch_profiled(pipeline: TorchPipeline, shapes: Shapes) -> Spent:
    operations, wall = pipeline.profiled()
    spent = Spent(wall)
    for operation in operations:
        spent.add(operation.within[0], torch_work(operation, shapes), operation.seconds)
    return spent


# Both.


def milliseconds(values: Iterable[float]) -> float:
    return 1e3 * statistics.median(values)


Steps = dict[str, list[Spent]]  # by system, those of the rounds


def kind_table(steps: Steps, plain: dict[str, list[float]]) -> str:
    """Rows: kinds; columns: systems, and the first less each other within the same round."""
    rows = {kind: [[s.of(kind) for s in of] for of in steps.values()] for kind in KINDS}
    rows["step, profiled"] = [[s.wall for s in of] for of in steps.values()]
    rows["step, not profiled"] = [plain[system] for system in steps]
    cells = []
    for kind, columns in rows.items():
        less = ([a - b for a, b in zip(columns[0], x, strict=True)] for x in columns[1:])
        figures = [f"{milliseconds(x):.1f}" for x in columns]
        cells.append((kind, *figures, *(f"{milliseconds(x):+.1f}" for x in less)))
        if kind == REST:
            totals = (sum(float(row[k]) for row in cells) for k in range(1, len(steps) + 1))
            cells.append(("sum", *(f"{total:.1f}" for total in totals), *[""] * (len(steps) - 1)))
    header = [*steps, *(f"ours less {name.split()[-1]}" for name in list(steps)[1:])]
    return table_text(("ms", *header), cells)


def pooled(ranks: list[Steps]) -> dict[str, dict[tuple[str, Work], list[float]]]:
    """By system and operation, the seconds of its runs in all rounds and processes."""
    found: dict[str, dict[tuple[str, Work], list[float]]] = {system: {} for system in ranks[0]}
    for system, spent in ((system, x) for rank in ranks for system, of in rank.items() for x in of):
        for key, seconds in spent.runs.items():
            found[system].setdefault(key, []).extend(seconds)
    return found


def quiet(runs: Mapping[tuple[str, Work], list[float]], steps: int) -> float:
    """ms of a step from each operation's first quartile: the machine's noise only slows."""

    def quartile(seconds: list[float]) -> float:
        return statistics.quantiles(seconds, n=4, method="inclusive")[0]

    return 1e3 * sum(quartile(x) * len(x) for x in runs.values() if len(x) > 1) / steps


def quiet_table(ranks: list[Steps]) -> str:
    """As kind_table, of the mean process, without what waits."""
    runs, rows = pooled(ranks), {}
    for kind in (kind for kind in KINDS if kind not in (EXCHANGE, REDUCTION)):
        by_system = ({k: x for k, x in of.items() if k[1].kind == kind} for of in runs.values())
        rows[kind] = [quiet(of, ROUNDS * len(ranks)) for of in by_system]
    rows["sum"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    return table_text(
        ("ms", *runs, *(f"ours less {name.split()[-1]}" for name in list(runs)[1:])),
        [
            (kind, *(f"{x:.1f}" for x in row), *(f"{row[0] - x:+.1f}" for x in row[1:]))
            for kind, row in rows.items()
        ],
    )


def product_table(ranks: list[Steps]) -> str:
    """Rows: products by pass, in a step of the mean process; columns by system: ms and GFLOP/s."""
    runs, rows, steps = pooled(ranks), [], ROUNDS * len(ranks)
    order = FORWARD, AGAIN, INPUT, WEIGHT, GRADIENT
    named = {(w.product, w.part) for of in runs.values() for _, w in of if w.product}
    for row in sorted(named, key=lambda row: (row[0], order.index(row[1]))):
        cells, most = [], 0.0
        for of in runs.values():
            found = {k: x for k, x in of.items() if (k[1].product, k[1].part) == row}
            flops, ms = (
                sum(k[1].flops * len(x) for k, x in found.items()) / steps,
                quiet(found, steps),
            )
            cells += [f"{ms:.1f}", f"{flops / ms / 1e6:.0f}"] if found else ["", ""]
            most = max(most, flops)
        rows.append((", ".join(row), f"{most / 1e9:.2f}", *cells))
    header = [x for name in runs for x in (f"{name.split()[-1]}, ms", "GFLOP/s")]
    return table_text(("product, pass", "GFLOP", *header), rows)


def operation_lines(ranks: list[Steps], most: int = 12) -> Iterator[str]:
    """The longest operations of each kind, in a step of the mean process."""
    steps = ROUNDS * len(ranks)
    for system, of in pooled(ranks).items():
        for kind in KINDS:
            times = {k: quiet({k: x}, steps) for k, x in of.items() if k[1].kind == kind}
            for key in sorted(times, key=lambda key: -times[key])[:most]:
                what = f"{key[0]} {key[1].product}".strip()
                count = len(of[key]) / steps
                yield f"{system}: {kind}: {times[key]:.2f} ms, {count:g} of {what}"


def compare(name: str, width: int, rows: int) -> None:
    config = configuration(width, rows)
    shapes, ours = Shapes.of(config), Ours(config)
    kept, again = TorchPipeline(config, False), TorchPipeline(config, True)
    systems: dict[str, tuple[Callable[[], float], Callable[[], Spent]]] = {
        "ours": (ours.seconds, ours.profiled),
        "torch recomputing": (again.seconds, lambda: torch_profiled(again, shapes)),
        "torch keeping": (kept.seconds, lambda: torch_profiled(kept, shapes)),
    }
    steps: Steps = {system: [] for system in systems}
    plain: dict[str, list[float]] = {system: [] for system in systems}

    def turn(system: str) -> float:
        seconds, profiled = systems[system]
        for _ in range(2):  # the first finds memory as the other systems left it
            dist.barrier()
            unprofiled = seconds()
        plain[system].append(unprofiled)
        steps[system].append(profiled())
        return unprofiled

    turns = {system: functools.partial(turn, system) for system in systems}
    for run in turns.values():
        run()
    by_turns(turns, ROUNDS)
    steps = {system: of[-ROUNDS:] for system, of in steps.items()}
    times = {system: of[-ROUNDS:] for system, of in plain.items()}
    found = gather((steps, times))
    if dist.get_rank():
        return
    llm = config.model.llm
    print(
        f"{name}: GPT of {llm.layers} layers, width {width}, {rows} rows x"
        f" {config.model.sequence} positions x {config.parallel.microbatches} microbatches;"
        f" medians of {ROUNDS} rounds"
    )
    for rank, (of, plainly) in enumerate(found):
        print(f"\nProcess {rank}, ms of a step\n{kind_table(of, plainly)}", flush=True)
    ranks = [of for of, _ in found]
    print(f"\nMean process, from first quartiles of operations' runs\n{quiet_table(ranks)}")
    print(f"\nProducts, likewise\n{product_table(ranks)}", flush=True)
    if os.environ.get("OPERATIONS"):
        print("\n".join(operation_lines(ranks)), flush=True)


def main() -> None:
    join()
    wait = dist.Work.wait

    def recorded(work: dist.Work, *arguments: Any) -> Any:
        with record_function(_WAIT):
            return wait(work, *arguments)

    dist.Work.wait = recorded  # type: ignore[assignment, method-assign]
    for name in sys.argv[1:] or ["small"]:
        compare(name, *SIZES[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
