"""The layers that the target and the drafter share: RMSNorm, rotary positions, SwiGLU, grouped-query projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the statistics in float32 or wider."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised [..., size] in the dtype of the weight."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.rms_norm(wide, (wide.shape[-1],), self.weight, self.eps)


def rotary_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles position * base^(-2i / head_dim), [..., 1, head_dim / 2], to broadcast over heads.

    Args:
        positions: [...] integers. The angles are computed in float64: a position of a long context keeps its phase.
        head_dim: even.
        base: of the frequencies.
        dtype: of the result.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angle = (positions[..., None].to(torch.float64) * base**-exponent)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of x [..., heads, head_dim] by the angles of `rotary_tables`."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., d]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class AttentionProjections(nn.Module):
    """q, k, v and o projections of grouped-query attention, with a per-head RMSNorm of q and k before the rotation.

    Args:
        hidden_size: d, of the residual stream that `output` writes to.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: even.
        eps: of the norms.
        input_size: what q, k and v read, where that is wider than the stream; d if None.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        width = input_size or hidden_size
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def query(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return the rotated queries [..., heads, head_dim] of x [..., d]."""
        return apply_rotary(self.q_norm(rearrange(self.q_proj(x), "... (h e) -> ... h e", e=self.head_dim)), tables)

    def key_value(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values, [..., kv_heads, head_dim] each, of x [..., d]."""
        keys = self.k_norm(rearrange(self.k_proj(x), "... (h e) -> ... h e", e=self.head_dim))
        values = rearrange(self.v_proj(x), "... (h e) -> ... h e", e=self.head_dim)
        return apply_rotary(keys, tables), values

    def output(self, mixed: Tensor) -> Tensor:
        """Return [..., d] from the attention's output [..., heads, head_dim]."""
        out: Tensor = self.o_proj(rearrange(mixed, "... h e -> ... (h e)"))
        return out


def causal_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v over the positions up to each query's own, [B, T, heads, head_dim].

    Written as two matrix products: for short texts in bfloat16 on a CPU that is twice as fast as the fused kernel.

    Args:
        query: [B, T, heads, head_dim]; head h reads key-value head h // (heads / kv_heads).
        keys: [B, T, kv_heads, head_dim].
        values: likewise.
    """
    length, kv_heads = keys.shape[1], keys.shape[2]
    grouped = rearrange(query * query.shape[-1] ** -0.5, "b t (k g) e -> b k (g t) e", k=kv_heads)
    scores = grouped @ rearrange(keys, "b s k e -> b k e s")
    future = torch.full((length, length), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
    probabilities = (scores + repeat(future, "t s -> (g t) s", g=query.shape[2] // kv_heads)).softmax(dim=-1)
    mixed = probabilities @ rearrange(values, "b s k e -> b k s e")
    out: Tensor = rearrange(mixed, "b k (g t) e -> b t (k g) e", t=length)
    return out


def initialise(module: nn.Module, num_layers: int, generator: torch.Generator) -> None:
    """Draw every matrix from N(0, 0.02^2), projections into the residual stream scaled by 1 / sqrt(2 layers); norms stay 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        scale = (2 * num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.02 * scale))
