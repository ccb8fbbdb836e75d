"""What the parts of K3 are doing inside a model: depth weights of Attention Residuals, decay of KDA. Pure observation."""

import math

import torch
from torch import Tensor

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@torch.no_grad()
def probe(model, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> dict:
    """One forward pass over ids `[B, T]`: `attn_res` (site → mean softmax weight per source), `decay` (layer → quantiles of α
    and the half-lives in tokens they mean)."""
    seen: dict[int, Tensor] = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if layer.is_kda:
            hooks.append(layer.self_attn.register_forward_pre_hook(
                lambda module, args, index=index: seen.__setitem__(index, module.decay(args[0]))))
    was_training = model.training
    model.eval()
    try:
        out = model(input_ids, cu_seqlens=cu_seqlens, trace=True, head=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    found: dict = {"attn_res": [], "decay": []}
    for site, weights in out.depth or []:
        names = ["embed", *(f"block {n}" for n in range(1, len(weights)))]
        if len(weights) > 1 and not _just_pushed(site, model):
            names[-1] = "partial"
        found["attn_res"].append({"site": site, "weights": [round(w, 4) for w in weights.tolist()], "sources": names[: len(weights)]})
    levels = torch.tensor(QUANTILES)
    for index, g in sorted(seen.items()):
        sampled = g.flatten()[:: max(1, g.numel() // 200_000)].float()
        log_alpha = torch.quantile(sampled, levels).tolist()
        found["decay"].append({
            "layer": index, "quantiles": [math.exp(x) for x in log_alpha],
            "half_life": [math.log(2) / max(-x, 1e-9) for x in log_alpha]})
    return found


def _just_pushed(site: str, model) -> bool:
    """At a block's first attention site the running sum is the finished block that is pushed next."""
    name = site.removesuffix(".attn")
    return name != site and int(name[1:]) % (model.model.block_size or 1) == 0
