"""What a sequence remembers: a state and a convolution tail per KDA layer, latent rows per MLA layer.

Layers see a small protocol, and a serving engine's pool of slots and pages is another implementation of it:

    cache.lengths          int64 [B], tokens each sequence has seen; cache.longest, the largest, without asking the device
    cache.kda(l)           .state [B, H, K, V] float32 or None, .tail [B, W−1, C] or None; .update(state, tail)
    cache.mla(l)           .append(rows [B, T, R], lengths [B] or None) → rows [B, S, R] with S = longest + T
    cache.advance(T, lengths)   once per forward pass, after the last layer

Rows beyond a sequence's length are garbage that the attention mask hides.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor

from openk3.config import K3Config


class KdaSlot:
    """The recurrent memory of one KDA layer: fixed size, whatever the length."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.tail: Tensor | None = None

    def update(self, state: Tensor, tail: Tensor) -> None:
        self.state, self.tail = state, tail

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.state is None or self.tail is None else {"state": self.state, "tail": self.tail}

    def map(self, f) -> None:
        if self.state is not None:
            self.state, self.tail = f(self.state), f(self.tail)


class MlaSlot:
    """The rows of one MLA layer, in a buffer that doubles as it fills."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.rows: Tensor | None = None

    def append(self, rows: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Write `[B, T, R]` behind each sequence's last row; give back a view `[B, longest + T, R]`.

        `lengths`: how many of the T rows count (right padding). The padded ones are written too and overwritten later.
        """
        batch, tokens, width = rows.shape
        start, end = self.cache.longest, self.cache.longest + tokens
        if self.rows is None or self.rows.shape[1] < end:
            capacity = max(end, 2 * (0 if self.rows is None else self.rows.shape[1]), self.cache.capacity)
            grown = rows.new_zeros(batch, capacity, width)
            if self.rows is not None and start:
                grown[:, :start] = self.rows[:, :start]
            self.rows = grown
        if self.cache.even:
            self.rows[:, start:end] = rows
        else:
            where = self.cache.lengths[:, None] + torch.arange(tokens, device=rows.device)
            self.rows.scatter_(1, where.unsqueeze(-1).expand(-1, -1, width), rows)
        return self.rows[:, :end]

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.rows is None else {"rows": self.rows}

    def map(self, f) -> None:
        if self.rows is not None:
            self.rows = f(self.rows)


class HybridCache:
    """The dense form: B sequences that advance together, each with its own length.

    `capacity`: rows to reserve for MLA layers (they grow by doubling anyway). Tensors take the dtype of what is appended.
    """

    def __init__(self, config: K3Config, batch_size: int = 1, capacity: int = 0, device: torch.device | str = "cpu"):
        text = config.text_config
        self.config, self.capacity = config, capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.longest = 0
        self.even = True                                 # all rows have the same length: plain slices serve
        self.slots = [KdaSlot() if text.is_kda(layer) else MlaSlot(self) for layer in range(text.num_hidden_layers)]

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    def kda(self, layer: int) -> KdaSlot:
        return cast(KdaSlot, self.slots[layer])

    def mla(self, layer: int) -> MlaSlot:
        return cast(MlaSlot, self.slots[layer])

    def advance(self, tokens: int, lengths: Tensor | None = None) -> None:
        """All layers have taken `tokens` columns, of which `lengths` `[B]` count in each row (None: all)."""
        if lengths is None:
            self.lengths, self.longest = self.lengths + tokens, self.longest + tokens
            return
        self.lengths = self.lengths + lengths
        self.longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        self.even = self.longest == shortest

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order, in place (finished sequences leave; a row may be taken twice)."""
        self.lengths = self.lengths[rows]
        for slot in self.slots:
            slot.map(lambda x: x[rows])
        if self.batch_size:
            self.longest, shortest = int(self.lengths.max()), int(self.lengths.min())
            self.even = self.longest == shortest

    def fork(self, copies: int) -> HybridCache:
        """Every row `copies` times side by side, in a cache of its own (many samples of one prompt)."""
        other = self.snapshot()
        other.select(torch.arange(self.batch_size, device=self.lengths.device).repeat_interleave(copies))
        return other

    def snapshot(self) -> HybridCache:
        """A copy that later steps of this cache leave alone; only the filled rows are copied."""
        other = copy.copy(self)
        other.slots = []
        for slot in self.slots:
            twin = copy.copy(slot)
            if isinstance(twin, MlaSlot):
                twin.cache = other
                twin.map(lambda x: x[:, : self.longest].clone())
            else:
                twin.map(torch.clone)
            other.slots.append(twin)
        other.lengths = self.lengths.clone()
        return other

    def restore(self, snapshot: HybridCache) -> None:
        """Go back to a snapshot, which stays whole and can be restored again."""
        fresh = snapshot.snapshot()
        self.slots, self.lengths, self.longest, self.even = fresh.slots, fresh.lengths, fresh.longest, fresh.even
        for slot in self.slots:
            if isinstance(slot, MlaSlot):
                slot.cache = self

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held: `state` (KDA states and tails, constant in length), `latent` (MLA rows as allocated)."""
        total = {"state": 0, "latent": 0}
        for slot in self.slots:
            kind = "state" if isinstance(slot, KdaSlot) else "latent"
            total[kind] += sum(t.nbytes for t in slot.tensors().values())
        return total
