"""Transformers by their sizes alone, and those of the Optimus paper."""

from __future__ import annotations

import dataclasses

from optimus_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a stack of layers: `width` of the residual stream, `hidden` of the MLP, `kv_heads`
    of keys and values (0: as many as `heads`).

    A `gated` MLP has a third matrix beside up and down. `vocabulary` 0 stands for no embedding and
    no head. In a `parallel_block` attention and MLP read the same norm and are added together
    (ViT-22B, arXiv 2302.05442, section 2); `qk_norm` normalises queries and keys of each head.
    Raises UserError for sizes that do not divide.
    """

    name: str
    layers: int
    width: int
    heads: int
    hidden: int
    kv_heads: int = 0
    gated: bool = False
    vocabulary: int = 0
    causal: bool = False
    parallel_block: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        sizes = (self.layers, self.width, self.heads, self.hidden, self.kv_heads)
        if min(sizes) < 1 or self.vocabulary < 0:
            raise UserError(f"sizes of a transformer must be positive, got {self}")
        if self.width % self.heads:
            raise UserError(
                f"{self.name}: {self.heads} heads do not divide a width of {self.width}"
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.name}: {self.kv_heads} heads of keys and values do not divide"
                f" {self.heads} heads of queries"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all keys of one position, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Entries of one layer's matrices. Biases and norms are left out, at most 13 width, about
        a thousandth of a layer at 12 width^2."""
        attention = 2 * self.width * (self.width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.width * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Entries of the token embedding; a head that is not tied to it has as many again."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Entries of all layers, of the embedding and of a head of its own."""
        return self.layers * self.layer_parameters + 2 * self.embedding_parameters


# Tables 8 and 9 of the paper print widths, depths and heads, all with a head dimension of 128; the
# MLP only for the ViTs. What its printed sizes need beyond that:
#   ViT-5B     5.44e9 in the layers, printed 5.5B: no patch size is given for the rest
#   ViT-11B    called ViT-10B in table 8 and ViT-11B elsewhere; 9.66e9 in the layers
#   ViT-22B    parallel layers and qk norm are those of the ViT-22B report; the paper does not say
#              whether its own ran that way
#   GPT-11B    9.06e9 in 80 plain layers of width 3072: width and depth do not give the printed 11B,
#              and the paper does not say where the rest is
#   LLAMA-70B  a plain MLP of 4 width would give 64.4e9; with LLaMA 2's own gated MLP of 28672 and 8
#              heads of keys and values it is 69.0e9
#   GPT-*      no vocabulary is given; 51200 is Megatron-LM's GPT-2 vocabulary, padded for tp 8
MODELS: dict[str, Transformer] = {
    model.name: model
    for model in (
        Transformer("ViT-3B", 48, 2304, 18, 9216),
        Transformer("ViT-5B", 48, 3072, 24, 12288),
        Transformer("ViT-11B", 48, 4096, 32, 16384),
        Transformer("ViT-22B", 48, 6144, 48, 24576, parallel_block=True, qk_norm=True),
        Transformer("GPT-11B", 80, 3072, 24, 12288, vocabulary=51200, causal=True),
        Transformer(
            "LLAMA-70B",
            layers=80,
            width=8192,
            heads=64,
            hidden=28672,
            kv_heads=8,
            gated=True,
            vocabulary=32000,
            causal=True,
        ),
        Transformer("GPT-175B", 96, 12288, 96, 49152, vocabulary=51200, causal=True),
    )
}
