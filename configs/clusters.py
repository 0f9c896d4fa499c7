"""Jobs to plan, not to train: python -m optimus_jax.plan --config=configs/clusters.py:NAME.

Nothing is taken from measurements or from the paper: kernels come from operations, bytes and links
of the hardware table (optimus_jax/cost/hardware.py). Names: h100_8 and h100_64 (plans searched),
h100_512, h100_3072, h100_98304 (the largest number up to 100,000 devices that tp 8 x pp 8 divides
with a batch of 49,152), frozen_encoder, frozen_llm, two_encoders, text_only.

h100_BATCH_GPUS, such as h100_1536_6144, is h100_3072 with another global batch on another number of
devices, dp 1 for each 64 of them (docs/scaling.md).
"""

import re

from ml_collections import ConfigDict

# GPUs, batch, dp, pp, tp, chunks
SIZES = {
    "h100_8": (8, 32, 0, 0, 0, 0),
    "h100_64": (64, 128, 0, 0, 0, 0),
    "h100_512": (512, 256, 8, 8, 8, 12),
    "h100_3072": (3072, 1536, 48, 8, 8, 12),
    "h100_98304": (98_304, 49_152, 1536, 8, 8, 12),
    "frozen_encoder": (512, 256, 8, 8, 8, 12),
    "frozen_llm": (512, 256, 8, 8, 8, 12),
    "two_encoders": (512, 256, 8, 8, 8, 12),
    "text_only": (512, 256, 8, 8, 8, 12),
}


# LLM, ViT, recompute policies; of every other job GPT-175B, ViT-22B, both selective
MODELS = {
    "h100_8": ("LLAMA-8B", "ViT-3B", "selective", "full"),
    "h100_64": ("LLAMA-70B", "ViT-11B", "full", "full"),
}
LLAMA_8B = dict(  # Llama 3 8B (arXiv 2407.21783, table 3)
    layers=32, width=4096, heads=32, hidden=14_336, kv_heads=8, gated=True, vocabulary=128_256
)


def sizes(name: str) -> tuple[int, ...]:
    """Those of a job. Raises ValueError for a name that is none."""
    if name in SIZES:
        return SIZES[name]
    match = re.fullmatch(r"h100_(\d+)_(\d+)", name)
    if not match or int(match[2]) % 64:
        raise ValueError(
            f"no job {name!r}; there is {', '.join(SIZES)}, and h100_BATCH_GPUS with a multiple of"
            " 64 GPUs, such as h100_1536_6144"
        )
    batch, gpus = int(match[1]), int(match[2])
    return gpus, batch, gpus // 64, 8, 8, 0  # chunks are searched


def get_config(name: str = "h100_64") -> ConfigDict:
    gpus, batch, dp, pp, tp, chunks = sizes(name)
    c = ConfigDict()
    c.hardware = "h100"
    c.gpus = gpus
    c.batch = batch
    c.memory_gb = 80.0
    c.profile = ""

    llm, vit, *recompute = MODELS.get(name, ("GPT-175B", "ViT-22B", "selective", "selective"))
    c.llm = ConfigDict(dict(name=llm, length=2048, **(LLAMA_8B if name == "h100_8" else {})))
    c.llm.frozen = name == "frozen_llm"
    c.llm.recompute = recompute[0]
    c.encoders = ConfigDict()
    if name != "text_only":
        chosen = dict(stages=0, tp=0, in_flight=0)  # by the planner
        c.encoders.image = ConfigDict(dict(name=vit, tokens=2048, image_tokens=256, **chosen))
        c.encoders.image.frozen = name == "frozen_encoder"
        c.encoders.image.recompute = recompute[1]
    if name == "two_encoders":
        # a plan of its own: one device for each of its pipelines
        c.encoders.audio = ConfigDict(dict(name="ViT-3B", tokens=1024, stages=8, tp=2))
    c.parallel = ConfigDict(dict(dp=dp, pp=pp, tp=tp, chunks=chunks, microbatch=2))
    # jax takes this share of a GPU (XLA_CLIENT_MEM_FRACTION, optimus_jax/gpu_settings.py)
    c.assume = ConfigDict(dict(slot_usable=1.0, slot_contention=1.0, memory_share=0.9))
    return c
