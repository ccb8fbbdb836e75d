"""Routing, the counting of loads and required biases, and the quantile that balances (K3 report §2.3, appendix D)."""

import pytest
import torch

from openk3.ops.routing import (
    exact_quantile_bias,
    expert_load,
    histogram_range,
    observed_range,
    quantile_from_histogram,
    required_bias_histogram,
    route,
)


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def counted(scores, cutoff, bias, bins=1000, valid=None):
    lo, width = histogram_range(bias, bins)
    return required_bias_histogram(scores, cutoff, lo, width, bins, valid), lo, width


def test_bias_chooses_experts_but_scores_weigh_them():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-1.0, 0.0, 0.0, 1.0])
    routing = route(logits, bias, 2)
    assert sorted(routing.indices[0].tolist()) == [1, 3]
    chosen = logits.sigmoid()[0, routing.indices[0]]
    torch.testing.assert_close(routing.weights[0], chosen / chosen.sum())
    torch.testing.assert_close(routing.scores, logits.sigmoid())
    assert routing.cutoff is None and routing.indices.dtype == torch.int64


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_by_definition(activation, renormalize):
    logits, bias = randn(50, 12), randn(12, seed=1, scale=0.1)
    routing = route(logits, bias, 3, activation=activation, renormalize=renormalize, scale=2.5)
    for row in range(50):
        scores = torch.sigmoid(logits[row]) if activation == "sigmoid" else torch.softmax(logits[row], 0)
        chosen = sorted(range(12), key=lambda j: -(scores[j] + bias[j]))[:3]
        total = scores[chosen].sum() if renormalize else 1.0
        assert routing.indices[row].tolist() == chosen
        torch.testing.assert_close(routing.weights[row], 2.5 * scores[chosen] / total)


def test_cutoff_is_the_next_biased_score_and_changes_nothing_else():
    logits, bias = randn(40, 10), randn(10, seed=1, scale=0.2)
    plain, routing = route(logits, bias, 4), route(logits, bias, 4, cutoff=True)
    torch.testing.assert_close(routing.cutoff, (logits.sigmoid() + bias).sort(-1, descending=True).values[:, 4])
    assert torch.equal(plain.indices, routing.indices) and torch.equal(plain.weights, routing.weights)


def test_gradient_flows_through_weights_and_never_into_the_bias():
    logits = randn(6, 8).double().requires_grad_()
    bias = randn(8, seed=1).double().requires_grad_()
    route(logits, bias, 3, cutoff=True).weights.square().sum().backward()
    assert bias.grad is None and logits.grad.abs().sum() > 0
    assert torch.autograd.gradcheck(lambda x: route(x, bias.detach(), 3).weights, logits)


def test_bad_routing_arguments_are_errors():
    logits, bias = randn(2, 4), torch.zeros(4)
    with pytest.raises(ValueError, match="cutoff"):
        route(logits, bias, 4, cutoff=True)
    with pytest.raises(ValueError, match="top 5 of 4"):
        route(logits, bias, 5)
    with pytest.raises(ValueError, match="activation"):
        route(logits, bias, 2, activation="relu")
    with pytest.raises(ValueError, match="float32"):
        route(logits.bfloat16(), bias.bfloat16(), 2)


def test_load_counts_choices_of_valid_tokens():
    indices = torch.tensor([[0, 1], [1, 3], [1, 2]])
    assert expert_load(indices, 5).tolist() == [1, 3, 1, 1, 0]
    assert expert_load(indices, 5, torch.tensor([True, False, True])).tolist() == [1, 2, 1, 0, 0]
    assert expert_load(indices, 5).dtype == torch.int64


def test_histogram_counts_by_definition_and_clamps_to_the_edge_bins():
    scores, cutoff = randn(30, 3).sigmoid(), randn(30, seed=1)
    histogram = required_bias_histogram(scores, cutoff, torch.tensor(-0.5), torch.tensor(0.125), 8)
    expected = torch.zeros(3, 8, dtype=torch.int32)
    for i in range(30):
        for j in range(3):
            required = cutoff[i].item() - scores[i, j].item()
            expected[j, min(max(int((required + 0.5) // 0.125), 0), 7)] += 1
    assert torch.equal(histogram, expected) and histogram.dtype == torch.int32
    assert histogram[:, 0].sum() > 0 and histogram[:, -1].sum() > 0  # both clamps happened


def test_counts_add_over_any_partition_of_the_tokens():
    bias = randn(16, scale=0.1)
    routing = route(randn(600, 16), bias, 4, cutoff=True)
    whole, lo, width = counted(routing.scores, routing.cutoff, bias)
    parts = zip(routing.scores.split([1, 130, 469]), routing.cutoff.split([1, 130, 469]), strict=True)
    assert torch.equal(whole, sum(required_bias_histogram(s, c, lo, width, 1000) for s, c in parts))


def test_padding_is_not_counted():
    bias = randn(16, scale=0.1)
    routing = route(randn(500, 16), bias, 4, cutoff=True)
    valid = torch.rand(500, generator=torch.Generator().manual_seed(3)) > 0.3
    masked, _, _ = counted(routing.scores, routing.cutoff, bias, valid=valid)
    kept, _, _ = counted(routing.scores[valid], routing.cutoff[valid], bias)
    assert torch.equal(masked, kept) and not torch.equal(masked, counted(routing.scores, routing.cutoff, bias)[0])


def test_required_bias_of_extreme_scores_stays_in_the_interval():
    bias = torch.tensor([-0.7, 0.3, 0.1, -0.2])
    logits = torch.where(randn(200, 4) > 0, 60.0, -60.0)
    routing = route(logits, bias, 2, cutoff=True)
    lo, width = histogram_range(bias, 10)
    required = routing.cutoff.unsqueeze(-1) - routing.scores
    assert lo == -1.7 and torch.isclose(lo + 10 * width, torch.tensor(1.3))
    assert required.min() >= lo and required.max() <= lo + 10 * width


@pytest.mark.parametrize("tokens", [4096, 1001])  # 1001·4/64 isn't whole
def test_quantile_is_within_a_bin_of_the_order_statistics(tokens):
    bias = randn(64, scale=0.05)
    routing = route(randn(tokens, 64) + randn(64, seed=1), bias, 4, cutoff=True)
    histogram, lo, width = counted(routing.scores, routing.cutoff, bias)
    found = quantile_from_histogram(histogram, 4, lo, width)
    order = (routing.cutoff.unsqueeze(-1) - routing.scores).sort(0).values
    q = tokens * 4 / 64
    below, above = order[-int(-q // 1) - 1], order[int(q)]  # the ⌈q⌉-th and the next, or the same one where q isn't whole
    assert found.mean().abs() < 1e-6
    exact = exact_quantile_bias(routing.scores, routing.cutoff, 4)
    assert (exact - (above - above.mean())).abs().max() < 1e-6
    assert (found - exact).abs().max() <= 2 * width + (above - below).abs().max()  # one bin for each expert, one for the mean


def test_quantile_by_hand():
    # q = 6·1/2 = 3. Expert 0: 2 before bin 1, 4 inside: 1 + 1/4 bins. Expert 1: 3 reached exactly at the end of bin 2.
    histogram = torch.tensor([[2, 4, 0, 0], [0, 0, 3, 3]], dtype=torch.int32)
    found = quantile_from_histogram(histogram, 1, 10.0, 2.0)
    raw = torch.tensor([10 + 2 * 1.25, 10 + 2 * 3.0])
    torch.testing.assert_close(found, raw - raw.mean())


def test_empty_histogram_gives_zeros():
    assert quantile_from_histogram(torch.zeros(4, 10, dtype=torch.int32), 2, -1.0, 0.2).tolist() == [0, 0, 0, 0]


def test_balancing_all_experts_is_an_error():
    with pytest.raises(ValueError, match="nothing to balance"):
        quantile_from_histogram(torch.ones(4, 10, dtype=torch.int32), 4, -1.0, 0.2)
    with pytest.raises(ValueError, match="nothing to balance"):
        exact_quantile_bias(torch.rand(8, 4), torch.rand(8), 4)


def simulate(steps, *, std=1.0, tokens=4096, experts=64, k=4, observed=False, exact=False):
    """MaxVio of each step: sigmoid of Gaussian logits with a fixed offset per expert, fresh tokens in every step."""
    draw = torch.Generator().manual_seed(5)
    offsets = 0.5 * torch.randn(experts, generator=draw)
    bias, seen, violations = torch.zeros(experts), None, []
    for _ in range(steps):
        routing = route(std * (torch.randn(tokens, experts, generator=draw) + offsets), bias, k, cutoff=True)
        violations.append(expert_load(routing.indices, experts).max().item() * experts / (tokens * k) - 1)
        lo, width = histogram_range(bias, 1000, seen)
        histogram = required_bias_histogram(routing.scores, routing.cutoff, lo, width, 1000)
        new = exact_quantile_bias(routing.scores, routing.cutoff, k) if exact else quantile_from_histogram(histogram, k, lo, width)
        seen = observed_range(histogram, lo, width, new - bias) if observed else None
        bias = new
    return violations


@pytest.mark.parametrize("form", ["histogram", "observed range", "exact"])
def test_skewed_router_is_balanced_within_four_steps(form):
    violations = simulate(5, observed=form == "observed range", exact=form == "exact")
    assert violations[0] > 3 and violations[4] < 0.25


def test_observed_range_balances_scores_too_close_for_the_full_interval():
    assert max(simulate(6, std=0.002)[3:]) > 1  # bins of 0.002 hold the scores of many experts at once
    assert max(simulate(6, std=0.002, observed=True)[3:]) < 0.3


def test_observed_range_encloses_what_comes_next_inside_the_bound():
    bias = randn(8, scale=0.1)
    routing = route(randn(900, 8, scale=0.05), bias, 2, cutoff=True)
    histogram, lo, width = counted(routing.scores, routing.cutoff, bias)
    new = quantile_from_histogram(histogram, 2, lo, width)
    narrow_lo, narrow_width = histogram_range(new, 1000, observed_range(histogram, lo, width, new - bias))
    following = route(randn(900, 8, seed=2, scale=0.05), new, 2, cutoff=True)
    required = following.cutoff.unsqueeze(-1) - following.scores
    assert narrow_lo <= required.min() and required.max() <= narrow_lo + 1000 * narrow_width
    assert narrow_width < width / 2
    bound_lo, bound_width = histogram_range(new, 1000)
    assert narrow_lo >= bound_lo and narrow_lo + 1000 * narrow_width <= bound_lo + 1000 * bound_width + 1e-6


def test_occupied_edge_bin_or_empty_histogram_brings_the_full_interval_back():
    bias = randn(4, scale=0.1)
    full = histogram_range(bias, 10)
    for where in ([0, 5], [5, 9], []):
        histogram = torch.zeros(4, 10, dtype=torch.int32)
        histogram[0, where] = 1
        ends = observed_range(histogram, torch.tensor(0.0), torch.tensor(0.01))
        torch.testing.assert_close(histogram_range(bias, 10, ends), full)


def test_bins_never_shrink_below_float_resolution():
    histogram = torch.zeros(4, 1000, dtype=torch.int32)
    histogram[:, 500] = 7  # all scores equal
    lo, width = torch.tensor(-0.5), torch.tensor(1e-3)
    for _ in range(5):
        lo, width = histogram_range(torch.zeros(4), 1000, observed_range(histogram, lo, width))
    assert width > 5e-8
