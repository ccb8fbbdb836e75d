"""Bits per byte on held-out text: the one quality figure that compares models of any tokenizer, and compressors.

Every byte of every document is scored exactly once. A document is read in windows of `context` tokens, each overlapping the one
before, so that a scored token has at least `context − stride` tokens of its document before it (or all there are).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from openk3.data.windows import batches, bits_per_byte, score_windows
from openk3.text.tokenizer import Tokenizer
from openk3.train.options import TrainOptions


@dataclass(frozen=True)
class Score:
    """`nats` summed over `tokens`, which spell `bytes` bytes."""

    nats: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nats, self.bytes)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)


def scoring_context(seq_len: int) -> int:
    """Tokens of a window for a model trained on rows of `seq_len`: 512, or more where it saw more."""
    return max(512, seq_len)


def trained_seq_len(folder: Path) -> int:
    """Tokens of a row that a run was trained on, as its train.json says; 0 for a checkpoint that has none."""
    return TrainOptions.of_run(folder).seq_len if (folder / "train.json").exists() else 0


@torch.no_grad()
def score(model, tokenizer: Tokenizer, documents: Sequence[str | bytes], *, context: int = 512, stride: int | None = None,
          batch_tokens: int = 8192, on_progress: Callable[[int, int], None] | None = None) -> Score:
    """Score `documents` with `model` (left in the mode it was in). on_progress(windows done, windows in all)."""
    texts = [d.decode("utf-8") if isinstance(d, bytes) else d for d in documents]
    encoded = [np.array([tokenizer.bos_id, *ids, tokenizer.eos_id]) for ids in tokenizer.encode_batch(texts)]
    size = sum(len(text.encode("utf-8")) for text in texts)
    device = model.lm_head.weight.device
    windows = [window for ids in encoded for window in score_windows(ids, context, stride)]
    was_training = model.training
    model.eval()
    nats, tokens, done = 0.0, 0, 0
    try:
        for batch in batches(windows, max(1, batch_tokens // context)):
            ids, targets, mask = batch.input_ids.to(device), batch.targets.to(device), batch.attention_mask.to(device)
            logits = model(ids, attention_mask=mask).logits
            losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="none")
            nats += losses.double().sum().item()
            tokens += batch.scored
            done += ids.shape[0]
            if on_progress:
                on_progress(done, len(windows))
    finally:
        model.train(was_training)
    return Score(nats, tokens, size)
