"""Kimi Delta Attention: the layer around `ops/kda.py` (K3 report §2.1.1, Eq. 5–6; arXiv 2510.26692).

Axes: B batch, T tokens, D model width, H heads, K head width (keys and values alike).
"""

import torch
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.cache import KdaSlot
from openk3.model.layers import Linear, RMSNorm
from openk3.model.layout import Layout
from openk3.ops import backend
from openk3.ops.kda import kda_chunk, kda_gate, kda_recurrent, kda_step, l2norm, short_conv
from openk3.ops.norm import rms_norm
from openk3.ops.precision import wide

RECURRENT_BELOW = 8            # tokens: under this, and with no gradient wanted, the plain recurrence is the quicker form


class ConvWeight(nn.Module):
    """A depthwise filter bank `[C, 1, W]`, float32 whatever the model's dtype; tap W − 1 meets the current token."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class KimiDeltaAttention(nn.Module):
    """y = W_o concat_h[ RMSNorm(o^h) ⊙ σ(gate^h) ], o from the delta rule with a decay per channel."""

    def __init__(self, config: K3Config):
        super().__init__()
        text = config.text_config
        linear = text.linear_attn_config
        assert linear is not None                       # a config without it has no KDA layers
        width, heads, size = text.hidden_size, linear.num_heads, linear.head_dim
        inner = heads * size
        self.heads, self.size, self.lower_bound = heads, size, linear.gate_lower_bound
        self.bounded = self.lower_bound is not None and self.lower_bound >= -5         # what kda_chunk's quick form is safe for
        self.q_proj, self.k_proj, self.v_proj = Linear(width, inner), Linear(width, inner), Linear(width, inner)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(inner, linear.short_conv_kernel_size) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Linear(width, size), Linear(size, inner)
        self.b_proj = Linear(width, heads)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        if linear.use_full_rank_gate:
            self.g_proj = Linear(width, inner)
        else:
            self.g_a_proj, self.g_b_proj = Linear(width, size), Linear(size, inner)
        self.o_norm = RMSNorm(size, text.rms_norm_eps)
        self.o_proj = Linear(inner, width)

    def forward(self, x: Tensor, layout: Layout, slot: KdaSlot | None = None) -> Tensor:
        """x `[B, T, D]`; the slot's state and tail are read and replaced."""
        tail = None if slot is None else slot.tail
        raw = torch.nn.functional.linear(x, torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(x.dtype))
        filters = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        mixed = short_conv(raw, filters, tail=tail, resets=layout.resets)
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.size)).unbind(2)                  # [B, T, H, K] each
        q, k = l2norm(q), l2norm(k)
        g = self.decay(x)
        beta = torch.sigmoid(wide(self.b_proj(x)))                                         # [B, T, H]
        if layout.valid is not None:                                                         # padding leaves the state alone
            g, beta = g * layout.valid[..., None, None], beta * layout.valid[..., None]
        o, state = self._mix(q, k, v, g, beta, None if slot is None else slot.state, layout)
        if slot is not None:
            slot.update(state, self._new_tail(raw, tail, layout))
        gate = self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))
        o = rms_norm(o.to(x.dtype), self.o_norm.weight, self.o_norm.eps).flatten(-2)
        return self.o_proj((wide(o) * torch.sigmoid(wide(gate))).to(x.dtype))

    def decay(self, x: Tensor) -> Tensor:
        """g = log α, float32 `[B, T, H, K]`."""
        z = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.heads, self.size))
        return kda_gate(z, self.A_log, self.dt_bias, self.lower_bound)

    def _mix(self, q, k, v, g, beta, state, layout: Layout) -> tuple[Tensor, Tensor]:
        if layout.tokens < RECURRENT_BELOW and state is not None and not torch.is_grad_enabled():
            backend.record("kda", "torch step")
            if layout.tokens == 1:
                o, state = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
                return o.unsqueeze(1), state
            return kda_recurrent(q, k, v, g, beta, initial_state=state)
        backend.record("kda", "torch chunk")
        return kda_chunk(q, k, v, g, beta, initial_state=state, resets=layout.resets, bounded=self.bounded)

    def _new_tail(self, raw: Tensor, tail: Tensor | None, layout: Layout) -> Tensor:
        """The last W − 1 inputs of the convolution that count, oldest first; zeros before a sequence's start."""
        history = self.q_conv1d.weight.shape[-1] - 1
        old = raw.new_zeros(raw.shape[0], history, raw.shape[-1]) if tail is None else tail
        joined = torch.cat([old, raw.detach()], 1)
        if layout.lengths is None:
            return joined[:, joined.shape[1] - history :].clone()
        where = layout.lengths[:, None] + torch.arange(history, device=raw.device)
        return joined.gather(1, where.unsqueeze(-1).expand(-1, -1, raw.shape[-1]))
