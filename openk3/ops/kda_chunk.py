"""Chunked Kimi Delta Attention: the training and prefill form of `kda_recurrent`, in batched matrix products.

Kimi K3 report §2.1; chunk (WY) form of arXiv 2510.26692. Per head, in a chunk of C tokens with S the state that enters it, G_i the sum of the
log-decays g_1..g_i, and the write strength folded into the written key, κ_j = β_j k_j:

    A[i,j] = Σ_c k_i[c] κ_j[c] exp(G_i[c] - G_j[c])   for j < i, else 0          (what the erase of token i reads of the write of j)
    P[i,j] = Σ_c q_i[c] κ_j[c] exp(G_i[c] - G_j[c])   for j <= i, else 0         (what the query of token i reads of it)
    E      = (I + A)^-1 (V - (K ⊙ e^G) S)                                        (e_i = v_i - S̄_iᵀ k_i, the error that token i writes)
    O      = scale ((Q ⊙ e^G) S + P E)
    S_out  = Diag(e^{G_C}) S + (κ ⊙ e^{G_C - G})ᵀ E

Every exponent needed is a difference G_i - G_j <= 0 with j <= i, but a matrix product wants it split into a factor of i and a factor of j:

* bounded decay (`_TilePairs`): 16-token tiles, both factors referred to the middle of the tile of i, so that each exponent is at most 8 |g|;
* any decay (`_TreePairs`): halves of 2, 4, ..., C tokens; the exponent splits at the border between the halves, so no factor exceeds 1.

The backward is written by hand: it keeps the inputs and the state at the start of each segment of chunks, and computes the rest again. The decay's
gradient needs no derivative of its own: the loss depends on G_i through the scaled q_i, k_i and κ_i alone, hence
dG_i = q_i dq_i + k_i dk_i - κ_i dκ_i, and the state that leaves adds Σ_v S_out dS_out to dG_C.

Axes: B batch, T tokens, H heads, K key dim, V value dim, N chunks, C tokens in a chunk, M = N·B·H. `[N, B, H, C, ...]` is the chunk-major layout in
which products run; `_chunks` shows a token-major tensor in it without a copy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 16
CHUNK = 32  # two tiles: measured best on CPU; more chunks cost state products, larger ones cost C² products
SEGMENT_ELEMENTS = 1 << 22  # B·T·H·K of one segment: what bounds the backward's working memory


def kda_chunk(
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
    """Same result as `kda_recurrent` (K3 report §2.1; arXiv 2510.26692), some fifty times quicker in training.

    q, k: [B, T, H, K]; v: [B, T, H, V]; g: [B, T, H, K] log-decay <= 0; beta: [B, T, H]; any T >= 1. q, k, v may be bfloat16: the work is done in
    float32, or in float64 if q, k, v or g is.
    scale: multiplies q; K**-0.5 if None. initial_state: [B, H, K, V], zero if None. resets: bool [B, T], True where a document begins: the state is
    zero before that token (and its g has no effect).
    bounded: a promise that g >= -10 (K3's gate gives g >= -5), which admits the quicker form; beyond it float32 overflows. Without it any g <= 0
    is safe, -inf included.

    Returns o [B, T, H, V] in v's dtype and the state after the last token, [B, H, K, V] in float32 (float64). Differentiable once, in q, k, v, g,
    beta and initial_state. Raises ValueError for shapes that don't fit.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    check_shapes(q, k, v, g, beta, initial_state, resets)
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype, g.dtype) else torch.float32
    if initial_state is None:
        initial_state = q.new_zeros(B, H, K, V, dtype=dtype)
    if resets is not None:
        g = g.masked_fill(resets[:, :, None, None], 0.0)
    return _KDAChunk.apply(q, k, v, g, beta, initial_state.to(dtype), resets, K**-0.5 if scale is None else scale, bounded, dtype)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, resets: Tensor | None) -> None:
    """Raise ValueError unless the arguments of a KDA form over [B, T, ...] fit each other."""
    B, T, H, K = q.shape
    want = {"k": (k, (B, T, H, K)), "v": (v, (B, T, H, v.shape[-1])), "g": (g, (B, T, H, K)), "beta": (beta, (B, T, H))}
    if initial_state is not None:
        want["initial_state"] = (initial_state, (B, H, K, v.shape[-1]))
    if resets is not None:
        want["resets"] = (resets, (B, T))
    for name, (x, shape) in want.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"kda: {name} has shape {list(x.shape)}, but q's shape {list(q.shape)} asks for {list(shape)}")
    if T == 0:
        raise ValueError("kda: no tokens (T = 0)")
    if resets is not None and resets.dtype != torch.bool:
        raise ValueError(f"kda: resets must be bool, not {resets.dtype}")


class _KDAChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, resets, scale, bounded, dtype):
        B, T, H, K = q.shape
        o = torch.empty(B, T, H, v.shape[-1], dtype=v.dtype, device=v.device)
        starts = []
        for begin, end in _segments(q.shape):
            starts.append(S)
            segment = _Segment((q, k, v, g, beta), begin, end, resets, bounded, dtype)
            S = segment.forward(S)
            o[:, begin:end] = segment.output(scale)
        ctx.save_for_backward(q, k, v, g, beta, resets, *starts)
        ctx.scale, ctx.bounded, ctx.dtype = scale, bounded, dtype
        ctx.set_materialize_grads(False)
        # The last state is a view into a buffer of all the segment's states: a copy frees them.
        return o, S.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dS):
        q, k, v, g, beta, resets, *starts = ctx.saved_tensors
        inputs = (q, k, v, g, beta)
        grads = [torch.empty(x.shape, dtype=ctx.dtype, device=x.device) for x in inputs]
        if do is None:
            do = torch.zeros_like(v)
        if dS is None:
            dS = torch.zeros_like(starts[0])
        for (begin, end), S in zip(reversed(_segments(q.shape)), reversed(starts), strict=True):
            segment = _Segment(inputs, begin, end, resets, ctx.bounded, ctx.dtype)
            segment.forward(S)
            *parts, dS = segment.backward(do[:, begin:end], dS, ctx.scale)
            for grad, part in zip(grads, parts, strict=True):
                grad[:, begin:end] = part[:, : end - begin]
        return *(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)), dS, None, None, None, None
