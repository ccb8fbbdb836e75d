"""One model, many configs: what each switch builds, that each one matters, and what the parts promise to those who use them."""

import pytest
import torch
from torch import Tensor

from openk3.model.k3 import K3ForCausalLM
from openk3.model.latent_moe import Router
from openk3.ops.attn_res import BlockSummary
from openk3.presets import nano


def random_ids(batch: int = 2, tokens: int = 20, vocab: int = 97, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


# What is built


def test_parameters_are_those_that_the_config_counts(variant: str, tiny) -> None:
    model = tiny(variant)
    built = sum(t.numel() for t in model.state_dict().values())
    assert built == model.config.parameter_count().total


TENSORS = {  # variant → patterns of which each must be found among its tensors' names, and patterns of which none may
    "k3": (["q_b_proj", "kv_b_proj", "0.self_attn.g_proj", "1.self_attn.g_proj", "_res_proj", "routed_expert_norm", "shared_experts",
            "A_log", "0.mlp.up_proj", "1.block_sparse_moe"], ["1.self_attn.q_proj", "g_a_proj", "0.block_sparse_moe", "1.mlp."]),
    "rotary-mla": (["_res_proj", "0.self_attn.kv_b_proj"], ["A_log", "conv1d", "self_attn.g_proj"]),
    "mha-hybrid": (["1.self_attn.k_proj", "1.self_attn.g_proj", "0.self_attn.A_log"], ["kv_b_proj", "q_b_proj"]),
    "dense": (["self_attn.k_proj", "2.mlp.gate_proj"], ["_res_", "block_sparse_moe", "kv_b_proj", "A_log", "g_proj"]),
    "kimi-linear": (["g_a_proj", "g_b_proj", "1.self_attn.q_proj"], ["_res_", "routed_expert", "q_a_proj", "self_attn.g_proj"]),
    "k2": (["q_a_proj", "shared_experts"], ["_res_", "routed_expert", "self_attn.g_proj", "A_log"]),
    "no-attn-res": (["routed_expert_norm", "A_log", "1.self_attn.q_proj"], ["_res_", "q_a_proj"]),
    "dense-ffn": (["_res_proj", "4.mlp.gate_proj"], ["experts", "block_sparse_moe"]),
    "softmax-router": (["routed_expert_down_proj", "routed_expert_up_proj"], ["shared_experts", "routed_expert_norm"]),
}  # fmt: skip


def test_a_variant_has_its_tensors_and_no_others(variant: str, tiny) -> None:
    names = list(tiny(variant).state_dict())
    present, absent = TENSORS[variant]
    assert [part for part in present if not any(part in name for name in names)] == []
    assert [name for name in names if any(part in name for part in absent)] == []


SWITCHES = [
    ("k3", {"attn_res_block_size": 1}), ("k3", {"activation_situ_beta": 1.0}), ("k3", {"activation_situ_linear_beta": 0.3}),
    ("k3", {"activation_situ_linear_beta": None, "activation_situ_beta": 2.0}), ("k3", {"hidden_act": "silu"}),
    ("k3", {"num_experts_per_token": 1}), ("k3", {"moe_router_activation_func": "softmax", "latent_moe_use_norm": True}),
    ("no-attn-res", {"rms_norm_eps": 1e-2}), ("kimi-linear", {"routed_scaling_factor": 1.0}), ("kimi-linear", {"moe_renormalize": False}),
    ("k2", {"rope_theta": 100.0}), ("k2", {"mla_use_nope": True}), ("mha-hybrid", {"mla_use_nope": True}),
]  # fmt: skip


@pytest.mark.parametrize("name,change", SWITCHES, ids=str)
@torch.no_grad()
def test_a_switch_without_tensors_of_its_own_changes_the_logits(name: str, change: dict, tiny, worst) -> None:
    """The same weights under another config: a field that nobody reads would leave the logits as they are."""
    one = tiny(name)
    other = K3ForCausalLM(one.config.replace_text(**change)).eval()
    other.load_state_dict(one.state_dict())
    ids = random_ids()
    assert worst(other(ids).logits, one(ids).logits) > 1e-2


@torch.no_grad()
def test_the_decay_is_bounded_or_softplus_as_the_config_says(tiny) -> None:
    """K3: g in (−5, 0), exactly its sigmoid; null: −exp(A)·softplus(z), which goes below any bound (K3 report Eq. 5)."""
    bounded = tiny("k3")
    free = K3ForCausalLM(bounded.config.replace_linear_attn(gate_lower_bound=None)).eval()
    free.load_state_dict(bounded.state_dict())
    x = 30 * torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(0))
    one, two = (m.model.layers[0].self_attn for m in (bounded, free))
    z = (one.f_b_proj(one.f_a_proj(x)) + one.dt_bias).unflatten(-1, (2, 16)).double()
    a = one.A_log.double().exp()[:, None]
    torch.testing.assert_close(one.decay(x).double(), -5 * torch.sigmoid(a * z), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two.decay(x).double(), -a * torch.nn.functional.softplus(z), rtol=1e-5, atol=1e-6)
    assert one.decay(x).min() >= -5 and one.decay(x).max() <= 0 and two.decay(x).min() < -20


def test_every_parameter_gets_a_gradient(variant: str, tiny) -> None:
    model, ids = tiny(variant).train(), random_ids(4, 30)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == ([] if model.config.text_config.attn_res_block_size is None else
                       ["model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"])  # fmt: skip
    for name, p in model.named_parameters():
        assert p.grad is None or (p.grad.isfinite().all() and p.grad.count_nonzero() > 0), name


def test_gradients_are_the_slope_of_the_loss(variant: str, tiny) -> None:
    """A central difference along the gradient, in float64: whatever backward is written by hand, it fits its forward."""
    model, ids = tiny(variant).double(), random_ids(2, 19)
    parameters = list(model.parameters())
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    slope = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    step, values = 1e-5 / slope.sqrt(), []
    with torch.no_grad():
        for sign in (1, -2):
            for p in parameters:
                if p.grad is not None:
                    p.add_(p.grad, alpha=float(sign * step))
            values.append(model.loss(ids[:, :-1], ids[:, 1:]))
    assert abs((values[0] - values[1]) / (2 * step) - slope) < 1e-5 * slope


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7])
def test_two_phase_reads_equal_direct_ones(block: int, tiny, monkeypatch) -> None:
    """Any block size, whole or cut short by the last layer: values and gradients; one summary a block."""
    results, made, init = [], [], BlockSummary.__init__
    monkeypatch.setattr(BlockSummary, "__init__", lambda self, *args: made.append(args[1].shape[0]) or init(self, *args))
    for two_phase in (False, True):
        model, ids = tiny("k3", attn_res_block_size=block).double(), random_ids()
        model.model.two_phase = two_phase
        logits = model(ids).logits
        logits.square().sum().backward()
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-9, atol=1e-10)
    layers = [min(block, 5 - first) for first in range(0, 5, block)]
    assert made == [2 * n for n in layers[:-1]] + [2 * layers[-1] + 1]  # two sites a layer, and the output's with the last
    for name, grad in results[0][1].items():
        if grad is not None:
            assert (results[1][1][name] - grad).norm() <= 1e-8 * grad.norm(), name


@torch.no_grad()
def test_sites_read_the_sources_of_the_report(tiny) -> None:
    """Attention of layer l: ceil(l/n) + 1 sources, one at l = 0; feed-forward: floor(l/n) + 2; output: blocks and the sum."""
    depth = tiny("k3")(random_ids(), trace=True).depth
    counts = {name: len(weights) for name, weights in depth}
    for layer in range(5):
        assert counts[f"L{layer}.attn"] == (-(-layer // 2) + 1 if layer else 1)
        assert counts[f"L{layer}.ffn"] == layer // 2 + 2
    assert counts["output"] == 4 and len(counts) == 11
    for _, weights in depth:
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


@torch.no_grad()
def test_outputs_asked_for(tiny) -> None:
    model, ids = tiny("k3"), random_ids()
    plain, full = model(ids), model(ids, keep_hidden=True, trace=True)
    assert plain.hidden is None and plain.depth is None
    assert torch.equal(plain.logits, full.logits)
    assert [tuple(h.shape) for h in full.hidden] == 5 * [(2, 20, 32)]
    assert torch.equal(model.lm_head(plain.last_hidden), plain.logits)
    headless = model(ids, head=False)
    assert headless.logits is None and torch.equal(headless.last_hidden, plain.last_hidden)


@torch.no_grad()
def test_loss_is_the_mean_over_what_is_asked(tiny) -> None:
    model, ids = tiny("k3"), random_ids()
    targets = ids.roll(-1, 1)
    targets[:, -1] = targets[0, 3:9] = -100
    logits = model(ids).logits.double().log_softmax(-1)
    asked = targets != -100
    nll = -logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)[asked]
    torch.testing.assert_close(model.loss(ids, targets).double(), nll.mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model.loss(ids, targets, reduction="sum").double(), nll.sum(), rtol=1e-5, atol=0)


@torch.no_grad()
def test_the_future_is_not_seen(variant: str, tiny) -> None:
    model, ids = tiny(variant).double(), random_ids()
    changed = ids.clone()
    changed[:, 13:] = random_ids(seed=1)[:, 13:]
    a, b = model(ids).logits, model(changed).logits
    torch.testing.assert_close(a[:, :13], b[:, :13], rtol=1e-9, atol=1e-10)
    assert (a[:, 13:] - b[:, 13:]).abs().max() > 0.1


# The router


@pytest.fixture
def gate(tiny) -> Router:
    return tiny("k3").model.layers[1].block_sparse_moe.gate


def listen(gate: Router) -> Router:
    """As whoever balances does at the start of a step."""
    gate.train()
    gate.collect = True
    gate.load = torch.zeros(gate.num_experts, dtype=torch.int64)
    gate.histogram = torch.zeros(gate.num_experts, gate.bins, dtype=torch.int32)
    return gate


def inputs(tokens: int = 40) -> Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2))


def test_the_bias_chooses_and_does_not_weigh(gate: Router) -> None:
    x = inputs()
    scores = torch.sigmoid(x @ gate.weight.T)
    gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    routing = gate(x)
    assert torch.equal(routing.indices.sort().values, (scores + gate.e_score_correction_bias).topk(3).indices.sort().values)
    assert not torch.equal(routing.indices.sort().values, scores.topk(3).indices.sort().values)
    chosen = scores.gather(1, routing.indices)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(1, keepdim=True))


def test_the_bias_has_no_gradient_and_no_optimizer(tiny) -> None:
    model, ids = tiny("k3"), random_ids()
    assert not any("e_score_correction_bias" in name for name, _ in model.named_parameters())
    assert sum("e_score_correction_bias" in name for name in model.state_dict()) == 4
    model.loss(ids, ids).backward()
    assert all(not b.requires_grad and b.grad is None for b in model.buffers())


@pytest.mark.parametrize("cast", [
    lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float16),
    lambda m: m.bfloat16().float(),
])  # fmt: skip
def test_casting_the_model_leaves_the_bias_alone(cast, tiny) -> None:
    model = tiny("k3")
    before = {name: b.clone() for name, b in model.named_buffers()}
    cast(model)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys() == {f"model.layers.{n}.block_sparse_moe.gate.e_score_correction_bias" for n in (1, 2, 3, 4)}
    for name, bias in after.items():
        assert bias.dtype == torch.float32 and torch.equal(bias, before[name])
        assert model.state_dict()[name] is not None and torch.equal(model.state_dict()[name], bias)


def test_scores_are_float32_under_half_precision(tiny) -> None:
    gate = tiny("k3").bfloat16().model.layers[1].block_sparse_moe.gate
    routing = gate(inputs().bfloat16())
    assert routing.scores.dtype == routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.scores, torch.sigmoid(inputs().bfloat16().float() @ gate.weight.float().T))


def test_loads_count_tokens_and_add_up_over_calls(gate: Router) -> None:
    listen(gate)
    first, second = gate(inputs(40)), gate(inputs(7))
    expected = torch.bincount(torch.cat([first.indices, second.indices]).flatten(), minlength=8)
    assert torch.equal(gate.load, expected) and gate.load.sum() == 47 * 3
    assert (gate.histogram.sum(1) == 47).all()


def test_padding_is_not_counted(gate: Router) -> None:
    valid = torch.arange(40) % 3 > 0
    masked = listen(gate)(inputs(), valid)
    load, histogram = gate.load, gate.histogram
    plain = listen(gate)(inputs()[valid])
    assert torch.equal(masked.indices[valid], plain.indices)
    assert torch.equal(load, gate.load) and torch.equal(histogram, gate.histogram)
    assert load.sum() == 3 * valid.sum()


def test_padding_is_not_counted_in_a_whole_model(tiny) -> None:
    ids, mask = random_ids(2, 10), torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    model = tiny("k3")
    gates = [listen(layer.block_sparse_moe.gate) for layer in model.model.layers[1:]]
    model.train()(ids, attention_mask=mask)
    assert [int(gate.load.sum()) for gate in gates] == 4 * [16 * 3]
    assert all((gate.histogram.sum(1) == 16).all() for gate in gates)


def test_nothing_is_counted_in_evaluation_or_unasked(gate: Router) -> None:
    listen(gate).eval()
    gate(inputs())
    assert gate.load.sum() == 0 and gate.histogram.sum() == 0
    gate.train()
    gate.collect = False
    gate(inputs())
    assert gate.load.sum() == 0 and gate.histogram.sum() == 0


def test_counting_changes_no_routing(gate: Router) -> None:
    gate.eval()
    plain = gate(inputs())
    counted = listen(gate)(inputs())
    assert torch.equal(plain.indices, counted.indices) and torch.equal(plain.weights, counted.weights)


# bfloat16


@pytest.fixture(scope="module")
def nano_model() -> K3ForCausalLM:
    return K3ForCausalLM(nano()).init_weights(0).eval()


@pytest.mark.parametrize("how", ["weights", "activations"])
@torch.no_grad()
def test_nano_in_bfloat16_has_the_loss_of_float32(how: str, nano_model) -> None:
    """Weights rounded as in a released file, or float32 masters under bfloat16 activations as in training."""
    model = K3ForCausalLM(nano_model.config).eval()
    model.load_state_dict(nano_model.state_dict())
    if how == "weights":
        model.bfloat16()
    else:
        model.model.compute_dtype = torch.bfloat16
    ids = random_ids(2, 65, 4096)
    logits = model(ids).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    loss, want = (m.loss(ids[:, :-1], ids[:, 1:]) for m in (model, nano_model))
    assert loss.dtype == torch.float32 and abs(float(loss - want)) < 0.01


def test_bfloat16_activations_give_float32_gradients_close_to_float32_ones(nano_model) -> None:
    model = K3ForCausalLM(nano_model.config)
    ids, grads = random_ids(2, 33, 4096), []
    for dtype in (None, torch.bfloat16):
        model.load_state_dict(nano_model.state_dict())
        model.zero_grad()
        model.model.compute_dtype = dtype
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    flat = [torch.cat([g.flatten() for g in some.values()]) for some in grads]
    assert flat[1].dtype == torch.float32 and flat[1].isfinite().all()
    assert torch.cosine_similarity(flat[0], flat[1], dim=0) > 0.99


@torch.no_grad()
def test_variants_in_bfloat16(variant: str, tiny) -> None:
    exact, half, ids = tiny(variant), tiny(variant).bfloat16(), random_ids()
    logits = half(ids).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert torch.cosine_similarity(logits.float().flatten(), exact(ids).logits.flatten(), dim=0) > 0.98
