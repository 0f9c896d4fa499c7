"""A job to compile, not to train: python -m optimus_jax.compile --config=configs/compile_tp.py.

A LLaMA-like LLM of 16 layers, width 8192, on 64 H100s: 4 replicas of 4 stages, every layer cut
over 4 GPUs with sequence parallelism. A ViT of 16 layers, width 3072, on 4 stages, its pictures
shared by the 4 GPUs of a stage: one of its layers then takes about as long as the collectives of
an LLM layer. At most 10 microbatches may have encoder activations at a time, so that pipeline
bubbles cannot take all of the encoder's work, and most of it runs inside LLM layers. Compiling
takes as long for any number of layers or GPUs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.hardware = "h100"
    c.evaluate_examples = 2

    c.model = ConfigDict()
    c.model.dtype = "bfloat16"
    c.model.image_height = 448
    c.model.image_width = 448
    c.model.text_length = 1024
    c.model.projector_hidden = 8192
    c.model.vocabulary = 32_768
    c.model.encoder = ConfigDict(
        dict(layers=16, width=3072, heads=24, hidden=12_288, patch=14, block="vit")
    )
    c.model.llm = ConfigDict(
        dict(layers=16, width=8192, heads=64, hidden=28_672, block="llama", kv_heads=8)
    )

    c.data = ConfigDict()
    c.data.name = "digits"
    c.data.digits_low = 1
    c.data.digits_high = 4

    c.parallel = ConfigDict()
    c.parallel.dp = 4
    c.parallel.pp = 4
    c.parallel.tp = 4
    c.parallel.chunks = 1
    c.parallel.microbatches = 16
    c.parallel.order = "1f1b"
    c.parallel.method = "filled"
    c.parallel.encoder = ConfigDict(dict(pp=4, tp=1))
    c.parallel.recompute = "full"
    c.parallel.sequence_parallel = True
    c.parallel.zero = True
    c.parallel.fuse = True
    c.parallel.encoder_cap = 10

    c.train = ConfigDict()
    c.train.seed = 0
    c.train.batch = 4 * 16 * 8  # replicas x microbatches x rows
    c.train.steps = 1000
    c.train.learning_rate = 1e-4
    c.train.warmup = 10
    c.train.weight_decay = 0.0
    c.train.clip = 1.0
    c.train.log_every = 10
    c.train.save_every = 1000
    c.train.keep = 1
    return c
