"""Which tensors a config implies, with shapes and dtypes, by arithmetic: K3's half million in a second or two, without a module.

Axes: D model width, H heads, K head width, E experts, L latent width, F hidden width of an expert, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from openk3.config import K3Config, TextConfig, VisionConfig
from openk3.quantization import MXFP4_GROUP

from .names import canonical, is_vision, keeps_float32, padded, released

FLOATS = ("BF16", "F16", "F32", "F64")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}

Spec = tuple[tuple[int, ...], str]  # shape and safetensors dtype
Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Stored(NamedTuple):
    """A tensor as a file's header tells it; `start` is the place of its first byte in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def expected_tensors(config: K3Config, packed: bool | Callable[[str], bool] | None = None) -> dict[str, Spec]:
    """Every tensor of the released layout, in the order of the layers: name → (shape, safetensors dtype).

    packed: whether routed experts are stored as MXFP4; a function decides for each matrix (`…experts.7.w1`); None asks the config.
    """
    text, flat = config.text_config, config.flat
    dtype = _DTYPES.get(str(config.dtype or text.extra.get("dtype") or text.extra.get("torch_dtype")), "BF16")
    if packed is None:
        packed = config.quantized
    tensors: dict[str, Spec] = {}

    def add(prefix: str, shapes: Shapes) -> None:
        for name, shape in shapes:
            name = prefix + name
            tensors[name] = shape, "F32" if keeps_float32(name) else dtype

    def add_experts(prefix: str) -> None:
        for expert in range(text.num_experts or 0):
            for which, (rows, columns) in _expert(text):
                matrix = f"{prefix}block_sparse_moe.experts.{expert}.{which}"
                if packed if isinstance(packed, bool) else packed(matrix):
                    tensors[f"{matrix}.weight_packed"] = (rows, columns // 2), "U8"
                    tensors[f"{matrix}.weight_scale"] = (rows, columns // MXFP4_GROUP), "U8"
                else:
                    tensors[f"{matrix}.weight"] = (rows, columns), dtype

    width = text.hidden_size
    add(released("model.", flat), iter([("embed_tokens.weight", (text.vocab_size, width))]))
    for layer in range(text.num_hidden_layers):
        prefix = released(f"model.layers.{layer}.", flat)
        add(prefix, _layer(text, layer))
        if not text.is_dense(layer):
            add_experts(prefix)
    add(released("model.", flat), _output(text))
    add(released("", flat), iter([("lm_head.weight", (text.vocab_size, width))]))
    if config.vision_config is not None:
        add("", _vision(config.vision_config))
    return tensors


def _output(text: TextConfig) -> Shapes:
    yield "norm.weight", (text.hidden_size,)
    if text.attn_res_block_size is not None:
        yield "output_attn_res_norm.weight", (text.hidden_size,)
        yield "output_attn_res_proj.weight", (1, text.hidden_size)


def _layer(text: TextConfig, layer: int) -> Shapes:
    """All but the routed experts."""
    width = text.hidden_size
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)
    if text.attn_res_block_size is not None:
        for site in ("self_attention_res", "mlp_res"):
            yield f"{site}_norm.weight", (width,)
            yield f"{site}_proj.weight", (1, width)
    for name, shape in _kda(text) if text.is_kda(layer) else _full_attention(text):
        yield f"self_attn.{name}", shape
    if text.is_dense(layer):
        for name, shape in _mlp(width, text.intermediate_size):
            yield f"mlp.{name}", shape
    else:
        for name, shape in _moe(text):
            yield f"block_sparse_moe.{name}", shape


def _kda(text: TextConfig) -> Shapes:
    linear, width = text.linear_attn_config, text.hidden_size
    assert linear is not None
    rank, inner = linear.head_dim, linear.num_heads * linear.head_dim
    for which in "qkv":
        yield f"{which}_proj.weight", (inner, width)
    for which in "qkv":
        yield f"{which}_conv1d.weight", (inner, 1, linear.short_conv_kernel_size)
    yield "f_a_proj.weight", (rank, width)
    yield "f_b_proj.weight", (inner, rank)
    yield "b_proj.weight", (linear.num_heads, width)
    yield "A_log", (padded(linear.num_heads),)
    yield "dt_bias", (inner,)
    if linear.use_full_rank_gate:
        yield "g_proj.weight", (inner, width)
    else:
        yield "g_a_proj.weight", (rank, width)
        yield "g_b_proj.weight", (inner, rank)
    yield "o_norm.weight", (rank,)
    yield "o_proj.weight", (width, inner)


def _full_attention(text: TextConfig) -> Shapes:
    width, heads = text.hidden_size, text.num_attention_heads
    query, value = heads * text.qk_head_dim, heads * text.v_head_dim
    if text.q_lora_rank is None:
        yield "q_proj.weight", (query, width)
    else:
        yield "q_a_proj.weight", (text.q_lora_rank, width)
        yield "q_a_layernorm.weight", (text.q_lora_rank,)
        yield "q_b_proj.weight", (query, text.q_lora_rank)
    if text.kv_lora_rank is None:
        yield "k_proj.weight", (query, width)
        yield "v_proj.weight", (value, width)
    else:
        yield "kv_a_proj_with_mqa.weight", (text.kv_lora_rank + text.qk_rope_head_dim, width)
        yield "kv_a_layernorm.weight", (text.kv_lora_rank,)
        yield "kv_b_proj.weight", (heads * text.qk_nope_head_dim + value, text.kv_lora_rank)
    if text.mla_use_output_gate:
        yield "g_proj.weight", (value, width)
    yield "o_proj.weight", (width, value)


def _mlp(width: int, hidden: int) -> Shapes:
    yield "gate_proj.weight", (hidden, width)
    yield "up_proj.weight", (hidden, width)
    yield "down_proj.weight", (width, hidden)


def _moe(text: TextConfig) -> Shapes:
    width, latent = text.hidden_size, text.routed_expert_hidden_size
    yield "gate.weight", (text.num_experts or 0, width)
    yield "gate.e_score_correction_bias", (text.num_experts or 0,)
    if latent is not None:
        yield "routed_expert_down_proj.weight", (latent, width)
        yield "routed_expert_up_proj.weight", (width, latent)
        if text.latent_moe_use_norm:
            yield "routed_expert_norm.weight", (latent,)
    if text.shared_intermediate:
        for name, shape in _mlp(width, text.shared_intermediate):
            yield f"shared_experts.{name}", shape


def _expert(text: TextConfig) -> tuple[tuple[str, tuple[int, int]], ...]:
    latent, hidden = text.latent_size, text.moe_intermediate_size or 0
    return ("w1", (hidden, latent)), ("w2", (latent, hidden)), ("w3", (hidden, latent))


def _vision(vision: VisionConfig) -> Shapes:
    width, inner = vision.vt_hidden_size, vision.qkv_hidden_size
    yield "vision_tower.patch_embed.proj.weight", (width, 3, vision.patch_size, vision.patch_size)
    yield "vision_tower.patch_embed.pos_emb.weight", (vision.init_pos_emb_height, vision.init_pos_emb_width, width)
    for block in range(vision.vt_num_hidden_layers):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield prefix + "norm0.weight", (width,)
        yield prefix + "norm1.weight", (width,)
        yield prefix + "wqkv.weight", (3 * inner, width)
        yield prefix + "wo.weight", (width, inner)
        yield prefix + "mlp.fc0.weight", (vision.vt_intermediate_size, width)
        yield prefix + "mlp.fc1.weight", (width, vision.vt_intermediate_size)
    yield "vision_tower.encoder.final_layernorm.weight", (width,)
    yield "mm_projector.proj.0.weight", (vision.merged_size, vision.merged_size)
    yield "mm_projector.proj.2.weight", (vision.text_hidden_size, vision.merged_size)
    yield "mm_projector.post_norm.weight", (vision.text_hidden_size,)


def problems(config: K3Config, stored: Mapping[str, Stored], promised: Mapping[str, Path]) -> list[str]:
    """What is wrong with stored tensors (by canonical name), one line for each kind of fault; empty when all is well.

    How an expert's matrix should be stored is decided by the names found, not by the config. promised: stored name → shard, from the index.
    """

    def packed(matrix: str) -> bool:
        found = {kind: f"{matrix}.{kind}" in stored for kind in ("weight", "weight_packed", "weight_scale")}
        return found["weight_packed"] or found["weight_scale"] or config.quantized and not found["weight"]

    expected = expected_tensors(config, packed)
    absent = [name for name in expected if name not in stored]
    shard = {canonical(name, config.flat): path for name, path in promised.items()} if absent else {}
    missing = []
    for name in absent:
        shape, dtype = expected[name]
        missing.append(f"{name} ({dtype} {list(shape)}{f', promised in {shard[name].name}' if name in shard else ''})")
    extra, misshapen, mistyped = [], [], []
    for name, tensor in stored.items():
        if name not in expected:
            extra.append(f"{tensor.name} in {tensor.file.name}")
            continue
        shape, dtype = expected[name]
        if tensor.shape != shape and tensor.shape not in _other_forms(name, shape, config):
            misshapen.append(f"{tensor.name} in {tensor.file.name} is {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype != dtype and (dtype == "U8" or tensor.dtype not in FLOATS):
            mistyped.append(f"{tensor.name} in {tensor.file.name} is {tensor.dtype}, expected {dtype}")
    kinds = (("missing", missing), ("unknown to this config", extra), ("of the wrong shape", misshapen), ("of the wrong dtype", mistyped))
    return [_line(kind, items) for kind, items in kinds if items]


def _other_forms(name: str, shape: tuple[int, ...], config: K3Config) -> tuple[tuple[int, ...], ...]:
    """The shapes of early ports: an unpadded A_log, also as [1, 1, H, 1], and a pseudo-query without its first axis."""
    if name.endswith(".A_log"):
        heads = config.text_config.linear_attn_config.num_heads  # type: ignore[union-attr]
        return (heads,), (1, 1, heads, 1)
    return (shape[1:],) if name.endswith("_res_proj.weight") else ()


def _line(kind: str, items: list[str], most: int = 5) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{len(items)} tensor{'s' if len(items) > 1 else ''} {kind}: {', '.join(items[:most])}{more}"


def component(name: str) -> str:
    """The part of the model that a released name belongs to, for totals."""
    if is_vision(name):
        return "vision tower" if name.startswith("vision_tower.") else "vision projector"
    for mark, part in _COMPONENTS:
        if mark in name:
            return part
    return "norms"


_COMPONENTS = (
    (".experts.", "routed experts"),
    ("_res_norm.", "attention residuals"),
    ("_res_proj.", "attention residuals"),
    (".self_attn.", "attention"),
    (".shared_experts.", "shared experts"),
    (".routed_expert_", "latent projections"),
    (".gate.", "routers"),
    (".mlp.", "dense feed-forward"),
    ("embed_tokens.", "embedding"),
    ("lm_head.", "lm_head"),
)
