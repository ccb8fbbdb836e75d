"""Attention Residuals as the decoder uses them: the state they carry through the layers, and their parameters (K3 report §2.2).

A site is one place that reads the depth: before each attention, before each feed-forward, and at the output. Its score weight
is ω = norm weight ⊙ pseudo-query, both stored as the release stores them.
"""

import torch
from torch import Tensor

from openk3.model.layers import Linear, RMSNorm
from openk3.ops.attn_res import BlockSummary, depth_weights, mix
from openk3.ops.precision import wide


def site_weight(norm: RMSNorm, proj: Linear) -> Tensor:
    """ω `[D]` in float32 (float64 stays)."""
    return wide(norm.weight) * wide(proj.weight[0])


class DepthState:
    """Frozen block vectors and the running partial sum of one forward pass.

    `block_size` None is the plain residual stream: reading gives the sum itself. With `omegas` given to `push`, the sites of the
    coming block are read in two phases (blocks once for all of them); without, each site mixes directly.
    """

    def __init__(self, embedding: Tensor, block_size: int | None, eps: float):
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = embedding
        self.block_size, self.eps = block_size, eps
        self.summary: BlockSummary | None = None
        self.trace: list[tuple[str, Tensor]] | None = None            # (site, mean softmax weights) when asked for

    def read(self, omega: Tensor | None, site: int | None = None, name: str = "") -> Tensor:
        """What the next sub-layer takes as its input, before its norm; `site` indexes the omegas given to `push`.

        `omega` `[D]` float32: the site's score weight; None in a plain residual stream.
        """
        if self.block_size is None:
            assert self.partial is not None                             # nothing is ever pushed
            return self.partial
        assert omega is not None
        sources = self.blocks if self.partial is None else [*self.blocks, self.partial]
        if self.trace is not None:
            with torch.no_grad():
                self.trace.append((name, depth_weights(sources, omega, self.eps).flatten(0, -2).mean(0)))
        if len(sources) == 1:                                           # layer 0: nothing to weigh
            return sources[0]
        if self.summary is not None and site is not None:
            return self.summary.mix(site, self.partial)
        return mix(sources, omega, self.eps)

    def push(self, omegas: Tensor | None = None) -> None:
        """A block begins: the partial sum becomes a source, and a new sum is empty."""
        assert self.partial is not None                                 # the embedding, or what the last block's layers added
        self.blocks.append(self.partial)
        self.partial = None
        self.summary = None if omegas is None else BlockSummary(self.blocks, omegas, self.eps)

    def add(self, update: Tensor) -> None:
        self.partial = update if self.partial is None else self.partial + update
