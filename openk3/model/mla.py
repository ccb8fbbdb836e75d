"""Gated multi-head latent attention without positions, its rotary variant, and plain multi-head attention for the dense control.

K3 report §2.1.2: y = W_o[σ(W_g x) ⊙ attention]. What is cached per token is the normed latent and one key shared by all heads.
Axes: B batch, T tokens, S keys, H heads, R latent rank, N nope, P rope, V value width.
"""

import torch
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.cache import MlaSlot
from openk3.model.layers import Linear, RMSNorm
from openk3.model.layout import Layout
from openk3.ops import backend
from openk3.ops.mla import absorbed_is_cheaper, attend, attend_absorbed, attend_expanded
from openk3.ops.precision import wide
from openk3.ops.rope import rotate


class GatedMLA(nn.Module):
    """Latent attention; `mla_use_nope`, `mla_use_output_gate` and `q_lora_rank` choose the variant."""

    def __init__(self, config: K3Config):
        super().__init__()
        text = config.text_config
        assert text.kv_lora_rank is not None            # null: `MultiHeadAttention`
        width, self.heads, self.rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
        self.nope, self.rope, self.value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
        self.theta = None if text.mla_use_nope else text.rope_theta
        eps = config.openk3.mla_latent_norm_eps
        if text.q_lora_rank is None:
            self.q_proj = Linear(width, self.heads * (self.nope + self.rope))
        else:
            self.q_a_proj = Linear(width, text.q_lora_rank)
            self.q_a_layernorm = RMSNorm(text.q_lora_rank, eps)
            self.q_b_proj = Linear(text.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = Linear(width, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, eps)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.value))
        self.g_proj = Linear(width, self.heads * self.value) if text.mla_use_output_gate else None
        self.o_proj = Linear(self.heads * self.value, width)

    def forward(self, x: Tensor, layout: Layout, slot: MlaSlot | None = None) -> Tensor:
        """x `[B, T, D]`; the slot's rows grow by T."""
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, -1))                                                # [B, T, H, N+P]
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        if self.theta is not None:
            cos, sin = layout.rotary(self.rope, self.theta)
            shared = rotate(shared, cos, sin)
            q = torch.cat([q[..., : self.nope], rotate(q[..., self.nope :], cos.unsqueeze(2), sin.unsqueeze(2))], -1)
        rows = torch.cat([self.kv_a_layernorm(latent), shared], -1)                          # [B, T, R+P]
        if slot is not None:
            rows = slot.append(rows, layout.lengths)
        kv_b = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))                          # [H, N+V, R]
        absorbed = slot is not None and absorbed_is_cheaper(
            x.shape[1], rows.shape[1], self.nope, self.value, self.rope, self.rank)
        backend.record("mla", "torch absorbed" if absorbed else "torch expanded")
        form = attend_absorbed if absorbed else attend_expanded
        o = form(q, rows, kv_b, self.nope, self.rank, layout.attention_mask(rows.shape[1])).flatten(-2)
        if self.g_proj is not None:
            o = (wide(o) * torch.sigmoid(wide(self.g_proj(x)))).to(x.dtype)
        return self.o_proj(o)


class MultiHeadAttention(nn.Module):
    """Plain attention (`kv_lora_rank` null) with rotary on each head's last `qk_rope_head_dim` channels: the dense control."""

    def __init__(self, config: K3Config):
        super().__init__()
        text = config.text_config
        width, self.heads = text.hidden_size, text.num_attention_heads
        self.nope, self.rope, self.value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
        self.theta = None if text.mla_use_nope else text.rope_theta
        self.q_proj = Linear(width, self.heads * (self.nope + self.rope))
        self.k_proj = Linear(width, self.heads * (self.nope + self.rope))
        self.v_proj = Linear(width, self.heads * self.value)
        self.g_proj = Linear(width, self.heads * self.value) if text.mla_use_output_gate else None
        self.o_proj = Linear(self.heads * self.value, width)

    def forward(self, x: Tensor, layout: Layout, slot: MlaSlot | None = None) -> Tensor:
        """x `[B, T, D]`; a cached row holds every head's key and value."""
        q, k = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj))    # [B, T, H, N+P]
        if self.theta is not None and self.rope:
            cos, sin = (t.unsqueeze(2) for t in layout.rotary(self.rope, self.theta))
            q, k = (torch.cat([y[..., : self.nope], rotate(y[..., self.nope :], cos, sin)], -1) for y in (q, k))
        v = self.v_proj(x)
        if slot is not None:
            rows = slot.append(torch.cat([k.flatten(-2), v], -1), layout.lengths)
            k, v = rows.split([k.shape[-2] * k.shape[-1], v.shape[-1]], -1)
            k = k.unflatten(-1, (self.heads, -1))
        v = v.unflatten(-1, (self.heads, -1))
        backend.record("attention", "torch sdpa")
        o = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout.attention_mask(k.shape[1]))
        o = o.transpose(1, 2).flatten(-2)
        if self.g_proj is not None:
            o = (wide(o) * torch.sigmoid(wide(self.g_proj(x)))).to(x.dtype)
        return self.o_proj(o)
