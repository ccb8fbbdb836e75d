"""Sampling from a model with a cache: prompts of different lengths together, one token a step, each row stopping on its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sampling:
    """temperature 0: greedy. top_p and min_p cut the tail; repetition_penalty > 1 divides the logits of what was seen."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        checks = [("temperature", self.temperature >= 0, "0 or more"), ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
                  ("min_p", 0 <= self.min_p < 1, "in [0, 1)"), ("top_k", self.top_k >= 0, "0 (off) or more"),
                  ("repetition_penalty", self.repetition_penalty > 0, "above 0")]
        for name, fine, want in checks:
            if not fine:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: give a value {want}")


def sample(logits: Tensor, sampling: Sampling, seen: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """One token per row: logits `[B, V]` → int64 `[B]`. seen bool `[B, V]`: tokens the repetition penalty applies to.

    Order as in vLLM and transformers: penalty, temperature, top-k, top-p, min-p.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1.0 and seen is not None:
        r = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k, -1).values[..., -1:], -torch.inf)
    probs = torch.softmax(logits, -1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        drop = ordered.cumsum(-1) - ordered >= sampling.top_p               # the token that crosses top_p stays
        probs = probs.scatter(-1, order, ordered.masked_fill(drop, 0))
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0)
    return torch.multinomial(probs / probs.sum(-1, keepdim=True), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(model, prompts: Sequence[Sequence[int]] | Tensor, max_new_tokens: int = 256, *, sampling: Sampling | None = None,
             stop_ids: Sequence[int] = (), seed: int | None = None, cache=None,
             on_token: Callable[[int, int], bool | None] | None = None) -> list[list[int]]:
    """Continue each prompt (token ids); give back the new ids, the stop id included where one was met.

    on_token(row, id) is called as tokens come; what it returns True for ends that row. With a `cache` the prompts are what
    follows the tokens it holds; it is advanced (rows that end leave it). Without a seed, torch's global generator is used.
    Errors: an empty prompt, ids outside the vocabulary.
    """
    sampling = sampling or Sampling()
    prompts = [list(map(int, p)) for p in prompts]
    vocab, device = model.config.text_config.vocab_size, model.lm_head.weight.device
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty: give at least one token, such as the one that begins a document")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"prompt {row} has a token id outside 0 … {vocab - 1}")
    if max_new_tokens < 1 or not prompts:
        return [[] for _ in prompts]
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    longest = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in prompts], device=device)
    if cache is None:
        cache = model.new_cache(len(prompts), longest + max_new_tokens)
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device).scatter_(1, ids, mask.bool())
    was_training = model.training
    model.eval()
    try:
        new: list[list[int]] = [[] for _ in prompts]
        rows, stops = list(range(len(prompts))), set(stop_ids)
        logits = model(ids, cache=cache, attention_mask=mask, last_only=True).logits[:, -1]
        while True:
            token = sample(logits, sampling, seen, generator)
            alive = []
            for position, (row, one) in enumerate(zip(rows, token.tolist(), strict=True)):
                new[row].append(one)
                ended = bool(on_token and on_token(row, one)) or one in stops or len(new[row]) >= max_new_tokens
                if not ended:
                    alive.append(position)
            if not alive:
                return new
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            if len(alive) < len(rows):
                keep = torch.tensor(alive, device=device)
                rows, token = [rows[i] for i in alive], token[keep]
                cache.select(keep)
                seen = None if seen is None else seen[keep]
            logits = model(token[:, None], cache=cache, last_only=True).logits[:, -1]
    finally:
        model.train(was_training)
