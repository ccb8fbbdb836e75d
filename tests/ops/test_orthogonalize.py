"""Newton–Schulz: singular values, independence of the matrices of a batch, and torch.optim.Muon as the oracle."""

import pytest
import torch

from openk3.ops.orthogonalize import COEFFICIENTS, newton_schulz


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 48), (5, 1), (1, 5)])
def test_singular_vectors_stay_and_singular_values_go_near_one(shape):
    G = randn(*shape)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    inner = U.T @ newton_schulz(G) @ Vh.T
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4
    assert 0.6 < inner.diagonal().min() and inner.diagonal().max() < 1.25


# (schedule, steps) → where the singular values of a Gaussian 32 × 64 matrix end
@pytest.mark.parametrize(
    ("coefficients", "steps", "low", "high"),
    [("quintic-muon", 5, 0.65, 1.22), ("polar-express", 5, 0.8, 1.15), ("polar-express", 8, 0.999, 1.001), ("quintic", 5, 0.95, 1.06),
     ("aol", 4, 0.95, 1.09)],
)  # fmt: skip
def test_each_schedule_ends_in_its_range(coefficients, steps, low, high):
    values = torch.linalg.svdvals(newton_schulz(randn(4, 32, 64), steps, coefficients))
    assert low < values.min() and values.max() < high


def test_last_coefficients_repeat():
    G, last = randn(8, 12, dtype=torch.float64), COEFFICIENTS["aol"][-1]
    X = newton_schulz(G, 4, "aol")
    A = X @ X.T
    torch.testing.assert_close(newton_schulz(G, 5, "aol"), last[0] * X + (last[1] * A + last[2] * A @ A) @ X)


@pytest.mark.parametrize("shape", [(2, 3, 12, 20), (2, 3, 20, 12)])
def test_batch_equals_a_loop_whatever_the_scales(shape):
    G = randn(*shape) * torch.logspace(-3, 3, 6).view(2, 3, 1, 1)
    batched = newton_schulz(G)
    assert batched.shape == G.shape and batched.dtype == torch.float32
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(batched[i, j], newton_schulz(G[i, j] / G[i, j].norm()), atol=2e-4, rtol=0)


def test_transpose_is_the_transpose():
    G = randn(3, 10, 30)
    torch.testing.assert_close(newton_schulz(G.mT), newton_schulz(G).mT)


def test_input_stays_and_zero_stays_zero():
    G = randn(3, 6, 8)
    G[1] = 0
    before = G.clone()
    assert newton_schulz(G)[1].abs().max() == 0 and torch.equal(G, before)


def test_bfloat16_is_within_two_percent():
    G = randn(4, 24, 48, dtype=torch.float64)
    exact, coarse = newton_schulz(G), newton_schulz(G, dtype=torch.bfloat16)
    assert exact.dtype == torch.float64 and coarse.dtype == torch.bfloat16
    assert ((coarse - exact).norm() / exact.norm()) < 0.02
    assert ((newton_schulz(G.float()) - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_equals_torch_muon(shape):
    """torch's update is -lr·O, computed in bfloat16 by the same operations; one rounding of the normalisation differs."""
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = randn(*shape)
    torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    theirs = -p.detach() / (0.2 * max(shape) ** 0.5)
    assert ((newton_schulz(p.grad, dtype=torch.bfloat16) - theirs).norm() / theirs.norm()) < 0.02
    assert ((newton_schulz(p.grad) - theirs).norm() / theirs.norm()) < 0.02


def test_bad_arguments_are_errors():
    with pytest.raises(ValueError, match="shape"):
        newton_schulz(torch.ones(3))
    with pytest.raises(ValueError, match="unknown"):
        newton_schulz(torch.ones(3, 3), coefficients="cubic")
    with pytest.raises(ValueError, match="step"):
        newton_schulz(torch.ones(3, 3), 0)
