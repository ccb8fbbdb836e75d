"""Attention over depth: the saving form and the two-phase form are the softmax of the equation, values and gradients."""

import pytest
import torch
from torch import Tensor

from openk3.ops.attn_res import BlockSummary, depth_weights, mix, mix_reference

EPS = 1e-5


def sources(count: int, shape: tuple[int, ...] = (2, 3, 8), dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Sources of very different sizes, as a residual stream has them."""
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=draw, dtype=torch.float64) * 3.0 ** (j - 1)).to(dtype).requires_grad_() for j in range(count)]


def query(width: int = 8, sites: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (width,) if sites is None else (sites, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype).requires_grad_()


def by_hand(vs: list[Tensor], omega: Tensor) -> Tensor:
    """The equation over one stacked tensor, by torch's own softmax: what the oracle itself is checked against."""
    v = torch.stack(vs)                                                    # [m + 1, ..., D]
    scores = torch.einsum("m...d,d->m...", v / (v.square().mean(-1, keepdim=True) + EPS).sqrt(), omega)
    return torch.einsum("m...,m...d->...d", scores.softmax(0), v)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_both_forms_equal_the_equation(count: int) -> None:
    vs, omega = sources(count), query()
    dy = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    want = by_hand(vs, omega)
    wanted = torch.autograd.grad(want, [omega, *vs], dy)
    for form in (mix_reference, mix):
        got = form(vs, omega, EPS)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
        for a, b in zip(torch.autograd.grad(got, [omega, *vs], dy), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    vs = sources(3, (2, 4))
    assert torch.autograd.gradcheck(lambda w, *v: mix(list(v), w, EPS), (query(4), *vs))


def test_sources_without_gradient_are_left_out() -> None:
    vs, omega = sources(3), query()
    vs[1].requires_grad_(False)
    got = torch.autograd.grad(mix(vs, omega, EPS).sum(), [omega, vs[0], vs[2]])
    want = torch.autograd.grad(mix_reference(vs, omega, EPS).sum(), [omega, vs[0], vs[2]])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_one_tensor_may_stand_in_several_places() -> None:
    v, omega = sources(1)[0], query()
    got, want = (torch.autograd.grad(form([v, 2 * v, v], omega, EPS).sum(), [v, omega]) for form in (mix, mix_reference))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_two_phases_equal_the_direct_mix_at_every_site(count: int) -> None:
    blocks, omegas = sources(count), query(sites=5)
    partial = sources(1, seed=4)[0]
    summary = BlockSummary(blocks, omegas, EPS)
    for site in range(5):
        for last in ([partial], []):
            got = summary.mix(site, *(last or [None]))
            want = by_hand([*blocks, *last], omegas[site])
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
            inputs = [omegas, *blocks, *last]
            pair = [torch.autograd.grad(y.square().sum(), inputs, retain_graph=True) for y in (got, want)]
            for a, b in zip(*pair, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_zero_query_is_a_plain_mean() -> None:
    vs = sources(4)
    zero = torch.zeros(8, dtype=torch.float64)
    mean = torch.stack(vs).mean(0)
    torch.testing.assert_close(mix(vs, zero, EPS), mean)
    torch.testing.assert_close(BlockSummary(vs[:3], zero[None], EPS).mix(0, vs[3]), mean)
    torch.testing.assert_close(depth_weights(vs, zero, EPS), torch.full((2, 3, 4), 0.25, dtype=torch.float64))


def test_keys_are_normalised_and_values_are_not() -> None:
    """A source ten times as long keeps its weight, and counts ten times in the sum."""
    vs, omega = [v.detach() for v in sources(3)], query().detach()
    p = depth_weights(vs, omega, 0.0)
    longer = [vs[0], 10 * vs[1], vs[2]]
    torch.testing.assert_close(depth_weights(longer, omega, 0.0), p)
    torch.testing.assert_close(mix(longer, omega, 0.0) - mix(vs, omega, 0.0), 9 * p[..., 1, None] * vs[1])


def test_weights_are_a_distribution() -> None:
    p = depth_weights(sources(6), query(), EPS)
    assert p.shape == (2, 3, 6) and (p > 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e3, -1e3, 1e30])
def test_extreme_scores_stay_finite(scale: float) -> None:
    vs, omega = sources(4, dtype=torch.float32), query(dtype=torch.float32) * scale
    omega = omega.detach().requires_grad_()
    y = mix(vs, omega, EPS)
    grads = torch.autograd.grad(y.sum(), [omega, *vs])
    two = BlockSummary(vs[:3], omega[None], EPS).mix(0, vs[3])
    assert all(x.isfinite().all() for x in (y, *grads, two))
    torch.testing.assert_close(two, y)


def test_a_zero_source_stays_finite() -> None:
    vs = [torch.zeros(2, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)]
    omega = query(dtype=torch.float32)
    y = mix(vs, omega, EPS)
    assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y.sum(), [omega, *vs])))


def test_bfloat16_rounds_once_at_the_end() -> None:
    vs, omega = sources(5, (32, 16), torch.bfloat16), query(16, dtype=torch.float32)
    exact = by_hand([v.double() for v in vs], omega.double())
    two = BlockSummary(vs[:4], omega[None], EPS).mix(0, vs[4])
    for got in (mix(vs, omega, EPS), mix_reference(vs, omega, EPS), two):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=0.51 * torch.finfo(torch.bfloat16).eps, atol=1e-5)
    grads = torch.autograd.grad(mix(vs, omega, EPS).float().square().sum(), [omega, *vs])
    wanted = torch.autograd.grad(exact.square().sum(), [omega, *vs])
    assert [g.dtype for g in grads] == [torch.float32] + 5 * [torch.bfloat16]
    for a, b in zip(grads, wanted, strict=True):
        assert (a.double() - b.double()).norm() < 1e-2 * b.double().norm()
