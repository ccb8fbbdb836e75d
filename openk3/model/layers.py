"""The two layers everything else is made of. Weights may be float32 masters under bfloat16 activations: products follow the input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.ops.norm import rms_norm
from openk3.ops.situ import Activation


class Linear(nn.Linear):
    """y = W x, no bias (K3 has none), in x's dtype: a float32 weight is cast for the product, its gradient comes back in float32."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

    def reset_parameters(self) -> None:
        """Left to `init_weights`: the model sets every value in one place."""


class Embedding(nn.Embedding):
    """A row per token id; values are set by `init_weights` or a checkpoint, as `Linear`'s."""

    def reset_parameters(self) -> None:
        """torch's would draw values, on the meta device too, where that alone costs seconds of imports."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """down(act(gate(x), up(x))): the dense feed-forward of the first layers, and the shared experts."""

    def __init__(self, width: int, hidden: int, act: Activation):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(width, hidden), Linear(width, hidden), Linear(hidden, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
