"""The config: released files round-trip, every bad field is one clear line."""

import copy
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.config import K3Config, preset
from openk3.errors import UserError
from openk3.presets import PRESETS, layer_split
from openk3.schema import BOOKKEEPING, FrozenDict

K3_FILE = Path(__file__).parent / "golden" / "k3-config.json"
RELEASED = json.loads(K3_FILE.read_text())
FLAT = PRESETS["kimi-linear-48b"]().to_dict()
LEVELS = ["", "text_config.", "text_config.linear_attn_config.", "vision_config."]
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
JSON_VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=5)


def changed(source: dict, path: str, value: object) -> dict:
    """A copy of the file with one field set ("text_config.hidden_size"), or removed (value is `...`)."""
    d = copy.deepcopy(source)
    *levels, name = path.split(".")
    level = d
    for key in levels:
        level = level[key]
    if value is ...:
        del level[name]
    else:
        level[name] = value
    return d


def error(d: object) -> str:
    with pytest.raises(UserError) as caught:
        K3Config.from_dict(d)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Round trips


def test_released_file_comes_back_as_it_was():
    cfg = K3Config.load(K3_FILE)
    assert cfg.to_dict() == RELEASED
    assert json.loads(json.dumps(cfg.to_dict())) == RELEASED
    assert K3Config.from_dict(cfg.to_dict()) == cfg
    assert PRESETS["k3"]() == cfg


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips_through_a_folder(name, tmp_path):
    cfg = preset(name)
    cfg.save(tmp_path / "run")
    again = K3Config.load(tmp_path / "run")
    assert again == cfg and hash(again) == hash(cfg) and pickle.loads(pickle.dumps(cfg)) == cfg
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]
    assert "openk3" not in cfg.to_dict()


def test_flat_config_stays_flat_and_without_k3_fields():
    cfg = K3Config.from_dict(FLAT)
    assert cfg.flat and not K3Config.from_dict(RELEASED).flat
    assert cfg.to_dict() == FLAT and "text_config" not in FLAT
    assert not FLAT.keys() & {"attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size", "activation_situ_beta", "openk3"}
    assert FLAT["linear_attn_config"].keys() == {"num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}
    assert FLAT["linear_attn_config"]["full_attn_layers"] == [4, 8, 12, 16, 20, 24, 27]
    text = cfg.text_config
    assert text.linear_attn_config and text.linear_attn_config.gate_lower_bound is None and not text.linear_attn_config.use_full_rank_gate
    assert text.attn_res_block_size is None and text.latent_size == 2304 and not text.mla_use_output_gate and text.extra["head_dim"] == 72


def test_flat_config_keeps_its_extras_settings_and_variants():
    d = {**FLAT, "openk3": {"mla_latent_norm_eps": 1e-5}, "use_cache": True, "auto_map": {"AutoConfig": "a.B"}, "attn_res_block_size": 4}
    cfg = K3Config.from_dict(d)
    assert cfg.to_dict() == d and cfg.openk3.mla_latent_norm_eps == 1e-5 and cfg.dtype == "bfloat16"


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bookkeeping_is_kept_verbatim_at_every_level(level, data):
    names = sorted(BOOKKEEPING - {"architectures", "transformers_version", "dtype", "head_dim"})  # KDA's head_dim is a field
    d = changed(RELEASED, level + data.draw(st.sampled_from(names)), data.draw(JSON_VALUES))
    cfg = K3Config.from_dict(d)
    assert cfg.to_dict() == d and K3Config.from_dict(d) == cfg and isinstance(hash(cfg), int)


def test_settings_are_written_only_where_they_differ():
    cfg = K3Config.from_dict({**RELEASED, "openk3": {"clip_attention": "joint", "mtp_loss_weight": 0.1}})
    assert cfg.to_dict()["openk3"] == {"mtp_loss_weight": 0.1}
    assert K3Config.from_dict({**RELEASED, "openk3": {}}).to_dict() == RELEASED


def test_absent_fields_take_the_released_defaults():
    d = copy.deepcopy(RELEASED)
    for name in ("rms_norm_eps", "initializer_range", "moe_renormalize", "topk_method", "num_key_value_heads", "max_position_embeddings"):
        del d["text_config"][name]
    for name in ("merge_kernel_size", "norm_type", "patch_size", "projector_ln_eps"):
        del d["vision_config"][name]
    del d["image_placeholder"], d["ignore_index"]
    assert K3Config.from_dict(d) == K3Config.from_dict(RELEASED)
    bare = copy.deepcopy(RELEASED)
    del bare["text_config"]["linear_attn_config"], bare["vision_config"]
    cfg = K3Config.from_dict(bare)
    assert cfg.vision_config is None and not any(map(cfg.text_config.is_kda, range(93))) and cfg.to_dict() == bare


def test_integers_stand_for_floats_and_come_back_equal():
    assert K3Config.from_dict(changed(RELEASED, "text_config.activation_situ_beta", 4)).to_dict() == RELEASED


# Errors: one line that names the field


@settings(deadline=None)
@given(st.sampled_from(LEVELS), st.text(min_size=1).filter(lambda s: "." not in s))
def test_any_unknown_field_is_named_with_its_level(level, name):
    known = set(BOOKKEEPING) | RELEASED.keys() | RELEASED["text_config"].keys() | RELEASED["vision_config"].keys()
    known |= RELEASED["text_config"]["linear_attn_config"].keys() | {"openk3", "rope_theta", "attention_bias", "quantization_config"}
    if name in known:
        return
    message = error(changed(RELEASED, level + name, 1))
    assert f"unknown field in {level.rstrip('.') or 'the top level'}" in message and "nearest known one is" in message


@pytest.mark.parametrize(
    "path, near",
    [
        ("text_config.hiden_size", "'hidden_size'"),
        ("text_config.linear_attn_config.gate_lower_bounds", "'gate_lower_bound'"),
        ("vision_config.vt_hiden_size", "'vt_hidden_size'"),
        ("media_placeholder_token", "'media_placeholder_token_id'"),
        ("text_config.gate_lower_bound", "it belongs in text_config.linear_attn_config"),
        ("hidden_size", "it belongs in text_config"),
        ("text_config.media_placeholder_token_id", "it belongs in the top level"),
    ],
)
def test_misspelt_or_misplaced_field_is_pointed_home(path, near):
    message = error(changed(RELEASED, path, 1))
    assert message.startswith(f"{path}: unknown field") and near in message


def test_misspelt_required_field_is_reported_as_unknown_not_missing():
    d = changed(changed(RELEASED, "text_config.hidden_size", ...), "text_config.hiden_size", 7168)
    assert "'hidden_size'" in error(d)
    assert "unknown field in openk3" in error({**RELEASED, "openk3": {"mla_norm_eps": 1e-6}})


REQUIRED = [
    *(f"text_config.{name}" for name in """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope num_experts num_experts_per_token
    num_shared_experts moe_intermediate_size first_k_dense_replace""".split()),
    *(f"text_config.linear_attn_config.{name}" for name in """num_heads head_dim short_conv_kernel_size full_attn_layers kda_layers
    gate_lower_bound""".split()),
    *(f"vision_config.{name}" for name in """vt_hidden_size vt_num_hidden_layers vt_num_attention_heads qkv_hidden_size
    vt_intermediate_size mm_hidden_size text_hidden_size""".split()),
    "text_config", "model_type", "media_placeholder_token_id",
]  # fmt: skip


@pytest.mark.parametrize("path", REQUIRED)
def test_missing_required_field_is_named(path):
    message = error(changed(RELEASED, path, ...))
    assert message.startswith(path) and "missing" in message


BAD = [
    ("text_config.hidden_size", "7168", "must be an integer, not \"7168\""),
    ("text_config.hidden_size", 7168.0, "must be an integer"),
    ("text_config.hidden_size", True, "must be an integer"),
    ("text_config.hidden_size", None, "must be an integer, not null"),
    ("text_config.hidden_size", 0, "must be above 0"),
    ("text_config.hidden_size", -64, "must be above 0"),
    ("text_config.num_hidden_layers", 0, "must be above 0"),
    ("text_config.num_hidden_layers", 92, "93 isn't a layer"),
    ("text_config.num_hidden_layers", 10**15, "94 is listed 0 times"),
    ("text_config.vocab_size", 163585, "must lie in 0 to vocab_size - 1 (163584)"),
    ("text_config.mla_use_nope", 1, "must be true or false"),
    ("text_config.rms_norm_eps", "1e-5", "must be a number"),
    ("text_config.rms_norm_eps", float("nan"), "must be a number"),
    ("text_config.rms_norm_eps", 0, "must be above 0"),
    ("text_config.q_lora_rank", [1536], "must be an integer or null"),
    ("text_config.kv_lora_rank", None, "must be null where kv_lora_rank is null"),
    ("text_config.qk_nope_head_dim", -1, "must be at least 0"),
    ("text_config.hidden_act", "gelu", '"situ" or "silu"'),
    ("text_config.model_type", "llama", "kimi_linear"),
    ("text_config.num_key_value_heads", 8, "must be num_attention_heads (96)"),
    ("text_config.num_experts_per_token", 896, "must be below num_experts (896)"),
    ("text_config.num_experts_per_token", 0, "must be above 0"),
    ("text_config.num_shared_experts", -1, "must be at least 0"),
    ("text_config.first_k_dense_replace", -1, "must be at least 0"),
    ("text_config.attn_res_block_size", 0, "must be above 0"),
    ("text_config.topk_method", "greedy", "noaux_tc"),
    ("text_config.num_expert_group", 8, "it must be 1"),
    ("text_config.topk_group", 4, "it must be 1"),
    ("text_config.moe_router_activation_func", "relu", "sigmoid"),
    ("text_config.tie_word_embeddings", True, "it must be false"),
    ("text_config.attention_bias", True, "it must be false"),
    ("text_config.eos_token_id", [163586, 163840], "must lie in 0 to"),
    ("text_config.eos_token_id", ["a"], "must be an integer or a list of integers or null"),
    ("text_config.routed_expert_hidden_size", 3600, "multiple of 32"),
    ("text_config.moe_intermediate_size", 3000, "multiple of 32"),
    ("text_config.quantization_config", {"quant_method": "gptq"}, "compressed-tensors"),
    ("text_config.quantization_config.format", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, "groups of 32"),
    ("text_config.quantization_config.config_groups", [], "4 bits"),
    ("text_config.linear_attn_config", [], "must be an object or null"),
    ("text_config.linear_attn_config.num_heads", 0, "must be above 0"),
    ("text_config.linear_attn_config.gate_lower_bound", 0.0, "must be below 0"),
    ("text_config.linear_attn_config.full_attn_layers", "all", "must be a list of integers"),
    ("text_config.linear_attn_config.full_attn_layers", [4, 8], "12 is listed 0 times"),
    ("text_config.linear_attn_config.full_attn_layers", list(range(1, 94)), "1 is listed 2 times"),
    ("text_config.linear_attn_config.full_attn_layers", [0, *range(4, 93, 4), 93], "0 isn't a layer"),
    ("text_config", 5, "must be an object"),
    ("vision_config", True, "must be an object or null"),
    ("vision_config.patch_size", 0, "must be above 0"),
    ("vision_config.vt_num_attention_heads", 7, "multiple of 4 channels"),
    ("vision_config.mm_hidden_size", 512, "must equal vt_hidden_size (1024)"),
    ("vision_config.text_hidden_size", 4096, "must equal text_config.hidden_size (7168)"),
    ("vision_config.merge_kernel_size", [2], "two numbers"),
    ("vision_config.merge_kernel_size", [2, 0], "two numbers"),
    ("vision_config.norm_type", "layernorm", "rmsnorm"),
    ("vision_config.attn_bias", True, "it must be false"),
    ("media_placeholder_token_id", 163840, "must lie in 0 to"),
    ("model_type", "llama", "'kimi_k3'"),
    ("model_type", "kimi_linear", "when flat"),
    ("tie_word_embeddings", True, "it must be false"),
    ("quantization_config", {"quant_method": "fp8"}, "compressed-tensors"),
    ("openk3", {"clip_attention": "both"}, "factorised"),
    ("openk3", {"mla_latent_norm_eps": 0}, "must be above 0"),
]  # fmt: skip


@pytest.mark.parametrize("path, value, says", BAD)
def test_wrong_type_or_impossible_value_is_named(path, value, says):
    message = error(changed(RELEASED, path, value))
    assert says in message and message.startswith(path.split(".")[0])


def test_rotary_needs_pairs_of_channels_and_no_scaling():
    rotary = changed(RELEASED, "text_config.mla_use_nope", False)
    assert K3Config.from_dict(rotary).text_config.rope_theta == 10000.0
    for odd in (63, 0):
        assert "qk_rope_head_dim" in error(changed(rotary, "text_config.qk_rope_head_dim", odd))
    assert "rope_scaling" in error(changed(rotary, "text_config.rope_scaling", {"type": "yarn"}))
    K3Config.from_dict(changed(RELEASED, "text_config.rope_scaling", {"type": "yarn"}))  # NoPE: it never enters the maths


def test_flat_errors_speak_of_the_top_level():
    assert error(changed(FLAT, "hidden_size", ...)).startswith("hidden_size is missing")
    assert error({**FLAT, "hiden_size": 1}).startswith("hiden_size: unknown field in the top level")
    assert error(changed(FLAT, "linear_attn_config.head_dim", 0)).startswith("linear_attn_config.head_dim is 0")
    assert "text only" in error({**FLAT, "vision_config": RELEASED["vision_config"]})
    assert "JSON object" in error([])


@pytest.mark.parametrize(
    "text, says",
    [("{", "not valid JSON"), ("", "not valid JSON"), ("[]", "JSON object"), ("\xff", "not valid JSON"), ("[" * 100_000, "not valid JSON"),
     ('{"model_type": NaN}', "NaN is not a JSON number"), ('{"a": ' + "1" * 5000 + "}", "not valid JSON"), ("{}", "model_type")],
)  # fmt: skip
def test_broken_file_is_one_line_with_its_path(text, says, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        K3Config.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and says in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_one_line_with_its_path(tmp_path):
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no such file") as caught:
            K3Config.load(path)
        assert str(tmp_path) in str(caught.value)


def test_failed_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = preset("nano").save(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        preset("k2-nano").save(tmp_path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="config.json"):
        preset("nano").save(path)  # a file stands where the folder should be


# Copies


def test_replace_checks_like_a_file():
    cfg = preset("nano")
    assert cfg.replace_text(attn_res_block_size=None).text_config.attn_res_block_size is None
    assert cfg.replace_text(num_attention_heads=6).text_config.num_key_value_heads == 6
    linear = cfg.replace_linear_attn(gate_lower_bound=None).text_config.linear_attn_config
    assert linear is not None and linear.gate_lower_bound is None
    assert cfg.replace_text(linear_attn_config=None).parameter_count().row("KDA attention").total == 0
    with pytest.raises(UserError, match="'hidden_size'"):
        cfg.replace_text(hiden_size=1)
    with pytest.raises(UserError, match="must be an integer"):
        cfg.replace_text(hidden_size="wide")
    with pytest.raises(UserError, match="no linear_attn_config"):
        preset("k2-nano").replace_linear_attn(gate_lower_bound=None)


def test_vocabulary_dtype_and_quantization_copies():
    cfg = preset("nano").with_vocab(1000, bos=985, eos=987, pad=999, media_placeholder=997)
    text = cfg.text_config
    assert (text.vocab_size, text.bos_token_id, text.eos_token_id, text.pad_token_id) == (1000, 985, 987, 999)
    assert (cfg.pad_token_id, cfg.media_placeholder_token_id) == (999, 997)
    assert preset("nano", vocab_size=1000) == cfg
    assert preset("kimi-linear-48b", vocab_size=1000).media_placeholder_token_id is None
    k3 = preset("k3").with_dtype("float32")
    assert k3.dtype == "float32" and k3.text_config.extra["dtype"] == "float32"
    assert k3.with_dtype("bfloat16") == preset("k3")
    assert preset("k3").quantized and preset("k3").with_quantization(True) == preset("k3")
    dense = preset("k3").with_quantization(False)
    assert not dense.quantized and "quantization_config" not in dense.to_dict()["text_config"]
    assert dense.with_quantization(True) == preset("k3")
    with pytest.raises(UserError, match="nearest: nano"):
        preset("nanno")


def test_frozen_dict_compares_and_hashes_by_content():
    a, b = FrozenDict({"x": [1, {"y": 2}], "z": None}), FrozenDict({"z": None, "x": (1, FrozenDict({"y": 2}))})
    assert a == b and hash(a) == hash(b) and a != FrozenDict({"x": 1}) and pickle.loads(pickle.dumps(a)) == a


# Layers


def test_layer_layout_of_k3():
    text = preset("k3").text_config
    assert [n for n in range(93) if not text.is_kda(n)] == [*range(3, 92, 4), 92]
    assert [n for n in range(93) if text.is_dense(n)] == [0]
    assert (text.qk_head_dim, text.latent_size, text.shared_intermediate) == (192, 3584, 6144)
    assert text.replace(moe_layer_freq=2).is_dense(3) and all(map(preset("dense-nano").text_config.is_dense, range(8)))
    assert layer_split(8)["full_attn_layers"] == (4, 8) and layer_split(9)["full_attn_layers"] == (4, 8, 9)
