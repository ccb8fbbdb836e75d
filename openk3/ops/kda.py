"""Kimi Delta Attention, the equations: gates, short convolution, one token, and the token loop that every fast form must equal.

Kimi K3 report §2.1, Eq. 5-6; arXiv 2510.26692. Per head, with state S [K, V] (rows: key channels), decay α = e^g per key channel
and write strength β:

    S_t = (I - β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ          o_t = scale · S_tᵀ q_t

that is: decay, then replace what the state answers to k_t by v_t to the degree β_t, then read. The chunked form is in `ops/kda_chunk.py`.

Axes: B batch, T tokens, H heads, K key dim, V value dim, C convolution channels, W convolution width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.kda_chunk import check_shapes, kda_chunk, working_dtype
from openk3.ops.precision import wide

__all__ = ["kda_chunk", "kda_gate", "kda_recurrent", "kda_step", "l2norm", "short_conv"]

CONV_BLOCK = 1 << 17  # elements of the convolution's input worked on at once: its passes then find them in the cache


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) over the last axis; eps is added to the sum, not to the mean. float32 within (float64 stays), x's dtype out."""
    return _L2Norm.apply(x, eps)


class _L2Norm(torch.autograd.Function):
    """Keeps one number per row beside its input; the plain formula's backward keeps and passes over five more tensors."""

    @staticmethod
    def forward(ctx, x, eps):
        values = wide(x)
        inverse = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse)
        return (values * inverse).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, inverse = ctx.saved_tensors
        unit, dy = wide(x) * inverse, wide(dy)
        inner = (unit * dy).sum(-1, keepdim=True)
        return torch.addcmul(dy, unit, inner, value=-1).mul_(inverse).to(x.dtype), None


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The log-decay g = log α, float32 (float64 if z is) and in z's shape (K3 report Eq. 5).

    z: [..., H, K], any float dtype; A_log: [H], one scalar per head; dt_bias: [H·K] or [H, K].
    lower_bound (K3: -5): g = lower_bound · σ(e^A (z + dt_bias)), so lower_bound <= g <= 0.
    None (Kimi Linear): g = -e^A softplus(z + dt_bias).
    Gradients stay finite where the gate saturates, however large A_log.
    """
    z = wide(z) + wide(dt_bias).view(z.shape[-2:])
    # e^60 saturates the gate already; e^A = inf would turn the vanishing derivative into 0 · inf.
    sharpness = wide(A_log).clamp(max=60.0).exp().unsqueeze(-1)
    if lower_bound is None:
        return -sharpness * F.softplus(z)
    return lower_bound * torch.sigmoid(sharpness * z)


def short_conv(x: Tensor, weight: Tensor, tail: Tensor | None = None, resets: Tensor | None = None) -> Tensor:
    """SiLU(Σ_j weight[c, 0, W-1-j] · x[:, t-j, c]): a causal convolution per channel, no bias, then SiLU (K3 report §2.1).

    x: [B, T, C]; weight: [C, 1, W], whose tap W-1 meets the current token. tail: [B, W-1, C], the inputs before x, oldest first
    (zero if None). resets: bool [B, T], True where a document begins: no tap reaches back over it, nor into the tail.
    float32 within (float64 stays), x's dtype out. Differentiable once. Raises ValueError for shapes that don't fit.
    """
    B, T, C = x.shape
    W = weight.shape[-1]
    if weight.shape != (C, 1, W):
        raise ValueError(f"short_conv: weight has shape {list(weight.shape)}, but x's shape {list(x.shape)} asks for [{C}, 1, W]")
    if tail is not None and tail.shape != (B, W - 1, C):
        raise ValueError(f"short_conv: tail has shape {list(tail.shape)}, but x and weight ask for {[B, W - 1, C]}")
    if resets is not None and resets.shape != (B, T):
        raise ValueError(f"short_conv: resets has shape {list(resets.shape)}, but x asks for {[B, T]}")
    if tail is None or W == 1:
        return _ShortConv.apply(x, weight, resets)
    joined = torch.cat([tail.to(x.dtype), x], 1)
    return _ShortConv.apply(joined, weight, None if resets is None else F.pad(resets, (W - 1, 0)))[:, W - 1 :]


class _ShortConv(torch.autograd.Function):
    """One multiply-add per tap, some rows of the batch at a time. Autograd's own backward of shifted slices costs three times as much.

    The few tokens with a document start within their taps' reach are left out of those passes and computed apart, by gathering.
    """

    @staticmethod
    def forward(ctx, x, weight, resets):
        values = wide(x)
        taps = weight[:, 0].t().flip(0).to(values.dtype).contiguous()  # [W, C]: taps[j] meets the token j back
        y, out = torch.empty(x.shape, dtype=values.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        apart = None if resets is None else _first_tokens(resets, len(taps))
        for rows in _row_blocks(x.shape):
            xs, ys = values[rows], y[rows]
            torch.mul(xs, taps[0], out=ys)
            for j in range(1, min(len(taps), x.shape[1])):
                ys[:, j:].addcmul_(xs[:, :-j], taps[j])
            out[rows] = F.silu(ys)
        if apart is not None:
            y[apart.mask] = sum(back * tap for tap, back in zip(taps, apart.look_back(values), strict=True))
            out[apart.mask] = F.silu(y[apart.mask]).to(x.dtype)
        ctx.save_for_backward(x, weight, y)
        ctx.apart = apart
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, weight, y = ctx.saved_tensors
        apart, values = ctx.apart, wide(x)
        taps = weight[:, 0].t().flip(0).to(y.dtype).contiguous()
        dx, dtaps = torch.empty_like(y), torch.zeros_like(taps)
        for rows in _row_blocks(x.shape):
            xs, dxs, dy = values[rows], dx[rows], torch.ops.aten.silu_backward(dout[rows].to(y.dtype), y[rows])
            if apart is not None:
                dy[apart.mask[rows]] = 0.0
            torch.mul(dy, taps[0], out=dxs)
            dtaps[0] += (dy * xs).sum((0, 1))
            for j in range(1, min(len(taps), x.shape[1])):
                dxs[:, :-j].addcmul_(dy[:, j:], taps[j])
                dtaps[j] += (dy[:, j:] * xs[:, :-j]).sum((0, 1))
        if apart is not None:
            dy = torch.ops.aten.silu_backward(dout[apart.mask].to(y.dtype), y[apart.mask])
            for j, back in enumerate(apart.look_back(values)):
                dtaps[j] += (dy * back).sum(0)
                dx.view(-1, dx.shape[-1]).index_add_(0, apart.sources[j], (dy * taps[j]).masked_fill_(apart.cut[j], 0.0))
        return dx.to(x.dtype), dtaps.flip(0).t().unsqueeze(1).to(weight.dtype), None


def _row_blocks(shape: torch.Size) -> list[slice]:
    B, T, C = shape
    step = max(1, CONV_BLOCK // (T * C))
    return [slice(begin, begin + step) for begin in range(0, B, step)]


class _Apart(NamedTuple):
    """The R tokens of a batch that have a document start within reach of W taps."""

    mask: Tensor  # bool [B, T]
    sources: list[Tensor]  # for each tap j, [R]: which of the B·T tokens it meets
    cut: list[Tensor]  # for each tap j, [R, 1]: True where that token belongs to an earlier document or row

    def look_back(self, x: Tensor) -> list[Tensor]:
        """For each tap, what of x [B, T, C] it meets, [R, C]; 0 across a document start."""
        return [x.flatten(0, 1)[source].masked_fill_(cut, 0.0) for source, cut in zip(self.sources, self.cut, strict=True)]


def _first_tokens(resets: Tensor, W: int) -> _Apart:
    document = resets.cumsum(1)  # [B, T]
    mask = document != F.pad(document, (W - 1, 0))[:, : resets.shape[1]]
    where = mask.flatten().nonzero().squeeze(1)
    row, t = where // resets.shape[1], where % resets.shape[1]
    sources, cut = [], []
    for j in range(W):
        source = where - t.clamp(max=j)
        sources.append(source)
        cut.append(((t < j) | (document.flatten()[source] != document[row, t])).unsqueeze(1))
    return _Apart(mask, sources, cut)


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One token: the recurrence above, as it stands.

    q, k, g: [B, H, K]; v: [B, H, V]; beta: [B, H]; state: [B, H, K, V], left as it is. scale: K**-0.5 if None.
    Returns o [B, H, V] in v's dtype and the new state in float32 (float64 if an input is). Differentiable.
    """
    dtype = working_dtype(q, k, v, g)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, values, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    state = state * g.exp().unsqueeze(-1)
    error = values - (k.unsqueeze(-2) @ state).squeeze(-2)
    state = torch.addcmul(state, (beta.unsqueeze(-1) * k).unsqueeze(-1), error.unsqueeze(-2))
    o = ((q * factor).unsqueeze(-2) @ state).squeeze(-2)
    return o.to(v.dtype), state


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    resets: Tensor | None = None,
    bounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """The token loop over `kda_step`: what every fast form must equal. Arguments, results and errors are those of `kda_chunk`; any g <= 0.

    `bounded` is there for the shared signature and changes nothing.
    """
    check_shapes(q, k, v, g, beta, initial_state, resets)
    B, T, H, K = q.shape
    state = q.new_zeros(B, H, K, v.shape[-1], dtype=working_dtype(q, k, v, g)) if initial_state is None else initial_state
    outputs = []
    for t, (qt, kt, vt, gt, bt) in enumerate(zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True)):
        if resets is not None:
            state = state.masked_fill(resets[:, t, None, None, None], 0.0)
        o, state = kda_step(qt, kt, vt, gt, bt, state, scale=scale)
        outputs.append(o)
    return torch.stack(outputs, 1), state
