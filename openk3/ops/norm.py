"""RMSNorm (arXiv 1910.07467) as the released model computes it: normalised in float32, rounded, then multiplied by the weight."""

import torch
from torch import Tensor

from openk3.ops.precision import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in x's dtype.

    x `[..., D]` any float dtype; weight `[D]`. The mean square and the division are done in float32 (float64 stays float64);
    the quotient is rounded to x's dtype before it meets the weight (architecture of the K3 release, dtype policy).
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row for the backward, instead of a float32 copy of x per step of the formula."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = wide(x)
        inverse = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (values * inverse).to(x.dtype).mul_(weight.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, inverse = ctx.saved_tensors
        normed = wide(x) * inverse
        dy = wide(dy)
        dweight = (dy * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dnormed = dy * wide(weight)
        inner = (dnormed * normed).mean(-1, keepdim=True)
        return (dnormed.sub_(normed.mul_(inner)).mul_(inverse)).to(x.dtype), dweight, None
