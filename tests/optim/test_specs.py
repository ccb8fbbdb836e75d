"""Every parameter of every variant gets the rule that its name asks for, and what has no rule is refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from openk3.errors import UserError
from openk3.model.k3 import K3ForCausalLM
from openk3.optim.specs import block_specs, describe, specs_for
from openk3.presets import k3 as real_k3
from openk3.presets import kimi_linear_48b


def by_name(model, **options):
    return {spec.name: spec for spec in block_specs(model, **options)}


def test_every_parameter_of_every_variant_has_one_spec(tiny, variant):
    model = tiny(variant)
    specs = block_specs(model)
    assert [s.name for s in specs] == [name for name, _ in model.named_parameters()]
    assert all(s.param is p for s, p in zip(specs, model.parameters(), strict=True))
    for spec in specs:
        if spec.treatment == "muon":
            assert spec.param.ndim in (2, 3) and min(spec.param.shape[-2:]) > 1
            assert spec.rows is None or (spec.param.ndim == 2 and spec.param.shape[0] % spec.rows == 0)
        if spec.param.ndim == 1:
            assert spec.treatment == "adamw-no-decay"


K3_LAYER = {  # suffix: (treatment, rows per head) at hidden 32, 2 heads of 16 (KDA), nope 8 + rope 4, values 8
    "layers.0.self_attn.q_proj.weight": ("muon", 16),
    "layers.0.self_attn.k_proj.weight": ("muon", 16),
    "layers.0.self_attn.v_proj.weight": ("muon", 16),
    "layers.0.self_attn.o_proj.weight": ("muon", None),  # divides by rows, but its heads are columns
    "layers.0.self_attn.g_proj.weight": ("muon", None),
    "layers.0.self_attn.f_a_proj.weight": ("muon", None),
    "layers.0.self_attn.f_b_proj.weight": ("muon", None),
    "layers.0.self_attn.b_proj.weight": ("muon", None),
    "layers.0.self_attn.q_conv1d.weight": ("adamw-no-decay", None),  # maxtext #4843: taps as matrix rows are unstable
    "layers.0.self_attn.A_log": ("adamw-no-decay", None),
    "layers.0.self_attn.dt_bias": ("adamw-no-decay", None),
    "layers.0.self_attn.o_norm.weight": ("adamw-no-decay", None),
    "layers.0.self_attention_res_proj.weight": ("adamw-no-decay", None),
    "layers.0.mlp.down_proj.weight": ("muon", None),
    "layers.1.self_attn.q_a_proj.weight": ("muon", None),
    "layers.1.self_attn.q_b_proj.weight": ("muon", 12),
    "layers.1.self_attn.kv_a_proj_with_mqa.weight": ("muon", None),
    "layers.1.self_attn.kv_b_proj.weight": ("muon", 16),
    "layers.1.self_attn.kv_a_layernorm.weight": ("adamw-no-decay", None),
    "layers.1.self_attn.o_proj.weight": ("muon", None),
    "layers.1.block_sparse_moe.gate.weight": ("muon", None),
    "layers.1.block_sparse_moe.experts.w1": ("muon", None),
    "layers.1.block_sparse_moe.experts.w2": ("muon", None),
    "layers.1.block_sparse_moe.routed_expert_up_proj.weight": ("muon", None),
    "layers.1.block_sparse_moe.routed_expert_norm.weight": ("adamw-no-decay", None),
    "layers.1.block_sparse_moe.shared_experts.gate_proj.weight": ("muon", None),
    "embed_tokens.weight": ("adamw", None),
    "output_attn_res_proj.weight": ("adamw-no-decay", None),
    "norm.weight": ("adamw-no-decay", None),
}


def test_table_of_k3(tiny):
    specs = by_name(tiny("k3"))
    assert {name: (specs[f"model.{name}"].treatment, specs[f"model.{name}"].rows) for name in K3_LAYER} == K3_LAYER
    assert specs["lm_head.weight"].treatment == "adamw"


def test_heads_of_the_other_attentions(tiny):
    hybrid = by_name(tiny("mha-hybrid"))  # plain attention beside KDA under the same names: nope 8 + rope 4, values 20
    assert hybrid["model.layers.0.self_attn.q_proj.weight"].rows == 16
    assert [hybrid[f"model.layers.1.self_attn.{x}_proj.weight"].rows for x in "qkv"] == [12, 12, 20]
    assert by_name(tiny("no-attn-res"))["model.layers.1.self_attn.q_proj.weight"].rows == 12
    linear = by_name(tiny("kimi-linear"))
    assert linear["model.layers.0.self_attn.g_a_proj.weight"].rows is None and linear["model.layers.0.self_attn.q_proj.weight"].rows == 16


@pytest.mark.parametrize("config", [real_k3, kimi_linear_48b])
def test_released_sizes(config):
    with torch.device("meta"):
        model = K3ForCausalLM(config())
    specs = by_name(model)
    rows = {name.split("self_attn.")[1]: s.rows for name, s in specs.items() if s.rows}
    assert rows["q_proj.weight"] in (128, 192) and rows["kv_b_proj.weight"] == 256
    if config is real_k3:
        assert rows["q_b_proj.weight"] == 192
        heads = [s.param.shape[0] // s.rows for s in specs.values() if s.rows]
        assert set(heads) == {96} and len(heads) == 69 * 3 + 24 * 2


def test_without_heads_projections_stay_whole(tiny):
    model = tiny("k3")
    assert all(s.rows is None for s in block_specs(model, per_head=False))
    assert [s.treatment for s in block_specs(model, per_head=False)] == [s.treatment for s in block_specs(model)]


def test_optimizer_options(tiny):
    model = tiny("k3")
    assert [s.rows for s in specs_for(model, "per-head-muon")] == [s.rows for s in block_specs(model)]
    assert not any(s.rows for s in specs_for(model, "muon"))
    adamw = {s.name: s.treatment for s in specs_for(model, "adamw")}
    assert set(adamw.values()) == {"adamw", "adamw-no-decay"} and adamw["model.layers.0.self_attn.q_proj.weight"] == "adamw"
    with pytest.raises(UserError, match="per-head-muon, muon, adamw"):
        specs_for(model, "sgd")


def test_description_counts_everything(tiny):
    model = tiny("k3")
    rows = describe(block_specs(model))
    assert {r["treatment"] for r in rows} == {"muon per head", "muon per expert", "muon whole matrix", "adamw", "adamw-no-decay"}
    assert sum(r["count"] for r in rows) == len(list(model.parameters()))
    assert sum(r["parameters"] for r in rows) == sum(p.numel() for p in model.parameters())
    experts = next(r for r in rows if r["treatment"] == "muon per expert")
    assert experts["count"] == 3 * sum("experts.w1" in n for n, _ in model.named_parameters())


def test_unknown_matrix_is_refused_by_name(tiny):
    model = tiny("k3")
    model.model.layers[0].self_attn.adapter = nn.Linear(32, 32, bias=False)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.adapter\.weight \[32, 32\]"):
        block_specs(model)
    model.model.layers[0].self_attn.adapter.requires_grad_(False)
    assert not any("adapter" in s.name for s in block_specs(model))


def test_rows_that_contradict_the_config_are_refused(tiny):
    model = tiny("k3")
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.zeros(34, 32))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj\.weight has 34 rows.*2 heads of 16"):
        block_specs(model)


def test_model_without_config_is_refused():
    with pytest.raises(UserError, match="Linear has no config"):
        block_specs(nn.Linear(2, 2))


def test_wrappers_do_not_change_the_rules(tiny):
    expected = [(s.treatment, s.rows) for s in block_specs(tiny("k3"))]
    model = tiny("k3")

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model

    assert [(s.treatment, s.rows) for s in block_specs(Wrapper())] == expected
    assert [(s.treatment, s.rows) for s in block_specs(torch.compile(model, backend="eager"))] == expected

    attention, experts = model.model.layers[0].self_attn, model.model.layers[1].block_sparse_moe.experts
    parametrize.register_parametrization(attention.q_proj, "weight", nn.Identity())  # as quantisation-aware training does
    parametrize.register_parametrization(experts, "w1", nn.Identity())
    specs = by_name(model)
    assert specs["model.layers.0.self_attn.q_proj.parametrizations.weight.original"].rows == 16
    assert specs["model.layers.1.block_sparse_moe.experts.parametrizations.w1.original"].treatment == "muon"


def test_vision_gets_adamw():
    """The tower isn't split into heads; K3's report is silent about it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = real_k3()
            self.vision_tower = nn.ModuleDict({"wqkv": nn.Linear(4, 12, bias=False), "norm0": nn.RMSNorm(4)})
            self.mm_projector = nn.ModuleDict({"proj": nn.Linear(4, 4, bias=False)})

    assert [(s.name, s.treatment) for s in block_specs(Model())] == [
        ("vision_tower.wqkv.weight", "adamw"),
        ("vision_tower.norm0.weight", "adamw-no-decay"),
        ("mm_projector.proj.weight", "adamw"),
    ]


def test_the_routers_may_have_a_rate_of_their_own(tiny):
    specs = specs_for(tiny("k3"), router_lr=0.25)
    assert {s.lr_scale for s in specs if s.name.endswith("gate.weight")} == {0.25}
    assert {s.lr_scale for s in specs if not s.name.endswith("gate.weight")} == {1.0}
