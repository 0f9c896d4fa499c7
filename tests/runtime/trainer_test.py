"""One training step against optax on the sequential model's gradients."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

from optimus_jax.config import TrainConfig
from optimus_jax.models.mllm import Mllm
from optimus_jax.optimizer import _decays, learning_rate, make_optimizer
from optimus_jax.parallel.stages import unstage_tree
from optimus_jax.runtime import slots as slot_buffers
from optimus_jax.runtime.comparison import Bench
from optimus_jax.runtime.small_plan import SmallPlan, Tower
from optimus_jax.runtime.trainer import Trainer
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from tests.models.small import modern_model, small_model
from tests.runtime.stray_work import copies_in_loops

CONFIG = TrainConfig(
    seed=3,
    batch=1,
    steps=10,
    learning_rate=0.01,
    warmup=2,
    weight_decay=0.1,
    clip=0.5,
    log_every=1,
    save_every=1,
    keep=1,
)


# Every device a whole encoder; and stages, shards and replicas of it, master weights cut too.
PLANS = [
    pytest.param(SmallPlan(2, 2, 1, 3), marks=pytest.mark.slow),
    SmallPlan(2, 2, 1, 3, tp=2, towers=(Tower(pp=2, recompute="none"),), zero=True),
]


@pytest.fixture(scope="module", params=PLANS, ids=str)
def trained(request: pytest.FixtureRequest) -> tuple[Bench, Trainer, list, list]:
    plan: SmallPlan = request.param
    durations = plan.durations
    program = lower(schedule("filled", "1f1b", plan.pipeline, durations), durations)
    bench = Bench(plan)
    executor = bench.executor(program)
    trainer = Trainer(executor, CONFIG)
    state, step, states, metrics = trainer.init(), trainer.train_step(bench.options), [], []
    batch, tables = executor.feed.batch(bench.batch), executor.feed.tables(program)
    for _ in range(3):
        state, values = step(state, batch, *tables)
        free = unstage_tree(state.params, bench.pipe, executor.encoders)
        states.append(jax.tree.map(np.asarray, free))
        metrics.append(jax.tree.map(np.asarray, values))
    assert step._cache_size() == 1
    trainer.last, trainer.program = state, program
    return bench, trainer, states, metrics


def test_steps_equal_optax_with_clipping_on_the_sequential_model(
    trained: tuple[Bench, Trainer, list, list],
) -> None:
    bench, _, states, metrics = trained
    jit = functools.partial(jax.jit, compiler_options=bench.options)
    params = bench.model.init(jax.random.key(CONFIG.seed))
    value_and_grad = jit(jax.value_and_grad(bench.model.loss))
    tx = optax.chain(optax.clip_by_global_norm(CONFIG.clip), make_optimizer(CONFIG))
    optimizer, update, apply = tx.init(params), jit(tx.update), jit(optax.apply_updates)
    for state, values in zip(states, metrics, strict=True):
        loss, grads = value_and_grad(params, bench.batch)
        norm = float(optax.global_norm(grads))
        assert norm > CONFIG.clip  # or clipping is not tested
        assert float(values["loss"]) == pytest.approx(float(loss), rel=1e-6)
        assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        updates, optimizer = update(grads, optimizer, params)
        params = apply(params, updates)
        for (path, got), want in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(params), strict=True
        ):
            if path[-1].key == "qkv_bias":
                # softmax does not feel a key bias: its gradient is rounding, which Adam blows up
                got, want = got[:, ::2], want[:, ::2]
            np.testing.assert_allclose(got, want, atol=5e-5, err_msg=str(path))


def test_no_loop_of_the_training_step_copies_a_slot_or_a_gradient(
    trained: tuple[Bench, Trainer, list, list],
) -> None:
    bench, trainer, _, _ = trained
    executor = trainer.executor
    tables = executor.feed.tables(trainer.program)
    arguments = trainer.last, executor.feed.batch(bench.batch), *tables
    hlo = trainer.train_step().lower(*arguments).compile().as_text()
    carry = jax.tree.leaves(slot_buffers.shapes(executor, trainer.last.params))
    shapes = {x.shape for x in carry if x.shape}
    assert len(carry) > 40 and copies_in_loops(hlo, shapes) == []


def test_state_survives_unstaging_and_staging(trained: tuple[Bench, Trainer, list, list]) -> None:
    _, trainer, _, _ = trained
    free = trainer.unstage(trainer.last)
    want = jax.tree.map(np.asarray, trainer.last)
    assert jax.tree.map(lambda x: x.shape, free) == jax.tree.map(
        lambda x: x.shape, trainer.abstract()
    )
    again = trainer.stage(free)
    jax.tree.map(np.testing.assert_array_equal, want, jax.tree.map(np.asarray, again))
    assert int(again.step) == 3


def test_weight_decay_spares_biases_norms_and_positions() -> None:
    pull = make_optimizer(CONFIG)
    spared = "qkv_bias", "scale", "query_scale", "position"  # by the ends of their names
    params = {"a": {name: np.ones(2) for name in ("kernel", *spared)}}
    zero = jax.tree.map(np.zeros_like, params)
    state = pull.init(params)
    for _ in range(3):
        updates, state = pull.update(zero, state, params)
    assert np.all(updates["a"]["kernel"] < 0)
    assert not any(np.any(updates["a"][name]) for name in spared)


@pytest.mark.parametrize(
    "model", [small_model(), modern_model()], ids=["vit, gpt", "vit22b, llama"]
)
def test_no_vector_of_weights_decays(model: Mllm) -> None:
    """Every norm's scale is one, whatever its name."""
    weights = jax.eval_shape(model.init, jax.random.key(0))
    for path, decays in jax.tree_util.tree_flatten_with_path(_decays(weights))[0]:
        leaf = functools.reduce(lambda tree, key: tree[key.key], path, weights)
        stacked = any(key.key == "layers" for key in path)
        assert leaf.ndim - stacked > 1 or not decays, path


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [float(learning_rate(CONFIG)(n)) for n in range(CONFIG.steps + 1)]
    assert rates[0] == 0 and rates[CONFIG.warmup] == pytest.approx(CONFIG.learning_rate)
    assert rates[CONFIG.warmup :] == sorted(rates[CONFIG.warmup :], reverse=True)
    assert rates[-1] == pytest.approx(0)


@pytest.mark.slow
def test_gradients_may_be_summed_in_bfloat16() -> None:
    """Weights, their state and the norm stay float32; the first update, which AdamW scales to the
    learning rate, is nearly the same."""
    plan = SmallPlan(1, 2, 1, 3)
    program = lower(schedule("filled", "1f1b", plan.pipeline, plan.durations), plan.durations)
    bench, found = Bench(plan), {}
    for gradients in ("float32", "bfloat16"):
        executor = bench.executor(program, gradients=gradients)
        trainer = Trainer(executor, CONFIG)
        step = trainer.train_step(bench.options)
        batch, tables = executor.feed.batch(bench.batch), executor.feed.tables(program)
        state, metrics = step(trainer.init(), batch, *tables)
        assert {x.dtype for x in jax.tree.leaves(state[:2])} <= {np.dtype("f4"), np.dtype("i4")}
        found[gradients] = float(metrics["loss"]), float(metrics["grad_norm"])
        carry = slot_buffers.shapes(executor, state.params)
        # bfloat16 is kept as its bits
        bits = {"float32": np.float32, "bfloat16": np.uint16}[gradients]
        assert {x.dtype for x in jax.tree.leaves(carry.grads)} == {np.dtype(bits)}
    (loss, norm), (same, near) = found.values()
    assert same == loss
    assert near != norm and near == pytest.approx(norm, rel=1e-2)
