"""Routed experts sorted by expert equal the loop over experts: values, gradients, and the corners of routing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import openk3.ops.experts as module
from openk3.ops.experts import experts, experts_by_need, experts_reference
from openk3.ops.situ import Activation

K3, SILU = Activation("situ", 4.0, 25.0), Activation("silu")
E, L, F = 5, 6, 4


def weights_of(dtype: torch.dtype = torch.float64, scale: float = 0.7) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    shapes = [(E, F, L), (E, F, L), (E, L, F)]
    return [(scale * torch.randn(s, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


def tokens(indices: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(6)
    n, k = indices.shape
    z, dy = (torch.randn(n, L, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    p = torch.rand(n, k, generator=draw, dtype=torch.float64) + 0.1
    return z.requires_grad_(), p.requires_grad_(), dy


STEPS = [1, 2, 64]


@contextmanager
def layout(step: int) -> Iterator[None]:
    """Experts' rows close together (1), or filled up to a multiple of `step`, and to one length where that costs little."""
    plan = module._Plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_Plan", lambda indices, count: plan(indices, count, step))
        yield


def assert_equal_to_the_loop(indices: Tensor, act: Activation) -> list[Tensor]:
    """Values and all gradients in float64, in every layout; gives back the gradients of the last."""
    z, p, dy = tokens(indices)
    inputs = [z, p, *weights_of()]
    want = experts_reference(z, indices, p, *inputs[2:], act)
    wanted = torch.autograd.grad(want, inputs, dy)
    for step in STEPS:
        with layout(step):
            got = experts(z, indices, p, *inputs[2:], act)
            grads = torch.autograd.grad(got, inputs, dy)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    return list(grads)


def distinct(n: int, k: int) -> Tensor:
    draw = torch.Generator().manual_seed(n * 10 + k)
    return torch.stack([torch.randperm(E, generator=draw)[:k] for _ in range(n)])


ROUTINGS: dict[str, Callable[[], Tensor]] = {
    "random": lambda: distinct(9, 3),
    "many": lambda: distinct(90, 3),
    "one token": lambda: distinct(1, 2),
    "one expert a token": lambda: distinct(7, 1),
    "every expert": lambda: distinct(4, E),
    "all on the same": lambda: torch.tensor([[1, 3]]).repeat(6, 1),
    "all on the last": lambda: torch.full((6, 1), E - 1),
    "all on the first": lambda: torch.zeros(6, 1, dtype=torch.int64),
}


@pytest.mark.parametrize("act", [K3, Activation("situ", 2.0), SILU], ids=["k3", "linear-up", "silu"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_sorted_equals_the_loop(name: str, act: Activation) -> None:
    assert_equal_to_the_loop(ROUTINGS[name](), act)


@settings(max_examples=40)
@given(st.data())
def test_sorted_equals_the_loop_for_any_routing(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, E))
    rows = data.draw(st.lists(st.permutations(range(E)), min_size=1, max_size=12))
    assert_equal_to_the_loop(torch.tensor([row[:k] for row in rows]), K3)


@pytest.mark.parametrize("step", STEPS)
def test_gradcheck(step: int) -> None:
    indices = distinct(3, 2)
    z, p, _ = tokens(indices)
    with layout(step):
        assert torch.autograd.gradcheck(lambda z, p, *w: experts(z, indices, p, *w, K3), (z, p, *weights_of()))


def test_both_kinds_of_product_are_among_the_layouts() -> None:
    """One batched product where loads are even, one product an expert where they aren't."""
    kinds = {(name, step): module._Plan(make(), E, step).even for name, make in ROUTINGS.items() for step in STEPS}
    assert kinds["many", 2] and kinds["many", 64] and kinds["every expert", 2]
    assert not kinds["all on the last", 2] and not kinds["all on the same", 64] and not kinds["many", 1]


def test_experts_by_need_are_the_same_and_ask_only_for_those_chosen() -> None:
    indices, asked, w = torch.tensor([[1, 3], [3, 1], [4, 3]]), [], weights_of()
    z, p, _ = tokens(indices)

    def matrices(e: int) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(e)
        return w[0][e], w[1][e], w[2][e]

    got = experts_by_need(z, indices, p, E, matrices, K3)
    torch.testing.assert_close(got, experts_reference(z, indices, p, *w, K3))
    assert asked == [1, 3, 4] and not got.requires_grad


def test_an_idle_expert_gets_zero_gradient_and_may_hold_anything() -> None:
    indices = torch.tensor([[1, 3]]).repeat(6, 1)
    for grad in assert_equal_to_the_loop(indices, K3)[2:]:
        assert grad[[0, 2, 4]].count_nonzero() == 0 and grad[[1, 3]].abs().sum() > 0
    z, p, dy = tokens(indices)
    w = weights_of()
    with torch.no_grad():
        for matrix in w:
            matrix[0] = torch.nan
    for step in STEPS:
        with layout(step):
            y = experts(z, indices, p, *w, K3)
            assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y, [z, p], dy)))


def test_no_tokens_at_all() -> None:
    indices = torch.zeros(0, 3, dtype=torch.int64)
    z, p, dy = tokens(indices)
    inputs = [z, p, *weights_of()]
    y = experts(z, indices, p, *inputs[2:], K3)
    assert y.shape == (0, L)
    assert all(g.count_nonzero() == 0 for g in torch.autograd.grad(y, inputs, dy))


def test_the_weight_is_applied_after_the_expert() -> None:
    """Twice the weight is twice the output, exactly: the activation doesn't see it."""
    indices = distinct(6, 2)
    z, p, _ = tokens(indices)
    once, twice = (experts(z, indices, s * p, *weights_of(), K3) for s in (1, 2))
    torch.testing.assert_close(twice, 2 * once, rtol=1e-14, atol=0)


def test_slots_may_be_permuted() -> None:
    indices = distinct(6, 3)
    z, p, _ = tokens(indices)
    turned = experts(z, indices.flip(1), p.flip(1), *weights_of(), K3)
    torch.testing.assert_close(turned, experts(z, indices, p, *weights_of(), K3))


def test_runs_are_bit_equal() -> None:
    indices = distinct(50, 3)
    z, p, dy = tokens(indices, torch.float32)
    inputs = [z, p.detach().float().requires_grad_(), *weights_of(torch.float32)]

    def run() -> list[Tensor]:
        y = experts(inputs[0], indices, *inputs[1:], K3)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_bfloat16_activations_stay_close(master: torch.dtype) -> None:
    indices = distinct(40, 3)
    z, p, dy = tokens(indices, torch.bfloat16)
    half = [z, p.detach().float().requires_grad_(), *weights_of(master)]
    y = experts(z, indices, *half[1:], K3)
    grads = torch.autograd.grad(y, half, dy)
    assert [x.dtype for x in (y, *grads)] == [torch.bfloat16, torch.bfloat16, torch.float32, master, master, master]
    exact = [x.detach().double().requires_grad_() for x in half]
    want = experts_reference(exact[0], indices, *exact[1:], K3)
    for a, b in zip((y, *grads), (want, *torch.autograd.grad(want, exact, dy.double())), strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).norm() < 2e-2 * b.norm()


def test_huge_inputs_stay_finite_through_situ() -> None:
    indices = distinct(8, 2)
    z, p, dy = tokens(indices, torch.float32)
    big = (z * 1e6).detach().requires_grad_()
    inputs = [big, p.detach().float().requires_grad_(), *weights_of(torch.float32)]
    y = experts(big, indices, *inputs[1:], K3)
    assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y, inputs, dy)))
