"""The executor against the sequential model, and what its compiled step may not contain."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optimus_jax.runtime import comparison
from optimus_jax.runtime.buffers import when
from optimus_jax.runtime.comparison import Bench, compare
from optimus_jax.runtime.hlo import copies_in_loops, products_beside_loops
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import METHODS, schedule
from optimus_jax.schedule.program import fit_together
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Pipeline
from optimus_jax.schedule.validate import validate
from optimus_jax.verify import GRADIENT_BOUND, INJECTIONS, LOSS_BOUND, Shape, all_shapes, cases_of
from tests.schedule.random_schedules import random_schedule


@pytest.mark.parametrize(
    "shape", [Shape(2, 2, 2, 2), Shape(4, 1, 1, 3), Shape(1, 2, 1, 3)], ids=str
)
def test_loss_and_gradients_equal_the_sequential_model(shape: Shape) -> None:
    cases = [(case.order, case.method) for case in cases_of(shape)]
    errors = compare(shape.pp, shape.dp, shape.chunks, shape.microbatches, cases)
    for case, (loss, gradient) in zip(cases, errors, strict=True):
        assert loss <= LOSS_BOUND, case
        assert gradient <= GRADIENT_BOUND, case


@pytest.mark.parametrize("inject", INJECTIONS)
def test_a_broken_run_is_noticed(inject: str) -> None:
    errors = compare(2, 2, 1, 3, [("1f1b", "filled")], inject=inject)
    assert errors[0][1] >= 1e-2


def test_the_grid_of_verify_is_large_enough() -> None:
    names = [str(case) for shape in all_shapes() for case in cases_of(shape)]
    assert len(names) == len(set(names)) >= 150


@pytest.fixture(scope="module")
def many() -> tuple[Bench, list, list]:
    """One plan, pp 2 M 4: every method on both orders, and 20 random schedules."""
    pipe = Pipeline(2, 4, llm_layers=(2, 1), encoder_layers=4)
    durations = Durations.uniform(pipe, encoder=0.7)
    schedules = [schedule(m, o, pipe, durations) for o in ("1f1b", "gpipe") for m in METHODS]
    schedules += [random_schedule(pipe, random.Random(seed)) for seed in range(20)]
    programs = [lower(s, durations) for s in schedules]
    for program, s in zip(programs, schedules, strict=True):
        validate(program, s)
    return Bench(pipe, dp=1), schedules, fit_together(programs)


def test_every_schedule_of_a_plan_shares_one_compilation(many: tuple[Bench, list, list]) -> None:
    bench, schedules, programs = many
    executor = bench.executor(programs[0])
    step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
    batch = executor.place_batch(bench.batch)
    for s, program in zip(schedules, programs, strict=True):
        loss, grads, nans = step(params, batch, *executor.place_tables(program))
        worst = bench.errors(loss, grads, images=bool(s.encoded))
        assert worst[0] <= LOSS_BOUND and worst[1] <= GRADIENT_BOUND, f"{worst}\n{s}"
        assert int(nans.sum()) == 0
    assert len(schedules) == 2 * len(METHODS) + 20 and step._cache_size() == 1


def test_no_loop_copies_a_slot_or_a_gradient(many: tuple[Bench, list, list]) -> None:
    bench, _, programs = many
    executor = bench.executor(programs[0])
    params = bench.staged(executor, bench.params)
    arguments = params, executor.place_batch(bench.batch), *executor.place_tables(programs[0])
    hlo = executor.gradient_step().lower(*arguments).compile().as_text()
    shapes = executor.carry_shapes(params)
    assert (programs[0].slots.saved + 1, 3, bench.rows, 11, 24) in shapes
    assert copies_in_loops(hlo, shapes) == []
    assert products_beside_loops(hlo) == []


def test_the_search_for_products_finds_one_that_left_its_loop() -> None:
    def step(anchored: bool) -> Callable[..., jax.Array]:
        def tick(total: jax.Array, kind: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            def task(zero: jax.Array, total: jax.Array) -> jax.Array:
                place = kind + zero if anchored else kind
                return total + x[place] @ w

            return when(kind == 1, task, total)

        def run(kinds: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.scan(lambda t, k: (tick(t, k, x, w), None), jnp.zeros((40, 50)), kinds)[0]

        return run

    found = []
    for anchored in (True, False):
        arguments = jnp.zeros(9, jnp.int32), jnp.ones((3, 40, 60)), jnp.ones((60, 50))
        hlo = jax.jit(step(anchored)).lower(*arguments).compile().as_text()
        found.append(products_beside_loops(hlo))
    assert found[0] == [] and len(found[1]) == 1


def test_the_search_for_copies_finds_those_of_a_conditional() -> None:
    def tick(slots: jax.Array, kind: jax.Array) -> tuple[jax.Array, None]:
        branches = [lambda x: x, lambda x: x.at[3].add(1.0), lambda x: x.at[kind].multiply(x[0])]
        return lax.switch(kind, branches, slots), None

    def run(slots: jax.Array, kinds: jax.Array) -> jax.Array:
        return lax.scan(tick, slots, kinds)[0]

    hlo = jax.jit(run).lower(jnp.ones((7, 300)), jnp.zeros(5, jnp.int32)).compile().as_text()
    assert copies_in_loops(hlo, [(7, 300)])


def test_bfloat16_is_near_float32() -> None:
    pipe = Pipeline(2, 2, llm_layers=(1, 1), encoder_layers=4)
    durations = Durations.uniform(pipe, encoder=0.7)
    program = lower(schedule("filled", "1f1b", pipe, durations), durations)
    bench = Bench(pipe, dp=1, dtype="bfloat16")
    executor = bench.executor(program)
    params = bench.staged(executor, bench.params)
    loss, grads, _ = executor.gradient_step(bench.options)(
        params, executor.place_batch(bench.batch), *executor.place_tables(program)
    )
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    exact = jax.jit(comparison.small_model(2).loss)(bench.params, bench.batch)
    assert abs(float(loss) - float(exact)) < 0.02 * float(exact)
    assert bench.errors(loss, grads, images=True)[1] < 0.1  # the sequential bfloat16 model's
