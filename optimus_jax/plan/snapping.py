"""Snapping: the kernels of a filling as tasks of whole layers, which the executor runs."""

from __future__ import annotations

import dataclasses
import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from optimus_jax.fill.filling import Filling
from optimus_jax.plan.merging import merged
from optimus_jax.plan.stretches import Stretch, Stretches
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task

_EPSILON = 1e-9


# Passes of its direction that a layer with kernels in tensor-parallel slots waits for room in one;
# None: it never goes into a pass.
PATIENCE = (None, 0, 2, 8, 1000)


def snapped(
    filling: Filling,
    pipe: Pipeline,
    durations: Durations,
    patiences: Sequence[int | None] = PATIENCE,
) -> Schedule:
    """The schedule of a filling on the executor's pipeline: the LLM's passes in their order, and
    encoder layers where the filling has their kernels.

    Between two passes stand the backward layers that the filling completes there, and the forward
    layers that it begins there, since it packs these from their deadlines back. Kernels in
    tensor-parallel slots become fused tasks: layers of one unit, no more than the pass has, forward
    ones in forward passes and backward ones in backward passes. What finds no room waits for passes
    to come, up to a patience, and then stands between passes; of all patiences the one with the
    shortest event-driven time is taken. So a task may stand later than its kernels did, behind the
    pass in which they were placed.

    An encoder pipeline with c copies on its ranks is one pipeline of c tensor lanes here, which
    share the pictures of a unit: what the copies do at a time is done in turn, in 1 / c of the
    time. Raises ScheduleError for frozen encoders and split backwards.
    """
    for one in filling.placed:
        if one.crosses or one.backward is None:
            raise ScheduleError("the executor trains every encoder, a frozen one has no backward")
    work = Stretches(filling, pipe)
    best: tuple[float, bool, Schedule] | None = None
    for patience in patiences:
        if best and not (work.uses_slots and max(durations.window)):
            break
        # the better way is kept for all patiences
        for in_turn in (best[1],) if best else (True, False):
            orders = _Ordering(work, pipe, patience, in_turn).run()
            schedule = Schedule(pipe, merged(orders, pipe, durations))
            end = event_driven(schedule, durations).end
            if best is None or end < best[0] - _EPSILON:
                best = end, in_turn, schedule
    assert best is not None
    return best[2]


@dataclasses.dataclass(eq=False)
class _Node:
    """A pass of the LLM, or one encoder layer of some units: when it should start, how many it
    waits for and who waits for it. `slot` is the pass of its device beside which it lies, `turn`
    says which of several goes first."""

    device: int
    at: float
    task: Task
    turn: int = -1
    slot: int = -1
    waits: int = 0
    then: list[_Node] = dataclasses.field(default_factory=list)
    done: bool = False
    held: bool = False

    def before(self, other: _Node) -> None:
        self.then.append(other)
        other.waits += 1


class _Ordering:
    """Tasks in the order of their planned times, as far as dependencies allow: one topological
    order of all devices, so that no devices wait for one another in a cycle. What several copies do
    between two passes comes one after the other if `in_turn`, else layer by layer in order of time.
    """

    def __init__(self, work: Stretches, pipe: Pipeline, patience: int | None, in_turn: bool):
        self.work, self.pipe, self.patience, self.in_turn = work, pipe, patience, in_turn
        self.numbers: dict[int, int] = {}  # of LLM nodes by id: which pass of their device
        self.orders: list[list[Task]] = [[] for _ in range(pipe.stages)]
        self.pools: list[list[_Node]] = [[] for _ in range(pipe.stages)]
        self.slots: dict[tuple[int, int], list[_Node]] = defaultdict(list)
        self.heap: list[tuple[float, int, int, _Node]] = []
        self.pushed = 0
        llm = self._llm()
        self.nodes = list(llm.values()) + self._encoders(llm)

    def run(self) -> Orders:
        for node in self.nodes:
            self._offer(node)
        while self.heap:
            *_, node = heapq.heappop(self.heap)
            if not node.done:
                self._run(node)
            if not self.heap:  # whoever else could go has waited for room in a pass
                for node in self.nodes:
                    node.held = False
                    self._offer(node)
        left = [node.task for node in self.nodes if not node.done]
        if left:
            raise ScheduleError(f"{len(left)} tasks wait for one another, among them {left[0]}")
        return tuple(map(tuple, self.orders))

    def _llm(self) -> dict[tuple[int, str, int], _Node]:
        """The passes by virtual stage, kind and microbatch."""
        found: dict[tuple[int, str, int], _Node] = {}
        for device, row in enumerate(self.work.passes):
            last: _Node | None = None
            for k, (start, _, (stage, kind, i)) in enumerate(row):
                node = _Node(device, start, Task(Kind(kind), i, stage // self.pipe.stages))
                found[stage, kind, i], self.numbers[id(node)] = node, k
                if last:
                    last.before(node)
                last = node
        final = self.pipe.virtual_stages - 1
        for (stage, kind, i), node in found.items():
            if kind == "F" and stage:
                found[stage - 1, "F", i].before(node)
            elif kind == "B":
                found[(stage + 1, "B", i) if stage < final else (stage, "F", i)].before(node)
        return found

    def _encoders(self, llm: dict[tuple[int, str, int], _Node]) -> list[_Node]:
        """Nodes of encoder layers, with whom they wait for."""
        found: list[_Node] = []
        made: dict[tuple[int, Kind, int, int, int], _Node] = {}  # encoder .. layer, unit
        for turn, stretch in enumerate(self.work.all):
            for node in self._layers(stretch):
                node.turn = turn
                task = node.task
                assert task.layers
                found.append(node)
                for unit in task.units:
                    key = task.encoder, task.kind, task.microbatch, task.layers[0], unit
                    made[key] = node
        for node in found:
            task = node.task
            assert task.layers
            forward, layer = task.kind == Kind.EF, task.layers[0]
            ends = 0 if forward else self.pipe.encoders[task.encoder].total - 1
            below = layer - 1 if forward else layer + 1
            before: dict[int, _Node] = {}
            for unit in task.units:
                if layer != ends:
                    one = made[task.encoder, task.kind, task.microbatch, below, unit]
                    before[id(one)] = one
            for one in before.values():
                one.before(node)
            i = task.microbatch
            if forward and layer == self.pipe.encoders[task.encoder].total - 1:
                node.before(llm[0, "F", i])
            elif not forward and layer == ends:
                llm[0, "B", i].before(node)
        return found

    def _layers(self, stretch: Stretch) -> Iterator[_Node]:
        """One node for each layer, or for each unit of a layer where units lie apart."""
        first, end = self.pipe.stage_layers(stretch.encoder, stretch.device)
        forward, units = stretch.kind == Kind.EF, stretch.units
        parts = (end - first) * len(units)
        starts = self.work.starts[stretch.device]
        begun: dict[int, float] = {}  # by gap; what other copies do meanwhile comes behind
        for n in range(end - first):
            layer = first + n if forward else end - 1 - n
            places: dict[tuple[int, bool, int], tuple[float, list[int]]] = {}
            for k, unit in enumerate(units):
                number = n * len(units) + k + (0 if forward else 1)
                at, piece = stretch.place(number / parts, forward)
                gap = bisect_right(starts, at + _EPSILON)
                inside = piece.slot and self.patience is not None
                # one unit fits into an LLM pass
                key = gap, inside, unit if inside else -1
                places.setdefault(key, (at, []))[1].append(unit)
            for (gap, inside, _), (at, own) in places.items():
                task = Task(
                    stretch.kind,
                    stretch.microbatch,
                    units=tuple(own),
                    layers=(layer, layer + 1),
                    encoder=stretch.encoder,
                )
                if self.in_turn and not inside:
                    at = begun.setdefault(gap, at)
                node = _Node(stretch.device, at, task)
                if inside and gap:
                    node.slot, node.held = gap - 1, True
                    self.slots[stretch.device, self._from(node)].append(node)
                yield node

    def _from(self, node: _Node) -> int:
        """The first pass into which a node may go: forwards rather earlier than later."""
        row = self.work.passes[node.device]
        if node.task.kind == Kind.EB:
            return node.slot
        return next((k for k in range(node.slot, -1, -1) if row[k][2].kind == "F"), node.slot)

    def _offer(self, node: _Node) -> None:
        if node.waits or node.done or node.held:
            return
        at = node.at
        if node.slot >= 0:
            at = self._until(node)
        heapq.heappush(self.heap, (at, node.turn, self.pushed, node))
        self.pushed += 1

    def _until(self, node: _Node) -> float:
        """How long a node waits for a pass with room."""
        row, kind = self.work.passes[node.device], str(node.task.kind)[1:]
        k, left = node.slot, self.patience or 0
        while left and k + 1 < len(row):
            k += 1
            left -= row[k][2].kind == kind
        at = max(node.at, row[k][0] + _EPSILON)
        if kind == "F":
            at = min(at, self.work.need[node.task.microbatch] - _EPSILON)
        return at

    def _run(self, node: _Node) -> None:
        task, device = node.task, node.device
        if not task.kind.is_encoder:
            number = self.numbers[id(node)]
            released = self.slots[device, number]
            pool = self.pools[device] = [n for n in self.pools[device] + released if not n.done]
            for one in released:
                one.held = False
            self._finish(node)
            inside = self._inside(node, pool)
            self.orders[device].append(dataclasses.replace(task, inside=inside))
            for one in released:
                self._offer(one)
            return
        self.orders[device].append(task)
        self._finish(node)

    def _inside(self, node: _Node, pool: Sequence[_Node]) -> Task | None:
        """What of the pool goes into a pass: layers of one unit, no more than the pass has."""
        kind = Kind.EF if node.task.kind == Kind.F else Kind.EB
        room = self.pipe.llm_layers[node.task.chunk * self.pipe.stages + node.device]
        able = [
            n
            for n in pool
            if n.task.kind == kind and not n.waits and not n.done and n not in node.then
        ]
        if not able or not room:
            return None
        one: _Node | None = min(able, key=lambda n: n.at)
        inside: Task | None = None
        while one and room:
            task, room = one.task, room - 1
            if inside and inside.layers and task.layers:
                low = min(inside.layers[0], task.layers[0])
                high = max(inside.layers[1], task.layers[1])
                task = dataclasses.replace(task, layers=(low, high))
            inside = task
            self._finish(one)
            following = [n for n in one.then if n in pool and not n.waits and not n.done]
            one = next((n for n in following if n.task.units == task.units), None)
        return inside

    def _finish(self, node: _Node) -> None:
        node.done = True
        for one in node.then:
            one.waits -= 1
            self._offer(one)
