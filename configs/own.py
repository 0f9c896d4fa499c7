"""Caption your own pictures: a ViT of 3 layers, width 64, into a GPT of 2 layers, width 64.

The folder holds pictures that Pillow reads, and a caption for each: in NAME.txt beside it, or in a
table such as captions.csv. Captions of up to 60 characters are taken whole; text_length makes room
for longer ones, and training is faster with less of it. One picture in five is held out.

    python -m optimus_jax.train --config=configs/own.py --config.data.folder=PATH
    python -m optimus_jax.evaluate --config=configs/own.py --config.data.folder=PATH

colab/own_pictures.ipynb trains it on 233 drawn flags with captions such as "red over blue", in 500
steps with text_length=22. It then reads 95.5 % of 67 held-out captions right, every letter of them;
none with pictures shuffled. Flags were chosen because they are easy: of 300 pictures of circles and
triangles it read a third to a half. On two CPU cores that had other work too a step took 0.12 s.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.hardware = "cpu_core"  # the chip that predicted times are for (cost/hardware.py)
    c.evaluate_examples = 1000  # or all that are held out, if fewer

    c.model = ConfigDict()
    c.model.dtype = "float32"  # of the computation; "bfloat16" on GPUs
    c.model.image_height = 48
    c.model.image_width = 48
    c.model.image_channels = 3
    c.model.text_length = 62  # start, up to 60 characters, end
    c.model.projector_hidden = 128
    c.model.encoder = ConfigDict(dict(layers=3, width=64, heads=4, hidden=256, patch=8))
    c.model.llm = ConfigDict(dict(layers=2, width=64, heads=4, hidden=256))

    c.data = ConfigDict()
    c.data.name = "folder"
    c.data.folder = ""  # your pictures with their captions
    c.data.mirror = False  # whether a mirrored picture has the same caption
    c.data.hide_text = (
        0.5  # up to this share of a caption is hidden, so that pictures are looked at
    )

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
    c.train.steps = 1000
    c.train.learning_rate = 2e-3
    c.train.warmup = 100
    c.train.weight_decay = 0.1
    c.train.clip = 1.0
    c.train.log_every = 50
    c.train.save_every = 200
    c.train.keep = 2
    return c
