"""Causal grouped-query attention with rotary positions and optional QK-norm.

Decides how queries, keys and values are made. It never keeps a cache between calls: generation
runs the whole context again.

Shapes: B sequences, T positions, D model width, H query heads, K key/value heads, A head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spesd.config import ModelConfig
from spesd.model.layers import Linear, RMSNorm


def rotary_tables(config: ModelConfig, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [T, A], in the device and dtype of `x_BTD`.

    Computed anew each pass (T * A numbers): a buffer would have to survive meta devices and
    dtype casts, which is where rotary tables lose their precision.
    """
    device = x_BTD.device
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency = 1.0 / (config.rope_theta ** (even / config.head_dim))
    position = torch.arange(x_BTD.shape[1], device=device).float()
    angle = position[:, None] * frequency
    angle_TA = torch.cat((angle, angle), dim=-1)
    return angle_TA.cos().to(x_BTD.dtype), angle_TA.sin().to(x_BTD.dtype)


def rotate(x_BHTA: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    """Turn each pair (i, i + A/2) of a head by its position's angle (the half-rotation form)."""
    first, second = x_BHTA.chunk(2, dim=-1)
    return x_BHTA * cos_TA + torch.cat((-second, first), dim=-1) * sin_TA


class Attention(nn.Module):
    """Self-attention of one layer; `qk_norm` is `full`, `per_head` or `none`.

    `full` norms the whole projection before it is cut into heads (OLMoE), `per_head` each head
    (Qwen3).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qk_norm = config.qk_norm
        d_q = config.n_heads * config.head_dim
        d_kv = config.n_kv_heads * config.head_dim
        self.grouped = config.n_kv_heads != config.n_heads
        self.q = Linear(config.d_model, d_q)
        self.k = Linear(config.d_model, d_kv)
        self.v = Linear(config.d_model, d_kv)
        self.o = Linear(d_q, config.d_model)
        if config.qk_norm == "full":
            self.q_norm = RMSNorm(d_q, config.rms_eps)
            self.k_norm = RMSNorm(d_kv, config.rms_eps)
        elif config.qk_norm == "per_head":
            self.q_norm = RMSNorm(config.head_dim, config.rms_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_eps)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Attend causally: [B, T, D] to [B, T, D]. `rotary` comes from `rotary_tables`."""
        B, T, _ = x_BTD.shape
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, -1, self.head_dim)
        k = k.view(B, T, -1, self.head_dim)
        if self.qk_norm == "per_head":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHTA = rotate(q.transpose(1, 2), *rotary)
        k_BKTA = rotate(k.transpose(1, 2), *rotary)
        v_BKTA = v.view(B, T, -1, self.head_dim).transpose(1, 2)
        out_BHTA = F.scaled_dot_product_attention(
            q_BHTA,
            k_BKTA,
            v_BKTA,
            is_causal=True,
            scale=self.head_dim**-0.5,
            enable_gqa=self.grouped,
        )
        y_BTD: Tensor = self.o(out_BHTA.transpose(1, 2).reshape(B, T, -1))
        return y_BTD
