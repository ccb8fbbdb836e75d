"""The config tree: K3 and its relatives as frozen dataclasses whose fields carry the released names.

`K3Config.load("DIR")` reads a released `config.json`: Kimi K3's (a wrapper around `text_config` and `vision_config`) or Kimi Linear's
(flat: the text fields at the top). Everything that decides a shape or the maths must be written in the file, unless the released
classes share a default. Where the two families differ the default is Kimi Linear's, because a K3 file always writes the field.
What is unknown, missing, of a wrong type or impossible raises `UserError` with one line.

The comment beside a field says what null means. `is_kda(l)` counts layers from 0, the two released layer lists from 1.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from openk3.errors import UserError
from openk3.quantization import MXFP4_GROUP, MXFP4_QUANTIZATION, check_quantization
from openk3.schema import FrozenDict, Level, if_changed, read_json, variant, write_json

if TYPE_CHECKING:
    from openk3.counts import ParameterCount


@dataclass(frozen=True, kw_only=True)
class LinearAttnConfig(Level):
    """KDA layers (K3 report §2.1.1; arXiv 2510.26692)."""

    _path: ClassVar[str] = "text_config.linear_attn_config."
    num_heads: int
    head_dim: int  # of keys and values; also the rank of the decay projections and of the low-rank gate
    short_conv_kernel_size: int
    full_attn_layers: tuple[int, ...]  # MLA layers, counted from 1
    kda_layers: tuple[int, ...]  # KDA layers, counted from 1
    use_full_rank_gate: bool = variant(False)  # K3: true; false: output gate of rank head_dim (Kimi Linear)
    gate_lower_bound: float | None = variant(None)  # K3: -5.0, log-decay in (bound, 0); null: unbounded softplus decay (Kimi Linear)
    extra: FrozenDict = FrozenDict()

    def _check(self) -> None:
        self._above_zero("num_heads", "head_dim", "short_conv_kernel_size")
        if self.gate_lower_bound is not None and self.gate_lower_bound >= 0:
            self._fail("gate_lower_bound", "the bound of the log-decay must be below 0, or null for softplus decay")

    def check_layers(self, num_layers: int) -> None:
        """Raises `UserError` unless the two lists split the layers 1…num_layers between them."""
        times = Counter(self.kda_layers + self.full_attn_layers)
        wrong = [n for n in sorted(times) if not 1 <= n <= num_layers or times[n] > 1]
        wrong = wrong or [n for n in range(1, min(num_layers, len(times) + 1) + 1) if n not in times]
        if wrong:
            what = f"layer {wrong[0]} is listed {times[wrong[0]]} times" if 1 <= wrong[0] <= num_layers else f"{wrong[0]} isn't a layer"
            raise UserError(f"{self._path}kda_layers and full_attn_layers must split the layers 1 to {num_layers} between them: {what}")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Level):
    """The language model (`text_config`, or the top level of a flat config)."""

    _path: ClassVar[str] = "text_config."
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense feed-forward layers
    num_hidden_layers: int
    num_attention_heads: int  # of full-attention layers
    hidden_act: str  # "situ" (K3 report Eq. 12) or "silu" (SwiGLU)
    q_lora_rank: int | None  # null: queries straight from the hidden state (q_proj)
    kv_lora_rank: int | None  # null: plain multi-head attention
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool  # K3: true; false: rotary embedding on the qk_rope_head_dim channels
    num_experts: int | None  # null: dense feed-forward everywhere, and the fields of the experts are absent
    num_experts_per_token: int | None = if_changed(None)
    num_shared_experts: int | None = if_changed(None)
    moe_intermediate_size: int | None = if_changed(None)
    first_k_dense_replace: int | None = if_changed(None)  # that many layers at the start stay dense

    model_type: str = "kimi_linear"
    num_key_value_heads: int | None = None  # as many as num_attention_heads
    linear_attn_config: LinearAttnConfig | None = if_changed(None)  # absent: every layer is full attention
    attn_res_block_size: int | None = variant(None)  # K3: 12 decoder layers; null: plain residual stream
    mla_use_output_gate: bool = variant(False)  # K3: true
    routed_expert_hidden_size: int | None = variant(None)  # K3: 3584, half the width; null: experts at full width, no latent projections
    latent_moe_use_norm: bool = variant(False)  # K3: true; RMSNorm before the latent up-projection (no latent: no norm)
    activation_situ_beta: float = variant(1.0)  # K3: 4.0
    activation_situ_linear_beta: float | None = variant(None)  # K3: 25.0; null: the up branch stays linear
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0  # Kimi Linear: 2.446
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    rope_theta: float = if_changed(10000.0)  # used only where mla_use_nope is false
    attention_bias: bool = if_changed(False)
    bos_token_id: int | None = if_changed(None)
    eos_token_id: int | tuple[int, ...] | None = if_changed(None)
    pad_token_id: int | None = if_changed(None)
    quantization_config: FrozenDict | None = if_changed(None)  # present: the routed experts are stored as MXFP4
    extra: FrozenDict = FrozenDict()

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """The width at which routed experts work."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate(self) -> int:
        """The width of the one MLP that stands for all shared experts; 0 without any."""
        return (self.num_shared_experts or 0) * (self.moe_intermediate_size or 0)

    def is_kda(self, layer: int) -> bool:
        """Whether the layer (0-based) is KDA; otherwise it is full attention."""
        return self.linear_attn_config is not None and layer + 1 in self.linear_attn_config.kda_layers

    def is_dense(self, layer: int) -> bool:
        """Whether the layer (0-based) has a dense feed-forward; otherwise it has experts."""
        return self.num_experts is None or layer < (self.first_k_dense_replace or 0) or layer % self.moe_layer_freq != 0

    def _check(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        self._above_zero("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "v_head_dim")
        self._above_zero("q_lora_rank", "kv_lora_rank", "attn_res_block_size", "routed_expert_hidden_size", "moe_layer_freq")
        self._above_zero("rms_norm_eps", "initializer_range", "max_position_embeddings", "rope_theta", "routed_scaling_factor",
                         "activation_situ_beta", "activation_situ_linear_beta")  # fmt: skip
        self._at_least(0, "qk_nope_head_dim", "qk_rope_head_dim", "num_nextn_predict_layers")
        self._one_of("model_type", "kimi_linear")
        self._one_of("hidden_act", "situ", "silu")
        for name in ("tie_word_embeddings", "attention_bias"):
            self._one_of(name, False)
        self._check_attention()
        if self.num_experts is not None:
            self._check_experts()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(self, name)
            if any(not 0 <= i < self.vocab_size for i in (ids if isinstance(ids, tuple) else (ids,)) if i is not None):
                self._fail(name, f"a token id must lie in 0 to vocab_size - 1 ({self.vocab_size - 1})")
        if self.quantization_config is not None:
            self.check_packed(self.quantization_config, self._path)

    def _check_attention(self) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            self._fail("num_key_value_heads", f"each head has its own keys: it must be num_attention_heads ({self.num_attention_heads})")
        if self.qk_head_dim == 0:
            self._fail("qk_nope_head_dim", "it and qk_rope_head_dim can't both be 0")
        if self.kv_lora_rank is None and self.q_lora_rank is not None:
            self._fail("q_lora_rank", "it must be null where kv_lora_rank is null (plain multi-head attention)")
        if not self.mla_use_nope:
            if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim == 0:
                self._fail("qk_rope_head_dim", "rotary embedding (mla_use_nope false) turns pairs of channels: it must be even and above 0")
            for name in ("rope_scaling", "rope_parameters"):
                if self.extra.get(name) is not None:
                    raise UserError(f"{self._path}{name} must be null where mla_use_nope is false: openk3 has no scaled rotary embedding")
        if self.linear_attn_config is not None:
            self.linear_attn_config.check_layers(self.num_hidden_layers)

    def _check_experts(self) -> None:
        for name in ("num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "first_k_dense_replace"):
            if getattr(self, name) is None:
                raise UserError(f"{self._path}{name} is missing: it is required where num_experts is set")
        self._above_zero("num_experts", "num_experts_per_token", "moe_intermediate_size")
        self._at_least(0, "num_shared_experts", "first_k_dense_replace")
        if self.num_experts_per_token >= self.num_experts:  # type: ignore[operator]
            self._fail("num_experts_per_token", f"it must be below num_experts ({self.num_experts})")
        self._one_of("moe_router_activation_func", "sigmoid", "softmax")
        self._one_of("topk_method", "noaux_tc")
        self._one_of("num_expert_group", 1)
        self._one_of("topk_group", 1)

    def check_packed(self, quantization: Mapping[str, Any], path: str) -> None:
        """Raises `UserError` unless openk3 reads that form of MXFP4 and it fits the experts' widths."""
        check_quantization(quantization, path + "quantization_config")
        width = "hidden_size" if self.routed_expert_hidden_size is None else "routed_expert_hidden_size"
        for name in (width, "moe_intermediate_size") if self.num_experts is not None else ():
            if getattr(self, name) % MXFP4_GROUP:
                self._fail(name, f"the width of MXFP4 experts must be a multiple of {MXFP4_GROUP}")


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Level):
    """MoonViT-V2 and its projector (K3 report §2.4). The strings name the one form that the released tower has."""

    _path: ClassVar[str] = "vision_config."
    vt_hidden_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    qkv_hidden_size: int
    vt_intermediate_size: int
    mm_hidden_size: int
    text_hidden_size: int
    model_type: str = "kimi_k3_vision"
    patch_size: int = 14
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    pos_emb_type: str = "divided_fixed"
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_interpolation_mode: str = "bilinear"
    merge_type: str = "sd2_tpool"
    merge_kernel_size: tuple[int, ...] = (2, 2)
    mm_projector_type: str = "patchmergerv2"
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    video_attn_type: str = "spatial_temporal"
    extra: FrozenDict = FrozenDict()

    @property
    def head_dim(self) -> int:
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merged_size(self) -> int:
        """The width of a merged group of patches, the projector's input."""
        return self.mm_hidden_size * math.prod(self.merge_kernel_size)

    def _check(self) -> None:
        for f in dataclasses.fields(self):
            if isinstance(f.default, str | bool) and f.name != "model_type":
                self._one_of(f.name, f.default)
            elif f.type in (int, float):
                self._above_zero(f.name)
        if len(self.merge_kernel_size) != 2 or min(self.merge_kernel_size) < 1:
            self._fail("merge_kernel_size", "it must be two numbers above 0 (height, width)")
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            self._fail("qkv_hidden_size", f"each of {self.vt_num_attention_heads} heads needs a multiple of 4 channels (2-D rotary pairs)")
        if self.mm_hidden_size != self.vt_hidden_size:
            self._fail("mm_hidden_size", f"the projector takes the tower's output: it must equal vt_hidden_size ({self.vt_hidden_size})")


@dataclass(frozen=True, kw_only=True)
class OpenK3Settings(Level):
    """Settings that no released file names; written only where they differ from these defaults."""

    _path: ClassVar[str] = "openk3."
    mla_latent_norm_eps: float = if_changed(1e-6)  # of q_a_layernorm and kv_a_layernorm: the released Python's; serving engines use 1e-5
    vision_norm_eps: float | None = if_changed(None)  # null: the input dtype's machine epsilon, as torch's RMSNorm
    clip_attention: str = if_changed("joint")  # over all tokens of a clip (released code) or "factorised" (K3 report)
    initializer_std: float | None = if_changed(None)  # null: text_config.initializer_range
    mtp_loss_weight: float = if_changed(0.3)
    extra: FrozenDict = FrozenDict()

    def _check(self) -> None:
        self._above_zero("mla_latent_norm_eps", "vision_norm_eps", "initializer_std")
        self._at_least(0, "mtp_loss_weight")
        self._one_of("clip_attention", "joint", "factorised")


@dataclass(frozen=True, kw_only=True)
class K3Config(Level):
    """A whole model: `text_config`, perhaps `vision_config`, and the wrapper's fields. Hashable and immutable."""

    text_config: TextConfig
    model_type: str = "kimi_k3"  # "kimi_linear": a flat config, written with the text fields at the top
    dtype: str | None = if_changed(None)
    tie_word_embeddings: bool = False
    ignore_index: int = -100
    pad_token_id: int | None = if_changed(None)
    media_placeholder_token_id: int | None = if_changed(None)
    image_placeholder: str = "<|kimi_image_placeholder|>"  # a text marker, not a vocabulary entry
    quantization_config: FrozenDict | None = if_changed(None)
    vision_config: VisionConfig | None = if_changed(None)  # absent: text only
    openk3: OpenK3Settings = if_changed(OpenK3Settings())
    extra: FrozenDict = FrozenDict()

    @property
    def flat(self) -> bool:
        """Whether the text fields stand at the top (Kimi Linear): then released tensor names have no `language_model.` prefix."""
        return self.model_type == "kimi_linear"

    @property
    def quantized(self) -> bool:
        """Whether the file says that routed experts are stored as MXFP4."""
        return (self.text_config.quantization_config or self.quantization_config) is not None

    def _check(self) -> None:
        text, vision = self.text_config, self.vision_config
        self._one_of("model_type", "kimi_k3", "kimi_linear")
        self._one_of("tie_word_embeddings", False)
        if self.flat:
            for f in dataclasses.fields(self):
                if f.name not in ("text_config", "model_type", "dtype", "openk3") and getattr(self, f.name) != f.default:
                    self._fail(f.name, "a flat config (model_type kimi_linear) has no such field outside its text fields")
        for name in ("pad_token_id", "media_placeholder_token_id"):
            if not 0 <= (getattr(self, name) or 0) < text.vocab_size:
                self._fail(name, f"a token id must lie in 0 to vocab_size - 1 ({text.vocab_size - 1})")
        if self.quantization_config is not None:
            text.check_packed(self.quantization_config, self._path)
        if vision is not None:
            if vision.text_hidden_size != text.hidden_size:
                vision._fail("text_hidden_size", f"it must equal text_config.hidden_size ({text.hidden_size})")
            if self.media_placeholder_token_id is None:
                raise UserError("media_placeholder_token_id is missing: it is required where vision_config is set")

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Reads a config as JSON gives it, wrapped or flat. Raises `UserError`."""
        if not isinstance(d, Mapping):
            raise UserError("the config must be a JSON object")
        if "text_config" in d or d.get("model_type") != "kimi_linear":
            if d.get("model_type") != "kimi_k3":
                raise UserError(f"model_type is {d.get('model_type', 'missing')!r}: it must be 'kimi_k3' (or 'kimi_linear' when flat)")
            linear = d["text_config"].get("linear_attn_config") if isinstance(d.get("text_config"), Mapping) else None
            if isinstance(linear, Mapping) and "gate_lower_bound" not in linear:  # no tensor would betray the wrong decay
                raise UserError(f"{LinearAttnConfig._path}gate_lower_bound is missing: K3's is -5.0, null means softplus decay")
            return super().from_dict(d)
        top = {key: d[key] for key in ("dtype", "openk3") if key in d}
        if "vision_config" in d:
            raise UserError("vision_config: a flat config (model_type kimi_linear) is text only; a wrapped one has model_type kimi_k3")
        try:
            text = TextConfig.from_dict({key: value for key, value in d.items() if key not in top})
        except UserError as e:
            raise UserError(str(e).removeprefix("text_config.").replace(" in text_config;", " in the top level;")) from None
        return cls(model_type="kimi_linear", text_config=text, **top)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON: a released file's fields, each with the value it had."""
        top = super().to_dict()
        keep = {name: top[name] for name in ("dtype", "openk3") if name in top}
        return {**self.text_config.written(flat=True), **keep} if self.flat else top

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads DIR/config.json, or the JSON file itself. Raises `UserError` that starts with the path."""
        path = Path(path, "config.json") if Path(path).is_dir() else Path(path)
        try:
            return cls.from_dict(read_json(path))
        except UserError as e:
            raise UserError(f"{path}: {e}") from None

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes FOLDER/config.json (the folder is made where missing), aside and then renamed; returns its path."""
        return write_json(Path(folder) / "config.json", self.to_dict())

    def replace_text(self, **changes: Any) -> Self:
        """A copy with other text fields, checked like any config: `cfg.replace_text(attn_res_block_size=None)`."""
        if "num_attention_heads" in changes:
            changes.setdefault("num_key_value_heads", None)
        return dataclasses.replace(self, text_config=self.text_config.replace(**changes))

    def replace_linear_attn(self, **changes: Any) -> Self:
        """A copy with other fields of `linear_attn_config`: `cfg.replace_linear_attn(gate_lower_bound=None)`."""
        if self.text_config.linear_attn_config is None:
            raise UserError("this config has no linear_attn_config: every layer is full attention")
        return self.replace_text(linear_attn_config=self.text_config.linear_attn_config.replace(**changes))

    def with_vocab(self, vocab_size: int, bos: int | None, eos: int | None, pad: int | None, media_placeholder: int | None = None) -> Self:
        """A copy for a tokenizer: its size and special ids. `media_placeholder` is left out of a flat config, which has no images."""
        top = {"pad_token_id": pad, "media_placeholder_token_id": media_placeholder}
        text = self.text_config.replace(vocab_size=vocab_size, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
        return dataclasses.replace(self, text_config=text, **({} if self.flat else top))

    def with_dtype(self, dtype: str) -> Self:
        """A copy that names another storage dtype ("bfloat16", "float32") at every level that names one."""
        changes: dict[str, Any] = {"dtype": dtype}
        for name, level in (("text_config", self.text_config), ("vision_config", self.vision_config), ("extra", self)):
            if level is not None and level.extra.keys() & {"dtype", "torch_dtype"}:
                extra = FrozenDict({key: dtype if key in ("dtype", "torch_dtype") else value for key, value in level.extra.items()})
                changes[name] = extra if level is self else level.replace(extra=extra)
        return dataclasses.replace(self, **changes)

    def with_quantization(self, packed: bool) -> Self:
        """A copy that says that the routed experts are stored as MXFP4 (unchanged where it does already), or that they are not."""
        if packed:
            return self if self.quantized else self.replace_text(quantization_config=MXFP4_QUANTIZATION)
        return dataclasses.replace(self.replace_text(quantization_config=None), quantization_config=None)

    def parameter_count(self) -> "ParameterCount":
        """Parameters by component, total and active per token, by arithmetic: no tensor is built."""
        from openk3.counts import count

        return count(self)


def __getattr__(name: str) -> Any:
    """The presets, as if they were written here: `from openk3.config import nano, preset, PRESETS`."""
    if not name.startswith("_"):
        from openk3 import presets

        if name in presets.__all__:
            return getattr(presets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
