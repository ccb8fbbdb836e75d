"""The routed experts of a mixture: gated feed-forwards, a few per token (arXiv 2601.18089 for the latent form; K3 report §2.3).

    u = Σ_{j ∈ T} p_j · w2_j act(w1_j z, w3_j z)

The weight p_j is applied after w2. Axes: N tokens, k experts per token, E experts, L expert width, F hidden width.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from openk3.ops.precision import wide
from openk3.ops.situ import Activation

ROUND = 32                     # rows: capacities come in these steps, so that few shapes occur


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
    """u for every token: rows sorted by expert, the products of all experts as one, gate and up together.

    z `[N, L]`; indices int64 `[N, k]`; weights float32 `[N, k]`; w1, w3 `[E, F, L]`; w2 `[E, L, F]` → `[N, L]` in z's dtype.
    Products run in z's dtype (weights are cast to it), sums over a token's experts in float32. An expert without tokens
    costs nothing and gets a zero gradient. Differentiable in z, weights, w1, w3, w2; deterministic.
    """
    return _Experts.apply(z, weights, w1, w3, w2, indices, act)


class _Plan:
    """Which row of the expert-major buffers holds which (token, slot) pair, and products over those buffers.

    Each expert's rows are filled up to a common capacity, so that a product over all experts is one batched product; the rows that
    fill up repeat a token and carry the weight 0. Where experts are so uneven that this would more than double the work, each is
    filled up to the next multiple of `step` only (few shapes: a product's kernel may be compiled for its shape) and done alone.
    """

    def __init__(self, indices: Tensor, num_experts: int, step: int = ROUND):
        flat = indices.reshape(-1)
        self.experts, self.k = num_experts, indices.shape[1]
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        sizes = [-(-n // step) * step for n in counts.tolist()]                # rows of each expert, filled up to a step
        self.even = step > 1 and 0 < max(sizes) * num_experts <= 2 * sum(sizes)
        if self.even:
            sizes = [max(sizes)] * num_experts
        ends = list(itertools.accumulate(sizes))
        self.rows, self.spans = ends[-1], [(e, t - n, t) for e, (n, t) in enumerate(zip(sizes, ends, strict=True)) if n]
        begins = flat.new_tensor([0, *ends[:-1]]) - (counts.cumsum(0) - counts)
        where = torch.arange(flat.numel(), device=flat.device) + begins[flat[order]]        # row of each sorted pair
        self.place = torch.empty_like(order).index_copy_(0, order, where)      # [N·k] pair → row
        self.token = order.new_zeros(self.rows).index_copy_(0, where, order // self.k)      # [rows] row → token

    def spread(self, weights: Tensor) -> Tensor:
        """Routing weights `[N, k]` → one per row `[rows, 1]`, 0 where a row only fills up."""
        return weights.new_zeros(self.rows).index_copy_(0, self.place, weights.reshape(-1)).unsqueeze(-1)

    def multiply(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Each row with its expert's matrix: `[rows, I]`, `[E, I, O]` → `[rows, O]`."""
        if self.even:
            return torch.bmm(x.view(self.experts, -1, x.shape[1]), matrices).view(self.rows, -1)
        out = x.new_empty(x.shape[0], matrices.shape[2])
        for e, s, t in self.spans:
            torch.mm(x[s:t], matrices[e], out=out[s:t])
        return out

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """aᵀ b over each expert's rows: `[rows, I]`, `[rows, O]` → `[E, I, O]`."""
        if self.even:
            return torch.bmm(a.view(self.experts, -1, a.shape[1]).mT, b.view(self.experts, -1, b.shape[1]))
        out = a.new_zeros(self.experts, a.shape[1], b.shape[1])
        for e, s, t in self.spans:
            torch.mm(a[s:t].T, b[s:t], out=out[e])
        return out

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum each token's k rows, weighted: `[rows, L]` → `[N, L]` float32 (or wider). A gather, so the order of additions is fixed."""
        per_token = wide(rows.index_select(0, self.place).unflatten(0, (-1, self.k)))
        if weights is None:
            return per_token.sum(1)
        return torch.bmm(weights.to(per_token.dtype).unsqueeze(1), per_token).squeeze(1)


class _Experts(torch.autograd.Function):
    """Saves the gathered input and the gate and up products; the activation is recomputed in the backward, and the gradient
    of a routing weight comes from the hidden activation and its gradient, so that expert outputs needn't be kept."""

    @staticmethod
    def forward(ctx, z, weights, w1, w3, w2, indices, act):
        plan = _Plan(indices, w1.shape[0])
        width = w1.shape[1]
        w13, down = torch.cat([w1, w3], 1).to(z.dtype), w2.to(z.dtype)
        x = z.index_select(0, plan.token)
        h = plan.multiply(x, w13.mT)
        y = plan.multiply(act.forward(h[:, :width], h[:, width:]), down.mT)
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
        p = plan.spread(weights).to(x.dtype)
        dy = du.to(x.dtype).index_select(0, plan.token)                              # before the weight p
        da = plan.multiply(dy, down)
        dp = torch.linalg.vecdot(wide(a), wide(da)).index_select(0, plan.place).view_as(weights).to(weights.dtype)
        ddown = plan.outer(dy, a.mul_(p))
        dh = act.backward_joined(da.mul_(p), gate, up)
        dw1, dw3 = plan.outer(dh, x).to(ctx.dtypes[0]).split(width, 1)
        dz = plan.combine(plan.multiply(dh, w13)).to(x.dtype)
        return dz, dp, dw1, dw3, ddown.to(ctx.dtypes[1]), None, None


@torch.no_grad()
def experts_by_need(z: Tensor, indices: Tensor, weights: Tensor, num_experts: int, matrices: Callable[[int], tuple[Tensor, Tensor, Tensor]],
                    act: Activation) -> Tensor:
    """`experts` for weights that are made when needed: `matrices(e)` gives (w1, w3, w2) of expert e in z's dtype, once, and only for
    experts that some token chose. No gradient."""
    plan = _Plan(indices, num_experts, step=1)
    x = z.index_select(0, plan.token)
    y = torch.empty_like(x)
    for e, s, t in plan.spans:
        w1, w3, w2 = matrices(e)
        torch.mm(act.forward(x[s:t] @ w1.T, x[s:t] @ w3.T), w2.T, out=y[s:t])
    return plan.combine(y, weights).to(z.dtype)
