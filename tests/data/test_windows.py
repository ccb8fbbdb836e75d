"""Scoring windows: every token of every document is scored once, with enough context before it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.packing import IGNORE_INDEX
from openk3.data.windows import batches, bits_per_byte, score_windows
from openk3.errors import UserError


@st.composite
def cases(draw):
    """Documents of tokens that are all different, [BOS] text [EOS]; a context and a stride that fits it."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    context = draw(st.integers(2, 20))
    stride = draw(st.none() | st.integers(1, context - 1))
    ends = np.cumsum([length + 2 for length in lengths])
    return [np.arange(end - length - 2, end, dtype=np.uint16) for end, length in zip(ends, lengths, strict=True)], context, stride


@given(cases())
def test_every_token_of_the_text_is_scored_once_in_order(case) -> None:
    documents, context, stride = case
    for document in documents:
        scored: list[int] = []
        for start, tokens, first in score_windows(document, context, stride):
            assert 2 <= len(tokens) <= context and 1 <= first < len(tokens)
            assert tokens.tolist() == document[start : start + len(tokens)].tolist()
            assert start == 0 or first >= context - (stride or context // 2)
            scored += tokens[first:].tolist()
        assert scored == document[1:-1].tolist()  # neither [BOS] nor [EOS]


@given(cases(), st.integers(1, 5))
def test_batches_score_every_token_once_from_the_token_before_it(case, batch_size) -> None:
    documents, context, stride = case
    windows = [window for document in documents for window in score_windows(document, context, stride)]
    scored: list[int] = []
    for batch in batches(windows, batch_size):
        ids, targets, mask = batch.input_ids, batch.targets, batch.attention_mask
        assert ids.shape == targets.shape == mask.shape and ids.shape[0] <= batch_size and ids.shape[1] < context
        assert ids.dtype == targets.dtype == mask.dtype == torch.int64
        assert (mask.diff(dim=1) <= 0).all() and mask[:, 0].all()  # padded on the right
        is_scored = targets != IGNORE_INDEX
        assert mask[is_scored].all() and batch.scored == is_scored.sum()
        assert torch.equal(ids[is_scored] + 1, targets[is_scored])  # neighbours differ by one in these documents
        scored += targets[is_scored].tolist()
    assert sorted(scored) == sorted(token for document in documents for token in document[1:-1].tolist())


def test_windows_of_similar_length_share_a_batch() -> None:
    windows = [window for n in (3, 9, 4, 10) for window in score_windows(np.arange(n), 16)]
    assert [tuple(batch.input_ids.shape) for batch in batches(windows, 2)] == [(2, 8), (2, 2)]


def test_the_default_stride_is_half_the_context() -> None:
    spans = [(start, len(tokens), first) for start, tokens, first in score_windows(np.arange(21), 8)]
    assert spans == [(0, 8, 1), (4, 8, 4), (8, 8, 4), (12, 8, 4)]


@pytest.mark.parametrize(("context", "stride"), [(8, 0), (8, 8), (8, -1), (1, None), (0, None)])
def test_a_stride_that_leaves_gaps_or_no_context_is_refused(context: int, stride: int | None) -> None:
    with pytest.raises(UserError, match="1 <= stride < context"):
        score_windows(np.arange(5), context, stride)


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="batch size 0"):
        list(batches([], 0))


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_8() -> None:
    assert bits_per_byte(50 * math.log(256), 50) == pytest.approx(8)
