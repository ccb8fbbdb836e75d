"""Which update rule each parameter gets, decided by its name and the config, never by its shape.

A shape can't tell: `o_proj` divides into heads by rows as well as `q_proj` does, though its heads lie along the columns; a depthwise
filter bank looks like a matrix. And marks left on parameters are lost when a wrapper replaces them, so this is read off the model
at the moment the optimizer is built. A name that no rule knows is an error, so that nothing is trained by accident.

The split (K3 report §2.5; the parts it leaves open follow Moonlight, arXiv 2502.16982): matrices get Muon, cut into heads for the
query, key and value projections and into single matrices for stacked experts; embeddings, the head and the vision tower get AdamW;
norms, biases, decay parameters, short convolutions and AttnRes queries get AdamW without weight decay. The router's correction bias
is a buffer that belongs to Quantile Balancing and to no optimizer.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from openk3.config import TextConfig
from openk3.errors import UserError

Treatment = Literal["muon", "adamw", "adamw-no-decay"]
OPTIMIZERS = ("per-head-muon", "muon", "adamw")


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """One trainable parameter and its update rule."""

    name: str
    param: nn.Parameter
    treatment: Treatment
    rows: int | None  # muon: this many consecutive rows are one matrix (a head); None: the last two dimensions are
    reason: str
    lr_scale: float = 1.0


# What wrappers put into names: torch.compile, activation checkpointing, DDP; and parametrize, which turns `weight` into
# `parametrizations.weight.original`.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|module)(?=\.)|\.parametrizations(?=\.)|(?<=\w)\.original$")

# First match wins; patterns are matched against the end of the name.
_RULES: tuple[tuple[str, Treatment, str], ...] = (
    (r"(A_log|dt_bias|bias)", "adamw-no-decay", "bias or decay parameter"),
    (r"\w*norm\d?\.weight", "adamw-no-decay", "norm"),
    (r"\w+_res_proj\.weight", "adamw-no-decay", "AttnRes query"),
    (r"[qkv]_conv1d\.weight", "adamw-no-decay", "short convolution"),
    (r"(vision_tower|mm_projector)\..+", "adamw", "vision"),
    (r"(embed_tokens|lm_head)\.weight", "adamw", "embedding or head"),
    (r"experts\.(w1|w2|w3)", "muon", "stacked experts, one matrix each"),
    (r"block_sparse_moe\.gate\.weight", "muon", "router"),
    (r"block_sparse_moe\.routed_expert_(down|up)_proj\.weight", "muon", "latent projection"),
    (r"(mlp|shared_experts)\.(gate|up|down)_proj\.weight", "muon", "feed-forward"),
    (r"self_attn\.(q|k|v|q_b|kv_b)_proj\.weight", "muon", "heads"),
    (r"self_attn\.(o_proj|q_a_proj|kv_a_proj_with_mqa)\.weight", "muon", "shared by all heads"),
    (r"self_attn\.(g|g_a|g_b|f_a|f_b|b)_proj\.weight", "muon", "gate"),
)
_COMPILED: tuple[tuple[re.Pattern[str], Treatment, str], ...] = tuple(
    (re.compile(rf"(?:^|\.){pattern}$"), treatment, reason) for pattern, treatment, reason in _RULES
)


def block_specs(model: nn.Module, *, per_head: bool = True) -> list[ParamSpec]:
    """A spec for every trainable parameter of a K3 model, in the order of `named_parameters()`.

    per_head: Per-Head Muon; otherwise query, key and value projections are orthogonalised whole.
    Raises `UserError` for a parameter that no rule places, and for a projection whose rows aren't heads × head size.
    """
    text = _text_config(model)
    names = {_plain(name) for name, _ in model.named_parameters()}
    specs = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        plain = _plain(name)
        treatment, reason = _place(plain, tuple(param.shape))
        rows = None
        if reason == "heads":
            rows, heads = _head_rows(plain, text, names)
            if rows * heads != param.shape[0]:
                raise UserError(f"{name} has {param.shape[0]} rows, but the config gives {heads} heads of {rows}: model and config differ")
            rows, reason = (rows, f"{heads} heads of {rows} rows") if per_head else (None, "heads, kept whole")
        specs.append(ParamSpec(name, param, treatment, rows, reason))
    return specs


def specs_for(model: nn.Module, optimizer: str = "per-head-muon", router_lr: float = 1.0) -> list[ParamSpec]:
    """`block_specs` under the name of a training option: "per-head-muon", "muon" or "adamw" (every matrix by AdamW, with decay).

    router_lr: the routers' learning rate as a part of the others'.
    """
    if optimizer not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
    specs = block_specs(model, per_head=optimizer == "per-head-muon")
    if optimizer == "adamw":
        specs = [replace(s, treatment="adamw", rows=None) if s.treatment == "muon" else s for s in specs]
    return [replace(s, lr_scale=router_lr) if s.reason == "router" else s for s in specs]


def describe(specs: Collection[ParamSpec]) -> list[dict[str, str | int]]:
    """What got which rule, for a table and for `train.json`: rows of treatment, count (tensors) and parameters (numbers)."""
    sizes: dict[str, list[int]] = {}  # per label
    for spec in specs:
        label: str = spec.treatment
        if spec.treatment == "muon":
            label += " per head" if spec.rows else " per expert" if spec.param.ndim == 3 else " whole matrix"
        sizes.setdefault(label, []).append(spec.param.numel())
    return [{"treatment": label, "count": len(sizes[label]), "parameters": sum(sizes[label])} for label in sorted(sizes, reverse=True)]


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name).lstrip(".")


def _place(name: str, shape: tuple[int, ...]) -> tuple[Treatment, str]:
    for pattern, treatment, reason in _COMPILED:
        if pattern.search(name):
            return treatment, reason
    raise UserError(f"no update rule for parameter {name} {list(shape)}: add one in openk3/optim/specs.py, or freeze the parameter")


def _head_rows(name: str, text: TextConfig, names: Collection[str]) -> tuple[int, int]:
    """(rows of one head, heads) of a projection whose rows are heads. What stands beside it tells KDA from full attention."""
    prefix, projection, _ = name.rsplit(".", 2)
    if f"{prefix}.A_log" in names and text.linear_attn_config is not None:
        return text.linear_attn_config.head_dim, text.linear_attn_config.num_heads
    size = {
        "q_proj": text.qk_head_dim,
        "k_proj": text.qk_head_dim,
        "v_proj": text.v_head_dim,
        "q_b_proj": text.qk_head_dim,
        "kv_b_proj": text.qk_nope_head_dim + text.v_head_dim,  # a head's key rows, then its value rows: one block
    }
    return size[projection], text.num_attention_heads


def _text_config(model: nn.Module) -> TextConfig:
    config = getattr(model, "config", None) or getattr(getattr(model, "module", None), "config", None)
    if config is None:
        raise UserError(f"{type(model).__name__} has no config: Muon's blocks are cut by the config's head sizes, give it a K3ForCausalLM")
    return config.text_config
