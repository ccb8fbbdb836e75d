"""Kimi K3's language model, and every other generation that its config can describe: Kimi Linear, K2-like, a dense control.

Read `DecoderLayer.forward` first: it is the model. Axes: B batch, T tokens, D width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.attn_res import DepthState, site_weight
from openk3.model.cache import HybridCache
from openk3.model.generate import generate
from openk3.model.kda import ConvWeight, KimiDeltaAttention
from openk3.model.latent_moe import Experts, LatentMoE, Router
from openk3.model.layers import MLP, Embedding, Linear, RMSNorm
from openk3.model.layout import Layout, align_left, resets_from_cu_seqlens
from openk3.model.mla import GatedMLA, MultiHeadAttention
from openk3.ops.precision import wide
from openk3.ops.situ import Activation


@dataclass
class Output:
    """`logits` `[B, T, V]`; `hidden` (when asked for): the partial sum after each layer, `[B, T, D]` each; `depth`: (site, weights)."""

    logits: Tensor | None
    last_hidden: Tensor
    hidden: list[Tensor] | None = None
    depth: list[tuple[str, Tensor]] | None = None


class DecoderLayer(nn.Module):
    def __init__(self, config: K3Config, index: int, act: Activation):
        super().__init__()
        text = config.text_config
        self.index, self.block_size = index, text.attn_res_block_size
        width, eps = text.hidden_size, text.rms_norm_eps
        if text.is_kda(index):
            self.self_attn = KimiDeltaAttention(config)
        else:
            self.self_attn = MultiHeadAttention(config) if text.kv_lora_rank is None else GatedMLA(config)
        self.is_kda = text.is_kda(index)
        if text.is_dense(index):
            self.mlp = MLP(width, text.intermediate_size, act)
        else:
            self.block_sparse_moe = LatentMoE(config, act)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        if self.block_size is not None:
            self.self_attention_res_norm, self.mlp_res_norm = RMSNorm(width, eps), RMSNorm(width, eps)
            self.self_attention_res_proj, self.mlp_res_proj = Linear(width, 1), Linear(width, 1)

    def omegas(self) -> tuple[Tensor, Tensor]:
        """Score weights `[D]` of the attention site and of the feed-forward site; a plain residual model has none."""
        return (site_weight(self.self_attention_res_norm, self.self_attention_res_proj),
                site_weight(self.mlp_res_norm, self.mlp_res_proj))

    def forward(self, depth: DepthState, layout: Layout, cache: HybridCache | None = None, block_omegas: Tensor | None = None) -> None:
        """One layer: read the depth, attend, add; read the depth, feed forward, add. `depth` is changed in place."""
        attention_omega, mlp_omega = (None, None) if self.block_size is None else self.omegas()
        first = self.block_size is not None and self.index % self.block_size == 0
        site = None if self.block_size is None else 2 * (self.index % self.block_size)
        h = depth.read(attention_omega, None if first else site, f"L{self.index}.attn")
        if first:
            depth.push(block_omegas)
        slot = None if cache is None else (cache.kda if self.is_kda else cache.mla)(self.index)
        depth.add(self.self_attn(self.input_layernorm(h), layout, slot))
        h = self.post_attention_layernorm(depth.read(mlp_omega, None if site is None else site + 1, f"L{self.index}.ffn"))
        depth.add(self.mlp(h) if hasattr(self, "mlp") else self.block_sparse_moe(h, layout.valid))


class K3Model(nn.Module):
    def __init__(self, config: K3Config):
        super().__init__()
        text = config.text_config
        act = Activation(text.hidden_act, text.activation_situ_beta, text.activation_situ_linear_beta)
        self.block_size, self.eps = text.attn_res_block_size, text.rms_norm_eps
        self.embed_tokens = Embedding(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index, act) for index in range(text.num_hidden_layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        if self.block_size is not None:
            self.output_attn_res_norm, self.output_attn_res_proj = RMSNorm(text.hidden_size, self.eps), Linear(text.hidden_size, 1)
        self.two_phase = False                      # read the blocks once per block instead of once per site
        self.compute_dtype: torch.dtype | None = None

    def forward(self, input_ids: Tensor, layout: Layout, cache: HybridCache | None = None,
                keep_hidden: bool = False, trace: bool = False) -> tuple[Tensor, list[Tensor], DepthState]:
        """ids `[B, T]` → (normed output `[B, T, D]`, per-layer partial sums, depth state)."""
        x = self.embed_tokens(input_ids)
        depth = DepthState(x if self.compute_dtype is None else x.to(self.compute_dtype), self.block_size, self.eps)
        depth.trace = [] if trace else None
        hidden = []
        for index, layer in enumerate(self.layers):
            layer(depth, layout, cache, self._block_omegas(index))
            if keep_hidden:
                hidden.append(depth.partial)
        omega = None if self.block_size is None else site_weight(self.output_attn_res_norm, self.output_attn_res_proj)
        return self.norm(depth.read(omega, self._output_site(), "output")), hidden, depth

    def _block_omegas(self, index: int) -> Tensor | None:
        """`[S, D]`: the score weights of every site that reads the block beginning at layer `index`; None: mix directly."""
        if not self.two_phase or self.block_size is None or index % self.block_size:
            return None
        layers = cast(Iterable[DecoderLayer], self.layers[index : index + self.block_size])
        omegas = [w for layer in layers for w in layer.omegas()]
        if index + self.block_size >= len(self.layers):
            omegas.append(site_weight(self.output_attn_res_norm, self.output_attn_res_proj))
        return torch.stack(omegas)

    def _output_site(self) -> int | None:
        if self.block_size is None:
            return None
        return 2 * (len(self.layers) - (len(self.layers) - 1) // self.block_size * self.block_size)


class K3ForCausalLM(nn.Module):
    """The model with its head. Weights are uninitialised until `init_weights` or a checkpoint sets them."""

    from_pretrained: ClassVar[Callable[..., "K3ForCausalLM"]]     # bound by `openk3/__init__.py`: `checkpoint` stands above the model
    save_pretrained: ClassVar[Callable[..., Path]]

    def __init__(self, config: K3Config):
        super().__init__()
        self.config = config
        self.model = K3Model(config)
        self.lm_head = Linear(config.text_config.hidden_size, config.text_config.vocab_size)

    def forward(self, input_ids: Tensor, cache: HybridCache | None = None, attention_mask: Tensor | None = None,
                cu_seqlens: Tensor | None = None, *, keep_hidden: bool = False, trace: bool = False,
                last_only: bool = False, head: bool = True) -> Output:
        """ids int64 `[B, T]` → `Output`.

        cache: what the rows remember; read and advanced. Feeding a sequence whole, in pieces, or token by token is the same.
        attention_mask `[B, T]` of 0 and 1: padding on the left or on the right; logits of padded places mean nothing.
        cu_seqlens: offsets of packed documents in the flattened B·T tokens; nothing is remembered over a boundary.
        last_only: logits of each row's last token only, `[B, 1, V]`. head False: no logits (`last_hidden` is before the head).
        Errors: packed documents together with a cache or a mask; a mask with a hole.
        """
        if cu_seqlens is not None and (cache is not None or attention_mask is not None):
            raise ValueError("cu_seqlens packs documents for training: give neither cache nor attention_mask with it")
        batch, tokens = input_ids.shape
        lengths = rolled = None
        if attention_mask is not None:
            lengths, rolled = align_left(attention_mask)
        if rolled is not None:
            input_ids = input_ids.gather(1, rolled)
        layout = Layout(
            batch, tokens, input_ids.device, lengths,
            None if cu_seqlens is None else resets_from_cu_seqlens(cu_seqlens, batch, tokens),
            None if cache is None else cache.lengths, 0 if cache is None else cache.longest)
        x, hidden, depth = self.model(input_ids, layout, cache, keep_hidden, trace)
        if cache is not None:
            cache.advance(tokens, lengths)
        if last_only:
            x = x[:, -1:] if lengths is None else x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, x.shape[-1]))
        elif rolled is not None:
            back = torch.empty_like(rolled).scatter_(1, rolled, torch.arange(tokens, device=rolled.device).expand(batch, -1))
            x = x.gather(1, back.unsqueeze(-1).expand_as(x))
        return Output(self.lm_head(x) if head else None, x, hidden if keep_hidden else None, depth.trace)

    def loss(self, input_ids: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, *, attention_mask: Tensor | None = None,
             reduction: str = "mean") -> Tensor:
        """Next-token cross-entropy in nats; targets int64 `[B, T]`, −100 where nothing is asked. Logits are float32 in the loss."""
        hidden = self(input_ids, cu_seqlens=cu_seqlens, attention_mask=attention_mask, head=False).last_hidden
        return self.token_loss(hidden, targets, reduction)

    def token_loss(self, hidden: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """The head and the cross-entropy of `loss`, for the model's last hidden states `[B, T, D]`."""
        logits = self.lm_head(hidden)
        return F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten(), ignore_index=-100, reduction=reduction)

    generate = generate

    def new_cache(self, batch_size: int = 1, capacity: int = 0) -> HybridCache:
        return HybridCache(self.config, batch_size, capacity, self.lm_head.weight.device)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> "K3ForCausalLM":
        """Values for training from scratch (K3 report §2.1, arXiv 2603.15031 §5): not those of ports that only load weights.

        Linears normal with std `initializer_range`; norms one; AttnRes pseudo-queries zero (a plain mean over depth);
        A_log zero; dt_bias the inverse softplus of a step log-uniform in [1e-3, 0.1] (Mamba-2); convolutions uniform in ± W^−½.
        """
        std = self.config.openk3.initializer_std or self.config.text_config.initializer_range
        draw = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            if isinstance(module, (Linear, Embedding, Router)):
                _normal(module.weight, std, draw) if not name.endswith("_res_proj") else module.weight.zero_()
            elif isinstance(module, Experts):
                for weight in (module.w1, module.w3, module.w2):
                    _normal(weight, std, draw)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, ConvWeight):
                bound = module.weight.shape[-1] ** -0.5
                module.weight.copy_((torch.rand(module.weight.shape, generator=draw) * 2 - 1) * bound)
            elif isinstance(module, KimiDeltaAttention):
                module.A_log.zero_()
                step = torch.exp(torch.rand(module.dt_bias.shape, generator=draw) * math.log(0.1 / 1e-3) + math.log(1e-3)).clamp_min(1e-4)
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
            if isinstance(module, Router):
                module.e_score_correction_bias.zero_()
        return self


def _normal(weight: Tensor, std: float, draw: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=draw) * std)
