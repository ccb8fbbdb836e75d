"""Kimi Delta Attention: the token loop is the equation, the chunked form is the token loop, and nothing overflows at the decay's limits."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openk3.ops import kda_chunk as chunk_module
from openk3.ops.kda import kda_chunk, kda_gate, kda_recurrent, kda_step, l2norm, short_conv

F64 = torch.float64
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 83)
FORMS = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "general"])


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decay(mode: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    u = torch.rand(shape, generator=rng, dtype=F64)
    T = shape[1]
    return {
        "random": lambda: -5 * u,
        "limit": lambda: torch.full(shape, -5.0, dtype=F64),
        "none": lambda: torch.zeros(shape, dtype=F64),
        "minus zero": lambda: torch.full(shape, -0.0, dtype=F64),
        "mixed": lambda: torch.where(u < 0.4, -5.0, torch.where(u < 0.7, 0.0, -u)),
        "weak then strong": lambda: torch.where((torch.arange(T) // 16 % 2 == 0)[:, None, None], -0.6 * u, -5.0),
        "strong then weak": lambda: torch.where((torch.arange(T) // 16 % 2 == 0)[:, None, None], -5.0, -0.6 * u),
        "-50": lambda: -50 * u,
        "-10000": lambda: torch.where(u < 0.5, -1e4 * u, -u),
        "-inf": lambda: torch.where(u < 0.1, -math.inf, -u),
    }[mode]()


def inputs(
    T: int, *, B: int = 2, H: int = 2, K: int = 6, V: int = 10, g: str = "random", beta: float | None = None, seed: int = 0
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and an initial state in float64; q and k of unit length, as K3's are."""
    rng = draw(seed)
    q, k, v = (torch.randn(B, T, H, size, generator=rng, dtype=F64) for size in (K, K, V))
    b = torch.rand(B, T, H, generator=rng, dtype=F64) if beta is None else torch.full((B, T, H), beta, dtype=F64)
    state = torch.randn(B, H, K, V, generator=rng, dtype=F64)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decay(g, (B, T, H, K), rng), b, state


def resets_at(T: int, where: str, B: int = 2) -> Tensor | None:
    """Where documents begin; the second row differs from the first."""
    places = {
        "none": [],
        "start": [0],
        "mid-chunk": [21],
        "several in a chunk": [3, 9, 10, 25],
        "chunk edges": [16, 31, 32, 33, 64],
        "both": [0, 5, 32, 47, 70],
        "every token": range(T),
    }[where]
    if where == "none":
        return None
    resets = torch.zeros(B, T, dtype=torch.bool)
    for row, t in itertools.product(range(B), places):
        if (t + 2 * row) % 90 < T:
            resets[row, (t + 2 * row) % 90] = True
    return resets if where != "every token" else torch.ones_like(resets)


def gradients(form, args: tuple[Tensor, ...], **kw) -> tuple[Tensor, ...]:
    """o, the final state and the gradients of a random linear function of both, in the order of NAMES."""
    leaves = [x.detach().clone().requires_grad_() for x in args]
    o, state = form(*leaves[:5], initial_state=leaves[5], **kw)
    rng = draw(99)
    up = [torch.randn(x.shape, generator=rng, dtype=F64).to(x.dtype) for x in (o, state)]
    return o.detach(), state.detach(), *torch.autograd.grad((o, state), leaves, up)


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float, note: str = "") -> None:
    for name, a, b in zip(("o", "final state", *(f"d{n}" for n in NAMES)), got, want, strict=True):
        error = float((a.double() - b.double()).abs().max())
        assert error <= tolerance * max(1.0, float(b.abs().max())), f"{name} is off by {error:.1e} {note}"  # NaN fails too


@FORMS
@pytest.mark.parametrize("where", ["none", "start", "mid-chunk", "several in a chunk", "chunk edges", "both", "every token"])
def test_chunk_equals_the_token_loop(bounded: bool, where: str) -> None:
    for T in LENGTHS:
        args, kw = inputs(T, seed=T), {"resets": resets_at(T, where), "scale": 0.7}
        assert_equal(gradients(kda_chunk, args, bounded=bounded, **kw), gradients(kda_recurrent, args, **kw), 1e-10, f"at T = {T}")


@FORMS
@pytest.mark.parametrize("beta", [0.0, 1.0, None], ids=["beta 0", "beta 1", "beta random"])
def test_chunk_equals_the_token_loop_at_the_limits(bounded: bool, beta: float | None) -> None:
    modes = ["limit", "none", "minus zero", "mixed", "weak then strong", "strong then weak"]
    for mode in modes + ([] if bounded else ["-50", "-10000", "-inf"]):
        for where in ("none", "both"):
            args, resets = inputs(83, B=2, H=1, K=9, V=4, g=mode, beta=beta), resets_at(83, where)
            want = gradients(kda_recurrent, args, resets=resets)
            assert_equal(gradients(kda_chunk, args, bounded=bounded, resets=resets), want, 1e-10, f"at g {mode}, resets {where}")


@FORMS
@pytest.mark.parametrize("mode", ["random", "limit", "none", "mixed", "weak then strong", "strong then weak"])
def test_float32_keeps_its_precision(bounded: bool, mode: str) -> None:
    """Against the float64 loop, values and gradients; small upstream gradients included, which a split exponent could lose to underflow."""
    args = inputs(96, B=1, K=16, V=8, g=mode)
    single = tuple(x.float() for x in args)
    exact = tuple(x.double() for x in single)
    assert_equal(gradients(kda_chunk, single, bounded=bounded), gradients(kda_recurrent, exact), 2e-5)
    leaves, doubles = ([x.clone().requires_grad_() for x in xs] for xs in (single, exact))
    o, want = kda_chunk(*leaves[:5], initial_state=leaves[5], bounded=bounded)[0], kda_recurrent(*doubles[:5], initial_state=doubles[5])[0]
    for x, y in zip(torch.autograd.grad(o.sum() * 1e-8, leaves), torch.autograd.grad(want.sum() * 1e-8, doubles), strict=True):
        assert float((x - y).abs().max()) <= 2e-5 * float(y.abs().max()) + 1e-13


@FORMS
@pytest.mark.parametrize("mode", ["random", "limit", "weak then strong", "strong then weak"])
def test_float32_fades_a_memory_by_the_right_factor(bounded: bool, mode: str) -> None:
    """Row j writes 1 at token j alone, the last row starts from a state of 1: token i reads e^{G_i - G_j} of it, down to 1e-15."""
    T, tiny = 64, 1e-15
    g = decay(mode, (1, T, 1, 1), draw())
    one, write = torch.ones(T + 1, T, 1, 1), torch.cat([torch.eye(T), torch.zeros(1, T)])
    state = write.new_zeros(T + 1, 1, 1, 1)
    state[T] = 1.0
    o, final = kda_chunk(one, one, one, g.float().expand_as(one), write.unsqueeze(-1), scale=1.0, initial_state=state, bounded=bounded)
    total = g.float().double().flatten().cumsum(0)
    want = torch.cat([(total - total[:, None]).exp().triu(), total.exp()[None]])  # [j, i]
    for got, exact in ((o.flatten(1).double(), want), (final.flatten().double(), want[:, -1])):
        seen = exact > tiny
        torch.testing.assert_close(got[seen], exact[seen], rtol=1e-4, atol=0)
        assert bool((got[~seen].abs() <= 2 * tiny).all())


def test_repeated_keys_do_not_cancel() -> None:
    """With one key all along, β = 1 and no decay, powers of A have entries like binomial coefficients; their sum would lose all digits."""
    q, k, v, g, beta, state = inputs(64, K=16, V=16, g="none", beta=1.0)
    k = k[:, :1].expand_as(k)
    args = (q, k, v, g, beta, state)
    for bounded in (True, False):
        got = gradients(kda_chunk, tuple(x.float() for x in args), bounded=bounded)
        assert_equal(got, gradients(kda_recurrent, args), 2e-5)


def test_very_negative_decay_in_float32_is_exactly_forgetting() -> None:
    q, k, v, g, beta, state = (x.float() for x in inputs(40, g="-10000"))
    g[:, 20] = -1e30
    o, final = kda_chunk(q, k, v, g, beta, initial_state=state)
    dg = gradients(kda_chunk, (q, k, v, g, beta, state))[5]
    assert bool((dg[g < -100] == 0).all())  # not rounding noise, which the gate would multiply by |g|
    alone, final_alone = kda_chunk(q[:, 20:], k[:, 20:], v[:, 20:], g[:, 20:], beta[:, 20:])
    torch.testing.assert_close(o[:, 20:], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, final_alone, rtol=1e-5, atol=1e-6)


def test_segments_change_nothing_and_bound_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    args, resets = inputs(150), resets_at(150, "both")
    whole = gradients(kda_chunk, args, resets=resets, bounded=True)
    assert whole[1].untyped_storage().nbytes() == whole[1].nbytes  # no view that keeps every chunk's state alive
    monkeypatch.setattr(chunk_module, "SEGMENT_ELEMENTS", args[0][:, :64].numel())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kda_chunk(*(x.requires_grad_() for x in args[:5]), initial_state=args[5], bounded=True)
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in args[:5]) + 3 * args[5].numel()
    assert_equal(gradients(kda_chunk, args, resets=resets, bounded=True), whole, 1e-12)


def test_step_is_the_equation() -> None:
    """Written out with indices, and as S_t = (I - β k kᵀ) Diag(α) S + β k vᵀ; K = V, so that a transposed state would still fit."""
    q, k, v, g, beta, state = (x[:, 0] if i < 5 else x for i, x in enumerate(inputs(1, K=7, V=7)))
    o, new = kda_step(q, k, v, g, beta, state, scale=0.3)
    faded = torch.einsum("bhk,bhkv->bhkv", g.exp(), state)
    error = v - torch.einsum("bhkv,bhk->bhv", faded, k)
    want = faded + torch.einsum("bh,bhk,bhv->bhkv", beta, k, error)
    torch.testing.assert_close(new, want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(o, 0.3 * torch.einsum("bhkv,bhk->bhv", want, q), rtol=1e-13, atol=1e-13)
    for b, h in itertools.product(range(2), range(2)):
        kt, strength = k[b, h], beta[b, h]
        closed = (torch.eye(7, dtype=F64) - strength * torch.outer(kt, kt)) @ torch.diag(g[b, h].exp()) @ state[b, h]
        torch.testing.assert_close(new[b, h], closed + strength * torch.outer(kt, v[b, h]), rtol=1e-13, atol=1e-13)
    default, _ = kda_step(q, k, v, g, beta, state)
    torch.testing.assert_close(default, o / 0.3 * 7**-0.5, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_resets_are_separate_runs(form) -> None:
    args, cuts = inputs(40, B=1), [0, 7, 8, 32, 40]
    resets = torch.zeros(1, 40, dtype=torch.bool)
    resets[0, cuts[1:-1]] = True
    o, final = form(*args[:5], initial_state=args[5], resets=resets)
    parts = [form(*(x[:, a:b] for x in args[:5]), initial_state=args[5] if a == 0 else None) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(o, torch.cat([part for part, _ in parts], 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, parts[-1][1], rtol=1e-12, atol=1e-12)


@FORMS
def test_decay_of_a_first_token_has_no_effect(bounded: bool) -> None:
    args, resets = inputs(40), resets_at(40, "mid-chunk")
    assert resets is not None
    want = gradients(kda_chunk, args, resets=resets, bounded=bounded)
    assert bool((want[5][resets] == 0).all())
    wild = tuple(torch.where(resets[..., None, None], -1e6, x) if i == 3 else x for i, x in enumerate(args))
    assert_equal(gradients(kda_chunk, wild, resets=resets, bounded=bounded), want, 1e-12)


@FORMS
def test_any_split_equals_the_whole(bounded: bool) -> None:
    """Convolution tail and state carried over, from projections to outputs."""
    T, H, K, V, W = 37, 2, 4, 6, 4
    rng = draw()
    x = torch.randn(2, T, H * (2 * K + V), generator=rng, dtype=F64)
    weight = torch.randn(x.shape[-1], 1, W, generator=rng, dtype=F64)
    _, _, _, g, beta, state = inputs(T, K=K, V=V)

    def run(begin: int, end: int, tail: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = x[:, begin:end]
        q, k, v = short_conv(raw, weight, tail=tail).unflatten(-1, (H, -1)).split([K, K, V], -1)
        part = g[:, begin:end], beta[:, begin:end]
        o, state = kda_chunk(l2norm(q), l2norm(k), v, *part, initial_state=state, bounded=bounded)
        history = raw.new_zeros(2, W - 1, x.shape[-1]) if tail is None else tail
        return o, torch.cat([history, raw], 1)[:, -(W - 1) :], state

    whole, _, final = run(0, T, None, state)
    for cut in range(1, T):
        first, tail, middle = run(0, cut, None, state)
        second, _, last = run(cut, T, tail, middle)
        torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(last, final, rtol=1e-11, atol=1e-11)


@FORMS
def test_gradcheck(bounded: bool) -> None:
    q, k, v, g, beta, state = (x.requires_grad_() for x in inputs(5, B=1, H=1, K=2, V=3))
    resets = torch.tensor([[False, False, False, True, False]])

    def run(*args: Tensor) -> tuple[Tensor, Tensor]:
        return kda_chunk(*args[:5], initial_state=args[5], resets=resets, bounded=bounded)

    assert torch.autograd.gradcheck(run, (q, k, v, g - 0.1, beta, state))


def test_one_output_alone_has_gradients_and_a_second_derivative_is_refused() -> None:
    args = inputs(20)
    for pick in (0, 1):
        leaves, others = ([x.clone().requires_grad_() for x in args] for _ in range(2))
        got = torch.autograd.grad(kda_chunk(*leaves[:5], initial_state=leaves[5])[pick].sum(), leaves)
        want = torch.autograd.grad(kda_recurrent(*others[:5], initial_state=others[5])[pick].sum(), others, materialize_grads=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    q = args[0].clone().requires_grad_()
    (dq,) = torch.autograd.grad(kda_chunk(q, *args[1:5])[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_dtypes(form) -> None:
    """bfloat16 in: bfloat16 out, from a float32 state, as near as its rounding allows; strided inputs are as good as packed ones."""
    args = inputs(50, K=16, V=16)
    half = tuple(x.bfloat16() if i < 3 else x.float() for i, x in enumerate(args))
    o, final = form(*half[:5], initial_state=half[5])
    want, want_final = kda_recurrent(*(x.double() for x in half[:5]), initial_state=half[5].double())
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o.double(), want, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(final.double(), want_final, rtol=1e-5, atol=1e-5)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[:5])
    for x, y in zip(form(*strided), form(*args[:5]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.integers(1, 70),
    low=st.sampled_from([-5.0, -4.9, -2.5, -1e-3, -0.0]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    beta=st.sampled_from([0.0, 1.0, None]),
    bounded=st.booleans(),
    half=st.booleans(),
    restart=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_no_decay_in_the_bound_makes_nan(
    T: int, low: float, share: float, beta: float | None, bounded: bool, half: bool, restart: float, seed: int
) -> None:
    q, k, v, g, b, state = inputs(T, B=1, K=8, V=8, beta=beta, seed=seed)
    g = torch.where(torch.rand(g.shape, generator=draw(seed)) < share, low, g)
    dtype = torch.bfloat16 if half else torch.float32
    resets = torch.rand(1, T, generator=draw(seed)) < restart
    args = (*(x.to(dtype) for x in (q, k, v)), *(x.float() for x in (g, b, state)))
    for x in gradients(kda_chunk, args, resets=resets, bounded=bounded):
        assert bool(x.isfinite().all())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(T=st.integers(1, 70), low=st.sampled_from([-5.5, -30.0, -90.0, -1e4, -1e38, -math.inf]), seed=st.integers(0, 2**16))
def test_no_decay_at_all_makes_nan_in_the_general_form(T: int, low: float, seed: int) -> None:
    q, k, v, g, b, state = inputs(T, B=1, K=8, V=8, seed=seed)
    g = torch.where(torch.rand(g.shape, generator=draw(seed)) < 0.5, low, g)
    for x in gradients(kda_chunk, tuple(x.float() for x in (q, k, v, g, b, state))):
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_shapes_that_do_not_fit_are_named(form) -> None:
    q, k, v, g, beta, state = inputs(4)
    with pytest.raises(ValueError, match=r"beta has shape \[2, 3, 2\]"):
        form(q, k, v, g, beta[:, :3])
    with pytest.raises(ValueError, match="initial_state has shape"):
        form(q, k, v, g, beta, initial_state=state.mT)
    with pytest.raises(ValueError, match="resets must be bool"):
        form(q, k, v, g, beta, resets=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="no tokens"):
        form(*(x[:, :0] for x in (q, k, v, g, beta)))


def test_l2norm() -> None:
    x = torch.randn(3, 5, generator=draw(), dtype=F64).requires_grad_()
    torch.testing.assert_close(l2norm(x, 0.1), x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt())
    assert torch.autograd.gradcheck(lambda x: l2norm(x, 0.1), x)
    zero = torch.zeros(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(l2norm(zero).sum(), zero)
    torch.testing.assert_close(grad, torch.full_like(zero, 1e3))  # 1 / sqrt(eps): finite where a plain norm isn't
    assert l2norm(x.detach().bfloat16()).dtype == torch.bfloat16


def test_gate_by_hand() -> None:
    z, A_log, bias = torch.tensor([[[0.5, -2.0], [3.0, 0.0]]], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64), torch.arange(4.0).double()
    want = [[0.5, -1.0], [math.e * 5, math.e * 3]]  # e^A (z + bias), one A per head
    bounded = torch.tensor([[[-5 / (1 + math.exp(-x)) for x in row] for row in want]], dtype=F64)
    torch.testing.assert_close(kda_gate(z, A_log, bias, -5.0), bounded)
    plain = [[0.5, -1.0], [5.0, 3.0]]
    scale = [1.0, math.e]
    unbounded = torch.tensor([[[-a * math.log1p(math.exp(x)) for x in row] for a, row in zip(scale, plain, strict=True)]], dtype=F64)
    torch.testing.assert_close(kda_gate(z, A_log, bias.view(2, 2), None), unbounded)
    assert kda_gate(z.bfloat16(), A_log.float(), bias.float(), -5.0).dtype == torch.float32


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gate_gradients_are_finite_at_saturation(lower_bound: float | None) -> None:
    for size, large in itertools.product((0.0, 1e-30, 1.0, 1e4, 1e30), (0.0, 20.0, 80.0, 89.0, 1000.0)):
        z = torch.tensor([[[size, -size]]], requires_grad=True)
        A_log, bias = torch.tensor([large], requires_grad=True), torch.zeros(2, requires_grad=True)
        g = kda_gate(z, A_log, bias, lower_bound)
        assert not bool(g.isnan().any()) and bool((g <= 0).all())
        if lower_bound is not None:
            assert bool((g >= lower_bound).all())
            for x in torch.autograd.grad(g.sum(), (z, A_log, bias)):
                assert bool(x.isfinite().all()), (size, large)
        else:  # what training sees of it: the decay factor
            for x in torch.autograd.grad(g.exp().sum(), (z, A_log, bias)):
                assert not bool(x.isnan().any()), (size, large)


def plain_conv(x: Tensor, weight: Tensor, tail: Tensor | None = None) -> Tensor:
    """SiLU of PyTorch's own convolution, zero (or the tail) before the first token."""
    W = weight.shape[-1]
    history = x.new_zeros(x.shape[0], W - 1, x.shape[2]) if tail is None else tail
    return F.silu(F.conv1d(torch.cat([history, x], 1).mT, weight, groups=x.shape[2]).mT)


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("with_tail", [False, True])
def test_short_conv_is_a_causal_convolution(W: int, with_tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import openk3.ops.kda as module

    monkeypatch.setattr(module, "CONV_BLOCK", 64)  # several blocks of rows
    for T in (1, 2, 3, 4, 9):
        rng = draw(T)
        x, weight, tail = (torch.randn(s, generator=rng, dtype=F64).requires_grad_() for s in ((5, T, 3), (3, 1, W), (5, W - 1, 3)))
        leaves, kept = ([x, weight, tail], tail) if with_tail and W > 1 else ([x, weight], None)
        got, want = short_conv(x, weight, tail=kept), plain_conv(x, weight, kept)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        up = torch.randn(got.shape, generator=rng, dtype=F64)
        for a, b in zip(torch.autograd.grad(got, leaves, up), torch.autograd.grad(want, leaves, up), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [[], [0], [1], [2, 3], [4, 9, 10, 18], list(range(20))], ids=str)
def test_short_conv_resets_are_separate_runs(cuts: list[int]) -> None:
    rng = draw()
    x, weight, tail = (torch.randn(s, generator=rng, dtype=F64).requires_grad_() for s in ((1, 20, 3), (3, 1, 4), (1, 3, 3)))
    resets = torch.zeros(1, 20, dtype=torch.bool)
    resets[0, cuts] = True
    edges = sorted({0, 20, *cuts})
    parts = [plain_conv(x[:, a:b], weight, None if a in cuts else tail) for a, b in itertools.pairwise(edges)]
    got, want = short_conv(x, weight, tail=tail, resets=resets), torch.cat(parts, 1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    up = torch.randn(got.shape, generator=rng, dtype=F64)
    leaves = (x, weight, tail)
    for a, b in zip(torch.autograd.grad(got, leaves, up), torch.autograd.grad(want, leaves, up, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_short_conv_does_not_look_across_a_document_start() -> None:
    x, weight = torch.randn(2, 12, 3, generator=draw()), torch.randn(3, 1, 4, generator=draw(1))
    resets = torch.zeros(2, 12, dtype=torch.bool)
    resets[:, 5] = True
    clean = short_conv(x, weight, resets=resets)
    spoiled = x.clone()
    spoiled[:, :5] = math.inf
    assert torch.equal(short_conv(spoiled, weight, resets=resets)[:, 5:], clean[:, 5:])
    half = short_conv(x.bfloat16(), weight, resets=resets)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), short_conv(x.bfloat16().float(), weight, resets=resets), rtol=2**-8, atol=1e-6)


def test_short_conv_names_what_does_not_fit() -> None:
    x, weight = torch.zeros(2, 5, 3), torch.zeros(3, 1, 4)
    with pytest.raises(ValueError, match="weight has shape"):
        short_conv(x, weight[:2])
    with pytest.raises(ValueError, match="tail has shape"):
        short_conv(x, weight, tail=torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match="resets has shape"):
        short_conv(x, weight, resets=torch.zeros(2, 4, dtype=torch.bool))
