"""Byte-level BPE with K3's pre-tokeniser and K3's control tokens, which no text can spell.

Two sources, one class: `Tokenizer.train` makes a small vocabulary of our own, `Tokenizer.from_tiktoken` reads the released
one. In both, the control tokens stand after the last text token. The BPE that encodes text doesn't know them, so
`encode("<|open|>")` gives the ids of those eight characters; only a segment marked special gives a control id.
"""

import base64
import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from openk3.errors import UserError
from openk3.text.chat import IMAGE_PLACEHOLDER, Segment

# The order of the released vocabulary. Its other control ids are reserved names and `<osagent_mode>`.
CONTROL_TOKENS = (
    "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[start_header_id]", "[end_header_id]", "[EOT]",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]",
)  # fmt: skip
RELEASED_CONTROLS = 256
RELEASED_OFFSETS = dict(zip(CONTROL_TOKENS, (0, 1, 2, 3, 4, 5, 6, 7, 9, 18, 19, 20, 21, 254, 255), strict=True)) | {"<osagent_mode>": 65}
# K3 flags these as ordinary, so that decoding with skip_special keeps them.
SHOWN_CONTROLS = ("<|open|>", "<|close|>", "<|sep|>")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Ordered alternatives, the first that matches wins; every character belongs to one of them.
SPLIT_PATTERN = "|".join([
    r"\p{Han}+",
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
    f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip

# K3 cuts long input here, and a cut is a token boundary.
MAX_CHARS, MAX_RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{MAX_RUN + 1},}}|(?<!\s)\s{{{MAX_RUN + 1},}}")


def _byte_chars() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


_CHAR_OF_BYTE = _byte_chars()
_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(_CHAR_OF_BYTE)}


def _valid(text: str) -> str:
    """`text` with surrogate pairs joined and each lone surrogate replaced by U+FFFD: UTF-8 has no bytes for one."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _cut(text: str) -> list[str]:
    """Cuts at 400,000 characters, and inside each run of more than 25,000 characters that are all space or all not."""
    if len(text) <= MAX_RUN:
        return [text]
    parts = []
    for start in range(0, len(text), MAX_CHARS):
        chunk, begin = text[start : start + MAX_CHARS], 0
        for run in _LONG_RUN.finditer(chunk):
            for end in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                parts.append(chunk[begin:end])
                begin = end
        parts.append(chunk[begin:])
    return parts


def _with_pre_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts whose merge completes `token` when its bytes are merged lowest rank first, or None if they never meet.

    tiktoken merges any neighbours whose concatenation is a token. As long as nothing merges across the ends of a stretch
    of bytes, what happens inside it is what happens to it alone, so a token's last merge is the same in every context: one
    merge rule per token says all that the ranks say.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[at] == len(ranks):
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _read_tiktoken(path: Path) -> dict[bytes, int]:
    """Token bytes → rank from a tiktoken file: one line per token, base64 and a decimal rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{path}: line {number} isn't a base64 token and a rank; download the vocabulary file again") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: the ranks of its {len(ranks)} tokens aren't 0 to {len(ranks) - 1}; download the vocabulary file again")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{path}: no token for {len(missing)} of the 256 bytes, 0x{missing[0]:02x} first; not a byte-level vocabulary")
    return ranks


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: can't read the tokenizer: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; a tokenizer is tokenizer.json or tiktoken.model") from None


class Tokenizer:
    """Text ↔ token ids. Ids below `text_size` are text, `text_size` to `vocab_size` − 1 are control tokens.

    Attributes: `controls` (name → id), `vocab_size`, `bos_id`, `eos_id` (end of a document), `end_of_msg_id`, `open_id`,
    `close_id`, `sep_id`, `pad_id`, `media_pad_id`, `stop_ids` (generation ends at any of them).
    """

    def __init__(self, bpe: tokenizers.Tokenizer, controls: dict[str, int]):
        self._bpe = bpe
        self.controls = controls
        self.text_size = bpe.get_vocab_size(with_added_tokens=False)
        self.vocab_size = self.text_size + len(controls)
        if missing := [name for name in CONTROL_TOKENS if name not in controls]:
            raise UserError(f"the tokenizer has no control token {missing[0]}; use one made by Tokenizer.train or the released one")
        if sorted(controls.values()) != list(range(self.text_size, self.vocab_size)):
            raise UserError(f"the tokenizer's control tokens must follow its {self.text_size} text tokens without a gap")
        vocab = bpe.get_vocab(with_added_tokens=False)
        if not vocab.keys() >= _BYTE_OF_CHAR.keys():
            raise UserError("the tokenizer's vocabulary lacks single bytes, so some text has no encoding; it must be byte-level BPE")
        self._bytes = [b""] * self.vocab_size
        for token, id in vocab.items():
            self._bytes[id] = bytes(_BYTE_OF_CHAR[char] for char in token)
        for name, id in controls.items():
            self._bytes[id] = name.encode()
        self._control_pattern = re.compile("|".join(re.escape(name) for name in controls))
        self._hidden = frozenset(id for name, id in controls.items() if name not in SHOWN_CONTROLS)
        self.bos_id, self.eos_id, self.pad_id = controls["[BOS]"], controls["[EOS]"], controls["[PAD]"]
        self.open_id, self.close_id, self.sep_id = controls["<|open|>"], controls["<|close|>"], controls["<|sep|>"]
        self.end_of_msg_id, self.media_pad_id = controls["<|end_of_msg|>"], controls["<|media_pad|>"]
        # Released generation settings name end_of_msg only, and the model also ends with [EOS].
        self.stop_ids = frozenset((self.end_of_msg_id, self.eos_id))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> "Tokenizer":
        """Learns merges from `texts`; the same texts give the same tokenizer.

        vocab_size counts the 256 bytes and the control tokens. The result is smaller when the texts have too few pairs that
        occur `min_frequency` times: take the size from the result.
        """
        smallest = 256 + len(CONTROL_TOKENS)
        if vocab_size < smallest:
            raise UserError(f"a vocabulary of {vocab_size} is too small: bytes and control tokens alone need {smallest}")
        bpe = _with_pre_tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(CONTROL_TOKENS),
            min_frequency=min_frequency,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator((part for text in texts for part in _cut(_valid(text))), trainer)
        size = bpe.get_vocab_size()
        return cls(bpe, {name: size + i for i, name in enumerate(CONTROL_TOKENS)})

    @classmethod
    def from_tiktoken(cls, path: str | Path) -> "Tokenizer":
        """The released vocabulary (`tiktoken.model`): its ranks are the text ids, 256 control ids follow. Ids equal tiktoken's."""
        ranks = _read_tiktoken(Path(path))
        chars = {token: "".join(_CHAR_OF_BYTE[byte] for byte in token) for token in ranks}
        merges = []
        for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
            if pair := _last_merge(token, ranks):
                merges.append((chars[pair[0]], chars[pair[1]]))
        # ignore_merges: a whole pre-token that is in the vocabulary is that token, even if merging wouldn't reach it.
        model = models.BPE(vocab={chars[token]: rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True)
        names = {offset: name for name, offset in RELEASED_OFFSETS.items()}
        ids = range(len(ranks), len(ranks) + RELEASED_CONTROLS)
        return cls(_with_pre_tokenizer(model), {names.get(id - ids[0], f"<|reserved_token_{id}|>"): id for id in ids})

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a file, or from the folder that holds it: `tiktoken.model` if it's there, else `tokenizer.json`."""
        path = Path(path)
        if path.is_dir():
            file = path / "tiktoken.model"
            file = file if file.exists() else path / "tokenizer.json"
            if not file.exists():
                raise UserError(f"{path}: no tokenizer.json and no tiktoken.model in this folder")
            path = file
        if path.suffix != ".json":
            return cls.from_tiktoken(path)
        try:
            tree = json.loads(_read(path))
            controls = {token["content"]: token["id"] for token in tree.pop("added_tokens")}
            bpe = tokenizers.Tokenizer.from_str(json.dumps(tree | {"added_tokens": []}))
        except Exception as error:  # the library raises bare Exception for a tree that it doesn't understand
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: not a tokenizer.json ({type(error).__name__}: {error})") from None
        try:
            return cls(bpe, controls)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> Path:
        """Writes tokenizer.json (into `path` when it's a folder); `tokenizers` and transformers' PreTrainedTokenizerFast read it.

        They, unlike `encode`, turn a control token's spelling in any text into its id: encode untrusted text with this class.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        whole = tokenizers.Tokenizer.from_str(self._bpe.to_str())
        for name in sorted(self.controls, key=self.controls.__getitem__):
            whole.add_tokens([AddedToken(name, special=name not in SHOWN_CONTROLS, normalized=False)])
        aside = path.with_name(path.name + ".partial")
        try:
            aside.write_text(whole.to_str(pretty=True), encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise UserError(f"{path}: can't write the tokenizer: {error.strerror}") from None
        return path

    def encode(self, text: str) -> list[int]:
        """The text ids of `text`; control tokens spelled in it stay text. A lone surrogate is encoded as U+FFFD."""
        ids: list[int] = []
        for part in _cut(_valid(text)):
            ids += self._bpe.encode(part, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        parts = [_cut(_valid(text)) for text in texts]
        flat = iter(self._bpe.encode_batch_fast([part for text in parts for part in text], add_special_tokens=False))
        return [[id for _ in text for id in next(flat).ids] for text in parts]

    def encode_segments(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
        """Ids of a rendered chat, and for each whether it's the assistant's (it counts for the loss).

        Every segment, and every piece of one that has pieces, is encoded alone: BPE across a border would give other ids.
        """
        ids: list[int] = []
        mask: list[bool] = []
        for segment in segments:
            if segment.special:
                ids += self._control_ids(segment.text)
            else:
                for piece in segment.pieces or (segment.text,):
                    ids += self.encode(piece)
            mask += [segment.assistant] * (len(ids) - len(mask))
        return ids, mask

    def _control_ids(self, text: str) -> Iterator[int]:
        names = self._control_pattern.findall(text)
        if "".join(names) != text:
            if text == IMAGE_PLACEHOLDER:
                raise UserError("an image has no size yet: give its content part width and height (pixels) and tokens before encoding")
            raise UserError(f"a special segment must be made of control tokens, not {text[:40]!r}")
        return (self.controls[name] for name in names)

    def is_control(self, id: int) -> bool:
        return id >= self.text_size

    def bytes_of(self, id: int) -> bytes:
        """The bytes a token stands for; for a control token, those of its name."""
        if not 0 <= id < self.vocab_size:
            raise UserError(f"token id {id} is outside the tokenizer's vocabulary of {self.vocab_size}")
        return self._bytes[id]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`, U+FFFD where bytes aren't UTF-8. skip_special drops control tokens but open, close and sep, as K3 does."""
        return b"".join(self.bytes_of(id) for id in ids if not (skip_special and id in self._hidden)).decode("utf-8", "replace")


class StreamDecoder:
    """Decodes ids as they arrive and holds back the bytes of an unfinished character: the parts join to `decode` of the whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip = tokenizer._hidden if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._tokenizer.bytes_of(id) for id in ids if id not in self._skip))

    def flush(self) -> str:
        """What is held back, U+FFFD for a character that never finished."""
        return self._utf8.decode(b"", final=True)
