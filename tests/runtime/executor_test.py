"""The executor against the sequential model, and what its compiled step may not contain."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optimus_jax.models.mllm import Mllm
from optimus_jax.runtime import slots as slot_buffers
from optimus_jax.runtime.buffers import when
from optimus_jax.runtime.comparison import Bench, compare
from optimus_jax.runtime.small_plan import SmallPlan, Tower
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import ON_ANY_PIPELINE, schedule
from optimus_jax.schedule.program import Program, fit_together
from optimus_jax.schedule.validate import validate
from optimus_jax.verified import BOUNDS, INJECTIONS, all_cases, drawn_cases, grid_cases
from tests.runtime.stray_work import copies_in_loops, products_beside_loops
from tests.schedule.random_schedules import random_schedule

LOSS_BOUND, GRADIENT_BOUND = BOUNDS["float32"]
# Everything at once: lanes, stages and tensor shards of encoders, ZeRO, fused tasks.
WIDE = SmallPlan(
    2,
    1,
    1,
    3,
    tp=4,
    towers=(Tower(pp=2, tp=2, recompute="none"), Tower("audio", "vit22b", tp=4)),
    block="llama",
    recompute="selective",
    zero=True,
    fuse=True,
)


@pytest.mark.parametrize(
    "plan",
    [
        *(SmallPlan(2, 2, 2, 2), SmallPlan(4, 1, 1, 3), SmallPlan(1, 2, 1, 3)),
        pytest.param(WIDE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_the_sequential_model(plan: SmallPlan) -> None:
    found = grid_cases(plan) if plan.tp == 1 else drawn_cases(plan)
    cases = [(case.order, case.method) for case in found]
    for case, (loss, gradient) in zip(cases, compare(plan, cases), strict=True):
        assert loss <= LOSS_BOUND, case
        assert gradient <= GRADIENT_BOUND, case


# `swap_slots` is in verify_test.py each time
@pytest.mark.parametrize(
    "inject",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "swap_slots" else ())
        for name in INJECTIONS
    ],
)
def test_a_broken_run_is_noticed(inject: str) -> None:
    errors = compare(SmallPlan(2, 2, 1, 3), [("1f1b", "filled")], inject=inject)
    assert errors[0][1] >= 1e-2


def test_the_cases_of_verify_are_many_enough() -> None:
    names = [str(case) for cases in all_cases() for case in cases]
    assert len(names) == len(set(names)) >= 150


Many = tuple[Bench, list, list[Program]]


def programs_of(plan: SmallPlan, schedules: list) -> list[Program]:
    programs = [lower(s, plan.durations) for s in schedules]
    for program, s in zip(programs, schedules, strict=True):
        validate(program, s)
    return fit_together(programs)


@pytest.fixture(scope="module")
def many() -> Many:
    """One plan, pp 2 M 4: every method on both orders, and 20 random schedules."""
    plan = SmallPlan(2, 1, 1, 4)
    orders = ("1f1b", "gpipe")
    schedules = [
        schedule(m, o, plan.pipeline, plan.durations) for o in orders for m in ON_ANY_PIPELINE
    ]
    schedules += [random_schedule(plan.pipeline, random.Random(seed)) for seed in range(20)]
    return Bench(plan), schedules, programs_of(plan, schedules)


@pytest.fixture(scope="module")
def wide() -> Many:
    """The wide plan: filled with fused tasks, and 6 random schedules with as many as fit."""
    schedules = [schedule("filled", "1f1b", WIDE.pipeline, WIDE.durations)]
    schedules += [
        random_schedule(WIDE.pipeline, random.Random(seed), fused=0.5) for seed in range(6)
    ]
    return Bench(WIDE), schedules, programs_of(WIDE, schedules)


def check_all(bench: Bench, schedules: list, programs: list[Program]) -> None:
    executor = bench.executor(programs[0])
    step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
    batch = executor.feed.batch(bench.batch)
    for s, program in zip(schedules, programs, strict=True):
        loss, grads, nans = step(params, batch, *executor.feed.tables(program))
        worst = bench.errors(loss, grads, images=bool(s.encoded))
        assert worst[0] <= LOSS_BOUND and worst[1] <= GRADIENT_BOUND, f"{worst}\n{s}"
        assert int(nans.sum()) == 0
    assert step._cache_size() == 1


def test_every_schedule_of_a_plan_shares_one_compilation(many: Many) -> None:
    assert len(many[1]) == 2 * len(ON_ANY_PIPELINE) + 20
    check_all(*many)


def test_every_schedule_with_fused_tasks_shares_one_compilation(wide: Many) -> None:
    fused = [sum(t.inside is not None for order in s.orders for t in order) for s in wide[1]]
    assert min(fused[1:]) >= 1 and max(fused) >= 4
    check_all(*wide)


def compiled(bench: Bench, program: Program) -> tuple[str, set[tuple[int, ...]]]:
    """The step as it is compiled for training, and the shapes of what its ticks carry."""
    executor = bench.executor(program)
    params = bench.staged(executor, bench.params)
    arguments = params, executor.feed.batch(bench.batch), *executor.feed.tables(program)
    hlo = executor.gradient_step().lower(*arguments).compile().as_text()
    return hlo, {x.shape for x in jax.tree.leaves(slot_buffers.shapes(executor, params)) if x.shape}


def test_no_loop_copies_a_slot_or_a_gradient(many: Many) -> None:
    bench, _, programs = many
    hlo, shapes = compiled(bench, programs[0])
    assert (programs[0].slots.saved + 1, 3, bench.plan.rows, 11, 24) in shapes
    assert copies_in_loops(hlo, shapes) == []
    assert products_beside_loops(hlo) == []


@pytest.mark.slow
def test_no_loop_of_a_wide_plan_copies_a_slot_or_a_gradient(wide: Many) -> None:
    bench, _, programs = wide
    hlo, shapes = compiled(bench, programs[0])
    assert len(shapes) > 40
    assert copies_in_loops(hlo, shapes) == []
    assert products_beside_loops(hlo) == []


def test_the_search_for_products_finds_one_beside_its_loop() -> None:
    def step(inside: bool) -> Callable[..., jax.Array]:
        def tick(total: jax.Array, kind: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            product = x[kind] @ w

            def task(zero: jax.Array, total: jax.Array) -> jax.Array:
                return total + (x[kind + zero] @ w if inside else product)

            return when(kind == 1, task, total)

        def run(kinds: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.scan(lambda t, k: (tick(t, k, x, w), None), jnp.zeros((40, 50)), kinds)[0]

        return run

    found = []
    for inside in (True, False):
        arguments = jnp.zeros(9, jnp.int32), jnp.ones((3, 40, 60)), jnp.ones((60, 50))
        hlo = jax.jit(step(inside)).lower(*arguments).compile().as_text()
        found.append(products_beside_loops(hlo))
    assert found[0] == [] and len(found[1]) == 1


def test_the_search_for_copies_finds_those_of_a_swap() -> None:
    def tick(slots: tuple[jax.Array, ...], kind: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        read, written = slots
        return (written, read.at[kind].add(written[0])), None

    def run(slots: tuple[jax.Array, ...], kinds: jax.Array) -> tuple[jax.Array, ...]:
        return lax.scan(tick, slots, kinds)[0]

    slots = jnp.ones((7, 300)), jnp.zeros((7, 300))
    hlo = jax.jit(run).lower(slots, jnp.zeros(5, jnp.int32)).compile().as_text()
    assert copies_in_loops(hlo, [(7, 300)])


@pytest.mark.parametrize("gradients", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_bfloat16_is_near_float32(gradients: str) -> None:
    plan = SmallPlan(2, 1, 1, 2, dtype="bfloat16")
    bench = Bench(plan)
    (program,) = programs_of(plan, [schedule("filled", "1f1b", bench.pipe, plan.durations)])
    executor = bench.executor(program, gradients=gradients)
    params = bench.staged(executor, bench.params)
    loss, grads, _ = executor.gradient_step(bench.options)(
        params, executor.feed.batch(bench.batch), *executor.feed.tables(program)
    )
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(gradients)}
    exact = jax.jit(Mllm(SmallPlan(2, 1, 1, 2).sizes).loss)(bench.params, bench.batch)
    assert abs(float(loss) - float(exact)) < 0.02 * float(exact)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    assert bench.errors(loss, grads, images=True)[1] < 0.1  # the sequential bfloat16 model's
