"""The routed experts of a mixture: gated feed-forwards, a few per token (arXiv 2601.18089 for the latent form; K3 report §2.3).

    u = Σ_{j ∈ T} p_j · w2_j act(w1_j z, w3_j z)

The weight p_j is applied after w2. Axes: N tokens, k experts per token, E experts, L expert width, F hidden width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from openk3.ops.situ import Activation


def experts_reference(z: Tensor, indices: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """The equation, plainly: a loop over experts, the oracle. Arguments as `experts`."""
    out = torch.zeros_like(z, dtype=weights.dtype)
    for e in range(w1.shape[0]):
        token, slot = (indices == e).nonzero(as_tuple=True)
        x = z[token]
        y = act.reference(x @ w1[e].T, x @ w3[e].T) @ w2[e].T
        out = out.index_add(0, token, y.to(weights.dtype) * weights[token, slot, None])
    return out.to(z.dtype)


def experts(z: Tensor, indices: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """u for every token: one pass over the tokens sorted by expert, the gate and up products as one.

    z `[N, L]`; indices int64 `[N, k]`; weights float32 `[N, k]`; w1, w3 `[E, F, L]`; w2 `[E, L, F]` → `[N, L]` in z's dtype.
    Products run in z's dtype (weights are cast to it), sums over a token's experts in float32. An expert without tokens
    costs nothing and gets a zero gradient. Differentiable in z, weights, w1, w3, w2; deterministic.
    """
    return _Experts.apply(z, weights, w1, w3, w2, indices, act)


class _Sorted:
    """Tokens in the order of their experts: `order` sorts the N·k (token, slot) pairs, `inverse` undoes it."""

    def __init__(self, indices: Tensor, num_experts: int):
        flat = indices.reshape(-1)
        self.k = indices.shape[1]
        self.order = flat.argsort(stable=True)
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(flat.numel(), device=flat.device)
        self.token = self.order // self.k
        ends = torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()
        self.spans = [(e, s, t) for e, (s, t) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if t > s]

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum each token's k rows, weighted: `[N·k, L]` → `[N, L]` float32 (or wider). A gather, so the order of additions is fixed."""
        per_token = rows.index_select(0, self.inverse).unflatten(0, (-1, self.k))
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        if weights is None:
            return per_token.sum(1, dtype=wide)
        return torch.bmm(weights.to(wide).unsqueeze(1), per_token.to(wide)).squeeze(1)


class _Experts(torch.autograd.Function):
    """Saves the gathered input and the gate and up products; the activation is recomputed in the backward, and the gradient
    of a routing weight comes from the hidden activation and its gradient, so that expert outputs needn't be kept."""

    @staticmethod
    def forward(ctx, z, weights, w1, w3, w2, indices, act):
        plan = _Sorted(indices, w1.shape[0])
        width = w1.shape[1]
        w13, down = torch.cat([w1, w3], 1).to(z.dtype), w2.to(z.dtype)
        x = z.index_select(0, plan.token)
        h = x.new_empty(x.shape[0], 2 * width)
        for e, s, t in plan.spans:
            torch.mm(x[s:t], w13[e].T, out=h[s:t])
        a = act.forward(h[:, :width], h[:, width:])
        y = torch.empty_like(x)
        for e, s, t in plan.spans:
            torch.mm(a[s:t], down[e].T, out=y[s:t])
        ctx.save_for_backward(x, h, weights, w13, down)
        ctx.plan, ctx.act, ctx.dtypes = plan, act, (w1.dtype, w2.dtype)
        return plan.combine(y, weights).to(z.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, du):
        x, h, weights, w13, down = ctx.saved_tensors
        plan, act = ctx.plan, ctx.act
        width = h.shape[1] // 2
        gate, up = h[:, :width], h[:, width:]
        a = act.forward(gate, up)
        p = weights.reshape(-1).index_select(0, plan.order).unsqueeze(-1).to(x.dtype)
        dy = du.to(x.dtype).index_select(0, plan.token)                              # before the weight p
        da = torch.empty_like(a)
        ddown = torch.zeros_like(down)
        pa = a * p
        for e, s, t in plan.spans:
            torch.mm(dy[s:t], down[e], out=da[s:t])
            torch.mm(dy[s:t].T, pa[s:t], out=ddown[e])
        dp = torch.linalg.vecdot(a.to(weights.dtype), da.to(weights.dtype)).index_select(0, plan.inverse).view_as(weights)
        dh = torch.cat(act.backward(da.mul_(p), gate, up), -1)
        dx = torch.empty_like(x)
        dw13 = torch.zeros_like(w13)
        for e, s, t in plan.spans:
            torch.mm(dh[s:t], w13[e], out=dx[s:t])
            torch.mm(dh[s:t].T, x[s:t], out=dw13[e])
        dw1, dw3 = dw13.to(ctx.dtypes[0]).split(width, 1)
        return plan.combine(dx).to(x.dtype), dp, dw1, dw3, ddown.to(ctx.dtypes[1]), None, None


@torch.no_grad()
def experts_by_need(z: Tensor, indices: Tensor, weights: Tensor, num_experts: int, matrices: Callable[[int], tuple[Tensor, Tensor, Tensor]],
                    act: Activation) -> Tensor:
    """`experts` for weights that are made when needed: `matrices(e)` gives (w1, w3, w2) of expert e in z's dtype, once, and only for
    experts that some token chose. No gradient."""
    plan = _Sorted(indices, num_experts)
    x = z.index_select(0, plan.token)
    y = torch.empty_like(x)
    for e, s, t in plan.spans:
        w1, w3, w2 = matrices(e)
        torch.mm(act.forward(x[s:t] @ w1.T, x[s:t] @ w3.T), w2.T, out=y[s:t])
    return plan.combine(y, weights).to(z.dtype)
