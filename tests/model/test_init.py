"""Weights for training from scratch: every value is set, by the rules of the reports, and the first loss is that of a blank guess."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.model.k3 import K3ForCausalLM
from openk3.presets import nano


@pytest.fixture(scope="module")
def nano_model() -> K3ForCausalLM:
    return K3ForCausalLM(nano()).init_weights(0)


def tensors(model: K3ForCausalLM) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def named(model: K3ForCausalLM, ending: str) -> list[Tensor]:
    found = [t.detach() for name, t in tensors(model).items() if name.endswith(ending)]
    assert found
    return found


@torch.no_grad()
def test_every_value_is_set(variant: str, tiny_config) -> None:
    model = K3ForCausalLM(tiny_config(variant))
    for t in tensors(model).values():
        t.fill_(torch.nan)
    model.init_weights(0)
    assert [name for name, t in tensors(model).items() if not t.isfinite().all()] == []


@torch.no_grad()
def test_the_first_loss_is_a_blank_guess(variant: str, tiny_config) -> None:
    model = K3ForCausalLM(tiny_config(variant)).init_weights(0)
    ids = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(0))
    assert abs(float(model.loss(ids[:, :-1], ids[:, 1:])) - math.log(97)) < 0.05


def test_nano_starts_at_ln_v_and_every_parameter_learns(nano_model) -> None:
    ids = torch.randint(4096, (2, 65), generator=torch.Generator().manual_seed(0))
    nano_model.zero_grad()
    loss = nano_model.loss(ids[:, :-1], ids[:, 1:])
    assert abs(loss.item() - math.log(4096)) < 0.1
    loss.backward()
    still = {name for name, p in nano_model.named_parameters() if p.grad is None or p.grad.count_nonzero() == 0}
    # A norm whose pseudo-query is zero moves from the second step on; layer 0's attention site reads one source.
    assert still == {n for n, _ in nano_model.named_parameters() if n.endswith("res_norm.weight")} | {
        "model.layers.0.self_attention_res_proj.weight"
    }
    assert all(p.grad is None or p.grad.isfinite().all() for p in nano_model.parameters())


def test_attention_residuals_begin_as_a_plain_mean(nano_model) -> None:
    assert all(q.count_nonzero() == 0 for q in named(nano_model, "res_proj.weight"))
    with torch.no_grad():
        depth = nano_model(torch.tensor([[5, 6, 7]]), trace=True).depth
    for _, weights in depth:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / len(weights)))


def test_decay_begins_as_in_mamba_2(nano_model) -> None:
    """A_log zero; softplus(dt_bias) log-uniform in [1e-3, 0.1] (K3 report §2.1, arXiv 2405.21060)."""
    assert all(a.count_nonzero() == 0 for a in named(nano_model, "A_log"))
    step = F.softplus(torch.cat(named(nano_model, "dt_bias")).double())
    assert 1e-3 * 0.999 < step.min() and step.max() < 0.1 * 1.001
    quartiles = step.log().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).exp()
    torch.testing.assert_close(quartiles, 1e-3 * 100 ** torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), rtol=0.15, atol=0)


def test_norms_are_one_and_the_bias_zero(nano_model) -> None:
    norms = [p for name, p in nano_model.named_parameters() if "norm" in name]
    assert len(norms) > 40 and all((p == 1).all() for p in norms)
    assert all(b.count_nonzero() == 0 for b in named(nano_model, "e_score_correction_bias"))


def test_convolutions_are_uniform(nano_model) -> None:
    filters = torch.cat([w.flatten() for w in named(nano_model, "conv1d.weight")])
    assert filters.abs().max() <= 0.5 and abs(float(filters.std()) - 0.5 / math.sqrt(3)) < 0.01


@pytest.mark.parametrize("std", [None, 0.1])
@torch.no_grad()
def test_matrices_are_normal(std: float | None, tiny_config) -> None:
    config = tiny_config("k3", hidden_size=128, vocab_size=512)
    config = config if std is None else config.replace(openk3=config.openk3.replace(initializer_std=std))
    model = K3ForCausalLM(config).init_weights(0)
    for name, p in model.named_parameters():
        if p.dim() > 1 and p.numel() > 2000 and "conv1d" not in name and "res_proj" not in name:
            assert abs(float(p.std()) / (std or 0.02) - 1) < 0.06, name
            assert abs(float(p.mean())) < 0.06 * (std or 0.02), name
            assert p.abs().max() > 2.5 * (std or 0.02), name  # a normal's tails, not a box


def test_the_seed_decides(variant: str, tiny_config) -> None:
    config = tiny_config(variant)
    one, again, other = (tensors(K3ForCausalLM(config).init_weights(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(t, again[name]) for name, t in one.items())
    constant = ("norm.weight", "A_log", "res_proj.weight", "e_score_correction_bias")
    for name, t in one.items():
        assert torch.equal(t, other[name]) == name.endswith(constant), name


def test_no_two_matrices_are_alike(nano_model) -> None:
    seen = [p.flatten()[:8] for name, p in nano_model.named_parameters() if p.dim() > 1 and "res_proj" not in name]
    assert len({tuple(v.tolist()) for v in seen}) == len(seen)


def test_torch_s_own_generator_is_left_alone(tiny_config) -> None:
    model = K3ForCausalLM(tiny_config("k3"))
    before = torch.get_rng_state()
    model.init_weights(0)
    assert torch.equal(before, torch.get_rng_state())
