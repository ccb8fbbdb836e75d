"""Names and shapes by arithmetic: K3's published totals, the golden files' headers, and the modules of every preset."""

import dataclasses
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.checkpoint.expected import component, expected_tensors
from openk3.checkpoint.names import canonical, padded, released, split_expert, split_stack
from openk3.checkpoint.reader import read_header
from openk3.config import K3Config
from openk3.model.k3 import K3ForCausalLM
from openk3.presets import PRESETS

K3_CONFIG = Path(__file__).parent.parent / "golden" / "k3-config.json"
BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@pytest.fixture(scope="module")
def k3():
    return expected_tensors(K3Config.load(K3_CONFIG))


def test_k3_has_the_published_number_of_tensors_and_bytes(k3):
    """As two independent audits of the released shards' headers found."""
    assert len(k3) == 497_220
    assert sum(prod(shape) * BYTES[dtype] for shape, dtype in k3.values()) == 1_560_860_324_864
    assert Counter(dtype for _, dtype in k3.values()) == {"U8": 494_592, "BF16": 2_122, "F32": 506}
    weights = {name: prod(shape) * (2 if name.endswith("_packed") else not name.endswith("_scale")) for name, (shape, _) in k3.items()}
    assert sum(weights.values()) == 2_779_931_837_184
    by_component = Counter()
    for name, count in weights.items():
        by_component[component(name)] += count
    assert by_component["vision tower"] == 401_214_464 and by_component["vision projector"] == 46_144_512
    assert by_component["routed experts"] == 2_722_740_830_208
    assert sum(name.startswith("vision_tower.") for name in k3) == 165 and sum(name.startswith("mm_projector.") for name in k3) == 3


def test_k3_tensors_one_by_one(k3):
    layer = "language_model.model.layers."
    want = {
        "language_model.lm_head.weight": ((163840, 7168), "BF16"),
        f"{layer}0.mlp.down_proj.weight": ((7168, 33792), "BF16"),
        f"{layer}0.self_attn.A_log": ((128,), "F32"),
        f"{layer}0.self_attn.q_conv1d.weight": ((12288, 1, 4), "F32"),
        f"{layer}0.self_attn.f_b_proj.weight": ((12288, 128), "BF16"),
        f"{layer}92.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
        f"{layer}92.self_attn.kv_b_proj.weight": ((24576, 512), "BF16"),
        f"{layer}1.block_sparse_moe.gate.e_score_correction_bias": ((896,), "F32"),
        f"{layer}1.block_sparse_moe.experts.895.w1.weight_packed": ((3072, 1792), "U8"),
        f"{layer}1.block_sparse_moe.experts.895.w1.weight_scale": ((3072, 112), "U8"),
        f"{layer}1.block_sparse_moe.experts.0.w2.weight_scale": ((3584, 96), "U8"),
        "vision_tower.encoder.blocks.26.wqkv.weight": ((4608, 1024), "BF16"),
        "mm_projector.proj.2.weight": ((7168, 4096), "BF16"),
    }
    assert {name: k3.get(name) for name in want} == want
    assert f"{layer}1.mlp.down_proj.weight" not in k3 and f"{layer}3.self_attn.A_log" not in k3


@pytest.mark.parametrize("name", ["k3-tiny", "k3-tiny-mxfp4", "k3-tiny-vision"])
def test_golden_headers(folder_of, name):
    stored = {t.name: (t.shape, t.dtype) for t in read_header(folder_of(name) / "model.safetensors")}
    assert stored == expected_tensors(K3Config.load(folder_of(name)))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_names_the_tensors_of_its_modules(name):
    config = dataclasses.replace(PRESETS[name](), vision_config=None)
    if config.text_config.num_experts is not None:  # as few as can be: they are alike
        config = config.replace_text(num_experts=config.text_config.num_experts_per_token + 1)
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    found = {}
    for key, value in model.state_dict().items():
        stack = split_stack(key)
        if stack is None:
            found[released(key, config.flat)] = (padded(len(value)),) if key.endswith("A_log") else tuple(value.shape)
        else:
            stem = released(stack[0], config.flat)
            found |= {f"{stem}.{e}.{stack[1]}.weight": tuple(value.shape[1:]) for e in range(len(value))}
    assert found == {key: shape for key, (shape, _) in expected_tensors(config, packed=False).items()}


def test_packed_can_be_decided_matrix_by_matrix(folder_of):
    names = expected_tensors(K3Config.load(folder_of("k3-tiny")), lambda matrix: split_expert(f"{matrix}.weight")[1] == 3)
    stem = "language_model.model.layers.1.block_sparse_moe.experts"
    assert names[f"{stem}.3.w1.weight_packed"] == ((32, 16), "U8") and f"{stem}.3.w1.weight" not in names
    assert names[f"{stem}.2.w1.weight"] == ((32, 32), "F32")


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.3.self_attention_res.proj_weight", "model.layers.3.self_attention_res_proj.weight"),
        ("language_model.model.layers.3.mlp_res.norm_weight", "model.layers.3.mlp_res_norm.weight"),
        ("language_model.model.output_attn_res.proj_weight", "model.output_attn_res_proj.weight"),
        ("language_model.output_attn_res.norm_weight", "model.output_attn_res_norm.weight"),
        ("language_model.layers.0.self_attn.A_log", "model.layers.0.self_attn.A_log"),
        ("language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("something.else", "something.else"),
    ],
)
def test_early_ports_spellings(stored, name):
    assert canonical(stored, flat=True) == name
    assert canonical(stored, flat=False) == f"language_model.{name}"


def test_released_names_are_their_own_spelling(k3):
    assert all(canonical(name, flat=False) == name for name in list(k3)[::50])
    flat = expected_tensors(PRESETS["kimi-linear-48b"](), packed=False)
    assert all(canonical(name, flat=True) == name for name in flat) and not any(name.startswith("language") for name in flat)


@given(st.text(st.sampled_from("abw123._experts"), max_size=40), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_renaming_is_settled_after_once(name, flat):
    assert canonical(canonical(name, flat), flat) == canonical(name, flat)


def test_stacks_and_experts():
    stem = "model.layers.1.block_sparse_moe.experts"
    assert split_stack(f"{stem}.w2_scale") == (stem, "w2", "_scale") and split_stack(f"{stem}.w1") == (stem, "w1", "")
    assert split_expert(f"{stem}.17.w3.weight_packed") == (stem, 17, "w3", "weight_packed")
    assert split_stack(f"{stem}.0.w1.weight") is split_expert(f"{stem}.w1") is None
    assert split_expert("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight") is None
    assert [padded(heads) for heads in (1, 96, 128, 129)] == [128, 128, 128, 256]
