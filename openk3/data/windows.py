"""Scoring held-out text: every token of every document is scored once, in overlapping windows, for bits per byte.

Axes: B windows of a batch, T tokens. A document is [BOS] text [EOS], as packing.py stores it. [BOS] is only context, and
[EOS] isn't text, so what is scored is exactly the document's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from openk3.data.packing import IGNORE_INDEX
from openk3.errors import UserError


class Window(NamedTuple):
    """`tokens` (a view) begin at `start` in their document; `tokens[first:]` are scored, from the logits one place before each."""

    start: int
    tokens: np.ndarray
    first: int


@dataclass(frozen=True)
class ScoreBatch:
    """input_ids, targets, attention_mask: int64 [B, T], padded on the right. targets: IGNORE_INDEX where nothing is scored.
    attention_mask: 1 for a token, 0 for padding.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def scored(self) -> int:
        """How many tokens are scored."""
        return int((self.targets != IGNORE_INDEX).sum())


def score_windows(doc_tokens: np.ndarray, context: int, stride: int | None = None) -> Iterator[Window]:
    """Windows of at most `context` tokens of one document, [BOS] text [EOS], that score each token of its text once.

    The first begins at [BOS]; each later one begins `stride` (default context // 2) tokens after the one before, and scores
    what that one didn't reach: at least context - stride tokens of context stand before every token scored there.
    A document without text has no window. Raises UserError unless 1 <= stride < context.
    """
    stride = context // 2 if stride is None else stride
    if not 1 <= stride < context:
        raise UserError(f"stride {stride} doesn't fit windows of {context} tokens: give 1 <= stride < context")
    return _windows(doc_tokens[:-1], context, stride)


def _windows(tokens: np.ndarray, context: int, stride: int) -> Iterator[Window]:
    scored = 1  # [BOS] is given
    for start in range(0, len(tokens), stride):
        if scored >= len(tokens):
            return
        window = tokens[start : start + context]
        yield Window(start, window, scored - start)
        scored = start + len(window)


def batches(windows: Iterable[Window], batch_size: int) -> Iterator[ScoreBatch]:
    """Batches of windows, longest first, so that windows of a batch are of similar length and memory runs out at once or never.

    A window's last token is only a target, so T is the longest window's length less one.
    """
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} is too small: give 1 or more")
    by_length = sorted(windows, key=lambda window: -len(window.tokens))
    for at in range(0, len(by_length), batch_size):
        yield _batch(by_length[at : at + batch_size])


def _batch(windows: list[Window]) -> ScoreBatch:
    shape = (len(windows), len(windows[0].tokens) - 1)
    input_ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORE_INDEX, np.int64)
    for row, (_, tokens, first) in enumerate(windows):
        length = len(tokens) - 1
        input_ids[row, :length] = tokens[:-1]
        mask[row, :length] = 1
        targets[row, first - 1 : length] = tokens[first:]
    return ScoreBatch(torch.from_numpy(input_ids), torch.from_numpy(targets), torch.from_numpy(mask))


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """From the sum of the scored tokens' losses (nats) and the bytes of their text."""
    return nats / math.log(2) / text_bytes
