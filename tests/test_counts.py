"""Every parameter of every variant is counted, K3's as audited; the presets are what they say."""

import json
from math import prod

import pytest

from openk3.config import K3Config, TextConfig, preset
from openk3.counts import describe, short
from openk3.presets import PRESETS


def test_k3_counts_are_the_audited_ones():
    counts = preset("k3").parameter_count()
    table = [tuple(row) for row in counts.rows]
    assert [row[:4] for row in table] == [
        ("KDA attention", 443_740_384, 69, 30_618_086_496),
        ("MLA attention", 232_196_096, 24, 5_572_706_304),
        ("norms and AttnRes", 43_008, 93, 3_999_744),
        ("dense FFN", 726_663_168, 1, 726_663_168),
        ("routed experts", 29_595_009_024, 92, 2_722_740_830_208),
        ("shared experts", 132_120_576, 92, 12_155_092_992),
        ("latent projections", 51_383_808, 92, 4_727_310_336),
        ("router", 6_423_424, 92, 590_955_008),
        ("embedding", 1_174_405_120, 1, 1_174_405_120),
        ("lm_head", 1_174_405_120, 1, 1_174_405_120),
        ("final norm and AttnRes", 21_504, 1, 21_504),
        ("vision tower", 401_214_464, 1, 401_214_464),
        ("projector", 46_144_512, 1, 46_144_512),
    ]
    inactive = {"embedding": 0, "vision tower": 0, "projector": 0, "routed experts": 48_620_371_968}
    assert all(row.active == inactive.get(row.name, row.total) for row in counts.rows)
    assert (counts.text_total, counts.vision_total, counts.total) == (2_779_484_476_000, 447_358_976, 2_779_931_834_976)
    assert (counts.active_without_head, counts.active, counts.active_with_embedding) == (103_015_207_520, 104_189_612_640, 105_364_017_760)


def test_kimi_linear_counts_are_the_released_models():
    counts = preset("kimi-linear-48b").parameter_count()
    assert counts.total == 49_122_681_728 and 2.9e9 < counts.active < 3.2e9


def tensors(cfg: K3Config):
    """(layer, name, shape) of every tensor, as the released names list them: a second way to count."""
    t, d = cfg.text_config, cfg.text_config.hidden_size
    yield from [(None, "embed_tokens", (t.vocab_size, d)), (None, "lm_head", (t.vocab_size, d)), (None, "norm", (d,))]
    if t.attn_res_block_size:
        yield from [(None, "output_attn_res_norm", (d,)), (None, "output_attn_res_proj", (1, d))]
    for n in range(t.num_hidden_layers):
        yield from [(n, "input_layernorm", (d,)), (n, "post_attention_layernorm", (d,))]
        if t.attn_res_block_size:
            for site in ("self_attention", "mlp"):
                yield from [(n, f"{site}_res_norm", (d,)), (n, f"{site}_res_proj", (1, d))]
        yield from ((n, name, shape) for name, shape in (kda(t) if t.is_kda(n) else full_attention(t)).items())
        if t.is_dense(n):
            yield from [(n, name, (t.intermediate_size, d)) for name in ("gate_proj", "up_proj", "down_proj")]
            continue
        yield from [(n, "gate", (t.num_experts, d)), (n, "e_score_correction_bias", (t.num_experts,))]
        if t.routed_expert_hidden_size:
            latent = t.routed_expert_hidden_size
            yield from [(n, "routed_expert_down_proj", (latent, d)), (n, "routed_expert_up_proj", (d, latent))]
            if t.latent_moe_use_norm:
                yield n, "routed_expert_norm", (latent,)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield n, f"shared_experts.{name}", (d, t.shared_intermediate)
        for e in range(t.num_experts):
            for name in ("w1", "w2", "w3"):
                yield n, f"experts.{e}.{name}", (t.moe_intermediate_size, t.latent_size)


def kda(t: TextConfig) -> dict[str, tuple[int, ...]]:
    c = t.linear_attn_config
    assert c is not None
    d, wide, rank = t.hidden_size, c.num_heads * c.head_dim, c.head_dim
    shapes = {f"{x}_proj": (wide, d) for x in "qkvo"} | {f"{x}_conv1d": (wide, 1, c.short_conv_kernel_size) for x in "qkv"}
    shapes |= {"f_a_proj": (rank, d), "f_b_proj": (wide, rank), "b_proj": (c.num_heads, d)}
    shapes |= {"A_log": (c.num_heads,), "dt_bias": (wide,), "o_norm": (c.head_dim,)}
    return shapes | ({"g_proj": (wide, d)} if c.use_full_rank_gate else {"g_a_proj": (rank, d), "g_b_proj": (wide, rank)})


def full_attention(t: TextConfig) -> dict[str, tuple[int, ...]]:
    d, h, v, qk = t.hidden_size, t.num_attention_heads, t.v_head_dim, t.qk_nope_head_dim + t.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {"o_proj": (d, h * v)} | ({"g_proj": (h * v, d)} if t.mla_use_output_gate else {})
    if t.kv_lora_rank is None:
        return shapes | {"q_proj": (h * qk, d), "k_proj": (h * qk, d), "v_proj": (h * v, d)}
    if t.q_lora_rank is None:
        shapes |= {"q_proj": (h * qk, d)}
    else:
        shapes |= {"q_a_proj": (t.q_lora_rank, d), "q_a_layernorm": (t.q_lora_rank,), "q_b_proj": (h * qk, t.q_lora_rank)}
    shapes |= {"kv_a_proj_with_mqa": (t.kv_lora_rank + t.qk_rope_head_dim, d), "kv_a_layernorm": (t.kv_lora_rank,)}
    return shapes | {"kv_b_proj": (h * (t.qk_nope_head_dim + v), t.kv_lora_rank)}


def variants() -> dict[str, K3Config]:
    nano = preset("nano")
    return {name: preset(name) for name in PRESETS if name != "k3"} | {
        "all MLA": nano.replace_text(linear_attn_config=None),
        "low-rank gate": nano.replace_linear_attn(use_full_rank_gate=False),
        "softplus decay": nano.replace_linear_attn(gate_lower_bound=None),
        "no output gate": nano.replace_text(mla_use_output_gate=False),
        "rotary": nano.replace_text(mla_use_nope=False),
        "full-rank queries": nano.replace_text(q_lora_rank=None),
        "multi-head attention": nano.replace_text(kv_lora_rank=None, q_lora_rank=None),
        "plain residual": nano.replace_text(attn_res_block_size=None),
        "no latent": nano.replace_text(routed_expert_hidden_size=None),
        "no latent norm": nano.replace_text(latent_moe_use_norm=False),
        "no shared experts": nano.replace_text(num_shared_experts=0),
        "dense": nano.replace_text(num_experts=None),
        "three dense layers": nano.replace_text(first_k_dense_replace=3),
        "silu": nano.replace_text(hidden_act="silu"),
    }


@pytest.mark.parametrize("name", variants())
def test_counts_equal_the_sum_over_tensors(name):
    cfg = variants()[name]
    text, counts = cfg.text_config, cfg.parameter_count()
    total = active = 0
    for _, tensor, shape in tensors(cfg):
        total += prod(shape)
        idle = tensor == "embed_tokens" or tensor.startswith("experts.") and int(tensor.split(".")[1]) >= (text.num_experts_per_token or 0)
        active += 0 if idle else prod(shape)
    assert (counts.total, counts.text_total, counts.vision_total, counts.active) == (total, total, 0, active)
    assert all(row.total == row.per_unit * row.units and row.total > 0 for row in counts.rows)
    assert K3Config.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert dict(describe(cfg))["parameters"].startswith(f"{total:,} ")


def test_description_says_what_the_model_is():
    k3, dense = dict(describe(preset("k3"))), dict(describe(preset("dense-nano")))
    assert k3["layers"] == "93 (69 KDA, 24 MLA; 1 dense, 92 with experts)" and k3["residual"] == "AttnRes, 8 blocks of 12 layers"
    assert "2.78T" in k3["with vision"] and "104.2B" in k3["active per token"] and "MXFP4" in k3["experts"]
    assert dense["residual"] == "plain" and "rotary" in dense["multi-head attention"] and "experts" not in dense and "KDA" not in dense
    assert [short(n) for n in (999, 1234, 999_960, 12_345_678, 2_779_931_834_976)] == ["999", "1.234K", "1M", "12.35M", "2.78T"]


# Presets


def test_nano_is_k3_in_every_part():
    cfg = preset("nano")
    text, linear = cfg.text_config, cfg.text_config.linear_attn_config
    layers = text.num_hidden_layers
    assert linear is not None and layers >= 8 and not text.is_kda(layers - 1) and sum(map(text.is_kda, range(layers))) * 4 == layers * 3
    assert linear.gate_lower_bound == -5.0 and linear.use_full_rank_gate and text.mla_use_nope and text.mla_use_output_gate
    assert text.attn_res_block_size and layers / text.attn_res_block_size >= 2
    assert text.num_experts and text.num_experts_per_token and text.num_experts >= 64 and text.num_experts / text.num_experts_per_token >= 8
    assert text.latent_size * 2 == text.hidden_size and text.latent_moe_use_norm and text.shared_intermediate > 0
    assert text.is_dense(0) and not any(map(text.is_dense, range(1, layers))) and text.hidden_act == "situ"
    text.check_packed(preset("k3").text_config.quantization_config, "")  # its experts can be packed


def test_baselines_differ_from_nano_only_in_their_parts():
    nano, dense, k2 = (preset(name) for name in ("nano", "dense-nano", "k2-nano"))
    d, k = dense.text_config, k2.text_config
    assert d.kv_lora_rank is None and d.num_experts is None and d.hidden_act == "silu" and not d.mla_use_nope
    assert k.kv_lora_rank and k.routed_expert_hidden_size is None and k.num_experts == nano.text_config.num_experts and not k.mla_use_nope
    for text in (d, k):
        assert text.linear_attn_config is None and text.attn_res_block_size is None and not text.mla_use_output_gate
    assert abs(dense.parameter_count().active_without_head / nano.parameter_count().active_without_head - 1) < 0.1
    assert abs(k2.parameter_count().total / nano.parameter_count().total - 1) < 0.15


def test_ladder_grows():
    totals = [preset(name).parameter_count().total for name in ("nano", "micro", "small", "base", "k3")]
    assert totals == sorted(totals)
    for name in ("nano", "micro", "small", "base"):
        text = preset(name).text_config
        assert not text.is_kda(text.num_hidden_layers - 1) and text.latent_size * 2 == text.hidden_size and text.hidden_act == "situ"
