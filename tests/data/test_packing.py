"""Packing: one epoch holds every document once, targets stay inside documents, resume is bit-equal, the cache is safe."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.corpus import Document
from openk3.data.packing import IGNORE_INDEX, Batch, PackedDataset, TokenizedDocuments, tokenize_documents, user_cache
from openk3.errors import UserError
from openk3.text.tokenizer import Tokenizer

BOS, EOS = 300, 301


class ByteTokenizer:
    """A token a byte; counts what it encodes."""

    bos_id, eos_id = BOS, EOS

    def __init__(self, vocab_size: int = 302) -> None:
        self.vocab_size = vocab_size
        self.encoded = 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.encoded += len(texts)
        return [list(text.encode()) for text in texts]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"vocab_size": self.vocab_size}))


def packed(texts: list[list[int]], seq_len: int, batch_size: int, seed: int = 0, **kw: int) -> PackedDataset:
    documents = [[BOS, *text, EOS] for text in texts]
    offsets = np.cumsum([0, *map(len, documents)])
    return PackedDataset(np.array(sum(documents, []), np.uint16), offsets, seq_len, batch_size, seed, **kw)


def take(dataset: PackedDataset, count: int) -> list[Batch]:
    return [next(dataset) for _ in range(count)]


def assert_equal(a: Batch, b: Batch) -> None:
    for name in ("input_ids", "targets", "cu_seqlens"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def documents_of(stream: list[int]) -> list[list[int]]:
    """Splits targets in order (text and EOS; the masked BOS are gone) back into documents."""
    documents: list[list[int]] = [[]]
    for token in stream:
        documents[-1].append(token)
        if token == EOS:
            documents.append([])
    assert not documents.pop()
    return documents


texts = st.lists(st.lists(st.integers(0, 255), max_size=12), min_size=1, max_size=8).filter(any)
sizes = {"seq_len": st.integers(2, 9), "batch_size": st.integers(1, 4), "seed": st.integers(0, 2**40)}


@given(texts=texts, **sizes)
def test_unmasked_targets_of_an_epoch_are_every_document_once(texts, seq_len, batch_size, seed) -> None:
    dataset = packed(texts, seq_len, batch_size, seed, spread_rows=False)
    epochs = 3
    stream: list[int] = []
    while dataset.epoch < epochs:
        batch = next(dataset)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert batch.input_ids.shape == batch.targets.shape == (batch_size, seq_len)
        assert batch.tokens == batch_size * seq_len
        stream += batch.targets.flatten().tolist()
        assert (batch.targets != IGNORE_INDEX).any()
    stream = stream[: epochs * dataset.tokens_per_epoch]
    for epoch in range(epochs):  # a small corpus goes round several times in a batch
        targets = stream[epoch * dataset.tokens_per_epoch : (epoch + 1) * dataset.tokens_per_epoch]
        documents = documents_of([target for target in targets if target != IGNORE_INDEX])
        assert sorted(documents) == sorted([*text, EOS] for text in texts if text)


@given(texts=texts, **sizes)
def test_targets_are_the_next_inputs_and_never_another_documents(texts, seq_len, batch_size, seed) -> None:
    dataset = packed(texts, seq_len, batch_size, seed, spread_rows=False)
    batches = take(dataset, 4)
    inputs = torch.cat([batch.input_ids.flatten() for batch in batches]).tolist()
    targets = torch.cat([batch.targets.flatten() for batch in batches]).tolist()
    for place, following in enumerate(inputs[1:]):  # across rows and batches too
        assert targets[place] == (IGNORE_INDEX if inputs[place] == EOS else following)
        assert (inputs[place] == EOS) == (following == BOS)


@given(texts=texts, **sizes)
def test_spread_rows_are_the_rows_of_the_stream(texts, seq_len, batch_size, seed) -> None:
    shuffled, ordered = (packed(texts, seq_len, batch_size, seed, spread_rows=shuffle) for shuffle in (True, False))
    window = max(1, shuffled.tokens_per_epoch // seq_len)                # windows and batches meet again after so many batches

    def rows(dataset: PackedDataset) -> list[tuple]:
        batches = take(dataset, window)
        return [(tuple(i), tuple(t)) for b in batches for i, t in zip(b.input_ids.tolist(), b.targets.tolist(), strict=True)]

    assert sorted(rows(shuffled)) == sorted(rows(ordered))


def test_a_batch_is_drawn_from_all_over_the_corpus() -> None:
    texts = [[n] * 510 for n in range(64)]                               # eight rows each
    ordered, shuffled = (next(packed(texts, 64, 8, spread_rows=shuffle)) for shuffle in (False, True))
    assert len(ordered.input_ids.unique()) <= 3 and len(shuffled.input_ids.unique()) >= 7


@given(texts=texts, **sizes)
def test_cu_seqlens_begin_documents_and_rows(texts, seq_len, batch_size, seed) -> None:
    for batch in take(packed(texts, seq_len, batch_size, seed), 3):
        flat = batch.input_ids.flatten().tolist()
        begins = [place for place, token in enumerate(flat) if token == BOS or place % seq_len == 0]
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.cu_seqlens.tolist() == [*begins, len(flat)]


@given(texts=texts, before=st.integers(0, 9), **sizes)
def test_resume_continues_bit_for_bit(texts, before, seq_len, batch_size, seed) -> None:
    dataset = packed(texts, seq_len, batch_size, seed)
    take(dataset, before)
    state = json.loads(json.dumps(dataset.state_dict()))
    other = packed(texts, seq_len, batch_size, seed=1)
    take(other, 3)
    other.load_state_dict(state)
    for _ in range(5):
        assert_equal(next(dataset), next(other))
    assert dataset.state_dict() == other.state_dict()


@given(texts=texts, world=st.integers(1, 3), **sizes)
def test_ranks_take_turns_and_share_a_state(texts, world, seq_len, batch_size, seed) -> None:
    whole = take(packed(texts, seq_len, batch_size, seed), 3 * world)
    ranks = [packed(texts, seq_len, batch_size, seed, rank=rank, world=world) for rank in range(world)]
    for step in range(3):
        for rank, dataset in enumerate(ranks):
            assert_equal(next(dataset), whole[step * world + rank])
    assert all(dataset.state_dict() == ranks[0].state_dict() for dataset in ranks)


def test_order_depends_on_seed_and_epoch_only_and_is_pinned() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        dataset = packed([[i] for i in range(50)], seq_len=150, batch_size=1, seed=seed)  # an epoch is one batch
        return [token for token in take(dataset, epoch + 1)[-1].input_ids[0].tolist() if token < BOS]

    first = order(0, 0)[0]
    assert first == 15 and order(0, 0) == [(first + n) % 50 for n in range(50)]  # on every platform and NumPy, or no run resumes
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_any_few_rows_lie_evenly_over_the_corpus() -> None:
    dataset = packed([[n // 250] * 250 for n in range(1000)], 84, 1)      # 3 rows a document, 4 kinds of them
    kinds = np.array([batch.input_ids[0, 40].item() for batch in take(dataset, 3000)])
    for start in range(0, 2900, 7):
        window = kinds[start : start + 32]
        shares = [(window == kind).sum() for kind in range(4)]
        assert max(shares) - min(shares) <= 2, (start, shares)            # of 32 random rows: 6, in the median


def test_a_state_of_other_documents_is_refused() -> None:
    state = packed([[1, 2, 3]], 4, 1).state_dict()
    with pytest.raises(UserError, match="same data and tokenizer"):
        packed([[1, 2]], 4, 1).load_state_dict(state)


@pytest.mark.parametrize(("seq_len", "batch_size", "seed"), [(1, 4, 0), (8, 0, 0), (8, 1, -1)])
def test_sizes_that_give_no_batch_are_refused(seq_len: int, batch_size: int, seed: int) -> None:
    with pytest.raises(UserError):
        packed([[1, 2, 3]], seq_len, batch_size, seed)


def test_documents_without_text_alone_are_refused() -> None:
    with pytest.raises(UserError, match="no document has any text"):
        packed([[], []], 4, 1)


DOCUMENTS = [Document("a", b"first"), Document("empty", b""), Document("b", "zweites ü".encode())]


def check_tokens(tokenized: TokenizedDocuments) -> None:
    assert len(tokenized) == len(DOCUMENTS)
    for index, document in enumerate(DOCUMENTS):
        assert tokenized[index].tolist() == [BOS, *document.content, EOS]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(302, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_tokens_are_mapped_and_encoded_once(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    tokenizer = ByteTokenizer(vocab_size)
    for _ in range(2):
        tokenized = tokenize_documents(DOCUMENTS, tokenizer, tmp_path / "cache")
        check_tokens(tokenized)
        assert isinstance(tokenized.tokens, np.memmap) and tokenized.tokens.dtype == dtype and not tokenized.note
    assert tokenizer.encoded == len(DOCUMENTS)
    check_tokens(tokenize_documents(DOCUMENTS, tokenizer))
    assert tokenizer.encoded == 2 * len(DOCUMENTS)


def test_other_documents_or_another_tokenizer_are_encoded_anew(tmp_path: Path) -> None:
    tokenize_documents(DOCUMENTS, ByteTokenizer(), tmp_path)
    tokenize_documents(DOCUMENTS, ByteTokenizer(303), tmp_path)
    tokenize_documents(DOCUMENTS[:2], ByteTokenizer(), tmp_path)
    tokenize_documents([Document("a", b"First"), *DOCUMENTS[1:]], ByteTokenizer(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damaged", [slice(0), slice(50), slice(-3), slice(-4), slice(1, None)])
def test_a_damaged_cache_file_is_made_again(tmp_path: Path, damaged: slice) -> None:
    tokenize_documents(DOCUMENTS, ByteTokenizer(), tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.unlink()  # the mapping of the first call keeps its file
    path.write_bytes(whole[damaged])
    check_tokens(tokenize_documents(DOCUMENTS, ByteTokenizer(), tmp_path))
    assert path.read_bytes() == whole


def test_a_tokenizer_loaded_again_finds_its_tokens(tmp_path: Path) -> None:
    documents = [Document(str(i), f"def f{i}(x):\n    return x + {i}  # é\n".encode()) for i in range(20)]
    trained = Tokenizer.train((document.text for document in documents), 300)
    first = tokenize_documents(documents, trained, tmp_path / "cache")
    again = tokenize_documents(documents, Tokenizer.load(trained.save(tmp_path / "tokenizer.json")), tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    for index, document in enumerate(documents):
        bos, *text, eos = again[index].tolist()
        assert first[index].tolist() == [bos, *text, eos]
        assert (bos, eos) == (trained.bos_id, trained.eos_id)
        assert b"".join(map(trained.bytes_of, text)) == document.content


def test_writers_side_by_side_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for tokenized in pool.map(lambda _: tokenize_documents(DOCUMENTS, ByteTokenizer(), tmp_path), range(32)):
            check_tokens(tokenized)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="no file size limits on this platform")
    documents = [Document("long", b"x" * 200_000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write past this fails half-way, as on a full disk
    try:
        with pytest.raises(UserError, match="XDG_CACHE_HOME") as error:
            tokenize_documents(documents, ByteTokenizer(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_means_memory_and_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tokenized = tokenize_documents(DOCUMENTS, ByteTokenizer(), tmp_path / "file" / "cache")
    check_tokens(tokenized)
    assert "stay in memory" in (tokenized.note or "") and str(tmp_path / "file") in (tokenized.note or "")


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == tmp_path / ".cache" / "openk3"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache() == tmp_path / "xdg" / "openk3"
