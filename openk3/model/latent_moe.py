"""Stable LatentMoE: many narrow experts in a latent space, a few per token, beside shared ones (K3 report §2.3; arXiv 2601.18089).

    y = W_↑ RMSNorm(Σ_{j ∈ T} p_j E_j(W_↓ x)) + shared(x)

Axes: N = B·T tokens, D model width, L latent width, E experts, k experts per token, F hidden width of an expert.
"""

from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.layers import MLP, Linear, RMSNorm
from openk3.ops import backend
from openk3.ops.experts import experts
from openk3.ops.precision import wide
from openk3.ops.routing import Routing, expert_load, required_bias_histogram, route
from openk3.ops.situ import Activation


class Router(nn.Module):
    """Float32 scores, selection by score plus correction bias, weights from the scores alone.

    The bias is a float32 buffer that no optimizer touches. While training with `collect` on, each forward adds to `load`
    (tokens per expert) and `histogram` (counts of the bias each expert would have needed, for Quantile Balancing), which
    whoever balances has zeroed, with the histogram's range fixed for the step.
    """

    def __init__(self, config: K3Config):
        super().__init__()
        text = config.text_config
        assert text.num_experts is not None and text.num_experts_per_token is not None      # or every layer is dense
        self.num_experts, self.k = text.num_experts, text.num_experts_per_token
        self.activation, self.renormalize, self.scale = text.moe_router_activation_func, text.moe_renormalize, text.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(text.num_experts, text.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(text.num_experts, dtype=torch.float32))
        self.collect, self.bins = False, 1000
        self.counting = Lock()                                           # micro-batches may run side by side
        self.hist_lo, self.hist_width = torch.tensor(-1.0), torch.tensor(0.002)
        self.histogram: Tensor | None = None                             # int32 [E, bins]
        self.load: Tensor | None = None                                  # int64 [E]

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """x `[N, D]`; valid bool `[N]`: padding isn't counted."""
        logits = F.linear(wide(x), wide(self.weight))
        collect = self.training and self.collect
        routing = route(logits, self.e_score_correction_bias.to(logits.dtype), self.k, activation=self.activation,
                        renormalize=self.renormalize, scale=self.scale, cutoff=collect)
        if collect:
            with self.counting, torch.no_grad():
                assert self.load is not None and self.histogram is not None and routing.cutoff is not None
                self.load += expert_load(routing.indices, self.num_experts, valid)
                self.histogram += required_bias_histogram(
                    routing.scores, routing.cutoff, self.hist_lo, self.hist_width, self.bins, valid)
        return routing

    def _apply(self, fn, recurse=True):
        """A model-wide cast must not touch the bias: rounded to bfloat16 it picks other experts."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = before.to(self.e_score_correction_bias.device)
        return self


class Experts(nn.Module):
    """All routed experts of a layer, stacked: w1 (gate) and w3 (up) `[E, F, L]`, w2 (down) `[E, L, F]`."""

    def __init__(self, num_experts: int, latent: int, hidden: int, act: Activation):
        super().__init__()
        self.act = act
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, latent))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, latent))
        self.w2 = nn.Parameter(torch.empty(num_experts, latent, hidden))

    def forward(self, z: Tensor, routing: Routing) -> Tensor:
        backend.record("experts", "torch sorted")
        return experts(z, routing.indices, routing.weights, self.w1, self.w3, self.w2, self.act)


class LatentMoE(nn.Module):
    """`routed_expert_hidden_size` null: experts at full width, no latent projections, no norm (K2, Kimi Linear)."""

    def __init__(self, config: K3Config, act: Activation):
        super().__init__()
        text = config.text_config
        width, latent = text.hidden_size, text.routed_expert_hidden_size
        assert text.num_experts is not None and text.moe_intermediate_size is not None      # or every layer is dense
        self.gate = Router(config)
        self.experts = Experts(text.num_experts, text.latent_size, text.moe_intermediate_size, act)
        if latent is not None:
            self.routed_expert_down_proj, self.routed_expert_up_proj = Linear(width, latent), Linear(latent, width)
            if text.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(latent, text.rms_norm_eps)
        self.shared_experts = MLP(width, text.shared_intermediate, act) if text.num_shared_experts else None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x `[B, T, D]` → `[B, T, D]`; valid bool `[B, T]` or None."""
        flat = x.flatten(0, -2)
        routing = self.gate(flat, None if valid is None else valid.flatten())
        u = self.experts(self.routed_expert_down_proj(flat) if hasattr(self, "routed_expert_down_proj") else flat, routing)
        if hasattr(self, "routed_expert_norm"):
            u = self.routed_expert_norm(u)
        if hasattr(self, "routed_expert_up_proj"):
            u = self.routed_expert_up_proj(u)
        u = u.view_as(x)
        return u if self.shared_experts is None else u + self.shared_experts(x)
