"""Where sequences begin and end: packed documents equal separate runs, padding on either side changes nothing.

Differences are in standard deviations of the logits, for the worst element.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openk3.model.k3 import K3ForCausalLM
from openk3.model.layout import Layout, align_left, resets_from_cu_seqlens


def random_ids(batch: int, tokens: int, seed: int = 0, vocab: int = 97) -> Tensor:
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def separately(model: K3ForCausalLM, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each document in a run of its own, rows cut at their ends; logits of the flattened tokens."""
    batch, tokens = ids.shape
    cuts = sorted({*cu_seqlens.tolist(), *range(0, batch * tokens + 1, tokens)})
    flat = ids.flatten()
    return torch.cat([model(flat[None, a:b]).logits[0] for a, b in zip(cuts, cuts[1:], strict=False)])


# Packed documents

precisions = pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=["f32", "f64"])


@precisions
@torch.no_grad()
def test_packed_documents_equal_separate_runs(dtype: torch.dtype, tolerance: float, variant: str, tiny, worst) -> None:
    model, ids = tiny(variant).to(dtype), random_ids(2, 40)
    documents = offsets(3, 1, 17, 16, 3, 1, 2, 37)  # two of them a token long, one as long as a tile, and the row's end at 40
    packed = model(ids, cu_seqlens=documents).logits.flatten(0, 1)
    assert worst(packed, separately(model, ids, documents)) < tolerance
    assert worst(packed, model(ids).logits.flatten(0, 1)) > 0.1  # without the boundaries it is another text


@torch.no_grad()
def test_packed_golden_model(golden, worst) -> None:
    ids, documents = golden("k3-tiny")["input_ids"], offsets(13, 57, 20, 1, 49)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):  # this model multiplies rounding by thousands
        model = golden("k3-tiny").model().to(dtype)
        packed, apart = model(ids, cu_seqlens=documents).logits.flatten(0, 1), separately(model, ids, documents)
        assert worst(packed, apart) < tolerance
        assert (packed - apart).square().mean().sqrt() < tolerance / 10 * apart.std()


@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, 2 * 23 - 1), max_size=12))
@torch.no_grad()
def test_any_packing_equals_separate_runs(cuts: set[int], tiny, worst) -> None:
    model, ids = double(tiny, "k3"), random_ids(2, 23)
    documents = torch.tensor([0, *sorted(cuts), 2 * 23])
    assert worst(model(ids, cu_seqlens=documents).logits.flatten(0, 1), separately(model, ids, documents)) < 1e-9


@torch.no_grad()
def test_a_row_begins_a_document_whether_it_is_named_or_not(tiny, worst) -> None:
    model, ids = tiny("k3"), random_ids(3, 10)
    over_the_edge = model(ids, cu_seqlens=offsets(4, 12, 14)).logits
    named = model(ids, cu_seqlens=offsets(4, 6, 6, 4, 10)).logits
    assert worst(over_the_edge, named) < 1e-5
    assert torch.equal(model(ids, cu_seqlens=offsets(10, 10, 10)).logits, model(ids).logits)


@torch.no_grad()
def test_documents_of_no_length_count_for_nothing(tiny) -> None:
    model, ids = tiny("k3"), random_ids(1, 12)
    with_empty, without = (model(ids, cu_seqlens=offsets(*lengths)).logits for lengths in ((0, 5, 0, 0, 7, 0), (5, 7)))
    assert torch.equal(with_empty, without)


def test_packed_gradients_equal_separate_ones(variant: str, tiny) -> None:
    model, ids = tiny(variant).double(), random_ids(2, 24)
    documents = offsets(5, 19, 9, 1, 14)
    targets = ids.roll(-1)
    model.loss(ids, targets, documents, reduction="sum").backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for a, b in zip(documents, documents[1:], strict=False):
        model.loss(ids.flatten()[None, a:b], targets.flatten()[None, a:b], reduction="sum").backward()
    assert packed.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, grad in packed.items():
        want = model.get_parameter(name).grad
        assert (grad - want).norm() <= 1e-8 * want.norm(), name


@pytest.mark.parametrize("bad", [[0, 5, 19], [1, 20], [0, 12, 9, 20], [0], [0, 21]])
def test_wrong_offsets_are_refused(bad: list[int], tiny) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to batch . tokens = 20"):
        tiny("k3")(random_ids(2, 10), cu_seqlens=torch.tensor(bad))


def test_packing_takes_neither_cache_nor_mask(tiny) -> None:
    model, ids = tiny("k3"), random_ids(1, 6)
    for extra in ({"cache": model.new_cache()}, {"attention_mask": torch.ones(1, 6)}):
        with pytest.raises(ValueError, match="neither cache nor attention_mask"):
            model(ids, cu_seqlens=offsets(2, 4), **extra)


# Padding

MASK = torch.tensor([[1] * 9 + [0] * 5, [0] * 4 + [1] * 10, [1] * 14, [0] * 3 + [1] * 4 + [0] * 7, [0] * 13 + [1]])


@precisions
@torch.no_grad()
def test_padding_on_either_side_equals_no_padding(dtype: torch.dtype, tolerance: float, variant: str, tiny, worst) -> None:
    model, ids, keep = tiny(variant).to(dtype), random_ids(5, 14), MASK.bool()
    padded = model(ids, attention_mask=MASK).logits
    for row in range(5):
        alone = model(ids[row, keep[row]][None]).logits[0]
        assert worst(padded[row, keep[row]], alone) < tolerance


@torch.no_grad()
def test_left_padded_golden_model(golden, worst) -> None:
    model, ids = golden("k3-tiny").model().double(), golden("k3-tiny")["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :25] = 0
    mask[1, :1] = 0
    padded = model(ids, attention_mask=mask).logits
    for row, start in enumerate((25, 1)):
        assert worst(padded[row, start:], model(ids[row : row + 1, start:]).logits[0]) < 1e-9


@torch.no_grad()
def test_what_stands_in_the_padding_is_not_seen(variant: str, tiny, worst) -> None:
    model, ids, keep = tiny(variant), random_ids(5, 14), MASK.bool()
    a, b = (model(torch.where(keep, ids, other), attention_mask=MASK).logits[keep] for other in (0, random_ids(5, 14, 1)))
    assert worst(a, b) < 1e-5  # not bit-equal: padding is routed too, and experts multiply more rows or fewer


def test_padding_has_no_part_in_gradients(tiny) -> None:
    model, ids, keep = tiny("k3").train(), random_ids(5, 14), MASK.bool()
    targets = ids.roll(-1, 1).masked_fill(~(keep & keep.roll(-1, 1)), -100)
    targets[:, -1] = -100
    grads = []
    for other in (torch.zeros_like(ids), random_ids(5, 14, 1)):
        model.zero_grad()
        model.loss(torch.where(keep, ids, other), targets, attention_mask=MASK).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], msg=name)


@torch.no_grad()
def test_last_only_finds_the_last_token_of_each_row(tiny, worst) -> None:
    model, ids = tiny("k3"), random_ids(5, 14)
    last = model(ids, attention_mask=MASK, last_only=True).logits
    assert last.shape == (5, 1, 97)
    whole = model(ids, attention_mask=MASK).logits
    place = [8, 13, 13, 6, 13]
    assert worst(last[:, 0], whole[torch.arange(5), place]) < 1e-6
    assert worst(model(ids, last_only=True).logits[:, 0], model(ids).logits[:, -1]) < 1e-6


@torch.no_grad()
def test_a_mask_of_ones_is_no_mask(tiny) -> None:
    model, ids = tiny("k3"), random_ids(2, 9)
    assert torch.equal(model(ids, attention_mask=torch.ones(2, 9)).logits, model(ids).logits)


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
def test_a_mask_with_a_hole_or_without_tokens_is_refused(row: list[int], tiny) -> None:
    with pytest.raises(ValueError, match="one unbroken run of ones"):
        tiny("k3")(random_ids(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], row]))


# The parts


def test_align_left_gathers_each_row_to_its_start() -> None:
    lengths, index = align_left(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0]]))
    assert lengths.tolist() == [2, 3, 2]
    assert index.tolist() == [[2, 3, 0, 1], [0, 1, 2, 3], [1, 2, 3, 0]]
    assert align_left(torch.ones(2, 3)) == (None, None)
    lengths, index = align_left(torch.tensor([[1, 1, 0]]))
    assert lengths.tolist() == [2] and index is None


def test_resets_stand_where_documents_begin() -> None:
    resets = resets_from_cu_seqlens(offsets(2, 3, 1, 2), 2, 4)
    assert resets.nonzero().tolist() == [[0, 0], [0, 2], [1, 1], [1, 2]]
    assert resets_from_cu_seqlens(offsets(4, 4), 2, 4) is None


def test_positions_count_from_each_document() -> None:
    resets = resets_from_cu_seqlens(offsets(2, 3, 3), 2, 4)
    assert Layout(2, 4, resets.device, resets=resets).positions.tolist() == [[0, 1, 0, 1], [0, 0, 1, 2]]
    past = torch.tensor([7, 0])
    assert Layout(2, 3, past.device, past=past, past_max=7).positions.tolist() == [[7, 8, 9], [0, 1, 2]]


@functools.cache
def double(tiny, name: str) -> K3ForCausalLM:
    """One float64 model for all examples of a property."""
    return tiny(name).double()
