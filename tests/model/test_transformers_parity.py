"""The generations before K3 equal Hugging Face's: Kimi Linear part by part, K2-like (DeepSeek-V3) and dense (Llama) as wholes.

Tiny random models, weights mapped by name, float32. Differences are in standard deviations, for the worst element.
"""

import pytest
import torch
from torch import Tensor, nn

from openk3.model.attn_res import DepthState
from openk3.model.k3 import K3ForCausalLM
from openk3.model.layout import Layout

transformers = pytest.importorskip("transformers", minversion="5.24")

TOLERANCE = 1e-5
VOCAB = 97


def their_weights(model: K3ForCausalLM) -> dict[str, Tensor]:
    """Our state dict by transformers' names: filters of a layer joined, decay parameters in a module of their own, experts stacked."""
    ours, theirs = model.state_dict(), {}
    for name, value in ours.items():
        stem = name.rpartition("self_attn.")[0] + "self_attn."
        if name.endswith("q_conv1d.weight"):
            theirs[stem + "conv1d.weight"] = torch.cat([ours[stem + f"{x}_conv1d.weight"] for x in "qkv"])
        elif "_conv1d" in name or name.endswith("experts.w3"):
            continue
        elif name.endswith(("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")):
            theirs[stem + "forget_gate." + name.removeprefix(stem)] = value.view(1, 1, -1, 1) if name.endswith("A_log") else value
        elif name.endswith("experts.w1"):
            into = name.replace("block_sparse_moe", "mlp").removesuffix("w1")
            theirs[into + "gate_up_proj"] = torch.cat([value, ours[name.removesuffix("w1") + "w3"]], 1)
            theirs[into + "down_proj"] = ours[name.removesuffix("w1") + "w2"]
        elif not name.endswith("experts.w2"):
            theirs[name.replace("block_sparse_moe", "mlp")] = value
    return theirs


def twin(model: K3ForCausalLM, kind: str, **config) -> nn.Module:
    """The same model in transformers."""
    text = model.config.text_config
    shared = {
        name: getattr(text, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                     "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    }  # fmt: skip
    made = getattr(transformers, kind + "Config")(**shared, **config)
    made._attn_implementation = "eager"
    theirs = getattr(transformers, kind + "ForCausalLM")(made).eval()
    theirs.load_state_dict(their_weights(model))
    return theirs


@pytest.fixture(scope="module")
def kimi_linear(tiny) -> tuple[K3ForCausalLM, nn.Module]:
    model = tiny("kimi-linear")
    fields = model.config.to_dict()
    names = (
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts "
        "moe_intermediate_size first_k_dense_replace routed_scaling_factor hidden_act linear_attn_config"
    )
    return model, twin(model, "KimiLinear", **{name: fields[name] for name in names.split()}, mla_use_nope=True)


def random_ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(1, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(0))


def stream(tokens: int = 70) -> Tensor:
    """Something a sub-layer may get as input."""
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(1))


def causal(tokens: int) -> Tensor:
    return torch.full((1, 1, tokens, tokens), -torch.inf).triu(1)


# Kimi Linear, part by part


@pytest.mark.parametrize("tokens", [1, 5, 64, 70])
@torch.no_grad()
def test_kda_layer(tokens: int, kimi_linear, worst) -> None:
    """Against their chunk form of 64 tokens, with softplus decay and a low-rank gate."""
    x, layout = stream(tokens), Layout(2, tokens, torch.device("cpu"))
    for layer in (0, 2):
        ours, theirs = (m.model.layers[layer].self_attn for m in kimi_linear)
        assert ours.lower_bound is None and hasattr(ours, "g_a_proj")
        assert worst(ours(x, layout), theirs(x)) < TOLERANCE


@torch.no_grad()
def test_mla_layer(kimi_linear, worst) -> None:
    x = stream()
    ours, theirs = (m.model.layers[1].self_attn for m in kimi_linear)
    assert ours.theta is None and ours.g_proj is None
    assert worst(ours(x, Layout(2, 70, torch.device("cpu"))), theirs(x, causal(70))[0]) < TOLERANCE


@torch.no_grad()
def test_latent_norms_use_their_own_epsilon(kimi_linear, worst) -> None:
    """1e-6 in the released Python, not rms_norm_eps; it shows where the latent is small."""
    x = 1e-3 * stream()
    ours, theirs = (m.model.layers[1].self_attn for m in kimi_linear)
    layout, want = Layout(2, 70, torch.device("cpu")), theirs(x, causal(70))[0]
    assert worst(ours(x, layout), want) < TOLERANCE
    ours.kv_a_layernorm.eps = 1e-5
    other = ours(x, layout)
    ours.kv_a_layernorm.eps = 1e-6
    assert worst(other, want) > 0.01


@torch.no_grad()
def test_moe_and_dense_feed_forward(kimi_linear, worst) -> None:
    x = stream()
    (dense, *sparse), (their_dense, *their_sparse) = (m.model.layers for m in kimi_linear)
    assert worst(dense.mlp(x), their_dense.mlp(x)) < TOLERANCE
    for ours, theirs in zip(sparse, their_sparse, strict=True):
        routing = ours.block_sparse_moe.gate(x.flatten(0, 1))
        _, weights, indices = theirs.mlp.gate(x)
        order, their_order = routing.indices.argsort(-1), indices.argsort(-1)
        assert torch.equal(routing.indices.gather(1, order), indices.gather(1, their_order))
        torch.testing.assert_close(routing.weights.gather(1, order), weights.gather(1, their_order))
        assert routing.weights.sum(-1).allclose(torch.tensor(2.446))
        assert worst(ours.block_sparse_moe(x), theirs.mlp(x)) < TOLERANCE


@torch.no_grad()
def test_each_decoder_layer(kimi_linear, worst) -> None:
    x = stream()
    for ours, theirs in zip(*(m.model.layers for m in kimi_linear), strict=True):
        depth = DepthState(x, None, 1e-5)
        ours(depth, Layout(2, 70, torch.device("cpu")))
        want = theirs(x, attention_mask=None if ours.is_kda else causal(70))
        assert worst(depth.partial, want) < TOLERANCE


# Whole models


@torch.no_grad()
def test_kimi_linear_logits(kimi_linear, worst) -> None:
    ours, theirs = kimi_linear
    ids = random_ids(2, 75)
    assert worst(ours(ids).logits, theirs(ids).logits) < TOLERANCE


@torch.no_grad()
def test_kimi_linear_left_padded(kimi_linear, worst) -> None:
    ours, theirs = kimi_linear
    ids, mask = random_ids(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :11] = 0
    got, want = ours(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask).logits
    assert worst(got[mask.bool()], want[mask.bool()]) < TOLERANCE


@torch.no_grad()
def test_kimi_linear_step_by_step(kimi_linear, worst) -> None:
    """A prompt, then tokens one by one, each with its own cache."""
    ours, theirs = kimi_linear
    ids, cache, their_cache = random_ids(2, 26), ours.new_cache(2), None
    for piece in ids.split([20, 1, 1, 1, 1, 1, 1], 1):
        out = theirs(piece, cache=their_cache, use_cache=True)
        their_cache = out.cache
        assert worst(ours(piece, cache=cache).logits, out.logits) < TOLERANCE


def test_kimi_linear_gradients(kimi_linear) -> None:
    ours, theirs = kimi_linear
    ids = random_ids(2, 40)
    for model in kimi_linear:
        model.zero_grad()
    loss = ours.loss(ids[:, :-1], ids[:, 1:])
    want = theirs(ids, labels=ids).loss
    assert abs(loss.item() - want.item()) < 1e-5
    loss.backward()
    want.backward()
    grads = K3ForCausalLM(ours.config)
    grads.load_state_dict({name: p.grad for name, p in ours.named_parameters()}, strict=False)  # the bias has no gradient
    grads = their_weights(grads)
    for name, p in theirs.named_parameters():
        assert (grads[name] - p.grad).norm() < 1e-4 * p.grad.norm(), name


@torch.no_grad()
def test_k2_like_equals_deepseek_v3(tiny, worst) -> None:
    """Rotary latent attention with low-rank queries. Pairs are (i, i + half), so their interleaving is off."""
    model = tiny("k2", rope_theta=500.0, routed_scaling_factor=1.7)
    text = model.config.text_config
    names = (
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size first_k_dense_replace "
        "routed_scaling_factor hidden_act"
    )
    theirs = twin(
        model, "DeepseekV3", **{name: getattr(text, name) for name in names.split()}, n_routed_experts=text.num_experts,
        num_experts_per_tok=text.num_experts_per_token, n_shared_experts=text.num_shared_experts, n_group=1, topk_group=1,
        rope_interleave=False, num_mtp_layers=0, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    ids = random_ids(2, 40)
    got = model(ids).logits
    assert worst(got, theirs(ids).logits) < TOLERANCE
    assert worst(tiny("k2", routed_scaling_factor=1.7)(ids).logits, got) > 1e-3  # with another theta


@torch.no_grad()
def test_the_dense_control_is_a_llama(tiny, worst) -> None:
    model = tiny("dense", rope_theta=500.0)
    theirs = twin(model, "Llama", head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, hidden_act="silu")
    ids = random_ids(2, 40)
    got = model(ids).logits
    assert worst(got, theirs(ids).logits) < TOLERANCE
    assert worst(tiny("dense")(ids).logits, got) > 1e-3
