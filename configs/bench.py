"""Sizes for python -m optimus_jax.bench: --config=configs/bench.py:PRESET, pp2_m4 by default.

With F and B for a stage's forward and backward of one microbatch, e and e_b for the encoder's of
all its pictures: a backward computes its layers again, so B is near 3 F. On two cores of a Xeon
pp2_m4 was seen with F 61 ms, B 185 ms (3.1 F), e 32 ms (0.52 F) and e_b 101 ms (0.55 B); the
machine's speed drifts by half within minutes. pp2_m8 has the same tasks and twice as many.
pp4_m8 and pp8_v2_m16 need a core for each stage, or --emulate: there tasks sleep, 20 ms a
chunk's forward, with B = 2 F, e = F and e_b = 2 F (pp2: e = 0.5 F).
"""

from ml_collections import ConfigDict

PRESETS = {  # pp, chunks, microbatches, rows of a microbatch, encoder layers, emulated e / F
    "pp2_m4": (2, 1, 4, 10, 3, 0.5),
    "pp2_m8": (2, 1, 8, 10, 3, 0.5),
    "pp4_m8": (4, 1, 8, 12, 6, 1.0),
    "pp8_v2_m16": (8, 2, 16, 16, 6, 1.0),
}


def get_config(preset: str = "pp2_m4") -> ConfigDict:
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; there is {', '.join(PRESETS)}")
    pp, chunks, microbatches, rows, encoder_layers, encoder = PRESETS[preset]
    c = ConfigDict()
    c.hardware = "cpu_core"
    c.evaluate_examples = 16

    c.model = ConfigDict()
    c.model.dtype = "float32"
    c.model.image_height = 64
    c.model.image_width = 64
    c.model.text_length = 64
    c.model.projector_hidden = 256
    c.model.encoder = ConfigDict(
        dict(layers=encoder_layers, width=200, heads=4, hidden=720, patch=8)
    )
    c.model.llm = ConfigDict(dict(layers=2 * pp * chunks, width=256, heads=4, hidden=1024))

    c.data = ConfigDict()
    c.data.name = "digits"
    c.data.digits_low = 1
    c.data.digits_high = 4

    c.parallel = ConfigDict()
    c.parallel.dp = 1
    c.parallel.pp = pp
    c.parallel.chunks = chunks
    c.parallel.microbatches = microbatches
    c.parallel.order = "1f1b"
    c.parallel.method = "filled"

    c.emulate = ConfigDict()  # with --emulate: task times, beside a stage's forward
    c.emulate.chunk_forward_s = 0.02
    c.emulate.backward = 2.0
    c.emulate.encoder = encoder
    c.emulate.encoder_backward = 2 * encoder

    c.train = ConfigDict()
    c.train.seed = 0
    c.train.batch = rows * microbatches
    c.train.steps = 1000
    c.train.learning_rate = 1e-5
    c.train.warmup = 10
    c.train.weight_decay = 0.0
    c.train.clip = 1.0
    c.train.log_every = 10
    c.train.save_every = 1000
    c.train.keep = 1
    return c
