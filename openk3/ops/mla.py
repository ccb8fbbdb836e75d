"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; gated and NoPE in K3, report §2.1.2): the attention itself.

    k^h = [W_UK^h c | k_p]      v^h = W_UV^h c      o^h = softmax_causal(q^h · k^h / sqrt(nope + rope)) v^h

Two forms. Expanded: build every head's keys and values from the latents, then ordinary attention (prefill, training).
Absorbed: move W_UK to the query and W_UV to the output, and attend to the latents themselves (decode over a long cache).
Axes: B batch, T queries, S keys, H heads, R latent rank, N nope, P rope, V value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.precision import wide


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Ordinary attention. q, k `[B, H, T|S, N+P]`, v `[B, H, S, V]`; mask bool `[B|1, 1, T, S]`, None: causal with T = S.

    The softmax is in float32. Values of another width than the keys are padded to it: the fused kernels want them equal.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., :width]


def attend_expanded(q: Tensor, latent: Tensor, kv_b: Tensor, nope: int, rank: int, mask: Tensor | None = None) -> Tensor:
    """q `[B, T, H, N+P]`, latent `[B, S, R+P]` (normed latent, then the shared key), kv_b `[H, N+V, R]` → `[B, T, H, V]`."""
    heads = kv_b.shape[0]
    c, k_p = latent.split([rank, latent.shape[-1] - rank], -1)
    kv = (c @ kv_b.flatten(0, 1).T.to(c.dtype)).unflatten(-1, (heads, -1))                    # [B, S, H, N+V]
    k_n, v = kv.split([nope, kv.shape[-1] - nope], -1)
    k = torch.cat([k_n, k_p.to(k_n.dtype).unsqueeze(2).expand(-1, -1, heads, -1)], -1)
    out = attend(q.transpose(1, 2).to(k.dtype), k.transpose(1, 2), v.transpose(1, 2), mask)
    return out.transpose(1, 2)


def attend_absorbed(q: Tensor, latent: Tensor, kv_b: Tensor, nope: int, rank: int, mask: Tensor | None = None) -> Tensor:
    """The same values with the up-projections absorbed: nothing of size S · H · (N+V) is built. Arguments as `attend_expanded`."""
    q_n, q_p = q.split([nope, q.shape[-1] - nope], -1)
    up_k, up_v = kv_b.to(q.dtype).split([nope, kv_b.shape[1] - nope], 1)                      # [H, N, R], [H, V, R]
    q_lat = torch.einsum("bthn,hnr->bhtr", q_n, up_k)
    query = torch.cat([q_lat, q_p.transpose(1, 2)], -1)                                       # [B, H, T, R+P]
    scores = wide(query @ latent.unsqueeze(1).transpose(-1, -2)) * q.shape[-1] ** -0.5    # [B, H, T, S]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif q.shape[1] > 1:
        scores = scores.masked_fill(causal_mask(q.shape[1], latent.shape[1], q.device).logical_not(), -torch.inf)
    p = torch.softmax(scores, -1).to(latent.dtype)
    r = p @ latent[..., :rank].unsqueeze(1)                                                   # [B, H, T, R]
    return torch.einsum("bhtr,hvr->bthv", r, up_v)


def absorbed_is_cheaper(queries: int, keys: int, nope: int, value: int, rope: int, rank: int) -> bool:
    """Compare multiplications per head: expanding S keys once and attending narrow, or attending wide T times."""
    expanded = keys * rank * (nope + value) + queries * keys * (nope + rope + value)
    absorbed = queries * keys * (2 * rank + rope) + queries * rank * (nope + value)
    return absorbed < expanded


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """bool `[T, S]`: the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
