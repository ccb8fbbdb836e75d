"""The one rule of working precision: what K3 computes in float32 is computed in float32 at least, and float64 stays float64."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that already: half precision is widened, a float64 oracle isn't narrowed."""
    return x if x.dtype == torch.float64 else x.float()
