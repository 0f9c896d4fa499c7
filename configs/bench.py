"""Sizes for python -m optimus_jax.bench: --config=configs/bench.py:PRESET, pp2_m4 by default.

With F and B for a stage's forward and backward of one microbatch, e and e_b for the encoder's of
all its pictures: a backward computes its layers again, so B is near 3 F. On two cores of a Xeon
pp2_m4 was seen with F 61 ms, B 185 ms (3.1 F), e 32 ms (0.52 F) and e_b 101 ms (0.55 B); the
machine's speed drifts by half within minutes. pp2_m8 has the same tasks and twice as many.
pp2_v2_m4 has two chunks in each of its stages, tp2_m4 one stage that two tensor shards share.
pp4_m8, pp4_e2_m8, whose encoder has two stages, and pp8_v2_m16 need a core for each stage, or
--emulate: there tasks sleep, 20 ms a chunk's forward, with B = 2 F, e = F and e_b = 2 F (pp2:
e = 0.5 F).
"""

import math
from typing import NamedTuple

from ml_collections import ConfigDict

from optimus_jax.data import tokens


class Preset(NamedTuple):
    """`layers` of the LLM; `rows` of a microbatch; `encoder`, the emulated e / F."""

    pp: int
    chunks: int
    layers: int
    microbatches: int
    rows: int
    encoder_layers: int
    encoder: float
    tp: int = 1
    encoder_pp: int = 1


PRESETS = {
    "pp2_m4": Preset(2, 1, 4, 4, 10, 3, 0.5),
    "pp2_m8": Preset(2, 1, 4, 8, 10, 3, 0.5),
    "pp2_v2_m4": Preset(2, 2, 4, 4, 10, 3, 0.5),
    "tp2_m4": Preset(1, 1, 4, 4, 10, 3, 0.5, tp=2),
    "pp4_m8": Preset(4, 1, 8, 8, 12, 6, 1.0),
    "pp4_e2_m8": Preset(4, 1, 8, 8, 12, 6, 1.0, encoder_pp=2),
    "pp8_v2_m16": Preset(8, 2, 32, 16, 16, 6, 1.0),
}


def get_config(preset: str = "pp2_m4") -> ConfigDict:
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; there is {', '.join(PRESETS)}")
    p = PRESETS[preset]
    c = ConfigDict()
    c.hardware = "cpu_core"
    c.evaluate_examples = 16

    c.model = ConfigDict()
    c.model.dtype = "float32"
    c.model.image_height = 64
    c.model.image_width = 64
    c.model.text_length = 64
    c.model.projector_hidden = 256
    c.model.vocabulary = p.tp * math.ceil(tokens.SIZE / p.tp)
    c.model.encoder = ConfigDict(
        dict(layers=p.encoder_layers, width=200, heads=4, hidden=720, patch=8)
    )
    c.model.llm = ConfigDict(dict(layers=p.layers, width=256, heads=4, hidden=1024))

    c.data = ConfigDict()
    c.data.name = "digits"
    c.data.digits_low = 1
    c.data.digits_high = 4

    c.parallel = ConfigDict()
    c.parallel.dp = 1
    c.parallel.pp = p.pp
    c.parallel.tp = p.tp
    c.parallel.chunks = p.chunks
    c.parallel.microbatches = p.microbatches
    c.parallel.encoder = ConfigDict(dict(pp=p.encoder_pp))
    c.parallel.order = "1f1b"
    c.parallel.method = "filled"

    c.emulate = ConfigDict()  # with --emulate: task times, beside a stage's forward
    c.emulate.chunk_forward_s = 0.02
    c.emulate.backward = 2.0
    c.emulate.encoder = p.encoder
    c.emulate.encoder_backward = 2 * p.encoder

    c.train = ConfigDict()
    c.train.seed = 0
    c.train.batch = p.rows * p.microbatches
    c.train.steps = 1000
    c.train.learning_rate = 1e-5
    c.train.warmup = 10
    c.train.weight_decay = 0.0
    c.train.clip = 1.0
    c.train.log_every = 10
    c.train.save_every = 1000
    c.train.keep = 1
    return c
