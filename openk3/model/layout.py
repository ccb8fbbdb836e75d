"""Where sequences begin and end in a batch: padding, packed documents, and what the cache already holds.

Inside the model, rows are always left-aligned: a left-padded batch is rolled so that its tokens come first, and its output
is rolled back. So a layer needs to know three things only: how many tokens of each row count, where documents begin, and how
many tokens of the sequence came before.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from openk3.ops.rope import rotary_table


@dataclass
class Layout:
    """One forward pass over `[B, T]` tokens.

    lengths: int64 `[B]`, tokens of each row that count; None: all T.
    resets: bool `[B, T]`, True where a document begins inside a row; None: none does.
    past: int64 `[B]`, tokens of each sequence already in the cache; None without a cache.
    past_max: the largest of them, known without asking the device.
    """

    batch: int
    tokens: int
    device: torch.device
    lengths: Tensor | None = None
    resets: Tensor | None = None
    past: Tensor | None = None
    past_max: int = 0
    _memo: dict = field(default_factory=dict)

    @property
    def valid(self) -> Tensor | None:
        """bool `[B, T]`: tokens that count; None: all."""
        lengths = self.lengths
        if lengths is None:
            return None
        return self._once("valid", lambda: torch.arange(self.tokens, device=self.device) < lengths[:, None])

    @property
    def positions(self) -> Tensor:
        """int64 `[B, T]`: place in the document, counted over the cache (rotary baselines only)."""
        return self._once("positions", self._positions)

    def rotary(self, dim: int, theta: float) -> tuple[Tensor, Tensor]:
        """cos and sin `[B, T, dim/2]` of these positions, made once for all layers."""
        return self._once(("rotary", dim, theta), lambda: rotary_table(self.positions, dim, theta))

    def attention_mask(self, keys: int) -> Tensor | None:
        """bool `[B, 1, T, keys]`: what each query may look at; None: plain causal with keys = T."""
        if self.resets is None and (self.past is None or self.past_max == 0):
            return None
        return self._once(("mask", keys), lambda: self._mask(keys))

    def _positions(self) -> Tensor:
        t = torch.arange(self.tokens, device=self.device)
        if self.past is not None:
            return self.past[:, None] + t
        if self.resets is None:
            return t.expand(self.batch, -1)
        starts = torch.where(self.resets, t, 0).cummax(1).values
        return t - starts

    def _mask(self, keys: int) -> Tensor:
        s = torch.arange(keys, device=self.device)
        t = torch.arange(self.tokens, device=self.device)
        last = t if self.past is None else self.past[:, None] + t                     # the newest key a query may see
        mask = s <= last[..., None]
        if self.resets is not None:
            document = self.resets.cumsum(1)
            mask = mask & (document[:, :, None] == document[:, None, :])
        return (mask if mask.dim() == 3 else mask.unsqueeze(0)).unsqueeze(1)

    def _once(self, key, make):
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]


def resets_from_cu_seqlens(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor | None:
    """Offsets `[N+1]` into the flattened B·T tokens → bool `[B, T]`, or None when only rows begin documents.

    Row starts are boundaries whether named or not. Errors: offsets that don't rise from 0 to B·T.
    """
    offsets = cu_seqlens.to(torch.int64)
    if offsets.dim() != 1 or offsets.numel() < 2 or offsets[0] != 0 or offsets[-1] != batch * tokens or (offsets.diff() < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to batch · tokens = {batch * tokens}, one offset a document")
    resets = torch.zeros(batch * tokens + 1, dtype=torch.bool, device=offsets.device)
    resets[offsets] = True
    resets = resets[:-1].view(batch, tokens)
    return resets if bool(resets[:, 1:].any()) else None


def align_left(attention_mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """mask `[B, T]` of 0 and 1 → (lengths `[B]` or None when nothing is padded, gather index `[B, T]` or None when no row is left-padded).

    Errors: a row whose ones aren't contiguous, or that has none.
    """
    mask = attention_mask.bool()
    lengths = mask.sum(1)
    tokens = mask.shape[1]
    if bool((lengths == tokens).all()):
        return None, None
    t = torch.arange(tokens, device=mask.device)
    first = mask.int().argmax(1)
    if not torch.equal(mask, (t >= first[:, None]) & (t < (first + lengths)[:, None])) or bool((lengths == 0).any()):
        raise ValueError("attention_mask: each row must be one unbroken run of ones (pad on the left or on the right)")
    if not bool(first.any()):
        return lengths, None
    return lengths, (t + first[:, None]) % tokens
