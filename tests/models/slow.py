"""The model once more, by the definitions of its parts: numpy in float64, row by row, in loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray


def layer_norm(p: Any, x: Array) -> Array:
    """Of one vector."""
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return (x - mean) / math.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def gelu(x: float) -> float:
    """Its usual approximation by tanh (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(p: Any, x: Array) -> Array:
    """Of one vector."""
    hidden = np.array([gelu(v) for v in x @ p["up"] + p["up_bias"]])
    return hidden @ p["down"] + p["down_bias"]


def mix(q_TH: Array, k_TH: Array, v_TH: Array, causal: bool) -> Array:
    """Values of one head, mixed position by position."""
    length, head = q_TH.shape
    out = np.zeros((length, head))
    for t in range(length):
        seen = range(t + 1) if causal else range(length)
        scores = np.array([q_TH[t] @ k_TH[s] / math.sqrt(head) for s in seen])
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        out[t] = sum(share * v_TH[s] for share, s in zip(shares, seen, strict=True))
    return out


def attention(p: Any, x_TD: Array, causal: bool) -> Array:
    """Of one row, head by head."""
    out = np.zeros((len(x_TD), p["out"].shape[-1]))
    for n in range(p["qkv"].shape[2]):
        q, k, v = (x_TD @ p["qkv"][:, c, n] + p["qkv_bias"][c, n] for c in range(3))
        out += mix(q, k, v, causal) @ p["out"][n]
    return out + p["out_bias"]


def block(p: Any, x_TD: Array, causal: bool) -> Array:
    normed = np.array([layer_norm(p["attention_norm"], x) for x in x_TD])
    x_TD = x_TD + attention(p["attention"], normed, causal)
    return np.array([x + mlp(p["mlp"], layer_norm(p["mlp_norm"], x)) for x in x_TD])


def patches(image_HWC: Array, patch: int) -> Array:
    """A picture's patches as vectors, left to right, then top to bottom; pixels from -1 to 1."""
    height, width, channels = image_HWC.shape
    out = []
    for top in range(0, height, patch):
        for left in range(0, width, patch):
            out.append(
                [
                    image_HWC[top + i, left + j, c] / 127.5 - 1
                    for i in range(patch)
                    for j in range(patch)
                    for c in range(channels)
                ]
            )
    return np.array(out)


def splice(p: Any, tokens_T: Array, features_PD: Array, image_token: int) -> Array:
    """A row's token vectors, each image token replaced by the next feature, with positions."""
    following, out = iter(features_PD), []
    for position, token in enumerate(tokens_T):
        vector = next(following) if token == image_token else p["token"][token]
        out.append(vector + p["position"][position])
    return np.array(out)


def cross_entropy(scores_TV: Array, targets_T: Array, weights_T: Array) -> float:
    """Summed with weights."""
    total = 0.0
    for scores, target, weight in zip(scores_TV, targets_T, weights_T, strict=True):
        total -= weight * math.log(math.exp(scores[target]) / sum(map(math.exp, scores)))
    return total


def layers(stacked: Any) -> list[Any]:
    """The weights of each layer of a stack."""
    if not isinstance(stacked, dict):
        return list(stacked)
    parts = {name: layers(part) for name, part in stacked.items()}
    count = len(next(iter(parts.values())))
    return [{name: part[k] for name, part in parts.items()} for k in range(count)]


def logits(params: Any, image_HWC: Array, tokens_T: Array, patch: int, image_token: int) -> Array:
    """The whole model on one row."""
    encoder = params["encoders"]["vision"]
    embed = encoder["embed"]
    x = patches(image_HWC, patch) @ embed["kernel"] + embed["bias"] + embed["position"]
    for p in layers(encoder["layers"]):
        x = block(p, x, causal=False)
    projector = encoder["projector"]
    features = np.array([mlp(projector["mlp"], layer_norm(projector["norm"], v)) for v in x])
    x = splice(params["llm"]["embed"], tokens_T, features, image_token)
    for p in layers(params["llm"]["layers"]):
        x = block(p, x, causal=True)
    head = params["llm"]["head"]
    return np.array([layer_norm(head["norm"], v) @ head["kernel"] for v in x])
