import base64
import json
import pickle
import random
import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import UserError
from openk3.text import Segment, StreamDecoder, Tokenizer, render
from openk3.text import tokenizer as module
from openk3.text.tokenizer import CONTROL_TOKENS

BYTES = [bytes([i]) for i in range(256)]
# Orders the single bytes as the released vocabulary does: printable ASCII from "!" first.
GPT2_BYTES = [bytes([b]) for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]]
GPT2_BYTES += [byte for byte in BYTES if byte not in GPT2_BYTES]


def write_tiktoken(path, tokens):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


@given(st.one_of(st.text(max_size=80), st.text(alphabet=" \t\n\r\0aA1é你😀'\u0301<|>", max_size=80)))
@settings(max_examples=150, deadline=None)
def test_any_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_surrogates_are_joined_in_pairs_and_replaced_alone(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud83d\ude00b\ud83dc")) == "a😀b\ufffdc"
    assert tokenizer.encode_batch(["\ud83d"]) == [tokenizer.encode("\ufffd")]


@given(st.lists(st.sampled_from([*CONTROL_TOKENS, "<|kimi_image_placeholder|>", "<|", "|>", " ", "message", '"'])).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_text_gives_a_control_id(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_control(id) for id in ids) and tokenizer.decode(ids) == text


def test_control_tokens_follow_the_text_tokens_in_released_order(tokenizer):
    assert [tokenizer.controls[name] for name in CONTROL_TOKENS] == list(range(tokenizer.text_size, tokenizer.vocab_size))
    assert tokenizer.vocab_size == 440
    assert tokenizer.stop_ids == {tokenizer.end_of_msg_id, tokenizer.eos_id}
    assert tokenizer.bytes_of(tokenizer.open_id) == b"<|open|>"


def test_training_is_deterministic_and_counts_everything_in_the_size(tokenizer, corpus):
    again = Tokenizer.train(iter(corpus), 440)
    assert [again.bytes_of(i) for i in range(440)] == [tokenizer.bytes_of(i) for i in range(440)]
    assert Tokenizer.train(["ab"], 700).vocab_size == 256 + len(CONTROL_TOKENS)
    with pytest.raises(UserError, match="270 is too small"):
        Tokenizer.train(corpus, 270)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello world", ["Hello", " world"]),
        ("don't WE'LL it's", ["don't", " WE'LL", " it's"]),
        ("CamelCase HTTPServer", ["Camel", "Case", " HTTPServer"]),
        ("x=12345", ["x", "=", "123", "45"]),
        ("你好world世界", ["你好", "world", "世界"]),
        ("    return", ["   ", " return"]),
        ("a  \n\n  b", ["a", "  \n\n", " ", " b"]),
        ("end;\r\n\tx", ["end", ";\r\n", "\tx"]),
        (' role="user"', [" role", '="', "user", '"']),
        ("tail   ", ["tail", "   "]),
        ("e\u0301té ｶﾅ", ["e\u0301té", " ｶﾅ"]),
    ],
)
def test_text_is_split_as_k3_splits_it(tokenizer, text, parts):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(module.SPLIT_PATTERN), "isolated")
    assert [part for part, _ in split.pre_tokenize_str(text)] == parts


def cut_by_counting(text, max_chars, max_run):
    parts = []
    for start in range(0, len(text), max_chars):
        part, run = "", 0
        for char in text[start : start + max_chars]:
            run = run + 1 if part and char.isspace() == part[-1].isspace() else 1
            if run > max_run:
                parts.append(part)
                part, run = "", 1
            part += char
        parts.append(part)
    return parts


@given(st.text(alphabet="ab \n\u00a0", min_size=5, max_size=60))
@settings(max_examples=200, deadline=None)
def test_long_input_is_cut_at_run_and_length_limits(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CHARS", 20)
        patch.setattr(module, "MAX_RUN", 4)
        patch.setattr(module, "_LONG_RUN", re.compile(module._LONG_RUN.pattern.replace("25001", "5")))
        assert module._cut(text) == cut_by_counting(text, 20, 4)


def test_a_very_long_run_is_lossless_and_has_a_token_border_every_25000(tokenizer):
    text = "e" * 60_000
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode("e" * 25_000) * 2 + tokenizer.encode("e" * 10_000)
    assert tokenizer.decode(ids) == text


def test_a_batch_equals_one_by_one(tokenizer, corpus):
    texts = [*corpus, "", "x" * 30_000, "\0", "<|open|>"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_streamed_parts_join_to_the_whole(tokenizer, data):
    ids = data.draw(st.lists(st.one_of(st.integers(0, 255), st.integers(0, tokenizer.vocab_size - 1)), max_size=40))
    skip = data.draw(st.booleans())
    stream, text, at = StreamDecoder(tokenizer, skip), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        text += stream.feed(ids[at : at + size])
        at += size
    assert text + stream.flush() == tokenizer.decode(ids, skip)


def test_an_unfinished_character_is_held_back(tokenizer):
    ids = [next(i for i in range(256) if tokenizer.bytes_of(i) == bytes([byte])) for byte in "😀".encode()]
    stream = StreamDecoder(tokenizer)
    assert [stream.feed([id]) for id in ids] == ["", "", "", "😀"]


def test_skip_special_keeps_the_tag_tokens_as_k3_does(tokenizer):
    ids = [tokenizer.bos_id, tokenizer.open_id, *tokenizer.encode("hi"), tokenizer.sep_id, tokenizer.eos_id]
    assert tokenizer.decode(ids, skip_special=True) == "<|open|>hi<|sep|>"
    assert tokenizer.decode(ids) == "[BOS]<|open|>hi<|sep|>[EOS]"


def test_an_id_out_of_range_is_named(tokenizer):
    for id in (-1, 440):
        with pytest.raises(UserError, match=f"token id {id} "):
            tokenizer.decode([id])


def test_saved_file_loads_here_and_in_the_libraries(tokenizer, corpus, tmp_path):
    path = tokenizer.save(tmp_path)
    assert path == tmp_path / "tokenizer.json" and list(tmp_path.iterdir()) == [path]
    ids = tokenizer.encode(corpus[2])
    for again in (Tokenizer.load(tmp_path), Tokenizer.load(path), pickle.loads(pickle.dumps(tokenizer))):
        assert again.controls == tokenizer.controls and again.encode(corpus[2]) == ids
    plain = tokenizers.Tokenizer.from_file(str(path))
    assert plain.encode(corpus[2]).ids == ids and plain.get_vocab_size() == tokenizer.vocab_size
    assert plain.token_to_id("<|sep|>") == tokenizer.sep_id
    assert plain.decode([tokenizer.bos_id, tokenizer.open_id, *ids]) == "<|open|>" + corpus[2]


def test_saved_file_loads_in_transformers(tokenizer, corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.save(tmp_path)))
    ids = tokenizer.encode(corpus[3])
    assert fast(corpus[3])["input_ids"] == ids and fast.decode(ids) == corpus[3] and len(fast) == tokenizer.vocab_size


def test_a_failed_save_leaves_nothing(tokenizer, tmp_path):
    with pytest.raises(UserError, match="can't write"):
        tokenizer.save(tmp_path / "no" / "tokenizer.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match="can't write"):
        tokenizer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_bad_tokenizer_file_is_told_in_one_line(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    good = json.loads(path.read_text())
    shifted = [token | {"id": token["id"] + 1} for token in good["added_tokens"]]
    short = good["model"] | {"vocab": {t: i for t, i in good["model"]["vocab"].items() if t != "a"}, "merges": []}
    cases = {
        "{": "not a tokenizer.json",
        "[]": "not a tokenizer.json",
        json.dumps(good | {"model": {"type": "BPE"}}): "not a tokenizer.json",
        json.dumps(good | {"added_tokens": good["added_tokens"][:-1]}): r"no control token \[PAD\]",
        json.dumps(good | {"added_tokens": shifted}): "without a gap",
        json.dumps(good | {"model": short}): "gap|single bytes",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            Tokenizer.load(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    for bad in (path, tmp_path / "none.json", tmp_path / "none"):
        with pytest.raises(UserError):
            Tokenizer.load(bad)
    path.unlink()
    with pytest.raises(UserError, match=r"no tokenizer.json and no tiktoken.model"):
        Tokenizer.load(tmp_path)


def merge_lowest_rank_first(piece, ranks):
    """tiktoken's rule: a whole piece that is a token, else merge the leftmost neighbours whose concatenation ranks lowest."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


def random_vocabulary(rng):
    """Tokens of few distinct bytes in any order: they overlap themselves, and many aren't reached by merging."""
    alphabet = rng.choice(["ab", " \n", "-=", "a", "ab'é"])
    words = {"".join(rng.choices(alphabet, k=rng.randint(2, 7))).encode() for _ in range(rng.randint(1, 40))}
    tokens = BYTES + sorted(word for word in words if len(word) > 1)
    rng.shuffle(tokens)
    return tokens, ["".join(rng.choices(alphabet + "x", k=rng.randint(1, 60))) for _ in range(30)]


def test_a_tiktoken_vocabulary_encodes_by_its_ranks(tmp_path):
    rng = random.Random(0)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(module.SPLIT_PATTERN), "isolated")
    for _ in range(25):
        tokens, texts = random_vocabulary(rng)
        ranks = {token: rank for rank, token in enumerate(tokens)}
        tokenizer = Tokenizer.from_tiktoken(write_tiktoken(tmp_path / "tiktoken.model", tokens))
        for text in texts:
            expected = [id for part, _ in split.pre_tokenize_str(text) for id in merge_lowest_rank_first(part.encode(), ranks)]
            assert tokenizer.encode(text) == expected


def test_a_tiktoken_vocabulary_encodes_as_tiktoken_does(tokenizer, corpus, tmp_path):
    tiktoken = pytest.importorskip("tiktoken", reason="the tiktoken package, the oracle of this test, isn't installed")
    rng = random.Random(1)
    trained = [tokenizer.bytes_of(i) for i in range(tokenizer.text_size)], corpus
    for tokens, texts in [trained, *(random_vocabulary(rng) for _ in range(40))]:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        oracle = tiktoken.Encoding("oracle", pat_str=module.SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
        ours = Tokenizer.from_tiktoken(write_tiktoken(tmp_path / "tiktoken.model", tokens))
        for text in texts:
            assert ours.encode(text) == oracle.encode(text, disallowed_special=())


def test_released_control_ids_stand_at_their_offsets(tmp_path):
    path = write_tiktoken(tmp_path / "tiktoken.model", [*GPT2_BYTES, b"he", b"hello"])
    tokenizer = Tokenizer.load(tmp_path)
    base = 258
    assert tokenizer.vocab_size == base + 256
    names = [tokenizer.bytes_of(base + offset).decode() for offset in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 18, 19, 20, 21, 65, 254, 255)]
    assert names == [
        "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[start_header_id]", "[end_header_id]",
        f"<|reserved_token_{base + 8}|>", "[EOT]", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
        "<osagent_mode>", "[UNK]", "[PAD]",
    ]  # fmt: skip
    assert tokenizer.encode("hello") == [257]  # a whole piece, though no merges lead to it
    tokenizer.save(tmp_path / "other.json")
    assert Tokenizer.load(tmp_path / "other.json").controls == tokenizer.controls
    (tmp_path / "tokenizer.json").write_text("broken")  # beside the released file, another is not read
    assert Tokenizer.load(tmp_path).controls == tokenizer.controls
    for text, message in {"a\n": "line 1", "IQ== x\n": "line 1", "IQ== 5\n": "ranks", "": "256 bytes"}.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            Tokenizer.load(tmp_path)


@pytest.mark.slow
def test_a_vocabulary_of_released_size_gives_the_published_ids(tmp_path):
    """The ids that were published for the released vocabulary, each of their tokens at its rank, filler elsewhere."""
    known = {18699: b"Hi", 2778: b"message", 6244: b" role", 878: b'="', 2482: b"user", 69702: b"assistant", 39964: b"think", 4454: b"open"}
    known |= {19180: b"Hello", 2695: b" world", 33845: "你好".encode(), 2243: "世界".encode()}
    tokens = GPT2_BYTES + [known.get(rank, b"\xff" + rank.to_bytes(3, "big")) for rank in range(256, 163_584)]
    tokenizer = Tokenizer.from_tiktoken(write_tiktoken(tmp_path / "tiktoken.model", tokens))
    assert tokenizer.vocab_size == 163_840 and tokenizer.stop_ids == {163585, 163586}
    assert tokenizer.encode("Hello world") == [19180, 2695]
    assert tokenizer.encode("<|open|>") == [27, 91, 4454, 91, 29]
    ids, mask = tokenizer.encode_segments(render([{"role": "user", "content": "Hi"}]))
    assert ids == [
        163587, 2778, 6244, 878, 2482, 1, 163589, 18699, 163588, 2778, 163589, 163586,
        163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589,
    ]  # fmt: skip
    assert not any(mask)


def test_segments_are_encoded_one_by_one(tokenizer):
    segments = [Segment("<|open|>", special=True), Segment("the", assistant=True), Segment(" model", assistant=True)]
    ids, mask = tokenizer.encode_segments(segments)
    assert ids == [tokenizer.open_id, *tokenizer.encode("the"), *tokenizer.encode(" model")]
    assert mask == [False] + [True] * (len(ids) - 1)
    joined = [Segment("message", pieces=("mess", "age"))]
    assert tokenizer.encode_segments(joined)[0] == tokenizer.encode("mess") + tokenizer.encode("age") != tokenizer.encode("message")


def test_a_special_segment_is_made_of_control_tokens_only(tokenizer):
    ids, _ = tokenizer.encode_segments([Segment("<|media_pad|>" * 3, special=True)])
    assert ids == [tokenizer.media_pad_id] * 3
    for text, message in {"<|open|>x": "control tokens", "<|kimi_image_placeholder|>": "width and height"}.items():
        with pytest.raises(UserError, match=message):
            tokenizer.encode_segments([Segment(text, special=True)])
