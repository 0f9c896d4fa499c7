"""Bytes that devices send, and what stays whole: counted by hand at small sizes."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.plan.candidates import without_work
from optimus_jax.plan.cluster import Cluster, EncoderSpec, LlmPlan, LlmSpec, ParallelPlan
from optimus_jax.plan.device_memory import llm_memory, with_encoders
from optimus_jax.plan.traffic import Traffic, boundaries, sent, traffic
from optimus_jax.plan.zero_cuts import (
    checkpoint_bytes,
    is_cut,
    matrices,
    saved_whole_bytes,
    uncut_bytes,
    whole_entries,
)

LLM = LlmSpec("llm", 4, layers=4, width=8, heads=4, hidden=32, vocabulary=16)
VIT = EncoderSpec("vit", 8, image_tokens=4, layers=2, width=4, heads=2, hidden=16)
JOB = Cluster("h100", 16, 16, LLM, {"image": VIT}, LlmPlan(microbatch=1))
PLAN = ParallelPlan(2, 2, 4)  # 8 microbatches
VITS = {"image": without_work(2, 1, 2)}  # 4 pipelines of one stage of 2 devices


def counted(job: Cluster = JOB, plan: ParallelPlan = PLAN) -> Traffic:
    return traffic(job, plan, VITS)


def without_encoder(plan: ParallelPlan = PLAN, **llm: object) -> Traffic:
    job = dataclasses.replace(JOB, llm=dataclasses.replace(LLM, **llm))  # type: ignore[arg-type]
    return traffic(job, plan, {})


def test_tensor_shards() -> None:
    # of an array of 4 positions x 8 in bfloat16, 64 bytes, a device sends 3 parts of 4: 48; 4
    # collectives forward and 4 backward, 2 layers of a stage, 8 microbatches
    assert without_encoder().llm_tp == 8 * 48 * 2 * 8
    assert without_encoder(recompute="full").llm_tp == 12 * 48 * 2 * 8
    # 2 images of 4 positions x 4 on 2 devices: 64 bytes, of which one half; 2 layers, and a
    # pipeline has 2 of 8 microbatches
    assert counted().encoder_tp == 8 * 32 * 2 * 2
    assert without_encoder(ParallelPlan(8, 2, 1)).llm_tp == 0


def test_stages() -> None:
    assert [boundaries(stages, 1) for stages in (1, 2, 3, 8)] == [0, 1, 2, 2]
    assert [boundaries(stages, 3) for stages in (1, 2, 4)] == [0, 5, 6]
    assert boundaries(2, 1, backward=False) == 1
    # a device's quarter of 64 bytes, once for each of 8 microbatches
    assert without_encoder().llm_pp == 16 * 8
    assert without_encoder(ParallelPlan(2, 2, 4, 2)).llm_pp == 3 * 16 * 8
    assert counted().encoder_pp == 0
    two = traffic(JOB, PLAN, {"image": without_work(2, 2, 2)})  # 2 pipelines, 4 microbatches each
    assert two.encoder_pp == 4 * (2 * 8 * 4 / 2)


def test_features() -> None:
    # 8 positions x 8 in bfloat16, 128 bytes, whole on every device of an encoder pipeline: back
    # from the LLM's first stage, of all 8 microbatches, those of a device's lane, of 2; there from
    # an encoder's last stage, 2 microbatches
    assert counted().features == max(8 * 128 / 2, 2 * 128)
    frozen = dataclasses.replace(JOB, encoders={"image": dataclasses.replace(VIT, frozen=True)})
    assert counted(frozen).features == 2 * 128
    # the LLM's first stage gathers all from its 2 lanes; alone, an encoder pipeline has one lane
    assert counted().lanes == counted(frozen).lanes == 8 * 128 / 2
    assert counted().tp == counted().llm_tp + counted().encoder_tp + counted().lanes
    one = traffic(JOB, ParallelPlan(4, 2, 2), {"image": without_work(2, 1, 1)})
    assert (one.features, one.lanes) == (4 * 128, 0)
    assert traffic(JOB, ParallelPlan(4, 1, 4), {"image": without_work(1, 1, 2)}).features == 0


def test_features_are_held_whole_by_each_shard() -> None:
    base = llm_memory(JOB, PLAN)
    table = with_encoders(base, JOB, PLAN, VITS, [0.0])
    # features and gradients of a microbatch, 128 bytes each, of which a device's lane has half
    assert table.communication_buffers - base.communication_buffers == 2 * 128 / 2
    one = with_encoders(base, JOB, PLAN, {"image": without_work(2, 1, 1)}, [0.0])
    assert one.communication_buffers - base.communication_buffers == 2 * 128


def test_replicas() -> None:
    assert sent(100, 4, 2) == 150
    assert sent(100, 1, 4) == 0
    # a layer has 4 x 64 + 2 x 256 = 768 entries, 2 layers on 4 devices 384, of 2 replicas;
    # embedding and head 64 on a device, of 4 replicas: every stage has them
    llm = without_encoder()
    assert llm.dp_gather == 2 * (384 / 2 + 64 * 3 / 4)
    assert llm.dp_scatter == 4 * (384 / 2 + 64 * 3 / 4)
    # the encoder's layers: 192 each, 2 on 2 devices, of 2 x 4 replicas
    assert counted().dp_gather - llm.dp_gather == 2 * 192 * 7 / 8
    assert counted().dp_scatter - llm.dp_scatter == 4 * 192 * 7 / 8


def test_frozen_weights_do_not_travel() -> None:
    assert without_encoder(frozen=True).dp == 0
    job = dataclasses.replace(JOB, encoders={"image": dataclasses.replace(VIT, frozen=True)})
    assert counted(job).dp == without_encoder().dp
    assert counted(job).encoder_tp == 4 * 32 * 2 * 2  # forward only


def test_links() -> None:
    chip = HARDWARE["h100"]
    rows = counted().rows(PLAN, chip)
    assert [link for _, link in rows.values()] == [chip.nvlink, *[chip.network] * 3]
    assert sum(count for count, _ in rows.values()) == counted().tp + counted().pp + counted().dp
    assert {link for _, link in counted().rows(ParallelPlan(1, 2, 4), chip).values()} == {
        chip.nvlink
    }


def test_what_no_dimension_divides_stays_whole() -> None:
    assert is_cut((3, 8), 4) and not is_cut((3, 8), 16)
    # qkv 4 x 3 x 2 x 2, out 2 x 2 x 4, up 4 x 16, down 16 x 4, of which 16 parts cut the last two
    model = VIT.model
    assert whole_entries(model, 1, (2,), 16) == 2 * (48 + 16)
    assert whole_entries(model, 1, (2,), 4) == 0
    assert whole_entries(model, 1, (16,), 16) == 0  # layers divide
    assert whole_entries(model, 2, (2,), 16) == 2 * (24 + 8 + 32 + 32)
    # 8 replicas: on 2 devices up and down have a dimension of 8, qkv and out have none
    assert uncut_bytes(JOB, PLAN, VITS) == {"llm": 0, "image": 12 * 2 * (24 + 8) * 7 / 8}
    # on 16 devices, saved: the LLM's up and down (32), not qkv and out, and not the ViT's
    assert saved_whole_bytes(JOB) == 12 * (4 * (3 * 64 + 64) + 2 * (48 + 16))
    assert checkpoint_bytes(JOB) == 12 * (4 * 768 + 2 * 128 + 2 * 192)


@pytest.mark.parametrize("devices", ["64", "98304"])
def test_the_rules_are_those_of_the_executor(devices: str) -> None:
    import jax

    from configs.compile_grid import get_config
    from optimus_jax.config import from_config_dict
    from optimus_jax.cost.transformer import Transformer
    from optimus_jax.models.mllm import Mllm
    from optimus_jax.parallel.layout import is_layout, layouts
    from optimus_jax.parallel.mesh import Grid
    from optimus_jax.parallel.stages import stage_axes, stage_tree

    config = from_config_dict(get_config(devices).to_dict())
    model, pipe, names = Mllm(config.model), config.pipeline, tuple(config.model.encoders)
    shapes = jax.eval_shape(lambda key: stage_tree(model.init(key), pipe, names), jax.random.key(0))
    sequence = dict.fromkeys(("llm", *names), True)
    axes = stage_axes(model.axes(), pipe, names)
    found = layouts(axes, shapes, Grid.of(config), sequence, 2**20 / 4)
    dp, pp, tp = config.parallel.dp, config.parallel.pp, config.parallel.tp
    e = config.model.encoders[names[0]]
    vit = Transformer("vit", e.layers, e.width, e.heads, e.hidden)
    llm = config.model.llm
    gpt = Transformer("gpt", llm.layers, llm.width, llm.heads, llm.hidden)
    for mine, tree, stack in (
        (gpt, ("llm",), (1, 1)),
        (vit, ("encoders", names[0]), (1,)),
    ):
        layers, sizes = found, shapes
        for key in (*tree, "layers"):
            layers, sizes = layers[key], sizes[key]
        whole = sum(
            x.size // (pp * tp)
            for layout, x in zip(
                jax.tree.leaves(layers, is_leaf=is_layout), jax.tree.leaves(sizes), strict=True
            )
            if layout.zero is None and x.size // (pp * tp) * 4 >= 2**20
        )
        assert whole == whole_entries(mine, tp, stack, dp)


@pytest.mark.parametrize("devices", [64, 12_288, 98_304])
def test_what_is_saved_whole_is_what_the_trainer_saves_whole(devices: int) -> None:
    from jax.sharding import AbstractMesh

    from optimus_jax.cost.transformer import MODELS
    from optimus_jax.parallel.sharding import storage_sharding

    mesh = AbstractMesh((devices,), ("all",))
    for model in (MODELS["GPT-175B"], MODELS["ViT-22B"]):
        for shape in matrices(model):
            stored = (model.layers, *shape)
            assert any(storage_sharding(stored, mesh).spec) == is_cut(stored, devices)  # type: ignore[arg-type]
