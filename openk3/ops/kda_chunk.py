"""Chunked Kimi Delta Attention: the training and prefill form of `kda_recurrent`, in batched matrix products.

Kimi K3 report §2.1; chunk (WY) form of arXiv 2510.26692. Per head, in a chunk of C tokens, with S the state that enters it, G_i the
sum of the log-decays g_1..g_i, and the write strength folded into the written key, κ_j = β_j k_j:

    A[i,j] = Σ_c k_i[c] κ_j[c] exp(G_i[c] - G_j[c])   for j < i, else 0        what the erase of token i reads of the write of j
    P[i,j] = Σ_c q_i[c] κ_j[c] exp(G_i[c] - G_j[c])   for j <= i, else 0       what the query of token i reads of it
    E      = (I + A)^-1 (V - (K ⊙ e^G) S)                                      e_i = v_i - S̄_iᵀ k_i, the error that token i writes
    O      = scale ((Q ⊙ e^G) S + P E)
    S_out  = Diag(e^{G_C}) S + (κ ⊙ e^{G_C - G})ᵀ E

Every exponent is a difference G_i - G_j <= 0, but a matrix product wants it split into a factor of i and a factor of j:

* decay bounded by g >= -5 (`_TilePairs`): tiles of 16 tokens, both factors referred to the middle of a tile: no exponent exceeds 40;
* any decay (`_TreePairs`): halves of 2, 4, ..., C tokens; the exponent splits at the border between the halves: no factor exceeds 1.

The backward is written by hand: it keeps the inputs and the state at the start of each segment of chunks, and computes the rest
again. The decay needs no derivative of its own: the loss depends on G_i through the scaled q_i, k_i and κ_i alone, hence
dG_i = q_i dq_i + k_i dk_i - κ_i dκ_i (dk_i: of the key as it erases), and the leaving state adds Σ_v S_out dS_out to dG_C.

Axes: B batch, T tokens, H heads, K key dim, V value dim, N chunks, C tokens in a chunk, M = N·B·H. Products run chunk-major,
[N, B, H, C, ...]; `_chunks` shows a token-major tensor so, without a copy. The loop over chunks sees slices [B·H, ...].
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 16
CHUNK = 2 * TILE  # the quickest on CPU: smaller chunks cost more in states, larger ones in C x C products
SEGMENT_ELEMENTS = 1 << 21  # B·T·H·K of a segment, which bounds the working memory: some 25 tensors of this size


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
    """What `kda_recurrent` computes (K3 report §2.1; arXiv 2510.26692), chunk by chunk.

    q, k: [B, T, H, K]; v: [B, T, H, V]; g: [B, T, H, K] log-decay <= 0; beta: [B, T, H]; any T >= 1. q, k, v may be bfloat16: the
    work is done in float32, or in float64 if q, k, v or g is.
    scale: multiplies q; K**-0.5 if None. initial_state: [B, H, K, V], zero if None. resets: bool [B, T], True where a document
    begins: the state is zero before that token, and its g has no effect.
    bounded: a promise that g >= -5, as K3's gate gives, which admits the quicker form; beyond it float32 under- and overflows.
    Without it any g <= 0 is safe, -inf included.

    Returns o [B, T, H, V] in v's dtype and the state after the last token, [B, H, K, V] in float32 (float64). Differentiable once,
    in q, k, v, g, beta and initial_state. Raises ValueError for shapes that don't fit.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    check_shapes(q, k, v, g, beta, initial_state, resets)
    dtype = working_dtype(q, k, v, g)
    if initial_state is None:
        initial_state = q.new_zeros(B, H, K, V, dtype=dtype)
    if resets is not None:
        g = g.masked_fill(resets[:, :, None, None], 0.0)
    return _KDAChunk.apply(q, k, v, g, beta, initial_state.to(dtype), resets, K**-0.5 if scale is None else scale, bounded, dtype)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if one of them is, else float32: the dtype of the state and of all sums."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


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
        starts, outputs = [], []
        for begin, end in _segments(q.shape):
            starts.append(S)
            segment = _Segment((q, k, v, g, beta), begin, end, resets, bounded, dtype)
            S = segment.forward(S).clone()  # a copy frees the segment's other states
            outputs.append(segment.output(scale)[:, : end - begin].to(v.dtype))
        ctx.save_for_backward(q, k, v, g, beta, resets, *starts)
        ctx.scale, ctx.bounded, ctx.dtype = scale, bounded, dtype
        ctx.set_materialize_grads(False)
        return _join(outputs), S

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dS):
        q, k, v, g, beta, resets, *starts = ctx.saved_tensors
        inputs = (q, k, v, g, beta)
        do = torch.zeros_like(v) if do is None else do
        dS = torch.zeros_like(starts[0]) if dS is None else dS
        parts = []
        for (begin, end), S in zip(reversed(_segments(q.shape)), reversed(starts), strict=True):
            segment = _Segment(inputs, begin, end, resets, ctx.bounded, ctx.dtype)
            segment.forward(S)
            *part, dS = segment.backward(do[:, begin:end].to(ctx.dtype), dS, ctx.scale)
            parts.append([grad[:, : end - begin].to(x.dtype) for grad, x in zip(part, inputs, strict=True)])
        return *(_join(grads[::-1]) for grads in zip(*parts, strict=True)), dS, None, None, None, None


def _join(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _segments(shape: torch.Size) -> list[tuple[int, int]]:
    """Token ranges [begin, end) of whole chunks, of about SEGMENT_ELEMENTS each."""
    B, T, H, K = shape
    step = CHUNK * max(1, SEGMENT_ELEMENTS // (B * H * K * CHUNK))
    return [(begin, min(begin + step, T)) for begin in range(0, T, step)]


def _chunks(x: Tensor, size: int = CHUNK) -> Tensor:
    """[B, N·size, H, ...] seen as [N, B, H, size, ...]."""
    return x.unflatten(1, (-1, size)).transpose(2, 3).transpose(0, 1)


def _negligible(dtype: torch.dtype) -> float:
    """Factors under this (1e-19 in float32) are taken for 0: far below rounding, and the product of two that stay isn't denormal."""
    return torch.finfo(dtype).tiny ** 0.5


def _shrink(x: Tensor) -> Tensor:
    """Zero what is negligible. CPUs multiply denormal numbers a hundred times slower, and strong decay would make many."""
    return F.hardshrink(x, _negligible(x.dtype))


def _is_strong(decay: Tensor) -> bool:
    """Whether a channel forgets all within some chunk, so that shrinking pays."""
    return bool(decay.amin() < _negligible(decay.dtype))


class _Borders(NamedTuple):
    """1 where documents allow it, else 0, for each of the N chunks and B rows."""

    same: Tensor  # [N, B, 1, C, C] token i sees token j
    heard: Tensor  # [N, B, 1, C, 1] the entering state reaches the token
    kept: Tensor  # [N, B, 1, C, 1] the leaving state remembers the token
    crossed: Tensor  # [N, B, 1, 1, 1] the entering state reaches the leaving one


class _Segment:
    """Some whole chunks: everything that doesn't need the state at once for all of them, then one short loop over the chunks."""

    def __init__(self, inputs: tuple[Tensor, ...], begin: int, end: int, resets: Tensor | None, bounded: bool, dtype: torch.dtype):
        pad = -(end - begin) % CHUNK  # k = 0, β = 0, g = 0 leave the state alone

        def part(x: Tensor) -> Tensor:
            x = x[:, begin:end]
            return F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) if pad else x

        q, k, v, g, beta = (part(x).to(dtype) for x in inputs)
        self.tokens = end - begin + pad
        self.borders = None
        if resets is not None and bool(resets[:, begin:end].any()):
            document = _chunks(part(resets).unsqueeze(2)).cumsum(-1).unsqueeze(-1)  # [N, B, 1, C, 1], counted within the chunk
            last = document[..., -1:, :]
            masks = (document == document.mT, document == 0, document == last, last == 0)
            self.borders = _Borders(*(mask.to(dtype) for mask in masks))
        self.pairs = (_TilePairs if bounded else _TreePairs)(q, k, g, beta)
        self.v = _chunks(v).contiguous()  # [N, B, H, C, V]

    def forward(self, S: Tensor) -> Tensor:
        """From the state that enters, [B, H, K, V], to the one that leaves."""
        N, B, H, C, V = self.v.shape
        pairs, K = self.pairs, S.shape[-2]
        M, rows = N * B * H, B * H
        A, P = pairs.products()  # [M, C, C] each
        A.tril_(-1)
        P.tril_()
        reads, writes, decay = pairs.state_factors()  # [N, B, H, 2, C, K], [N, B, H, C, K], [N, B, H, K, 1]
        strong = _is_strong(decay)
        if strong:
            A, P, reads, writes, decay = (_shrink(x) for x in (A, P, reads, writes, decay))
        if self.borders is not None:
            for x in (A, P):
                x.view(N, B, H, C, C).mul_(self.borders.same)
            reads.mul_(self.borders.heard.unsqueeze(3))
            writes.mul_(self.borders.kept)
            decay.mul_(self.borders.crossed)
        identity = torch.eye(C, dtype=A.dtype, device=A.device).expand(M, C, C)
        inverse = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
        inverse = _shrink(inverse) if strong else inverse
        self.P, self.inverse = P, inverse.view(N, rows, C, C)
        self.reads, self.writes, self.decay = reads.view(N, rows, 2 * C, K), writes.view(N, rows, C, K), decay.view(N, rows, K, 1)
        self.errors = A.new_empty(N, rows, C, V)
        self.states = A.new_empty(N + 1, rows, K, V)
        self.states[0] = S.reshape(rows, K, V)
        # unbind, not x[n]: one op for all the views.
        states = self.states.unbind()
        loop = zip(
            states, states[1:], self.errors.unbind(), self.v.view(N, rows, C, V).unbind(), self.reads[:, :, :C].unbind(),
            self.inverse.unbind(), self.writes.mT.unbind(), self.decay.unbind(), strict=False,
        )  # fmt: skip
        for S_in, S_out, e, v, k_read, inv, writesT, alpha in loop:
            torch.bmm(inv, torch.baddbmm(v, k_read, S_in, alpha=-1), out=e)
            torch.mul(S_in, alpha, out=S_out).baddbmm_(writesT, e)
        return states[-1].view(B, H, K, V)

    def output(self, scale: float) -> Tensor:
        """O as [B, T, H, V]."""
        N, B, H, C, V = self.v.shape
        q_read = self.reads.flatten(0, 1)[:, C:]
        o = torch.bmm(self.P, self.errors.flatten(0, 1)).baddbmm_(q_read, self.states[:-1].flatten(0, 1), beta=scale, alpha=scale)
        return o.view(N, B, H, C, V).permute(1, 0, 3, 2, 4).reshape(B, N * C, H, V)

    def backward(self, do: Tensor, dS: Tensor, scale: float) -> tuple[Tensor, ...]:
        """dq, dk, dv, dg, dbeta token-major, and the gradient of the state that entered; needs `forward` before it."""
        N, B, H, C, V = self.v.shape
        rows, K = B * H, dS.shape[-2]
        do = F.pad(do, (0, 0, 0, 0, 0, self.tokens - do.shape[1])) if do.shape[1] < self.tokens else do
        # Beside each other, as `reads` holds k above q: the gradients of -(K ⊙ e^G) S, i.e. of what is erased, and of Q S.
        both = self.v.new_empty(N, rows, 2 * C, V)
        erased, do_scaled = both[:, :, :C], both[:, :, C:]
        torch.mul(_chunks(do), scale, out=do_scaled.view(N, B, H, C, V))
        d_errors = torch.bmm(self.P.mT, do_scaled.flatten(0, 1)).view(N, rows, C, V)
        d_states = torch.empty_like(self.states)
        d_states[N] = dS.reshape(rows, K, V)
        views = d_states.unbind()
        loop = zip(
            views, views[1:], d_errors.unbind(), both.unbind(), erased.unbind(), self.reads.mT.unbind(), self.inverse.mT.unbind(),
            self.writes.unbind(), self.decay.unbind(), strict=False,
        )  # fmt: skip
        for d_in, d_out, de, d_both, d_erased, readsT, invT, writes, alpha in reversed(list(loop)):
            de.baddbmm_(writes, d_out)
            torch.baddbmm(d_erased, invT, de, beta=0, alpha=-1, out=d_erased)
            torch.mul(d_out, alpha, out=d_in).baddbmm_(readsT, d_both)
        both, errors = both.flatten(0, 1), self.errors.flatten(0, 1)
        d_products = torch.bmm(both, errors.mT).view(N, B, H, 2, C, C)
        mask = torch.ones(2, C, C, dtype=do.dtype, device=do.device).tril_()
        mask[0].tril_(-1)
        d_products.mul_(mask)
        d_reads = torch.bmm(both, self.states[:-1].flatten(0, 1).mT).view(N, B, H, 2, C, K)
        d_writes = torch.bmm(errors, d_states[1:].flatten(0, 1).mT).view(N, B, H, C, K)
        if self.borders is not None:
            d_products.mul_(self.borders.same.unsqueeze(3))
            d_reads.mul_(self.borders.heard.unsqueeze(3))
            d_writes.mul_(self.borders.kept)
        d_total = torch.einsum("nhkv,nhkv->nhk", self.states[1:], d_states[1:]).view(N, B, H, K)
        dq, dk, dg, dbeta = self.pairs.backward(d_products.view(-1, 2, C, C), d_reads, d_writes, d_total)
        dv = torch.empty_like(do)
        torch.neg(erased.view(N, B, H, C, V), out=_chunks(dv))
        return dq, dk, dv, dg, dbeta, views[0].view(B, H, K, V)


class _TilePairs:
    """A and P, and the factors of the state, for bounded decay: a chunk is two tiles, each with exponents centred in it.

    With G counted from the middle of a tile, `up` = e^{G_i} scales what reads (k, above it q) and `down` = e^{-G_j} what writes (κ);
    `enter`, `leave` and `across` carry a tile's middle from the chunk's start, to its end, and from the first tile's to the second's.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor, beta: Tensor):
        B, T, H, K = q.shape
        N = T // CHUNK
        # All exponents by one product with 0 and ±1, so that nothing cancels: G from the centre, -G, and the sum up to the centre.
        upto = torch.ones(TILE, TILE, dtype=g.dtype, device=g.device).tril_()
        centre = upto[TILE // 2 - 1]
        sums = torch.cat([upto - centre, centre - upto, centre[None]])
        factors = torch.matmul(sums, g.reshape(B * N * 2, TILE, H * K)).exp_().view(B, N, 2, 2 * TILE + 1, H, K).permute(2, 1, 0, 4, 3, 5)
        self.up, self.down = factors[..., :TILE, :], factors[..., TILE : 2 * TILE, :]  # [2, N, B, H, TILE, K]
        before, after = factors[..., 2 * TILE :, :], factors[..., TILE - 1 : TILE, :]  # [2, N, B, H, 1, K]
        whole = before * after
        self.enter, self.leave = torch.stack([before[0], before[1] * whole[0]]), torch.stack([after[0] * whole[1], after[1]])
        self.across, self.decay = after[0] * before[1], whole[0] * whole[1]
        self.strong = _is_strong(self.decay)
        if self.strong:  # small as they are, they count where they meet a large `up` or `down`: the first reader, the last writer
            self.enter.masked_fill_(self.enter * self.up[..., :1, :] < _negligible(g.dtype), 0.0)
            self.leave.masked_fill_(self.leave * self.down[..., -1:, :] < _negligible(g.dtype), 0.0)
        self.k, self.beta = self._tiles(k), self._tiles(beta.unsqueeze(-1))
        self.shape = (B, T, H, K)
        self.read = q.new_empty(2, N, B, H, 2, TILE, K)
        torch.mul(self.k, self.up, out=self.read[..., 0, :, :])
        torch.mul(self._tiles(q), self.up, out=self.read[..., 1, :, :])
        self.written = torch.mul(self.k, self.down, out=q.new_empty(2, N, B, H, TILE, K)).mul_(self.beta)

    @staticmethod
    def _tiles(x: Tensor) -> Tensor:
        """[B, T, H, ...] seen as [2, N, B, H, TILE, ...]."""
        return x.unflatten(1, (-1, 2, TILE)).transpose(0, 2).transpose(3, 4)

    def products(self) -> tuple[Tensor, Tensor]:
        K = self.shape[-1]
        self.M = self.read[0].numel() // (2 * TILE * K)
        M = self.M
        self.rows = self.read.view(2, M, 2 * TILE, K)
        self.keys0 = self.written[0].view(M, TILE, K)
        self.keys1 = self.keys0.new_empty(M, CHUNK, K)
        torch.mul(self.written[0], self.across, out=self.keys1[:, :TILE].view(self.written[0].shape))
        if self.strong:  # what reads these keys may be as large as e^35
            self.keys1[:, :TILE] = F.hardshrink(self.keys1[:, :TILE], torch.finfo(self.keys1.dtype).tiny * 2**12)
        self.keys1[:, TILE:] = self.written[1].view(M, TILE, K)
        top, bottom = torch.bmm(self.rows[0], self.keys0.mT), torch.bmm(self.rows[1], self.keys1.mT)
        products = []
        for rows in (slice(0, TILE), slice(TILE, None)):  # of k, of q
            x = top.new_empty(M, CHUNK, CHUNK)  # the caller zeroes what lies above the diagonal
            x[:, :TILE, :TILE] = top[:, rows]
            x[:, TILE:] = bottom[:, rows]
            products.append(x)
        return products[0], products[1]

    def state_factors(self) -> tuple[Tensor, Tensor, Tensor]:
        _, N, B, H, _, _, K = self.read.shape
        reads = self.read.new_empty(N, B, H, 2, CHUNK, K)
        torch.mul(self.read, self.enter.unsqueeze(4), out=self._by_tile(reads))
        writes = self.read.new_empty(N, B, H, CHUNK, K)
        torch.mul(self.written, self.leave, out=self._by_tile(writes))
        return reads, writes, self.decay.mT.contiguous()

    @staticmethod
    def _by_tile(x: Tensor) -> Tensor:
        """[N, B, H, ..., CHUNK, K] seen as [2, N, B, H, ..., TILE, K]."""
        return x.unflatten(-2, (2, TILE)).movedim(-3, 0)

    def backward(self, d_products: Tensor, d_reads: Tensor, d_writes: Tensor, d_total: Tensor) -> tuple[Tensor, ...]:
        B, T, H, K = self.shape
        M = self.M
        d_top = d_products[:, :, :TILE, :TILE].reshape(M, 2 * TILE, TILE)
        d_bottom = d_products[:, :, TILE:].reshape(M, 2 * TILE, CHUNK)
        d_read = torch.mul(self._by_tile(d_reads), self.enter.unsqueeze(4), out=torch.empty_like(self.read))
        rows = d_read.view(2, M, 2 * TILE, K)
        rows[0].baddbmm_(d_top, self.keys0)
        rows[1].baddbmm_(d_bottom, self.keys1)
        d_written = torch.mul(self._by_tile(d_writes), self.leave, out=torch.empty_like(self.written))
        d_written[0].view(M, TILE, K).baddbmm_(d_top.mT, self.rows[0])
        d_keys1 = torch.bmm(d_bottom.mT, self.rows[1]).view(*self.written.shape[1:4], CHUNK, K)
        d_written[0].addcmul_(d_keys1[..., :TILE, :], self.across)
        d_written[1].add_(d_keys1[..., TILE:, :])
        # The decay first, while the scaled factors stand; then unscale.
        dG, dq, dk = (d_reads.new_empty(B, T, H, K) for _ in range(3))
        torch.mul(self.read[..., 0, :, :], d_read[..., 0, :, :], out=self._tiles(dG))
        self._tiles(dG).addcmul_(self.read[..., 1, :, :], d_read[..., 1, :, :]).addcmul_(self.written, d_written, value=-1)
        dg = _decay_gradient(dG, d_total)
        d_kappa = d_written.mul_(self.down)
        torch.mul(d_read[..., 1, :, :], self.up, out=self._tiles(dq))
        torch.mul(d_read[..., 0, :, :], self.up, out=self._tiles(dk))
        self._tiles(dk).addcmul_(d_kappa, self.beta)
        dbeta = (self.k * d_kappa).sum(-1)  # [2, N, B, H, TILE]
        return dq, dk, dg, dbeta.permute(2, 1, 0, 4, 3).reshape(B, T, H)


def _decay_gradient(dG: Tensor, d_total: Tensor) -> Tensor:
    """dg [B, T, H, K] from the gradient of the sums G within each chunk (dG, token-major) and of each chunk's total [N, B, H, K]."""
    B, T, H, K = dG.shape
    _chunks(dG)[:, :, :, -1] += d_total
    onward = torch.ones(CHUNK, CHUNK, dtype=dG.dtype, device=dG.device).triu_()
    return torch.matmul(onward, dG.view(-1, CHUNK, H * K)).view(B, T, H, K)


class _TreePairs:
    """The same for any decay <= 0: at the levels h = 1, 2, ..., C/2, the later half of a block of 2h tokens reads what the earlier wrote.

    The exponent splits at the border between the halves: `up` decays from the border to the reader, `down` from the writer to the
    border, both at most 1. They are products of e^g, grown level by level, so nothing cancels and nothing overflows.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor, beta: Tensor):
        B, T, H, K = self.shape = q.shape
        self.q, self.k, self.beta = _chunks(q), _chunks(k), _chunks(beta.unsqueeze(-1))
        self.kappa = torch.mul(self.k, self.beta, out=q.new_empty(self.k.shape))
        self.g = g
        self.up = g.contiguous().exp()
        self.down = torch.ones_like(self.up)
        self.strong = bool(_chunks(g).sum(3).amin() < math.log(_negligible(g.dtype)))
        self.levels = []

    def products(self) -> tuple[Tensor, Tensor]:
        N, B, H, C, K = self.kappa.shape
        M = N * B * H
        A, P = (self.kappa.new_zeros(M, C, C) for _ in range(2))
        P.diagonal(dim1=1, dim2=2).copy_((self.q * self.kappa).sum(-1).view(M, C))
        h = 1
        while h < C:
            if self.strong:
                for x in (self.up, self.down):
                    torch.threshold_(x, _negligible(x.dtype), 0.0)
            blocks = C // (2 * h)
            up, down = self._half(_chunks(self.up), h, 1).clone(), self._half(_chunks(self.down), h, 0).clone()
            read = self.kappa.new_empty(N, B, H, blocks, 2, h, K)
            torch.mul(self._half(self.k, h, 1), up, out=read[..., 0, :, :])
            torch.mul(self._half(self.q, h, 1), up, out=read[..., 1, :, :])
            read = read.view(M * blocks, 2 * h, K)
            written = (self._half(self.kappa, h, 0) * down).view(M * blocks, h, K)
            pairs = torch.bmm(read, written.mT).view(M, blocks, 2, h, h)
            self._corner(A, h).copy_(pairs[:, :, 0])
            self._corner(P, h).copy_(pairs[:, :, 1])
            self.levels.append((h, up, down, read, written))
            ups, downs = (x.view(-1, 2, h, H * K) for x in (self.up, self.down))
            downs[:, 0] *= ups[:, 1, -1:]
            ups[:, 1] *= ups[:, 0, -1:]
            h *= 2
        return A, P

    @staticmethod
    def _half(x: Tensor, h: int, later: int) -> Tensor:
        """[N, B, H, C, K] seen as the earlier or later halves [N, B, H, blocks, h, K] of its blocks of 2h tokens."""
        return x.unflatten(3, (-1, 2, h)).select(4, later)

    @staticmethod
    def _corner(x: Tensor, h: int) -> Tensor:
        """[M, C, C] seen as [M, blocks, h, h]: of each diagonal block of 2h tokens, the later half's rows in the earlier half's columns."""
        blocks = x.shape[-1] // (2 * h)
        return x.view(-1, blocks, 2, h, blocks, 2, h)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def state_factors(self) -> tuple[Tensor, Tensor, Tensor]:
        N, B, H, C, K = self.kappa.shape
        up, down = _chunks(self.up), _chunks(self.down)
        reads = self.kappa.new_empty(N, B, H, 2, C, K)
        torch.mul(self.k, up, out=reads[:, :, :, 0])
        torch.mul(self.q, up, out=reads[:, :, :, 1])
        writes = torch.mul(self.kappa, down, out=torch.empty_like(self.kappa))
        return reads, writes, up[:, :, :, -1].unsqueeze(-1).contiguous()

    def backward(self, d_products: Tensor, d_reads: Tensor, d_writes: Tensor, d_total: Tensor) -> tuple[Tensor, ...]:
        B, T, H, K = self.shape
        N, _, _, C, _ = self.kappa.shape
        up, down = _chunks(self.up), _chunks(self.down)
        dk_read, dq = d_reads[:, :, :, 0].mul_(up), d_reads[:, :, :, 1].mul_(up)
        d_kappa = d_writes.mul_(down)
        dA, dP = d_products.unbind(1)
        diagonal = dP.diagonal(dim1=1, dim2=2).view(N, B, H, C, 1)
        dq.addcmul_(diagonal, self.kappa)
        d_kappa.addcmul_(diagonal, self.q)
        for h, up, down, read, written in self.levels:
            d = torch.stack([self._corner(x, h) for x in (dA, dP)], 2).view(-1, 2 * h, h)
            d_read = torch.bmm(d, written).view(N, B, H, -1, 2, h, K)
            self._half(dk_read, h, 1).addcmul_(d_read[..., 0, :, :], up)
            self._half(dq, h, 1).addcmul_(d_read[..., 1, :, :], up)
            self._half(d_kappa, h, 0).addcmul_(torch.bmm(d.mT, read).view(N, B, H, -1, h, K), down)
        dG, dk = (d_reads.new_empty(B, T, H, K) for _ in range(2))
        torch.mul(self.k, dk_read, out=_chunks(dG)).addcmul_(self.q, dq).addcmul_(self.kappa, d_kappa, value=-1)
        torch.addcmul(dk_read, d_kappa, self.beta, out=_chunks(dk))
        # Where e^g is negligible so is its gradient, but not the rounding of the sums, which a steep gate would multiply by |g|.
        dg = _decay_gradient(dG, d_total).masked_fill_(self.g < math.log(_negligible(self.g.dtype)), 0.0)
        dbeta = (self.k * d_kappa).sum(-1)  # [N, B, H, C]
        return dq.permute(1, 0, 3, 2, 4).reshape(B, T, H, K), dk, dg, dbeta.permute(1, 0, 3, 2).reshape(B, T, H)
