"""SiTU-GLU, the bounded gated activation of every K3 feed-forward (K3 report §2.3.2, Eq. 12), and SwiGLU, its limit.

    SiTU(g, u) = [β₁ tanh(g/β₁) · σ(g)] ⊙ [β₂ tanh(u/β₂)]          β₁ = 4, β₂ = 25 in K3
    SwiGLU(g, u) = g · σ(g) ⊙ u                                     β → ∞
"""

import torch
from torch import Tensor

from openk3.ops.precision import wide


def situ(gate: Tensor, up: Tensor, beta: float = 1.0, linear_beta: float | None = None) -> Tensor:
    """The equation, plainly: the oracle. gate, up `[..., F]` → `[..., F]` in their dtype, computed in float32 (or float64).

    `linear_beta` None leaves the up branch linear. The sigmoid takes the raw gate, not the capped one.
    """
    g, u = wide(gate), wide(up)
    capped = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * capped).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """g · σ(g) ⊙ u in float32: the activation of Kimi Linear and K2 (`hidden_act` silu)."""
    g, u = wide(gate), wide(up)
    return (g * torch.sigmoid(g) * u).to(gate.dtype)


BLOCK = 1 << 17          # elements: a dozen float32 temporaries of a block fit the second-level caches of two cores


class Activation:
    """`hidden_act` with its constants; `forward` and `backward` in float32 for those who fuse it with products around it."""

    def __init__(self, name: str, beta: float = 1.0, linear_beta: float | None = None):
        if name not in ("situ", "silu"):
            raise ValueError(f"unknown activation {name!r}: situ or silu")
        self.name, self.beta, self.linear_beta = name, beta, linear_beta

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Differentiable; saves gate and up alone and recomputes the rest in the backward."""
        return _GLU.apply(gate, up, self)

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        return situ(gate, up, self.beta, self.linear_beta) if self.name == "situ" else swiglu(gate, up)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """No autograd: the value in gate's dtype. gate, up `[N, F]` or more axes; worked through in blocks that stay in the cache."""
        if gate.device.type != "cpu" or gate.numel() <= BLOCK:
            return self._value(gate, up)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for o, g, u in zip(*(_blocks(x, gate.shape[-1]) for x in (out, gate, up)), strict=True):
            o.copy_(self._value(g, u))
        return out

    def backward(self, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """(d/dgate, d/dup) of `dy · act`: σ' and tanh' written so that saturation gives 0, never NaN."""
        dgate, dup = self.backward_joined(dy, gate, up).chunk(2, -1)
        return dgate, dup

    def backward_joined(self, dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """The same side by side, `[..., 2F]`. Blocks as in `forward`."""
        if gate.device.type != "cpu" or gate.numel() <= BLOCK:
            return torch.cat(self._slopes(dy, gate, up), -1)
        out = gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1])
        for o, d, g, u in zip(*(_blocks(x, gate.shape[-1]) for x in (out, dy, gate, up)), strict=True):
            torch.cat(self._slopes(d, g, u), -1, out=o)
        return out

    def _value(self, gate: Tensor, up: Tensor) -> Tensor:
        g, u = wide(gate), wide(up)
        value = torch.sigmoid(g)
        if self.name == "silu":
            return value.mul_(g).mul_(u).to(gate.dtype)
        value.mul_(torch.div(g, self.beta).tanh_()).mul_(u if self.linear_beta is None else torch.div(u, self.linear_beta).tanh_())
        return value.mul_(self.beta * (self.linear_beta or 1.0)).to(gate.dtype)

    def _slopes(self, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        g, u, dy = wide(gate), wide(up), wide(dy)
        s = torch.sigmoid(g)
        if self.name == "silu":
            value = s * g
            slope = torch.addcmul(s, value, 1 - s)
            return slope.mul_(dy).mul_(u).to(gate.dtype), value.mul_(dy).to(up.dtype)
        t = torch.div(g, self.beta).tanh_()
        value = (s * t).mul_(self.beta)                                    # a = β₁ tanh(g/β₁) σ(g)
        slope = torch.addcmul(value, s, 1 - t.mul_(t).add_(value))         # da/dg = σ(1 − tanh²) + a(1 − σ)
        if self.linear_beta is None:
            return slope.mul_(dy).mul_(u).to(gate.dtype), value.mul_(dy).to(up.dtype)
        tu = torch.div(u, self.linear_beta).tanh_()
        dgate = slope.mul_(dy).mul_(tu).mul_(self.linear_beta)
        return dgate.to(gate.dtype), value.mul_(dy).mul_(1 - tu.mul_(tu)).to(up.dtype)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, act: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act.forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        return *ctx.act.backward(dy, gate, up), None



def _blocks(x: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Pieces of about BLOCK elements along the rows."""
    rows = x.flatten(0, -2)
    return rows.split(max(1, BLOCK // columns))
