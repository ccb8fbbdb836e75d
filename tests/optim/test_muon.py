"""Muon and AdamW against torch's own, Per-Head Muon against a loop, equal update scales over heads, and exact resume."""

import io
import math

import pytest
import torch
from torch import nn

from openk3.errors import UserError
from openk3.ops.orthogonalize import newton_schulz
from openk3.optim import muon
from openk3.optim.muon import MuonAdamW, clip_grad_norm
from openk3.optim.specs import ParamSpec, block_specs


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def spec(param, treatment="muon", rows=None, name="w", lr_scale=1.0):
    return ParamSpec(name, param, treatment, rows, "", lr_scale)


def parameter(*shape, seed=0):
    return nn.Parameter(randn(*shape, seed=seed))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_whole_matrix_equals_torch_muon(shape, nesterov):
    ours, theirs = parameter(*shape), parameter(*shape)
    mine = MuonAdamW([spec(ours)], lr=0.02, nesterov=nesterov, ns_dtype=torch.bfloat16)
    oracle = torch.optim.Muon([theirs], lr=0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        ours.grad = theirs.grad = randn(*shape, seed=10 + step)
        start = ours.detach().clone()
        theirs.data.copy_(ours)  # the same start each time, so that the difference is one step's
        mine.step(), oracle.step()
        assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()


def test_step_by_definition_with_momentum_decay_and_scale():
    p = parameter(2, 6, 10)  # two experts
    optimizer = MuonAdamW([spec(p, lr_scale=0.5)], lr=0.1, weight_decay=0.3, momentum=0.9)
    expected, momentum = p.detach().clone(), torch.zeros(2, 6, 10)
    for step in range(3):
        p.grad = randn(2, 6, 10, seed=step + 1)
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * p.grad
        for e in range(2):
            update = newton_schulz(0.1 * p.grad[e] + 0.9 * momentum[e])
            expected[e] -= 0.05 * (0.2 * math.sqrt(10) * update + 0.3 * expected[e])
    torch.testing.assert_close(p.detach(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_the_rest_equals_torch_adamw(fused):
    shapes = [(9, 5), (7,), (3, 1, 4)]
    ours, theirs = ([parameter(*s, seed=i) for i, s in enumerate(shapes)] for _ in range(2))
    treatments = ["adamw", "adamw-no-decay", "adamw-no-decay"]
    mine = MuonAdamW([spec(p, t, name=str(i)) for i, (p, t) in enumerate(zip(ours, treatments, strict=True))], lr=0.01)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=fused)
    for step in range(5):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = b.grad = randn(*shapes[i], seed=100 * step + i)
        mine.step(), oracle.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if fused else (a - b).abs().max() < 1e-6


HEADS, ROWS, WIDTH = 8, 16, 96


def head_updates(rows, scales):
    """The update of each head [H, rows, width] for gradients of these scales over the heads."""
    p = nn.Parameter(torch.zeros(HEADS * ROWS, WIDTH))
    p.grad = (randn(HEADS, ROWS, WIDTH) * torch.as_tensor(scales).view(-1, 1, 1)).view(HEADS * ROWS, WIDTH)
    MuonAdamW([spec(p, rows=rows)], lr=1.0, weight_decay=0.0).step()
    return -p.detach().view(HEADS, ROWS, WIDTH)


def test_per_head_updates_have_one_scale_where_whole_matrix_updates_do_not():
    scales = torch.logspace(-2, 1, HEADS)
    rms = {rows: head_updates(rows, scales).square().mean((1, 2)).sqrt() for rows in (ROWS, None)}
    assert rms[ROWS].max() / rms[ROWS].min() < 1.1 and 0.15 < rms[ROWS].min() and rms[ROWS].max() < 0.21
    assert rms[None].max() / rms[None].min() > 10  # 0.014 to 0.22


def test_a_head_with_a_hundredfold_gradient_changes_nothing_for_the_others():
    plain, one_loud = torch.ones(HEADS), torch.ones(HEADS)
    one_loud[3] = 100
    others = [h for h in range(HEADS) if h != 3]
    per_head = head_updates(ROWS, one_loud)[others] - head_updates(ROWS, plain)[others]
    whole = head_updates(None, one_loud)[others] - head_updates(None, plain)[others]
    assert per_head.abs().max() == 0
    assert whole.norm() > 0.25 * head_updates(None, plain)[others].norm()


@pytest.mark.parametrize("budget", [1, 20_000, 1 << 30])  # bytes: one matrix at a time; chunks that cut and join; all at once
def test_batches_over_parameters_equal_each_parameter_alone(budget, monkeypatch):
    monkeypatch.setattr(muon, "CPU_BYTES_PER_THREAD", budget)
    layout = [((24, 12), 8), ((8, 12), None), ((7, 8, 12), None), ((12, 8), None), ((40, 12), 8), ((3, 12, 8), None)]
    together, alone = ([parameter(*shape, seed=i) for i, (shape, _) in enumerate(layout)] for _ in range(2))
    one = MuonAdamW([spec(p, rows=r, name=str(i)) for i, (p, (_, r)) in enumerate(zip(together, layout, strict=True))], lr=0.1)
    many = [MuonAdamW([spec(p, rows=r)], lr=0.1) for p, (_, r) in zip(alone, layout, strict=True)]
    for step in range(2):
        for i, (a, b) in enumerate(zip(together, alone, strict=True)):
            a.grad = b.grad = randn(*a.shape, seed=50 * step + i)
        one.step()
        for optimizer in many:
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_gradients_of_any_layout_are_taken():
    plain, strided = parameter(12, 10), parameter(12, 10)
    plain.grad = randn(12, 10, seed=4)
    strided.grad = plain.grad.T.contiguous().T
    for p in (plain, strided):
        MuonAdamW([spec(p, rows=4)], lr=0.1).step()
    assert torch.equal(plain, strided)


@pytest.mark.parametrize("treatment", ["muon", "adamw"])
def test_no_gradient_means_no_change(treatment):
    moved, still = parameter(4, 6), parameter(4, 6, seed=1)
    optimizer = MuonAdamW([spec(moved, treatment, name="a"), spec(still, treatment, name="b")], lr=0.1)
    moved.grad = randn(4, 6)
    before = still.detach().clone()
    optimizer.step()
    assert torch.equal(still, before) and not optimizer.state[still]


def test_an_expert_that_never_saw_a_token_only_decays():
    p = parameter(3, 4, 6)
    p.grad = randn(3, 4, 6, seed=1)
    p.grad[1] = 0
    before = p.detach().clone()
    MuonAdamW([spec(p)], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(p[1], before[1] * 0.99)


def test_one_learning_rate_drives_every_group():
    def moved(lr_or_scheduler):
        params = parameter(4, 6), parameter(5)
        before = [p.detach().clone() for p in params]
        optimizer = MuonAdamW([spec(params[0], name="a"), spec(params[1], "adamw", name="b")], lr=0.1)
        lr_or_scheduler(optimizer)
        params[0].grad, params[1].grad = randn(4, 6), randn(5)
        optimizer.step()
        return [p.detach() - b for p, b in zip(params, before, strict=True)]

    full = moved(lambda optimizer: None)
    halved = moved(lambda optimizer: optimizer.set_lr(0.05))
    scheduled = moved(lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5))
    for a, b, c in zip(full, halved, scheduled, strict=True):
        assert a.abs().max() > 0 and torch.equal(b, c)
        torch.testing.assert_close(b, a / 2, rtol=1e-4, atol=1e-6)


def train(model, optimizer, steps):
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = randn(*p.shape, seed=1000 * step + i)
        optimizer.step()


@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16])
def test_resume_is_bit_equal(tiny, ns_dtype):
    straight, first, second = (tiny("k3") for _ in range(3))
    optimizer = MuonAdamW(block_specs(straight), lr=0.01, ns_dtype=ns_dtype)
    train(straight, optimizer, range(4))
    before = MuonAdamW(block_specs(first), lr=0.01, ns_dtype=ns_dtype)
    train(first, before, range(2))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    after = MuonAdamW(block_specs(second), lr=0.5, ns_dtype=ns_dtype)
    after.load_state_dict(saved["optimizer"])
    train(second, after, range(2, 4))
    for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_state_of_another_model_or_option_is_refused(tiny):
    model = tiny("k3")
    saved = MuonAdamW(block_specs(model), lr=0.1).state_dict()
    with pytest.raises(UserError, match="parameters differ, such as"):
        MuonAdamW(block_specs(tiny("dense")), lr=0.1).load_state_dict(saved)
    specs = [s if s.treatment != "muon" else ParamSpec(s.name, s.param, "adamw", None, "") for s in block_specs(model)]
    with pytest.raises(UserError, match="grouped otherwise"):
        MuonAdamW(specs, lr=0.1).load_state_dict(saved)


def test_loss_falls_on_a_tiny_model(tiny):
    model = tiny("k3").train()
    optimizer = MuonAdamW(block_specs(model), lr=0.01)
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_clipping_scales_all_gradients_by_one_factor():
    params = [parameter(3, 4), parameter(5), parameter(2)]
    params[0].grad, params[1].grad = randn(3, 4), randn(5)
    norm = torch.cat([p.grad.flatten() for p in params[:2]]).norm()
    before = params[0].grad.clone()
    torch.testing.assert_close(clip_grad_norm(params, None), norm)
    assert torch.equal(params[0].grad, before)
    torch.testing.assert_close(clip_grad_norm(iter(params), 0.5), norm)
    torch.testing.assert_close(params[0].grad, before * (0.5 / norm), rtol=1e-5, atol=1e-7)
