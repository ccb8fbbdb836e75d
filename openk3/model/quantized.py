"""Routed experts that stay packed in memory: MXFP4 codes and scales as the release stores them, unpacked one expert at a time.

Axes: E experts, F hidden width of an expert, L expert width.
"""

import torch
from torch import Tensor, nn

from openk3.ops import backend
from openk3.ops.experts import experts, experts_by_need
from openk3.ops.mx import GROUP, dequantize_mxfp4
from openk3.ops.routing import Routing
from openk3.ops.situ import Activation


class PackedExperts(nn.Module):
    """In the place of `Experts`: uint8 buffers w1, w3 `[E, F, L/2]` and w2 `[E, L, F/2]` (`_packed`), a scale per 32 columns (`_scale`).

    Values are exact in bfloat16 and wider. Gradients flow to the input, never to the codes.
    """

    def __init__(self, num_experts: int, latent: int, hidden: int, act: Activation):
        super().__init__()
        self.num_experts, self.act = num_experts, act
        for name, rows, columns in (("w1", hidden, latent), ("w3", hidden, latent), ("w2", latent, hidden)):
            self.register_buffer(f"{name}_packed", torch.empty(num_experts, rows, columns // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.empty(num_experts, rows, columns // GROUP, dtype=torch.uint8))

    def dense(self, name: str, expert: int | slice, dtype: torch.dtype) -> Tensor:
        """w1, w3 or w2 of one expert, or of several stacked."""
        return dequantize_mxfp4(getattr(self, f"{name}_packed")[expert], getattr(self, f"{name}_scale")[expert], dtype)

    def forward(self, z: Tensor, routing: Routing) -> Tensor:
        if torch.is_grad_enabled() and (z.requires_grad or routing.weights.requires_grad):
            backend.record("experts", "torch sorted, MXFP4 unpacked whole")
            w1, w3, w2 = (self.dense(name, slice(None), z.dtype) for name in ("w1", "w3", "w2"))
            return experts(z, routing.indices, routing.weights, w1, w3, w2, self.act)
        backend.record("experts", "torch sorted, MXFP4 unpacked by need")

        def matrices(e: int) -> tuple[Tensor, Tensor, Tensor]:
            return self.dense("w1", e, z.dtype), self.dense("w3", e, z.dtype), self.dense("w2", e, z.dtype)

        return experts_by_need(z, routing.indices, routing.weights, self.num_experts, matrices, self.act)
