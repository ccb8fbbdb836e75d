"""Routing of tokens to experts, and the counting and quantiles behind Quantile Balancing (K3 report §2.3, appendices C and D).

Axes: N tokens, E experts, k experts chosen per token, q = N·k/E the load every expert should have.

The bias b decides which experts are chosen and nothing else: mixture weights come from the unbiased scores, so b has no gradient.
Quantile Balancing finds b from the batch that was just routed. With α_i the (k+1)-th largest biased score of token i, expert j
would just miss being chosen by token i at the bias r_ij = α_i − s_ij (the *required bias*); the bias that gives it q tokens is
therefore the q-th smallest r_ij over the global batch, the quantile at level k/E. Counts of r in fixed bins add up over
micro-batches and ranks, quantiles don't: an average of per-rank quantiles is another number and never balances skewed ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What `route` decides for N tokens."""

    indices: Tensor  # int64 [N, k], the chosen experts, best biased score first
    weights: Tensor  # float32 [N, k], mixture weights; carry the router's gradient
    scores: Tensor  # float32 [N, E], unbiased
    cutoff: Tensor | None  # float32 [N], the (k+1)-th largest biased score; None unless asked for


def route(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    cutoff: bool = False,
) -> Routing:
    """Choose `top_k` experts per token by score + bias and weigh them by score alone (K3 report §2.3).

    logits: [N, E] float32 (float64 is taken too; half precision is refused, because rounded scores pick other experts).
    bias: [E] in the same dtype. activation: "sigmoid" or "softmax". renormalize: weights of a token sum to `scale`.
    cutoff: also return the (k+1)-th largest biased score, from the same top-k; needs top_k < E.
    The order of equal scores is unspecified. Raises ValueError.
    """
    if logits.dtype not in (torch.float32, torch.float64) or bias.dtype != logits.dtype:
        raise ValueError(f"routing needs float32 logits and bias, got {logits.dtype} and {bias.dtype}")
    experts = logits.shape[-1]
    if not 0 < top_k <= experts or (cutoff and top_k == experts):
        raise ValueError(f"cannot choose top {top_k} of {experts} experts" + (" and the next one as cutoff" if cutoff else ""))
    if activation == "sigmoid":
        scores = logits.sigmoid()
    elif activation == "softmax":
        scores = logits.softmax(-1)
    else:
        raise ValueError(f"unknown router activation {activation!r}: use sigmoid or softmax")
    with torch.no_grad():
        values, indices = torch.topk(scores + bias, top_k + cutoff, dim=-1)
        alpha = values[:, top_k] if cutoff else None
        indices = indices[:, :top_k]
    weights = scores.gather(-1, indices)  # [N, k]
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if scale != 1.0:
        weights = weights * scale
    return Routing(indices, weights, scores, alpha)


@torch.no_grad()
def expert_load(indices: Tensor, experts: int, valid: Tensor | None = None) -> Tensor:
    """Tokens per expert: int64 [E] from chosen experts [N, k]. valid: bool or 0/1 [N]; tokens with 0 aren't counted."""
    return _count(indices, experts, valid, torch.int64)


def _count(index: Tensor, size: int, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Occurrences of 0 … size−1 in `index` [N, m], where row i counts valid[i] times.

    Weights instead of `index[valid]` and `bincount`: both would make the shape or the host wait for the data, which breaks CUDA graphs.
    """
    weights = index.new_ones(1, 1, dtype=dtype) if valid is None else valid.to(dtype).unsqueeze(-1)
    counts = torch.zeros(size, dtype=dtype, device=index.device)
    return counts.scatter_add_(0, index.reshape(-1), weights.expand(index.shape).reshape(-1))


@torch.no_grad()
def required_bias_histogram(
    scores: Tensor, cutoff: Tensor, lo: Tensor | float, width: Tensor | float, bins: int, valid: Tensor | None = None
) -> Tensor:
    """Per-expert counts of the required bias r_ij = α_i − s_ij in uniform bins: int32 [E, bins].

    scores: [N, E]; cutoff: [N]; bin β covers [lo + β·width, lo + (β+1)·width); valid: bool or 0/1 [N], padding not counted.
    A value outside the bins counts in the first or last one, so every row sums to the number of valid tokens and the quantile stays
    right as long as it doesn't itself fall into an edge bin (there it's off by at most the clamped distance, towards the middle).
    """
    # (α − lo) − s, not (α − s)/width − lo/width: the differences are near exact, so bins as narrow as a float32 step still work.
    bin_ = ((cutoff - lo).unsqueeze(-1) - scores).div_(width).to(torch.int64).clamp_(0, bins - 1)  # [N, E]
    experts = scores.shape[-1]
    bin_ += torch.arange(0, experts * bins, bins, device=scores.device)
    return _count(bin_, experts * bins, valid, torch.int32).view(experts, bins)


@torch.no_grad()
def histogram_range(
    bias: Tensor, bins: int, observed: tuple[Tensor | float, Tensor | float] | None = None, margin: float = 0.25
) -> tuple[Tensor, Tensor]:
    """Left edge and width of `bins` uniform bins for the required bias under the current `bias`: two 0-dim tensors.

    Scores in (0, 1) put α into (b_min, b_max + 1), so r lies in [b_min − 1, b_max + 1]; that's K3's interval (report appendix D).
    observed: (min, max) of r expected in the coming step (see `observed_range`), for routers whose scores are so close together that
    the full interval's bins are too wide to tell experts apart. The interval is then that one, widened by `margin` of its length on
    either side and kept inside K3's; what still falls outside counts in the edge bins.
    """
    bound_lo, bound_hi = bias.min() - 1, bias.max() + 1
    if observed is None:
        return bound_lo, (bound_hi - bound_lo) / bins
    low, high = (torch.as_tensor(v, dtype=bias.dtype, device=bias.device) for v in observed)
    # Bins narrower than the spacing of float32 near 1 would hold nothing but rounding.
    slack = (margin * (high - low)).clamp(min=bins * torch.finfo(torch.float32).eps / 2)
    lo = torch.maximum(bound_lo, low - slack)
    return lo, (torch.minimum(bound_hi, high + slack) - lo) / bins


@torch.no_grad()
def observed_range(histogram: Tensor, lo: Tensor, width: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Least and greatest required bias to expect next, from this step's pooled histogram [E, bins]: two 0-dim tensors.

    They're the outer edges of the first and the last occupied bin over all experts, moved by the least and the greatest change of the
    bias (`shift` [E] = new − old), because α moves at most that far. An occupied edge bin may hold values from far outside: that end is
    returned as ∓infinity, and `histogram_range` falls back to K3's whole interval for a step. So it does for an empty histogram.
    """
    bins = histogram.shape[-1]
    occupied = histogram.sum(0) > 0  # [bins]
    position = torch.arange(bins, device=histogram.device)
    first = torch.where(occupied, position, bins).min()
    last = torch.where(occupied, position, -1).max()
    infinity = torch.full_like(lo, torch.inf)
    low = torch.where((first == 0) | (first == bins), -infinity, lo + first * width)
    high = torch.where((last == bins - 1) | (last == -1), infinity, lo + (last + 1) * width)
    if shift is not None:
        low, high = low + shift.min(), high + shift.max()
    return low, high


@torch.no_grad()
def quantile_from_histogram(histogram: Tensor, top_k: int, lo: Tensor | float, width: Tensor | float) -> Tensor:
    """The balancing bias, float32 [E] with mean 0, from counts [E, bins] pooled over the global batch (K3 report appendix D).

    For each expert: the first bin β whose cumulative count reaches ⌈q⌉, q = m·k/E with m the tokens counted, interpolated inside it.
    Within one bin's width of the exact quantile. An empty histogram gives zeros. Raises ValueError where top_k ≥ E.
    """
    experts, bins = histogram.shape
    _check_balanced(top_k, experts)
    cumulative = histogram.cumsum(-1, dtype=torch.int64)
    load = cumulative[:, -1:] * top_k  # E·q, kept whole: q itself needn't be an integer
    reached = (cumulative < (load + experts - 1) // experts).sum(-1, keepdim=True).clamp_(max=bins - 1)  # β [E, 1]
    inside = histogram.gather(-1, reached).to(torch.int64)
    before = cumulative.gather(-1, reached) - inside
    fraction = ((load - experts * before).float() / (experts * inside).clamp(min=1)).clamp(0, 1)
    bias = lo + (reached + fraction).squeeze(-1) * width
    return bias - bias.mean()


@torch.no_grad()
def exact_quantile_bias(scores: Tensor, cutoff: Tensor, top_k: int) -> Tensor:
    """The same bias without bins: minus the (q+1)-th largest margin s_ij − α_i, mean 0 (report §2.3.3). scores [N, E], cutoff [N].

    The oracle for `quantile_from_histogram`; it sorts N × E values and needs the whole batch in one place.
    """
    tokens, experts = scores.shape
    _check_balanced(top_k, experts)
    required = cutoff.unsqueeze(-1) - scores
    bias = required.kthvalue(tokens * top_k // experts + 1, dim=0).values
    return bias - bias.mean()


def _check_balanced(top_k: int, experts: int) -> None:
    if not 0 < top_k < experts:
        raise ValueError(f"quantile balancing needs 0 < top_k < experts, got top {top_k} of {experts}: there is nothing to balance")
