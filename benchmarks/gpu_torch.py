"""The layers of gpu_blocks.py in PyTorch: same weights, same input, torch.compile."""

from __future__ import annotations

import time
from typing import Any

import jax
import torch
import torch.nn.functional as F
from gpu_blocks import Case
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimus_jax.models.layers import EPSILON
from optimus_jax.models.llama import BASE

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def to_torch(x: jax.Array) -> torch.Tensor:
    """The same array, not copied."""
    return torch.from_dlpack(x)


class Block(nn.Module):
    """Weights are named by their path in the model's tree; matrices are [out, in]."""

    def __init__(self, case: Case, weights: dict[str, Any], core: str):
        super().__init__()
        part = case.part
        self.kind, self.causal, self.backend = part.block, case.causal, BACKENDS[core]
        self.heads, self.keys, self.head = part.heads, case.kv_heads, part.width // part.heads
        self.weights = nn.ParameterDict()
        for path, value in jax.tree.flatten_with_path(weights)[0]:
            tensor, last = to_torch(value), path[-1].key
            if last.endswith("bias"):
                tensor = tensor.flatten()
            elif last == "out":
                tensor = tensor.flatten(0, 1).T
            elif tensor.dim() > 1:
                tensor = tensor.flatten(1).T
            name = "_".join(key.key for key in path)
            self.weights[name] = nn.Parameter(tensor.contiguous().clone())
        if self.kind == "llama":
            wave = BASE ** (-torch.arange(0, self.head, 2, dtype=torch.float32) / self.head)
            angle = torch.arange(case.length, dtype=torch.float32)[:, None] * wave
            self.register_buffer("cos", angle.cos()[:, None])
            self.register_buffer("sin", angle.sin()[:, None])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = self.weights[f"{name}_scale"]
        if f"{name}_bias" in self.weights:
            bias = self.weights[f"{name}_bias"]
            return F.layer_norm(x, scale.shape, scale, bias, eps=EPSILON)
        return F.rms_norm(x, scale.shape, scale, eps=EPSILON)

    def dense(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[name], self.weights.get(f"{name}_bias"))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, dim=-1)
        turned = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.cat(turned, -1).to(x.dtype)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        if self.kind == "llama":
            q = self.dense("attention_q", x).view(rows, length, self.heads, self.head)
            kv = self.dense("attention_kv", x).view(rows, length, 2, self.keys, self.head)
            k, v = kv.unbind(2)
            q, k = self.rotate(q), self.rotate(k)
        else:
            qkv = self.dense("attention_qkv", x).view(rows, length, 3, self.heads, self.head)
            q, k, v = qkv.unbind(2)
        if self.kind == "vit22b":
            query, key = (self.weights[f"attention_qk_norm_{x}_scale"] for x in ("query", "key"))
            q = F.rms_norm(q, query.shape, query, eps=EPSILON)
            k = F.rms_norm(k, key.shape, key, eps=EPSILON)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        with sdpa_kernel(self.backend):
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.keys
            )
        return self.dense("attention_out", mixed.transpose(1, 2).reshape(rows, length, -1))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dense("mlp_up", x)
        if self.kind == "llama":
            gate, passed = hidden.chunk(2, dim=-1)
            return self.dense("mlp_down", F.silu(gate) * passed)
        return self.dense("mlp_down", F.gelu(hidden, approximate="tanh"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "vit22b":
            y = self.norm("norm", x)
            return x + self.attention(y) + self.feed(y) + self.weights["bias"]
        x = x + self.attention(self.norm("attention_norm", x))
        return x + self.feed(self.norm("mlp_norm", x))


class TorchBlock:
    """Forward and backward of a case under torch.compile, `iterations` times in a row."""

    def __init__(
        self, case: Case, core: str, compiler: str, start: tuple[Any, ...], iterations: int
    ):
        weights, x, g = start
        self.iterations = iterations
        self.x = to_torch(x).clone().requires_grad_()
        self.g = to_torch(g).clone()
        block = Block(case, weights, core).to(self.x.device)
        self.names, self.parameters = zip(*block.named_parameters(), strict=True)
        self.block = torch.compile(block, backend=compiler, dynamic=False)

    def step(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y = self.block(self.x)
        return y, torch.autograd.grad(y, (self.x, *self.parameters), self.g)

    def seconds(self) -> float:
        """Of one forward and backward."""
        start = time.perf_counter()
        for _ in range(self.iterations):
            self.step()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.iterations

    def results(self) -> list[torch.Tensor]:
        """As JaxBlock gives them, the matrix's gradient as [in, out]."""
        y, (dx, *grads) = self.step()
        (queries,) = (g for name, g in zip(self.names, grads, strict=True) if name in _QUERIES)
        return [y.detach(), dx, queries.T]


_QUERIES = "weights.attention_qkv", "weights.attention_q"
