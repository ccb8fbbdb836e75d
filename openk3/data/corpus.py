"""What a model is trained on and scored on: documents of UTF-8 bytes, split into training and held-out ones.

The default corpus is the Python standard library's source on this machine; the user's own is files, folders or JSONL.
A document is held out when the SHA-256 of its name (its relative POSIX path), as an integer, is 0 mod 10: the choice
needs no list and no seed, and a document keeps its side when others come or go. Quality is measured in bits per byte on
the held-out bytes, beside `xz -9e` on the same bytes. A corpus is held in memory; tokens are mapped (packing.py).
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from openk3.errors import UserError

HELD_OUT_ONE_IN = 10
STDLIB_EXCLUDED = frozenset({"test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3", "site-packages"})
JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """`name`: relative POSIX path, for JSONL with `:line` after it (from 1). `content`: UTF-8, newlines as they were."""

    name: str
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()

    @cached_property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.content).digest()


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by name on both sides. `notes`: lines a user should read about how the corpus was made."""

    name: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def split(cls, name: str, documents: Iterable[Document], notes: Sequence[str] = ()) -> Corpus:
        """Splits by the SHA-256 rule; where the rule leaves one side without text (tiny corpora), by `_split_tiny`.

        Raises UserError when there is no text, or too little for two sides.
        """
        documents = sorted(documents, key=lambda document: document.name)
        with_text = [document for document in documents if document.content]
        if not with_text:
            raise UserError(f"the corpus {name!r} holds no text: give files or folders with UTF-8 text (--data PATH)")
        held_out = [document for document in documents if _name_hash(document) % HELD_OUT_ONE_IN == 0]
        train = [document for document in documents if _name_hash(document) % HELD_OUT_ONE_IN != 0]
        notes = list(notes)
        if not any(d.content for d in held_out) or not any(d.content for d in train):
            train, held_out, note = _split_tiny(with_text)
            notes.append(note)
        seen = {document.content for document in train}
        leaked = [document.name for document in held_out if document.content and document.content in seen]
        if leaked:
            notes.append(f"{len(leaked)} held-out document(s) also stand byte for byte in the training data, {leaked[0]!r} first")
        return cls(name, tuple(train), tuple(held_out), tuple(notes))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over every document's name and the SHA-256 of its content, sorted by name."""
        return documents_digest(sorted(self.train + self.held_out, key=lambda document: document.name))

    @cached_property
    def train_bytes(self) -> int:
        return sum(len(document.content) for document in self.train)

    @cached_property
    def held_out_bytes(self) -> int:
        return sum(len(document.content) for document in self.held_out)

    @cached_property
    def xz_bits_per_byte(self) -> float | None:
        """Bits per byte of `xz -9e` on the held-out documents, joined in order of their names (about 2 MB/s, 0.7 GB memory).

        None where this Python was built without lzma.
        """
        try:
            import lzma
        except ImportError:
            return None
        packed = lzma.compress(b"".join(document.content for document in self.held_out), preset=9 | lzma.PRESET_EXTREME)
        return 8 * len(packed) / self.held_out_bytes

    def summary(self) -> dict[str, str | int]:
        """What a run's train.json says of its corpus; `files` counts both sides."""
        return {
            "name": self.name,
            "digest": self.digest,
            "files": len(self.train) + len(self.held_out),
            "held_out_files": len(self.held_out),
            "train_bytes": self.train_bytes,
            "held_out_bytes": self.held_out_bytes,
        }


def documents_digest(documents: Iterable[Document]) -> str:
    """SHA-256 (hex) over (name, SHA-256 of the content), in the order given."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(_name_bytes(document) + b"\0" + document.sha256)
    return digest.hexdigest()


def load_corpus(
    paths: str | Path | Sequence[str | Path] | None = None, *, exclude: str | Sequence[str] = (), skip_binary: bool = False
) -> Corpus:
    """Reads files, folders (recursively) and JSONL; nothing given: `stdlib_corpus()`.

    In a folder every regular file counts but hidden ones and `__pycache__`; links to folders aren't followed, and a file
    reached twice counts once. A `.jsonl` or `.ndjson` file gives one document a line, from the line's `text` field. Names
    are relative to the folder given; with several paths, its name stands before them. A UTF-8 byte order mark is dropped,
    every other byte is kept.

    exclude: shell patterns (case matters) for a path relative to its folder or for any one part of it: "*.png", "build".
    skip_binary: leave out what isn't text, with a note, instead of refusing it.
    Raises UserError for a missing, unreadable or binary file, a bad JSONL line, two documents of one name, too little text.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths or ())
    exclude = [exclude] if isinstance(exclude, str) else list(exclude)
    if not paths:
        return stdlib_corpus(exclude=exclude)
    documents: dict[str, tuple[Document, Path]] = {}
    binary: list[Path] = []
    for name, path in _named_files([Path(path) for path in paths], exclude):
        raw = _read(path).removeprefix(codecs.BOM_UTF8)
        jsonl = path.suffix.lower() in JSONL_SUFFIXES
        reason = _why_binary(raw)
        if reason and not skip_binary:
            pattern = f"*{path.suffix}" if path.suffix else path.name
            raise UserError(f"{str(path)!r} isn't UTF-8 text ({reason}): convert it, or leave it out with --exclude {pattern!r}")
        if reason:
            binary.append(path)
            continue
        for document in _jsonl_documents(name, raw, path) if jsonl else [Document(name, raw)]:
            if document.name in documents:
                other = documents[document.name][1]
                raise UserError(f"{str(path)!r} and {str(other)!r} would both be called {document.name!r}: give their common folder")
            documents[document.name] = (document, path)
    notes = [f"{len(binary)} file(s) that aren't UTF-8 text are left out, {str(binary[0])!r} first"] if binary else []
    name = ", ".join(path.name or path.resolve().name or str(path) for path in map(Path, paths))
    return Corpus.split(name, (document for document, _ in documents.values()), notes)


def stdlib_corpus(root: str | Path | None = None, *, exclude: Sequence[str] = ()) -> Corpus:
    """The `*.py` files of the standard library of the Python that runs this, without the parts in STDLIB_EXCLUDED.

    root: another standard library's folder. exclude: as for `load_corpus`. A source in another encoding (PEP 263) becomes
    UTF-8. Raises UserError when there is no source there.
    """
    root = Path(root or sysconfig.get_path("stdlib"))

    def skip(name: str) -> bool:
        return not STDLIB_EXCLUDED.isdisjoint(name.split("/")) or _matches(name, exclude)

    files = _walk(root, skip) if os.path.isdir(root) else ()
    documents = [Document(name, _python_source(path)) for name, path in files if name.endswith(".py")]
    if not any(document.content for document in documents):
        raise UserError(f"no Python standard-library source in {str(root)!r} to train on: give a folder of text with --data FOLDER")
    return Corpus.split(f"python-{platform.python_version()}-stdlib", documents)


def _name_bytes(document: Document) -> bytes:
    return document.name.encode(errors="surrogateescape")  # a file name that isn't UTF-8 counts as its own bytes


def _name_hash(document: Document) -> int:
    return int.from_bytes(hashlib.sha256(_name_bytes(document)).digest(), "big")


def _split_tiny(documents: list[Document]) -> tuple[list[Document], list[Document], str]:
    """Holds out the document with the smallest hash; of a single one, the end, from the line boundary nearest to 90 %."""
    if len(documents) > 1:
        chosen = min(documents, key=_name_hash)
        note = f"the rule for held-out documents doesn't divide {len(documents)} documents: {chosen.name!r} is held out"
        return [document for document in documents if document is not chosen], [chosen], note
    only = documents[0]
    size = len(only.content)
    goal = size - size // HELD_OUT_ONE_IN
    around = (only.content.rfind(b"\n", 0, goal) + 1, only.content.find(b"\n", goal) + 1)
    cuts = [cut for cut in around if 0 < cut < size]
    if not cuts:
        raise UserError(f"{only.name!r} is the only document and has a single line, so nothing can be held out: give two or more")
    cut = min(cuts, key=lambda cut: abs(cut - goal))
    parts = [Document(f"{only.name}[{a}:{b}]", only.content[a:b]) for a, b in ((0, cut), (cut, size))]
    return parts[:1], parts[1:], f"{only.name!r} is the only document: its last {size - cut} of {size} bytes are held out"


def _named_files(paths: list[Path], exclude: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(document name, path) of every file that the user's paths name, each file once."""
    seen: set[Path] = set()
    for path in paths:
        if os.path.isdir(path):  # unlike Path's, these don't raise for a name that is too long or a folder that is locked
            prefix = f"{path.resolve().name}/" if len(paths) > 1 else ""
            found = ((prefix + name, file) for name, file in _walk(path, lambda name: _matches(name, exclude)))
        elif os.path.isfile(path):
            found = iter([] if _matches(path.name, exclude) else [(path.name, path)])
        elif os.path.exists(path):
            raise UserError(f"{str(path)!r} is neither a regular file nor a folder: save its text to a file and give that")
        else:
            raise UserError(f"{str(path)!r} doesn't exist: give text files, folders or JSONL (--data PATH)")
        for name, file in found:
            if (real := file.resolve()) not in seen:
                seen.add(real)
                yield name, file


def _walk(folder: Path, skip: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """(POSIX path relative to the folder, path) of its regular files in a fixed order. `skip` prunes folders too."""

    def fail(error: OSError) -> None:
        raise UserError(f"can't read the folder {error.filename!r} ({error.strerror}): mend its permissions or --exclude it") from error

    for at, folders, files in os.walk(folder, onerror=fail):
        relative = Path(at).relative_to(folder)

        def wanted(name: str, relative: Path = relative) -> bool:
            return not name.startswith(".") and name != "__pycache__" and not skip((relative / name).as_posix())

        folders[:] = sorted(filter(wanted, folders))
        for name in sorted(filter(wanted, files)):
            if os.path.isfile(path := Path(at, name)):
                yield (relative / name).as_posix(), path


def _matches(name: str, patterns: Sequence[str]) -> bool:
    parts = [name, *name.split("/")]
    return any(fnmatchcase(part, pattern.rstrip("/")) for pattern in patterns for part in parts)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {str(path)!r} ({error.strerror}): mend its permissions or --exclude it") from error


def _why_binary(raw: bytes) -> str | None:
    if (at := raw.find(b"\0")) >= 0:
        return f"NUL at byte {at}"
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"0x{raw[error.start]:02x} at byte {error.start}"
    return None


def _jsonl_documents(name: str, raw: bytes, path: Path) -> Iterator[Document]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{str(path)!r}, line {number}"
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise UserError(f"{where}, isn't JSON ({reason}): mend the line, or rename the file to have it read as plain text") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f'{where}, has no string field "text": each line must be an object like {{"text": "..."}}')
        try:
            yield Document(f"{name}:{number}", text.encode())
        except UnicodeEncodeError as error:
            raise UserError(f"{where}, has half a surrogate pair in its text (character {error.start}): remove it") from error


def _python_source(path: Path) -> bytes:
    """A source file as UTF-8, decoded as its coding line says (PEP 263) where it isn't UTF-8 already."""
    raw = _read(path).removeprefix(codecs.BOM_UTF8)
    if (reason := _why_binary(raw)) is None:
        return raw
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding).encode()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} isn't text in the encoding it declares ({reason}): --exclude it") from error
