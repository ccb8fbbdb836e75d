"""The activation of every feed-forward: its fused form is the equation, and saturation gives zeros, never NaN."""

import math

import pytest
import torch
from torch import Tensor

from openk3.ops.situ import Activation, situ, swiglu

ACTS = [Activation("situ", 4.0, 25.0), Activation("situ", 1.0), Activation("situ", 0.5, 2.0), Activation("silu")]
NAMES = ["k3", "linear up branch", "tight", "silu"]
each = pytest.mark.parametrize("act", ACTS, ids=NAMES)


def pair(shape: tuple[int, ...] = (5, 7), scale: float = 3.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(scale * torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3))


def test_situ_by_hand() -> None:
    g, u = torch.tensor([1.0, -2.0, 6.0], dtype=torch.float64), torch.tensor([3.0, 40.0, -1.0], dtype=torch.float64)
    sigma = [1 / (1 + math.exp(-v)) for v in (1, -2, 6)]
    k3 = [4 * math.tanh(a / 4) * s * 25 * math.tanh(b / 25) for a, b, s in zip((1, -2, 6), (3, 40, -1), sigma, strict=True)]
    torch.testing.assert_close(situ(g, u, 4.0, 25.0), torch.tensor(k3, dtype=torch.float64), rtol=1e-14, atol=0)
    linear = [2 * math.tanh(a / 2) * s * b for a, b, s in zip((1, -2, 6), (3, 40, -1), sigma, strict=True)]
    torch.testing.assert_close(situ(g, u, 2.0), torch.tensor(linear, dtype=torch.float64), rtol=1e-14, atol=0)


def test_swiglu_is_torch_silu_and_the_limit_of_situ() -> None:
    g, u, _ = pair()
    torch.testing.assert_close(swiglu(g, u), torch.nn.functional.silu(g) * u)
    torch.testing.assert_close(situ(g, u, 1e7, 1e7), swiglu(g, u))


@each
def test_fused_equals_the_equation(act: Activation) -> None:
    g, u, dy = pair()
    a, b = ([x.clone().requires_grad_() for x in (g, u)] for _ in range(2))
    got, want = act(*a), act.reference(*b)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)
    for x, y in zip(torch.autograd.grad(got, a, dy), torch.autograd.grad(want, b, dy), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)


@each
def test_gradcheck(act: Activation) -> None:
    assert torch.autograd.gradcheck(act, [x.requires_grad_() for x in pair((2, 3))[:2]])


@each
def test_plain_forward_and_backward_are_what_autograd_uses(act: Activation) -> None:
    g, u, dy = pair()
    a = [x.clone().requires_grad_() for x in (g, u)]
    y = act(*a)
    assert torch.equal(y, act.forward(g, u))
    for x, z in zip(torch.autograd.grad(y, a, dy), act.backward(dy, g, u), strict=True):
        assert torch.equal(x, z)


@each
def test_leaves_its_inputs_alone(act: Activation) -> None:
    g, u, dy = pair()
    before = [x.clone() for x in (g, u, dy)]
    act.forward(g, u), act.backward(dy, g, u)
    assert all(map(torch.equal, before, (g, u, dy)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each
def test_saturated_inputs_have_finite_gradients(act: Activation, dtype: torch.dtype) -> None:
    extremes = torch.tensor([-1e4, -100.0, -30.0, -1e-30, 0.0, 1e-30, 30.0, 100.0, 1e4], dtype=dtype)
    g, u = (x.flatten().clone().requires_grad_() for x in torch.meshgrid(extremes, extremes, indexing="ij"))
    y = act(g, u)
    dg, du = torch.autograd.grad(y.sum(), (g, u))
    assert all(x.isfinite().all() for x in (y, dg, du))
    if act.linear_beta is not None:
        assert y.abs().max() <= act.beta * act.linear_beta
        capped = u.detach().abs() >= 1e4
        assert du[capped].count_nonzero() == 0 and dg[g.detach().abs() >= 1e4].abs().max() == 0
    expected = act.reference(g.detach().double(), u.detach().double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each
def test_rounds_once(act: Activation, dtype: torch.dtype) -> None:
    """Inside, everything is float32: the result is the exact one to the last bit of its dtype, or its neighbour."""
    g, u, dy = pair((64, 16), dtype=dtype)
    exact = act.reference(g.double(), u.double())
    step = torch.finfo(dtype).eps
    got = act(g, u)
    assert got.dtype == dtype
    tolerance = 0.51 * step if dtype == torch.bfloat16 else 4 * step
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=1e-30)
    doubles = [x.double().requires_grad_() for x in (g, u)]
    wanted = torch.autograd.grad(act.reference(*doubles), doubles, dy.double())
    for x, y in zip(act.backward(dy, g, u), wanted, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).abs().max() <= (1 if dtype == torch.bfloat16 else 4) * step * y.abs().max()


def test_the_sigmoid_takes_the_raw_gate() -> None:
    g, u = torch.tensor([8.0]), torch.tensor([1.0])
    capped_first = 4 * math.tanh(2) / (1 + math.exp(-4 * math.tanh(2))) * 25 * math.tanh(1 / 25)
    assert abs(float(situ(g, u, 4.0, 25.0)) - capped_first) > 0.05


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'gelu'.*situ or silu"):
        Activation("gelu")
