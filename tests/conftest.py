"""What tests share: one thread, hypothesis without chance, the golden checkpoints, and tiny models of every variant."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file
from torch import Tensor

import openk3.lab
from openk3 import checkpoint
from openk3.config import K3Config
from openk3.model.k3 import K3ForCausalLM
from openk3.presets import dense_nano, k2_nano, kimi_linear_48b, nano

torch.set_num_threads(1)  # sums in one order, and tests that run side by side don't fight for cores
settings.register_profile("openk3", derandomize=True, deadline=None)
settings.load_profile("openk3")

GOLDEN = {
    "k3-tiny": Path(openk3.lab.__file__).parent / "golden" / "k3-tiny",  # ships with the package: `openk3 doctor` needs it
    "k3-tiny-mxfp4": Path(__file__).parent / "golden" / "k3-tiny-mxfp4",
    "k3-tiny-vision": Path(__file__).parent / "golden" / "k3-tiny-vision",
}


@dataclass(frozen=True)
class Golden:
    """A released-layout checkpoint and what an independent implementation computes on it."""

    directory: Path
    tensors: dict[str, Tensor] = field(repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def model(self, **options) -> K3ForCausalLM:
        """A fresh copy of the model, in evaluation mode (`options`: those of `checkpoint.load`)."""
        return checkpoint.load(self.directory, **options)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """golden("k3-tiny"), read once."""

    @functools.cache
    def read(name: str) -> Golden:
        return Golden(GOLDEN[name], load_file(GOLDEN[name] / "golden.safetensors"))

    return read


# Tiny models: each is a variant that the config can describe, at a width where a whole test costs milliseconds.

_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
_LINEAR = {"num_heads": 2, "head_dim": 16, "full_attn_layers": (2, 4, 5), "kda_layers": (1, 3)}


def _k3(**changes) -> K3Config:
    text = nano().text_config
    linear = text.linear_attn_config.replace(**_LINEAR)
    small = {
        **_SMALL, **_EXPERTS, "num_hidden_layers": 5, "attn_res_block_size": 2, "q_lora_rank": 12, "kv_lora_rank": 16,
        "routed_expert_hidden_size": 16, "linear_attn_config": linear, "num_key_value_heads": None,
    }  # fmt: skip
    return K3Config(text_config=text.replace(**{**small, **changes}), media_placeholder_token_id=3)


def _kimi_linear() -> K3Config:
    config = kimi_linear_48b()
    linear = config.text_config.linear_attn_config.replace(num_heads=2, head_dim=16, full_attn_layers=(2, 4), kda_layers=(1, 3))
    return config.replace_text(
        **{**_SMALL, **_EXPERTS, "num_shared_experts": 1}, num_hidden_layers=4, kv_lora_rank=16, linear_attn_config=linear
    )


def _k2() -> K3Config:
    text = k2_nano().text_config.replace(
        **{**_SMALL, **_EXPERTS, "num_experts": 6}, num_hidden_layers=3, q_lora_rank=12, kv_lora_rank=16, num_key_value_heads=None)
    return K3Config(text_config=text)


def _dense() -> K3Config:
    small = {**_SMALL, "qk_nope_head_dim": 0, "qk_rope_head_dim": 8}
    return K3Config(text_config=dense_nano().text_config.replace(**small, num_hidden_layers=3, num_key_value_heads=None))


def _mha_hybrid() -> K3Config:
    """KDA beside plain attention, of which a part of each head is rotary, with an output gate and values wider than keys."""
    return _k3(q_lora_rank=None, kv_lora_rank=None, mla_use_nope=False, v_head_dim=20)


VARIANTS: dict[str, Callable[[], K3Config]] = {
    "k3": _k3,
    "rotary-mla": lambda: _k3(mla_use_nope=False, linear_attn_config=None, mla_use_output_gate=False),
    "mha-hybrid": _mha_hybrid,
    "dense": _dense,
    "kimi-linear": _kimi_linear,
    "k2": _k2,
    "no-attn-res": lambda: _k3(attn_res_block_size=None, q_lora_rank=None),
    "dense-ffn": lambda: _k3(
        num_experts=None, num_experts_per_token=None, num_shared_experts=None, moe_intermediate_size=None, first_k_dense_replace=None,
        routed_expert_hidden_size=None, latent_moe_use_norm=False, attn_res_block_size=1),
    "softmax-router": lambda: _k3(
        moe_router_activation_func="softmax", moe_renormalize=False, routed_scaling_factor=2.5, num_shared_experts=0,
        latent_moe_use_norm=False, attn_res_block_size=3, activation_situ_linear_beta=None),
}  # fmt: skip


@torch.no_grad()
def _scramble(model: K3ForCausalLM, seed: int) -> K3ForCausalLM:
    """Values like a trained model's: every parameter matters, so that a fault shows in the logits, and rounding isn't blown up."""
    model.init_weights(seed)
    draw = torch.Generator().manual_seed(seed + 1)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=draw)

    for name, p in model.named_parameters():
        if "norm.weight" in name or "layernorm.weight" in name:
            p.copy_(1 + 0.2 * noise(p))
        elif name.endswith("A_log"):
            p.copy_(0.5 * noise(p))
        elif name.endswith("dt_bias"):
            p.copy_(noise(p) - 2)
        elif name.endswith("res_proj.weight"):
            p.copy_(noise(p) * 0.1)
        elif "conv1d" not in name:
            p.copy_(noise(p) * (1.0 if "embed" in name else 0.7 * p.shape[-1] ** -0.5))
    for _, b in model.named_buffers():
        b.copy_(0.05 * noise(b))
    return model.eval()


@pytest.fixture(params=list(VARIANTS))
def variant(request) -> str:
    """The name of each variant in turn."""
    return request.param


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., K3Config]:
    """tiny_config("k3") → its config; other text fields may be given: tiny_config("k3", attn_res_block_size=None)."""
    return lambda name, **changes: VARIANTS[name]().replace_text(**changes)


@pytest.fixture(scope="session")
def tiny(tiny_config) -> Callable[..., K3ForCausalLM]:
    """tiny("k3", seed=0, **text fields) → a fresh model in evaluation mode whose every parameter matters."""
    return lambda name, seed=0, **changes: _scramble(K3ForCausalLM(tiny_config(name, **changes)), seed)


@pytest.fixture(scope="session")
def worst() -> Callable[[Tensor, Tensor], float]:
    """worst(a, b): the largest difference, in standard deviations of b."""
    return lambda a, b: float((a - b).abs().max() / b.std())
