"""Rotary position embedding (arXiv 2104.09864), for the baselines: K3 itself has no positional encoding (NoPE)."""

import torch
from torch import Tensor

from openk3.ops.precision import wide


def rotary_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin `[..., dim/2]` float64 of position · theta^(−2i/dim), i = 0 … dim/2 − 1; positions any integer shape."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    angle = positions.double().unsqueeze(-1) * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + dim/2) of x `[..., dim]` by their angles, in float32 at least; cos and sin broadcast to `[..., dim/2]`."""
    a, b = wide(x).chunk(2, -1)
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
