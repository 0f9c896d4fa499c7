"""Jobs to plan, not to train: python -m optimus_jax.plan --config=configs/clusters.py:NAME.

Nothing is taken from measurements or from the paper: kernels come from operations, bytes and links
of the hardware table (optimus_jax/cost/hardware.py). Names: h100_64 (plan searched), h100_98304
(the largest number up to 100,000 devices that tp 8 x pp 8 divides with a batch of 49,152),
frozen_encoder, frozen_llm, two_encoders, text_only.
"""

from ml_collections import ConfigDict

# GPUs, batch, dp, pp, tp, chunks
SIZES = {
    "h100_64": (64, 128, 0, 0, 0, 0),
    "h100_98304": (98_304, 49_152, 1536, 8, 8, 12),
    "frozen_encoder": (512, 256, 8, 8, 8, 12),
    "frozen_llm": (512, 256, 8, 8, 8, 12),
    "two_encoders": (512, 256, 8, 8, 8, 12),
    "text_only": (512, 256, 8, 8, 8, 12),
}


def get_config(name: str = "h100_64") -> ConfigDict:
    if name not in SIZES:
        raise ValueError(f"no job {name!r}; there is {', '.join(SIZES)}")
    gpus, batch, dp, pp, tp, chunks = SIZES[name]
    c = ConfigDict()
    c.hardware = "h100"
    c.gpus = gpus
    c.batch = batch
    c.memory_gb = 80.0
    c.profile = ""

    small = name == "h100_64"
    c.llm = ConfigDict(dict(name="LLAMA-70B" if small else "GPT-175B", length=2048))
    c.llm.frozen = name == "frozen_llm"
    c.llm.recompute = "full" if small else "selective"
    c.encoders = ConfigDict()
    if name != "text_only":
        vit = "ViT-11B" if small else "ViT-22B"
        chosen = dict(stages=0, tp=0, in_flight=0)  # by the planner
        c.encoders.image = ConfigDict(dict(name=vit, tokens=2048, image_tokens=256, **chosen))
        c.encoders.image.frozen = name == "frozen_encoder"
        c.encoders.image.recompute = "full" if small else "selective"
    if name == "two_encoders":
        # a plan of its own: one device for each of its pipelines
        c.encoders.audio = ConfigDict(dict(name="ViT-3B", tokens=1024, stages=8, tp=2))
    c.parallel = ConfigDict(dict(dp=dp, pp=pp, tp=tp, chunks=chunks, microbatch=2))
    c.assume = ConfigDict(dict(slot_usable=1.0, slot_contention=1.0))
    return c
