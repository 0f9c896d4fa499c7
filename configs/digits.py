"""Read handwritten digits: a ViT of 2 layers, width 48, into a GPT of 4 layers, width 64.

Pictures show 1 to 4 of scikit-learn's handwritten digits at varying positions; the caption is their
reading, "3 1 4". Train and held-out digits are disjoint.

    python -m optimus_jax.train --config=configs/digits.py

On two CPU cores a step takes 60 ms and the run 80 seconds; it reads 97 % of held-out digits.

Runs on 2 CPU devices: a pipeline of 2 stages with encoder work in its bubbles. Another plan is an
override away: --config.parallel.pp=1 for one device, --config.parallel.dp=2 for two replicas.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.hardware = "cpu_core"  # the chip that predicted times are for (cost/hardware.py)
    c.evaluate_examples = 512

    c.model = ConfigDict()
    c.model.dtype = "float32"  # of the computation; "bfloat16" on GPUs
    c.model.image_height = 16
    c.model.image_width = 40
    c.model.text_length = 9  # start, up to 4 digits with spaces between, end
    c.model.projector_hidden = 128
    c.model.encoder = ConfigDict(dict(layers=2, width=48, heads=4, hidden=192, patch=4))
    c.model.llm = ConfigDict(dict(layers=4, width=64, heads=4, hidden=256))

    c.data = ConfigDict()
    c.data.name = "digits"
    c.data.digits_low = 1
    c.data.digits_high = 4

    c.parallel = ConfigDict()
    c.parallel.dp = 1  # replicas of the pipeline
    c.parallel.pp = 2  # stages
    c.parallel.chunks = 1  # virtual stages on each device
    c.parallel.microbatches = 4
    c.parallel.order = "1f1b"  # of the LLM's tasks: 1f1b or gpipe
    c.parallel.method = "filled"  # where the encoder's tasks go

    c.train = ConfigDict()
    c.train.seed = 0
    c.train.batch = 32
    c.train.steps = 1200
    c.train.learning_rate = 2e-3
    c.train.warmup = 100
    c.train.weight_decay = 0.05
    c.train.clip = 1.0
    c.train.log_every = 50
    c.train.save_every = 500
    c.train.keep = 2
    return c
