"""Latent attention: expanded, absorbed and the softmax formula agree; rotary embedding knows distances only."""

import math

import pytest
import torch
from torch import Tensor

from openk3.ops.mla import absorbed_is_cheaper, attend, attend_absorbed, attend_expanded, causal_mask
from openk3.ops.rope import rotary_table, rotate

# queries, keys, heads, nope, rope, value, rank
SHAPES = [(5, 5, 2, 6, 4, 6, 8), (1, 1, 1, 4, 2, 4, 4), (1, 9, 3, 4, 0, 7, 5), (4, 9, 2, 3, 2, 12, 6), (7, 7, 2, 0, 4, 3, 8)]
each = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "t{}-s{}-h{}-n{}-p{}-v{}-r{}".format(*s))


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    t, s, h, n, p, v, r = shape
    draw = torch.Generator().manual_seed(sum(shape))
    sizes = [(2, t, h, n + p), (2, s, r + p), (h, n + v, r)]
    return [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def formula(q: Tensor, rows: Tensor, kv_b: Tensor, nope: int, rank: int, mask: Tensor) -> Tensor:
    """Head by head and query by query, as the paper writes it."""
    out = torch.zeros(*q.shape[:3], kv_b.shape[1] - nope, dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            keys = torch.cat([rows[b, :, :rank] @ kv_b[h, :nope].T, rows[b, :, rank:]], -1)
            values = rows[b, :, :rank] @ kv_b[h, nope:].T
            for t in range(q.shape[1]):
                see = mask[b, t]
                p = torch.softmax(keys[see] @ q[b, t, h] / math.sqrt(q.shape[-1]), 0)
                out[b, t, h] = p @ values[see]
    return out


def some_mask(shape: tuple[int, ...]) -> Tensor:
    """Another length in each row: causal, aligned at the end, the second row with its first key hidden where it has others."""
    mask = causal_mask(shape[0], shape[1]).repeat(2, 1, 1)
    mask[1, :, 0] &= mask[1].sum(-1) == 1
    return mask


@each
def test_expanded_and_absorbed_equal_the_formula(shape: tuple[int, ...]) -> None:
    args, nope, rank = inputs(shape), shape[3], shape[6]
    dy = torch.randn(2, shape[0], shape[2], shape[5], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = some_mask(shape)
    want = formula(*args, nope, rank, mask)
    wanted = torch.autograd.grad(want, args, dy)
    for form in (attend_expanded, attend_absorbed):
        got = form(*args, nope, rank, mask.unsqueeze(1))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        for a, b in zip(torch.autograd.grad(got, args, dy), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] == s[1]], ids=str)
def test_without_a_mask_attention_is_causal(shape: tuple[int, ...]) -> None:
    args, nope, rank = inputs(shape), shape[3], shape[6]
    want = formula(*args, nope, rank, causal_mask(shape[0], shape[1]).repeat(2, 1, 1))
    for form in (attend_expanded, attend_absorbed):
        torch.testing.assert_close(form(*args, nope, rank), want, rtol=1e-10, atol=1e-12)


@each
def test_float32_forms_agree(shape: tuple[int, ...]) -> None:
    args, nope, rank = inputs(shape, torch.float32), shape[3], shape[6]
    mask = some_mask(shape).unsqueeze(1)
    a, b = (form(*args, nope, rank, mask) for form in (attend_expanded, attend_absorbed))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_bfloat16_forms_stay_close() -> None:
    shape = SHAPES[0]
    args = inputs(shape)
    exact = attend_expanded(*args, shape[3], shape[6])
    for form in (attend_expanded, attend_absorbed):
        got = form(*(x.bfloat16() for x in args[:2]), args[2].float(), shape[3], shape[6])
        assert got.dtype == torch.bfloat16
        assert (got.double() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("width", [3, 8, 13])
def test_attend_takes_values_of_any_width(width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 5, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, 3, 5, width, generator=draw, dtype=torch.float64)
    for scale in (None, 0.7):
        scores = (q @ k.transpose(-1, -2)) * (scale or 8**-0.5)
        want = scores.masked_fill(~causal_mask(5, 5), -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(attend(q, k, v, scale=scale), want)


def test_causal_mask_is_aligned_at_the_end() -> None:
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(1, 3).all()


def test_decoding_over_a_long_cache_absorbs_and_prefill_expands() -> None:
    k3 = {"nope": 128, "value": 128, "rope": 64, "rank": 512}
    assert absorbed_is_cheaper(1, 10_000, **k3) and absorbed_is_cheaper(16, 10_000, **k3)
    assert not absorbed_is_cheaper(4096, 4096, **k3) and not absorbed_is_cheaper(1, 1, **k3)


# Rotary embedding (the baselines')


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 50, 999, 123_456])
    turned = rotate(x, *rotary_table(positions, 8, 10_000.0))
    angle = positions[:, None].double() * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    want = torch.complex(x[:, :4], x[:, 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat([want.real, want.imag], -1), rtol=0, atol=1e-9)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(rotate(x.float(), *rotary_table(positions, 8, 10_000.0)).double(), turned, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [1, 17, 100_000])
def test_products_depend_on_the_distance_only(shift: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, 16, generator=draw) for _ in range(2))
    places = torch.tensor([0, 3, 4, 11, 40])

    def products(at: Tensor) -> Tensor:
        table = rotary_table(at, 16, 10_000.0)
        return rotate(q, *table) @ rotate(k, *table).T

    torch.testing.assert_close(products(places + shift), products(places), rtol=0, atol=1e-5)
    assert (products(places) - q @ k.T).abs().max() > 0.1  # and on nothing less


def test_rotation_keeps_lengths_and_dtype() -> None:
    x = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
    table = rotary_table(torch.arange(7), 4, 500.0)
    torch.testing.assert_close(rotate(x, *table).norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), *table).dtype == torch.bfloat16
