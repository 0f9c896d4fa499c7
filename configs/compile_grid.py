"""A job to compile at any size: python -m optimus_jax.compile --config=configs/compile_grid.py:3072
--target=h100x3072.

The number after the colon is that of the GPUs, a multiple of 8. Stages and tensor shards are the
same at every size, pp 4 x tp 2, so only dp grows: what then grows in the program, and in the
compiler, grows with the number of devices. Widths are those of GPT-175B, with one layer in each
stage: compiling takes as long for any number of layers. Every replica has 8 microbatches.
"""

from ml_collections import ConfigDict

PP, TP, MICROBATCHES, ROWS = 4, 2, 8, 1


def get_config(devices: str = "8") -> ConfigDict:
    if not devices.isdecimal() or not int(devices) or int(devices) % (PP * TP):
        raise ValueError(f"{devices!r} devices: give a multiple of {PP * TP}, such as 64")
    c = ConfigDict()
    c.hardware = "h100"
    c.evaluate_examples = 2

    c.model = ConfigDict()
    c.model.dtype = "bfloat16"
    c.model.image_height = 224
    c.model.image_width = 224
    c.model.text_length = 768
    c.model.projector_hidden = 12_288
    c.model.vocabulary = 32_768
    c.model.encoder = ConfigDict(
        dict(layers=4, width=6144, heads=48, hidden=24_576, patch=14, block="vit")
    )
    c.model.llm = ConfigDict(dict(layers=4, width=12_288, heads=96, hidden=49_152, block="gpt"))

    c.data = ConfigDict()
    c.data.name = "digits"
    c.data.digits_low = 1
    c.data.digits_high = 4

    c.parallel = ConfigDict()
    c.parallel.dp = int(devices) // (PP * TP)
    c.parallel.pp = PP
    c.parallel.tp = TP
    c.parallel.chunks = 1
    c.parallel.microbatches = MICROBATCHES
    c.parallel.order = "1f1b"
    c.parallel.method = "filled"
    c.parallel.encoder = ConfigDict(dict(pp=PP, tp=TP))
    c.parallel.recompute = "full"
    c.parallel.sequence_parallel = True
    c.parallel.zero = True
    c.parallel.fuse = False

    c.train = ConfigDict()
    c.train.seed = 0
    c.train.batch = c.parallel.dp * MICROBATCHES * ROWS
    c.train.steps = 1000
    c.train.learning_rate = 1e-4
    c.train.warmup = 10
    c.train.weight_decay = 0.0
    c.train.clip = 1.0
    c.train.log_every = 10
    c.train.save_every = 1000
    c.train.keep = 1
    return c
