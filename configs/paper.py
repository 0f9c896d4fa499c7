"""Jobs of the Optimus paper's tables: python -m optimus_jax.plan --config=configs/paper.py:ROW.

Rows: strong_1536, strong_2048, strong_3072 (tables 5, 7, 12); weak_a to weak_d (tables 3, 11);
dual_11_5, dual_22_5, dual_22_11 (table 6); small (tables 4, 10); bubbles (table 1, a fit).

Three constants were calibrated, on the 1536-GPU rows alone (python -m optimus_jax.plan.calibrate):
efficiency from Megatron-LM's 10.65 s, p2p_busy_s from Optimus's 9.80 s, dp_exposed_s from the
coarse share of 34.3 %. The paper itself gives 300 us for a tensor-parallel collective and 1.4 and
2.0 ms for a layer of ViT-22B. It does not say how many images a sample has: here 2,048 positions of
the encoder are 8 images of 256.
"""

from ml_collections import ConfigDict

CALIBRATED = dict(efficiency=0.28528, p2p_busy_s=0.6172e-3, dp_exposed_s=0.14023)

# encoders, LLM, GPUs, batch, dp, pp, tp, chunks, hardware
ROWS = {
    "strong_1536": (("ViT-22B",), "GPT-175B", 1536, 1536, 24, 8, 8, 12, "h100"),
    "strong_2048": (("ViT-22B",), "GPT-175B", 2048, 1536, 32, 8, 8, 12, "h100"),
    "strong_3072": (("ViT-22B",), "GPT-175B", 3072, 1536, 48, 8, 8, 12, "h100"),
    "weak_a": (("ViT-11B",), "LLAMA-70B", 64, 32, 2, 4, 8, 6, "h100"),
    "weak_b": (("ViT-22B",), "LLAMA-70B", 128, 64, 4, 4, 8, 6, "h100"),
    "weak_c": (("ViT-11B",), "GPT-175B", 256, 128, 4, 8, 8, 12, "h100"),
    "weak_d": (("ViT-22B",), "GPT-175B", 512, 256, 8, 8, 8, 12, "h100"),
    "dual_11_5": (("ViT-11B", "ViT-5B"), "GPT-175B", 512, 256, 8, 8, 8, 12, "h100"),
    "dual_22_5": (("ViT-22B", "ViT-5B"), "GPT-175B", 512, 256, 8, 8, 8, 12, "h100"),
    "dual_22_11": (("ViT-22B", "ViT-11B"), "GPT-175B", 512, 256, 8, 8, 8, 12, "h100"),
    # no plan is printed for the small model: the planner looks for one; 2 divides ViT-3B's 18 heads
    "small": (("ViT-3B",), "GPT-11B", 8, 16, 0, 0, 2, 0, "a100"),
}


def get_config(row: str = "strong_3072") -> ConfigDict:
    if row == "bubbles":
        return _bubbles()
    if row not in ROWS:
        raise ValueError(f"no row {row!r}; there is {', '.join(ROWS)}, bubbles")
    encoders, llm, gpus, batch, dp, pp, tp, chunks, hardware = ROWS[row]
    c = ConfigDict()
    c.hardware = hardware
    c.gpus = gpus
    c.batch = batch
    c.memory_gb = 80.0
    c.profile = ""

    c.llm = ConfigDict(dict(name=llm, length=2048, frozen=False, recompute="selective"))
    c.encoders = ConfigDict()
    for name in encoders:
        encoder = dict(name=name, tokens=2048, image_tokens=256, frozen=False)
        encoder |= dict(recompute="selective", stages=0, tp=0, in_flight=0)
        c.encoders[name] = ConfigDict(encoder)
    c.parallel = ConfigDict(dict(dp=dp, pp=pp, tp=tp, chunks=chunks, microbatch=2))

    c.assume = ConfigDict(CALIBRATED)
    c.assume.all_gather_share = 0.3
    c.assume.slot_usable = 1.0
    c.assume.slot_contention = 1.0
    c.assume.tp_collective_s = 300e-6
    c.assume.vit_forward_s = 1.4e-3
    c.assume.vit_backward_s = 2.0e-3
    c.assume.vit_collective_s = 150e-6
    c.assume.memory_share = 1.0  # the paper's plans are held against the whole 80 GB
    return c


def _bubbles() -> ConfigDict:
    """An LLM with about the idle time of table 1: a fit, with constants of its own. The paper gives
    neither model nor plan of the job that it profiled; both bubbles of gradients and parameters are
    printed seconds."""
    c = get_config("strong_3072")
    c.batch = 2112
    c.llm = ConfigDict(dict(name="GPT", length=2048, layers=88, width=12288, heads=96))
    c.llm.hidden = 49152
    c.encoders = ConfigDict()
    c.parallel.chunks = 1
    c.assume = ConfigDict(dict(efficiency=0.588, llm_backward=2.68, tp_collective_s=243e-6))
    c.assume.dp_exposed_s = 0.625
    c.assume.p2p_busy_s = 1e-6  # transfers are not among the bubbles of table 1
    c.assume.all_gather_share = 0.267
    c.assume.memory_share = 1.0
    return c
