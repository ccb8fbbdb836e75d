"""Parameters by component, by arithmetic from the config: the table of what a model holds and what one token uses.

Active counts leave out the embedding (a row is looked up) and keep the LM head: for K3 that gives the report's 104.2B.
`A_log` counts one value per head; files pad it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from openk3.config import K3Config, LinearAttnConfig, TextConfig, VisionConfig


class Row(NamedTuple):
    """A component: parameters in one unit, how many units the model has, all of them, and those that one token uses."""

    name: str
    per_unit: int
    units: int
    total: int
    active: int


@dataclass(frozen=True)
class ParameterCount:
    total: int  # with vision
    active: int  # per text token: with lm_head, without the embedding
    text_total: int
    vision_total: int
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row of that name; all zeros where the model has no such component."""
        return next((row for row in self.rows if row.name == name), Row(name, 0, 0, 0, 0))

    @property
    def active_without_head(self) -> int:
        """Without embedding and lm_head: the layers alone."""
        return self.active - self.row("lm_head").active

    @property
    def active_with_embedding(self) -> int:
        return self.active + self.row("embedding").total


def count(cfg: K3Config) -> ParameterCount:
    text = cfg.text_config
    layers = range(text.num_hidden_layers)
    kda = sum(map(text.is_kda, layers))
    dense = sum(map(text.is_dense, layers))
    sparse = len(layers) - dense
    d = text.hidden_size
    rows: list[Row] = []

    def add(name: str, per_unit: int, units: int = 1, active: int | None = None) -> None:
        if per_unit * units:
            rows.append(Row(name, per_unit, units, per_unit * units, per_unit * units if active is None else active))

    attn_res = text.attn_res_block_size is not None
    if text.linear_attn_config is not None:
        add("KDA attention", kda_parameters(text.linear_attn_config, d), kda)
    add("full attention" if text.kv_lora_rank is None else "MLA attention", full_attention_parameters(text), len(layers) - kda)
    add("norms and AttnRes" if attn_res else "norms", (6 if attn_res else 2) * d, len(layers))
    add("dense FFN", 3 * d * text.intermediate_size, dense)
    if text.num_experts is not None and sparse:
        hidden, latent, per_token = text.moe_intermediate_size or 0, text.latent_size, text.num_experts_per_token or 0
        expert = 3 * latent * hidden
        add("routed experts", text.num_experts * expert, sparse, active=per_token * expert * sparse)
        add("shared experts", 3 * d * text.shared_intermediate, sparse)
        if text.routed_expert_hidden_size is not None:
            add("latent projections", 2 * d * latent + latent * text.latent_moe_use_norm, sparse)
        add("router", text.num_experts * (d + 1), sparse)
    add("embedding", text.vocab_size * d, active=0)
    add("lm_head", text.vocab_size * d)
    add("final norm and AttnRes" if attn_res else "final norm", (3 if attn_res else 1) * d)
    text_total = sum(row.total for row in rows)
    active = sum(row.active for row in rows)
    if cfg.vision_config is not None:
        add("vision tower", vision_tower_parameters(cfg.vision_config), active=0)
        add("projector", projector_parameters(cfg.vision_config), active=0)
    total = sum(row.total for row in rows)
    return ParameterCount(total, active, text_total, total - text_total, tuple(rows))


def kda_parameters(c: LinearAttnConfig, d: int) -> int:
    """One KDA layer's attention (K3 report §2.1.1): q, k, v, o, convolutions, decay, write strength, output gate and norm."""
    width, rank = c.num_heads * c.head_dim, c.head_dim
    low_rank = d * rank + rank * width
    gate = d * width if c.use_full_rank_gate else low_rank
    decay = low_rank + width + c.num_heads  # f_a, f_b, dt_bias, A_log
    return 4 * d * width + 3 * width * c.short_conv_kernel_size + decay + d * c.num_heads + gate + c.head_dim


def full_attention_parameters(c: TextConfig) -> int:
    """One MLA layer's attention (K3 report §2.1.2), or plain multi-head attention where `kv_lora_rank` is null."""
    d, heads, qk, v = c.hidden_size, c.num_attention_heads, c.qk_head_dim, c.v_head_dim
    if c.kv_lora_rank is None:
        q, kv = d * heads * qk, d * heads * (qk + v)
    else:
        q = d * heads * qk if c.q_lora_rank is None else c.q_lora_rank * (d + 1 + heads * qk)
        kv = d * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank * (1 + heads * (c.qk_nope_head_dim + v))
    return q + kv + heads * v * d * (2 if c.mla_use_output_gate else 1)


def vision_tower_parameters(c: VisionConfig) -> int:
    d = c.vt_hidden_size
    patches = 3 * c.patch_size**2 * d + c.init_pos_emb_height * c.init_pos_emb_width * d
    block = 2 * d + 4 * d * c.qkv_hidden_size + 2 * d * c.vt_intermediate_size
    return patches + c.vt_num_hidden_layers * block + d


def projector_parameters(c: VisionConfig) -> int:
    return c.merged_size**2 + c.merged_size * c.text_hidden_size + c.text_hidden_size


def short(n: int) -> str:
    """104189612640 → "104.2B": four digits."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= 0.99995 * size:
            return f"{n / size:.4g}{unit}"
    return str(n)


def describe(cfg: K3Config) -> list[tuple[str, str]]:
    """The model in rows of (label, value), for printing: what it is made of, then what it weighs."""
    text, linear = cfg.text_config, cfg.text_config.linear_attn_config
    layers = range(text.num_hidden_layers)
    dense = sum(map(text.is_dense, layers))
    kda = sum(map(text.is_kda, layers))
    counts = cfg.parameter_count()
    attention = "multi-head attention" if text.kv_lora_rank is None else "MLA"
    position = "no position embedding" if text.mla_use_nope else f"rotary on {text.qk_rope_head_dim} channels, base {text.rope_theta:g}"
    kinds = f"{kda} KDA, {len(layers) - kda} {attention}; {dense} dense, {len(layers) - dense} with experts"
    rows = [("layers", f"{len(layers)} ({kinds})")]
    rows.append(("width", f"{text.hidden_size}, vocabulary {text.vocab_size}"))
    if linear is not None and kda:
        bound = "softplus decay" if linear.gate_lower_bound is None else f"log-decay above {linear.gate_lower_bound:g}"
        gate = "full-rank gate" if linear.use_full_rank_gate else f"gate of rank {linear.head_dim}"
        rows.append(("KDA", f"{linear.num_heads} heads of {linear.head_dim}, {bound}, {gate}"))
    if kda < len(layers):
        ranks = "" if text.kv_lora_rank is None else f"latent {text.kv_lora_rank}, query rank {text.q_lora_rank or 'full'}, "
        gate = "output gate" if text.mla_use_output_gate else "no gate"
        heads = f"{text.num_attention_heads} heads, keys {text.qk_head_dim}, values {text.v_head_dim}"
        rows.append((attention, f"{heads}, {ranks}{gate}, {position}"))
    block = text.attn_res_block_size
    rows.append(("residual", "plain" if block is None else f"AttnRes, {-(-len(layers) // block)} blocks of {block} layers"))
    activation = "SwiGLU" if text.hidden_act == "silu" else "SiTU-GLU"
    rows.append(("feed-forward", activation + (f", dense width {text.intermediate_size}" if dense else "")))
    if text.num_experts is not None and dense < len(layers):
        width = "full width" if text.routed_expert_hidden_size is None else f"latent {text.latent_size}"
        shared = f"{text.num_shared_experts} shared" if text.num_shared_experts else "none shared"
        sparsity = f"sparsity {text.num_experts / (text.num_experts_per_token or 1):g}"
        routed = f"{text.num_experts} routed, top {text.num_experts_per_token} ({sparsity}), {width} × {text.moe_intermediate_size}"
        rows.append(("experts", f"{routed}, {shared}" + (", stored as MXFP4" if cfg.quantized else "")))
    if cfg.vision_config is not None:
        v = cfg.vision_config
        rows.append(("vision", f"{v.vt_num_hidden_layers} layers, width {v.vt_hidden_size}, patches of {v.patch_size}"))
    for row in counts.rows:
        units = f" ({row.per_unit:,} × {row.units})" if row.units > 1 else ""
        rows.append((row.name, f"{row.total:,}{units}" + (f", active {row.active:,}" if row.active not in (0, row.total) else "")))
    if counts.vision_total:
        rows.append(("text parameters", f"{counts.text_total:,} ({short(counts.text_total)})"))
    label = "with vision" if counts.vision_total else "parameters"
    rows.append((label, f"{counts.total:,} ({short(counts.total)})"))
    rows.append(("active per token", f"{counts.active:,} ({short(counts.active)}; with lm_head, without the embedding)"))
    return rows
