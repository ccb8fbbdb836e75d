"""Attention Residuals: a softmax over depth in place of the residual sum (arXiv 2603.15031; K3 report §2.2, Eq. 8–10).

For one site, sources v_0 … v_m (finished blocks, then the running partial sum), score weight ω = norm weight ⊙ pseudo-query:

    s_j = ω · v_j / sqrt(mean(v_j²) + eps)      p = softmax(s)      mix = Σ_j p_j v_j

The keys are normalised, the values are not; there's no temperature. Everything in float32, rounded once at the end.
Axes: N tokens, D model width, S sites, m + 1 sources.
"""

import torch
from torch import Tensor

from openk3.ops.precision import wide


def depth_weights(sources: list[Tensor], omega: Tensor, eps: float) -> Tensor:
    """p: how much of each source a site takes. sources: m + 1 × `[..., D]`; omega `[D]` → `[..., m + 1]` float32."""
    scores = [_score(wide(v), wide(omega), eps) for v in sources]
    return torch.softmax(torch.stack(scores, -1), -1)


def mix_reference(sources: list[Tensor], omega: Tensor, eps: float) -> Tensor:
    """The equation, plainly: the oracle. Differentiable; `[..., D]` in the sources' dtype."""
    p = depth_weights(sources, omega, eps)
    terms = (p[..., j, None] * wide(v) for j, v in enumerate(sources))
    return sum(terms, start=torch.zeros_like(wide(sources[0]))).to(sources[-1].dtype)


def mix(sources: list[Tensor], omega: Tensor, eps: float) -> Tensor:
    """The same, keeping no copies of the sources for the backward: what training uses."""
    return _Mix.apply(omega, eps, *sources)


class BlockSummary:
    """Phase 1 of the two-phase form: what all sites of a block take from the finished blocks, read once.

    `blocks`: m × `[..., D]`, constant inside a block; `omegas`: `[S, D]`. Keeps, per site, the running maximum, the sum of
    exponentials and the weighted sum of an online softmax; `mix(site, partial)` adds the partial sum to it (phase 2).
    """

    def __init__(self, blocks: list[Tensor], omegas: Tensor, eps: float):
        self.omegas, self.eps = wide(omegas), eps
        stacked = torch.stack([wide(v) for v in blocks], -2)                                        # [..., m, D]
        scores = (stacked @ self.omegas.T) * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + eps)  # [..., m, S]
        self.peak = scores.amax(-2)                                                               # [..., S]
        weights = torch.exp(scores - self.peak.unsqueeze(-2))
        self.mass = weights.sum(-2)                                                               # [..., S]
        self.total = weights.transpose(-1, -2) @ stacked                                             # [..., S, D]
        self.dtype = blocks[-1].dtype

    def mix(self, site: int, partial: Tensor | None) -> Tensor:
        """The mixture that `site` reads; `partial` None where the running sum has just been pushed as a block."""
        total, mass, peak = self.total[..., site, :], self.mass[..., site, None], self.peak[..., site, None]
        if partial is None:
            return (total / mass).to(self.dtype)
        v = wide(partial)
        score = _score(v, self.omegas[site], self.eps).unsqueeze(-1)
        top = torch.maximum(peak, score)
        old, new = torch.exp(peak - top), torch.exp(score - top)
        return ((total * old + v * new) / (mass * old + new)).to(partial.dtype)


class _Mix(torch.autograd.Function):
    """Saves the sources (the graph holds them already) and two numbers per token and source."""

    @staticmethod
    def forward(ctx, omega: Tensor, eps: float, *sources: Tensor) -> Tensor:
        w, width = wide(omega), sources[0].shape[-1]
        values = [wide(v) for v in sources]
        dots = torch.stack([v @ w for v in values], -1)                                             # [..., m+1]
        inverse = torch.stack([torch.linalg.vector_norm(v, dim=-1) for v in values], -1)
        inverse = inverse.square_().div_(width).add_(eps).rsqrt_()
        p = torch.softmax(dots * inverse, -1)
        out = values[0] * p[..., :1]
        for j in range(1, len(values)):
            out.addcmul_(values[j], p[..., j : j + 1])
        ctx.save_for_backward(omega, dots, inverse, p, *sources)
        return out.to(sources[-1].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        omega, dots, inverse, p, *sources = ctx.saved_tensors
        w, width, dout = wide(omega), sources[0].shape[-1], wide(dout)
        values = [wide(v) for v in sources]
        dp = torch.stack([torch.linalg.vecdot(dout, v) for v in values], -1)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        along = ds * inverse                                           # d mix / d v_j has three parts: p_j · dout,
        radial = -(ds * dots) * inverse.pow(3) / width                 # along ω, and along v_j through the norm
        grads, domega = [], torch.zeros_like(w)
        for j, v in enumerate(values):
            if ctx.needs_input_grad[2 + j]:
                d = dout * p[..., j : j + 1]
                d.addcmul_(v, radial[..., j : j + 1])
                d.addcmul_(along[..., j : j + 1], w)
                grads.append(d.to(sources[j].dtype))
            else:
                grads.append(None)
            domega += v.reshape(-1, width).T @ along[..., j].reshape(-1)
        return domega.to(omega.dtype), None, *grads


def _score(v: Tensor, omega: Tensor, eps: float) -> Tensor:
    return (v @ omega) * torch.rsqrt(v.square().mean(-1) + eps)
