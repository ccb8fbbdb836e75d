"""Training rows: documents tokenised once, mapped from the user's cache, and packed back to back.

Axes: B rows, T tokens of a row. A document is stored as [BOS] text [EOS]. An epoch is one stream of all documents, begun
at another one each time; epochs follow each other without a gap, and the stream is cut into rows. Each input's target is the next
token of the stream, at a row's end too; after [EOS] that would be another document's [BOS], so it is masked. A document
that doesn't fit goes on in the next row, whose state starts fresh: a row knows nothing of the one before it. A batch's rows
come from all over the stream, evenly: neighbours are pieces of one document, and a batch of neighbours is one sample.
"""

from __future__ import annotations

import errno
import io
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from openk3.data.corpus import Document, documents_digest
from openk3.errors import UserError
from openk3.text.tokenizer import Tokenizer

IGNORE_INDEX = -100  # torch.nn.functional.cross_entropy's default: a target that isn't scored
LAYOUT_VERSION = 1  # part of a cache file's name: raise it when what the file holds changes
ENCODE_BYTES = 4 << 20  # text encoded at once
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class TokenizedDocuments:
    """Document i is `tokens[offsets[i] : offsets[i + 1]]`: [BOS] text [EOS].

    tokens: uint16 or uint32 [N], mapped from disk where there's a cache. offsets: int64 [documents + 1], from 0 to N.
    note: a line a user should read (the cache can't be used), or None.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    note: str | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Batch:
    """input_ids, targets: int64 [B, T], targets IGNORE_INDEX after a document's [EOS].

    cu_seqlens: int32 [N + 1], where documents and rows begin in the B*T flattened tokens, and B*T at the end.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()


def user_cache() -> Path | None:
    """`$XDG_CACHE_HOME/openk3` or `~/.cache/openk3`; None for a user without a home. Its files may be deleted at any time."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openk3"
    except RuntimeError:
        return None


def tokenize_documents(documents: Sequence[Document], tokenizer: Tokenizer, cache: Path | None = None) -> TokenizedDocuments:
    """Encodes documents, or maps what an earlier call has left in the folder `cache` for the same documents and tokenizer.

    cache None: in memory. A cache folder that can't be written (read-only, no permission) means memory too, with a note;
    a damaged cache file is made again. Writers may run side by side: each writes aside and renames.
    Raises UserError when the disk is full; nothing half-written stays.
    """
    if cache is None:
        return _encode(documents, tokenizer)
    key = sha256(f"{LAYOUT_VERSION} {_tokenizer_digest(tokenizer)} {documents_digest(documents)}".encode()).hexdigest()
    path = cache / f"tokens-{key[:40]}.bin"
    dtype = _dtype(tokenizer)
    if (mapped := _map(path, len(documents), dtype)) is not None:
        return mapped
    encoded = _encode(documents, tokenizer)
    try:
        _write(path, encoded)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(
                f"no room for the tokens in {str(cache)!r} ({error.strerror}): free {-(-encoded.tokens.nbytes // 10**6)} MB there, "
                "or set XDG_CACHE_HOME to a folder on another disk"
            ) from error
        reason = f"can't keep the tokens in {str(cache)!r} ({error.strerror}); they stay in memory and will be made again next time"
        return TokenizedDocuments(encoded.tokens, encoded.offsets, reason)
    mapped = _map(path, len(documents), dtype)
    return encoded if mapped is None else mapped


class PackedDataset:
    """An endless iterator of `Batch`, the same on every platform for the same seed, resumable from four numbers.

    tokens, offsets: as in `TokenizedDocuments`; documents without text are left out. With `world` ranks, rank r takes the
    batches r, r + world, …; the state is the same on all of them. spread_rows False: rows in the stream's order.
    Raises UserError for sizes that give no batch.

    Neighbours in the stream are one document, or documents of one folder, so rows are taken by a stride of the golden ratio of an
    epoch's rows: any few that follow one another lie evenly over the whole corpus. A batch is then a better sample of it than a random
    one, in which a few rows of a long table of constants may meet.
    """

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, seq_len: int, batch_size: int, seed: int = 0, *, rank: int = 0, world: int = 1,
        spread_rows: bool = True,
    ) -> None:
        if seq_len < 2 or batch_size < 1:
            raise UserError(f"a batch of {batch_size} x {seq_len} tokens can't be packed: batch size must be >= 1, sequence length >= 2")
        if seed < 0:
            raise UserError(f"seed {seed} is negative: give 0 or more")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.tokens, self.offsets = tokens, np.asarray(offsets, np.int64)
        self.seq_len, self.batch_size, self.seed, self.rank, self.world = seq_len, batch_size, seed, rank, world
        self._lengths = np.diff(self.offsets)
        self._documents = np.flatnonzero(self._lengths > 2)  # [BOS][EOS] alone would only teach to stop at once
        self.tokens_per_epoch = int(self._lengths[self._documents].sum())
        if not self.tokens_per_epoch:
            raise UserError("no document has any text to train on: give files or folders with text (--data PATH)")
        self._window = max(1, self.tokens_per_epoch // seq_len) if spread_rows else 1  # rows that the stride goes round
        self._stride = _coprime(self._window * (math.sqrt(5) - 1) / 2, self._window)
        self._position = 0  # tokens that all ranks together have taken from the stream since epoch 0 began
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def epoch(self) -> int:
        return self._position // self.tokens_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        size = self.batch_size * self.seq_len
        first = self._position // self.seq_len + self.rank * self.batch_size
        rows = [self._row(first + row) * self.seq_len for row in range(self.batch_size)]
        read = [self._read(start, self.seq_len + 1) for start in rows]  # one more, for the last target
        ids, begins = (np.stack(parts) for parts in zip(*read, strict=True))  # [B, T + 1]
        self._position += self.world * size
        targets = np.where(begins[:, 1:], IGNORE_INDEX, ids[:, 1:])
        begins[:, 0] = True
        cu_seqlens = np.append(np.flatnonzero(begins[:, :-1]), size).astype(np.int32)
        return Batch(torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets), torch.from_numpy(cu_seqlens))

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins: its epoch and the tokens of that epoch already taken; batch size and length aren't part of it."""
        epoch, position = divmod(self._position, self.tokens_per_epoch)
        return {"seed": self.seed, "epoch": epoch, "position": position, "tokens_per_epoch": self.tokens_per_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues bit for bit, with the state's seed. Raises UserError for a state of other documents or another tokenizer."""
        if state["tokens_per_epoch"] != self.tokens_per_epoch:
            raise UserError(
                f"the saved position is in a corpus of {state['tokens_per_epoch']} tokens, this one has {self.tokens_per_epoch}: "
                "resume with the same data and tokenizer, or begin a new run"
            )
        if state["seed"] != self.seed:
            self.seed, self._orders = state["seed"], {}
        self._position = state["epoch"] * self.tokens_per_epoch + state["position"]

    def _row(self, index: int) -> int:
        """Which row of the stream comes at place `index`: each window's rows once, from a random first one on."""
        window, place = divmod(index, self._window)
        return window * self._window + (_draw(self.seed, window, 1) + place * self._stride) % self._window

    def _read(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [count] tokens of the endless stream from `position`, and bool [count]: a document begins here."""
        ids, begins = np.empty(count, np.int64), np.zeros(count, bool)
        filled = 0
        while filled < count:
            epoch, offset = divmod(position + filled, self.tokens_per_epoch)
            documents, ends = self._order(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))  # of the document that holds `offset`
            left = int(ends[place]) - offset
            taken = min(left, count - filled)
            start = int(self.offsets[documents[place] + 1]) - left
            ids[filled : filled + taken] = self.tokens[start : start + taken]
            begins[filled] = start == self.offsets[documents[place]]
            filled += taken
        return ids, begins

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's documents in its order, the corpus's from a random first one on, and where each ends in the epoch's stream."""
        if epoch not in self._orders:
            documents = np.roll(self._documents, _draw(self.seed, epoch) % len(self._documents))
            self._orders = {e: order for e, order in self._orders.items() if abs(e - epoch) == 1}  # rows of a batch may lie in two epochs
            self._orders[epoch] = documents, np.cumsum(self._lengths[documents])
        return self._orders[epoch]


def _draw(*seed: int) -> int:
    """63 random bits. Raw ones, not a Generator's method: NumPy promises the first for all its versions, not the second."""
    return int(np.random.PCG64(np.random.SeedSequence(seed)).random_raw() >> 1)


def _coprime(near: float, to: int) -> int:
    """The smallest whole number from `near` on that shares no factor with `to`: multiples of it reach every remainder."""
    number = max(1, round(near))
    while math.gcd(number, to) > 1:
        number += 1
    return number


def _dtype(tokenizer: Tokenizer) -> type[np.generic]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(path := Path(folder, "tokenizer.json"))
        return sha256(path.read_bytes()).hexdigest()


def _encode(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenizedDocuments:
    dtype = _dtype(tokenizer)
    pieces: list[np.ndarray] = []
    group: list[str] = []
    size = 0
    for index, document in enumerate(documents):
        group.append(document.text)
        size += len(document.content)
        if size >= ENCODE_BYTES or index == len(documents) - 1:
            pieces += [np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype) for ids in tokenizer.encode_batch(group)]
            group, size = [], 0
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return TokenizedDocuments(np.concatenate(pieces) if pieces else np.empty(0, dtype), offsets)


def _write(path: Path, encoded: TokenizedDocuments) -> None:
    """The offsets as .npy, the raw tokens behind them. Raises OSError, and leaves nothing then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = io.BytesIO()
    np.save(header, encoded.offsets)
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False)
    try:
        with file:
            file.write(header.getvalue())
            file.write(encoded.tokens.data)  # not tofile, whose OSError doesn't say that the disk is full
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise


def _map(path: Path, documents: int, dtype: type[np.generic]) -> TokenizedDocuments | None:
    """What `_write` wrote, the tokens mapped read-only; None where there's no such file or it's damaged."""
    try:
        with open(path, "rb") as file:
            offsets = np.load(file, allow_pickle=False)
            tokens = np.memmap(path, dtype, "r", offset=file.tell())
    except (OSError, ValueError, EOFError):
        return None
    whole = offsets.shape == (documents + 1,) and offsets[-1] == len(tokens)
    return TokenizedDocuments(tokens, offsets) if whole else None
