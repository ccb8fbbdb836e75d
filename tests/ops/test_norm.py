"""RMSNorm with its hand-written backward is the formula, values and gradients."""

import pytest
import torch
from torch import Tensor

from openk3.ops.norm import rms_norm

SHAPES = [(7,), (1, 1), (3, 8), (2, 5, 16), (2, 3, 4, 6), (0, 4)]


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(sum(shape))
    x, dy = (torch.randn(shape, generator=draw, dtype=dtype) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=draw, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), dy


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape: tuple[int, ...], eps: float) -> None:
    x, weight, dy = inputs(shape)
    got, want = rms_norm(x, weight, eps), formula(x, weight, eps)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    for a, b in zip(torch.autograd.grad(got, (x, weight), dy), torch.autograd.grad(want, (x, weight), dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    x, weight, _ = inputs((2, 3, 5))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))


def test_transposed_input() -> None:
    x, weight, dy = inputs((4, 6, 5))
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    (a,), (b,) = (torch.autograd.grad(rms_norm(y, weight, 1e-5), y, dy) for y in (turned, x))
    assert torch.equal(a, b)


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e15])
def test_extreme_rows_stay_finite(value: float) -> None:
    x = torch.full((2, 4), value, requires_grad=True)
    weight = torch.ones(4, requires_grad=True)
    y = rms_norm(x, weight, 1e-5)
    grads = torch.autograd.grad(y.sum(), (x, weight))
    assert all(t.isfinite().all() for t in (y, *grads))
    assert y.abs().max() <= 1.001


def test_rounds_the_quotient_before_the_weight() -> None:
    """In bfloat16 the released order is: normalise in float32, round, multiply (and round) by the weight."""
    x, weight, _ = inputs((64, 32), torch.float32)
    x, weight = x.detach().bfloat16(), weight.detach()
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    expected = normed * weight.bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)
    fused = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight).bfloat16()
    assert not torch.equal(fused, expected)  # so the order is seen


def test_bfloat16_gradients_are_those_of_the_formula_and_keep_their_dtypes() -> None:
    x, weight, dy = inputs((16, 32))
    exact = torch.autograd.grad(formula(x, weight, 1e-5), (x, weight), dy)
    half, master = x.detach().bfloat16().requires_grad_(), weight.detach().float().requires_grad_()
    got = torch.autograd.grad(rms_norm(half, master, 1e-5), (half, master), dy.bfloat16())
    assert [g.dtype for g in got] == [torch.bfloat16, torch.float32]
    for a, b in zip(got, exact, strict=True):
        assert (a.double() - b).norm() < 8e-3 * b.norm()


def test_gradient_of_a_frozen_weight_is_not_computed() -> None:
    x, weight, _ = inputs((3, 4))
    weight.requires_grad_(False)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is None and x.grad is not None
