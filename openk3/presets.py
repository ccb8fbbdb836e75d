"""Named configs: a ladder of models that are K3 in every part (nano, micro, small, base, k3), and the baselines it is compared with.

Each is a plain function that returns a `K3Config`; `preset("nano", vocab_size=8192)` finds one by its name. The models to train
yourself have their special tokens at the end of the vocabulary, in the tokenizer's order; `with_vocab` takes the real ids.
"""

import difflib
from collections.abc import Callable
from typing import Any, TypedDict

from openk3.config import K3Config, LinearAttnConfig, TextConfig, VisionConfig
from openk3.errors import UserError
from openk3.quantization import MXFP4_QUANTIZATION
from openk3.schema import FrozenDict

__all__ = [
    "PRESETS", "base", "dense_nano", "k2_nano", "k3", "kimi_linear_48b", "layer_split", "micro", "nano", "preset", "small",
]  # fmt: skip


class LayerSplit(TypedDict):
    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]


def layer_split(num_layers: int, period: int = 4) -> LayerSplit:
    """The released pattern (K3 report §2.1): every `period`-th layer is MLA, and the last one too; all others are KDA. From 1."""
    full = tuple(n for n in range(1, num_layers + 1) if n % period == 0 or n == num_layers)
    return {"full_attn_layers": full, "kda_layers": tuple(n for n in range(1, num_layers + 1) if n not in full)}


def _special_ids(vocab_size: int) -> dict[str, int]:
    """Where our tokenizer puts them: 15 control tokens at the end, [BOS] first, <|end_of_msg|> third, [PAD] last."""
    return {"bos": vocab_size - 15, "eos": vocab_size - 13, "pad": vocab_size - 1, "media_placeholder": vocab_size - 3}


def _text(**fields: Any) -> TextConfig:
    return TextConfig(**fields, extra=FrozenDict({"architectures": ["KimiLinearForCausalLM"]}))


def _wrapped(text: TextConfig) -> K3Config:
    cfg = K3Config(text_config=text, extra=FrozenDict({"architectures": ["KimiK3ForConditionalGeneration"]}))
    return cfg.with_vocab(text.vocab_size, **_special_ids(text.vocab_size))


def _k3_like(
    *, layers: int, block: int, width: int, heads: int, head_dim: int, qk: tuple[int, int], ranks: tuple[int, int], vocab: int,
    context: int, dense: int, experts: int, top: int, expert_width: int,
) -> K3Config:  # fmt: skip
    """K3 in every part at another size: latent of half the width, two shared experts, one dense layer, AttnRes blocks of `block`."""
    linear = LinearAttnConfig(
        num_heads=heads, head_dim=head_dim, short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0, **layer_split(layers)
    )
    text = _text(
        vocab_size=vocab, hidden_size=width, intermediate_size=dense, num_hidden_layers=layers, max_position_embeddings=context,
        num_attention_heads=heads, q_lora_rank=ranks[0], kv_lora_rank=ranks[1], qk_nope_head_dim=qk[0], qk_rope_head_dim=qk[1],
        v_head_dim=head_dim, mla_use_nope=True, mla_use_output_gate=True, linear_attn_config=linear, attn_res_block_size=block,
        hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        num_experts=experts, num_experts_per_token=top, num_shared_experts=2, moe_intermediate_size=expert_width, first_k_dense_replace=1,
        routed_expert_hidden_size=width // 2, latent_moe_use_norm=True,
    )  # fmt: skip
    return _wrapped(text)


def nano() -> K3Config:
    """Every part of K3, small enough to train in minutes on two CPU cores."""
    return _k3_like(
        layers=8, block=4, width=128, heads=2, head_dim=64, qk=(32, 32), ranks=(64, 48), vocab=4096, context=8192,
        dense=384, experts=64, top=8, expert_width=32,
    )  # fmt: skip


def dense_nano() -> K3Config:
    """The control beside nano: a plain transformer (multi-head attention, rotary, SwiGLU) with about as many active parameters."""
    text = _text(
        vocab_size=4096, hidden_size=128, intermediate_size=384, num_hidden_layers=8, max_position_embeddings=8192,
        num_attention_heads=2, q_lora_rank=None, kv_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=64, v_head_dim=64,
        mla_use_nope=False, hidden_act="silu", num_experts=None,
    )  # fmt: skip
    return _wrapped(text)


def k2_nano() -> K3Config:
    """nano's size as Kimi K2 is built: MLA with rotary everywhere, SwiGLU experts at full width (so half as wide inside)."""
    text = _text(
        vocab_size=4096, hidden_size=128, intermediate_size=384, num_hidden_layers=8, max_position_embeddings=8192,
        num_attention_heads=2, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
        mla_use_nope=False, hidden_act="silu",
        num_experts=64, num_experts_per_token=8, num_shared_experts=4, moe_intermediate_size=16, first_k_dense_replace=1,
    )  # fmt: skip
    return _wrapped(text)


def micro() -> K3Config:
    """About 0.5B parameters, 0.1B active: one GPU, some hours."""
    return _k3_like(
        layers=17, block=4, width=640, heads=10, head_dim=64, qk=(64, 32), ranks=(256, 128), vocab=32768, context=32768,
        dense=2560, experts=128, top=8, expert_width=224,
    )  # fmt: skip


def small() -> K3Config:
    """About 2B parameters, 0.3B active."""
    return _k3_like(
        layers=17, block=4, width=1024, heads=8, head_dim=128, qk=(128, 64), ranks=(384, 256), vocab=65536, context=65536,
        dense=4096, experts=256, top=8, expert_width=288,
    )  # fmt: skip


def base() -> K3Config:
    """About 8B parameters, 0.9B active."""
    return _k3_like(
        layers=25, block=6, width=1536, heads=12, head_dim=128, qk=(128, 64), ranks=(512, 512), vocab=163840, context=131072,
        dense=6144, experts=384, top=8, expert_width=352,
    )  # fmt: skip


def kimi_linear_48b() -> K3Config:
    """Kimi Linear 48B-A3B (arXiv 2510.26692) as released: a flat config."""
    linear = LinearAttnConfig(num_heads=32, head_dim=128, short_conv_kernel_size=4, **layer_split(27))
    text = TextConfig(
        vocab_size=163840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, max_position_embeddings=1048576,
        num_attention_heads=32, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        mla_use_nope=True, linear_attn_config=linear, hidden_act="silu",
        num_experts=256, num_experts_per_token=8, num_shared_experts=1, moe_intermediate_size=1024, first_k_dense_replace=1,
        routed_scaling_factor=2.446, bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
        extra=FrozenDict({"architectures": ["KimiLinearForCausalLM"], "head_dim": 72, "model_max_length": 1048576}),
    )  # fmt: skip
    return K3Config(model_type="kimi_linear", text_config=text, dtype="bfloat16")


def k3() -> K3Config:
    """Kimi K3 as released: 2.78T parameters, 104.2B active (K3 report Table 1)."""
    linear = LinearAttnConfig(
        num_heads=96, head_dim=128, short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0, **layer_split(93)
    )
    text = TextConfig(
        vocab_size=163840, hidden_size=7168, intermediate_size=33792, num_hidden_layers=93, max_position_embeddings=1048576,
        num_attention_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        mla_use_nope=True, mla_use_output_gate=True, linear_attn_config=linear, attn_res_block_size=12,
        hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        num_experts=896, num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=3072, first_k_dense_replace=1,
        routed_expert_hidden_size=3584, latent_moe_use_norm=True, quantization_config=MXFP4_QUANTIZATION,
        bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
        extra=FrozenDict({"architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16"}),
    )  # fmt: skip
    vision = VisionConfig(
        vt_hidden_size=1024, vt_num_hidden_layers=27, vt_num_attention_heads=12, qkv_hidden_size=1536, vt_intermediate_size=4096,
        mm_hidden_size=1024, text_hidden_size=7168,
    )  # fmt: skip
    return K3Config(
        text_config=text, vision_config=vision, dtype="bfloat16", pad_token_id=163839, media_placeholder_token_id=163605,
        extra=FrozenDict({"architectures": ["KimiK3ForConditionalGeneration"], "transformers_version": "4.56.2"}),
    )  # fmt: skip


PRESETS: dict[str, Callable[[], K3Config]] = {
    "nano": nano,
    "dense-nano": dense_nano,
    "k2-nano": k2_nano,
    "micro": micro,
    "small": small,
    "base": base,
    "kimi-linear-48b": kimi_linear_48b,
    "k3": k3,
}


def preset(name: str, vocab_size: int | None = None) -> K3Config:
    """The preset of that name, with another vocabulary size (special ids then at its end). Raises `UserError` for an unknown name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise UserError(f"no preset is called {name!r} (nearest: {near}); there are {', '.join(PRESETS)}")
    cfg = PRESETS[name]()
    return cfg if vocab_size is None else cfg.with_vocab(vocab_size, **_special_ids(vocab_size))
