"""The corpus: which files count, exact bytes, the held-out rule, and one clear line for what can't be read."""

import hashlib
import json
import lzma
import os
import sysconfig
from pathlib import Path

import pytest

from openk3.data.corpus import STDLIB_EXCLUDED, Corpus, Document, load_corpus, stdlib_corpus
from openk3.errors import UserError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def contents(corpus: Corpus) -> dict[str, bytes]:
    return {document.name: document.content for document in corpus.train + corpus.held_out}


def held_out_by_rule(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0


def assert_one_line(error: pytest.ExceptionInfo[UserError], *parts: str) -> None:
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write(tmp_path / "many", {f"part{i % 3}/file{i:02}.txt": f"text {i}\r\n".encode() for i in range(60)})


def test_held_out_are_the_names_whose_hash_is_0_mod_10(many: Path) -> None:
    corpus = load_corpus([many])
    names = {path.relative_to(many).as_posix() for path in many.rglob("*.txt")}
    assert [d.name for d in corpus.held_out] == sorted(filter(held_out_by_rule, names))
    assert [d.name for d in corpus.train] == sorted(names - set(filter(held_out_by_rule, names)))
    assert corpus.held_out and not corpus.notes


def test_bytes_are_kept_but_a_byte_order_mark(tmp_path: Path) -> None:
    mixed = "a\r\nb\rc\n\n  é\u2028😀\t".encode()
    corpus = load_corpus([write(tmp_path, {"mixed": mixed, "mark.txt": b"\xef\xbb\xbfmarked", "other.txt": b"x"})])
    assert contents(corpus) == {"mixed": mixed, "mark.txt": b"marked", "other.txt": b"x"}


def test_hidden_files_and_caches_are_skipped_and_folders_entered(tmp_path: Path) -> None:
    files = {"a.txt": b"a", "deep/er/b.txt": b"b", ".hidden": b"\0", ".git/c.txt": b"c", "deep/__pycache__/d.pyc": b"\0"}
    assert contents(load_corpus([write(tmp_path, files)])) == {"a.txt": b"a", "deep/er/b.txt": b"b"}


def test_a_linked_file_counts_once_and_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"a.txt": b"a", "b.txt": b"b"})
    (root / "c.txt").symlink_to(root / "a.txt")
    (root / "loop").symlink_to(root, target_is_directory=True)
    (root / "broken.txt").symlink_to(root / "absent")
    assert contents(load_corpus([root, root / "b.txt"])) == {"root/a.txt": b"a", "root/b.txt": b"b"}


@pytest.mark.parametrize(
    ("pattern", "left"),
    [("*.log", {"a.txt", "sub/b.txt"}), ("sub", {"a.txt", "c.log"}), ("sub/", {"a.txt", "c.log"}), ("sub/*", {"a.txt", "c.log"})],
)
def test_exclude_takes_patterns_of_paths_and_of_their_parts(tmp_path: Path, pattern: str, left: set[str]) -> None:
    root = write(tmp_path, {"a.txt": b"a", "sub/b.txt": b"b", "c.log": b"c"})
    assert set(contents(load_corpus(root, exclude=pattern))) == left


def test_several_paths_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", {"x.txt": b"1"}), write(tmp_path / "two", {"x.txt": b"2"})
    corpus = load_corpus([one, str(two), *write(tmp_path, {"x.txt": b"3"}).glob("*.txt")])
    assert contents(corpus) == {"one/x.txt": b"1", "two/x.txt": b"2", "x.txt": b"3"}
    assert corpus.name == "one, two, x.txt"
    with pytest.raises(UserError) as error:
        load_corpus([one, *write(tmp_path / "other" / "one", {"x.txt": b"4"}).parent.glob("one")])
    assert_one_line(error, "'one/x.txt'", "give their common folder")


@pytest.mark.parametrize("content", [b"ab\0c", b"caf\xe9", "utf-16".encode("utf-16")])
def test_a_binary_file_is_named_with_the_way_to_exclude_it(tmp_path: Path, content: bytes) -> None:
    root = write(tmp_path, {"a.txt": b"a", "b.txt": b"b", "sub/image.png": content})
    for paths in ([root], [root / "a.txt", root / "sub" / "image.png"]):
        with pytest.raises(UserError) as error:
            load_corpus(paths)
        assert_one_line(error, str(root / "sub" / "image.png"), "--exclude '*.png'")
    assert set(contents(load_corpus(root, exclude=["*.png"]))) == {"a.txt", "b.txt"}
    skipped = load_corpus(root, skip_binary=True)
    assert set(contents(skipped)) == {"a.txt", "b.txt"}
    assert any("image.png" in note for note in skipped.notes)


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one\n\u00e9"}), "", json.dumps({"id": 3, "text": "\0 is text here"}, ensure_ascii=True) + "\r"]
    root = write(tmp_path, {"deep/data.jsonl": "\n".join(lines).encode()})
    assert contents(load_corpus(root)) == {"deep/data.jsonl:1": "one\né".encode(), "deep/data.jsonl:3": b"\0 is text here"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "isn't JSON"),
        ("[" * 100_000, "isn't JSON"),
        ('{"content": "x"}', '"text"'),
        ('{"text": 3}', '"text"'),
        ('["text"]', '"text"'),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    root = write(tmp_path, {"data.jsonl": b'{"text": "fine"}\n' + line.encode() + b"\n"})
    with pytest.raises(UserError) as error:
        load_corpus([root / "data.jsonl"])
    assert_one_line(error, "data.jsonl", "line 2", said)


def test_what_is_not_there_or_not_a_file_is_named(tmp_path: Path) -> None:
    for bad, said in ((tmp_path / "absent.txt", "doesn't exist"), (tmp_path / ("x" * 300), "doesn't exist"), (Path(os.devnull), "neither")):
        with pytest.raises(UserError) as error:
            load_corpus([bad])
        assert_one_line(error, str(bad), said)


@pytest.mark.parametrize("files", [{}, {"empty.txt": b"", "mark.txt": b"\xef\xbb\xbf"}])
def test_a_corpus_without_text_is_an_error(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(UserError) as error:
        load_corpus([write(tmp_path, files)])
    assert_one_line(error, "no text", repr(tmp_path.name))


def test_a_few_documents_give_up_the_one_with_the_smallest_hash() -> None:
    def smallest_first(document: Document) -> str:
        return hashlib.sha256(document.name.encode()).hexdigest()

    inside = [Document(name, b"x") for name in map(str, range(100)) if held_out_by_rule(name)][:3]
    outside = [Document(name, b"x") for name in map(str, range(100)) if not held_out_by_rule(name)][:3]
    for documents in (inside, outside):  # the rule would leave nothing for training; it would hold nothing out
        corpus = Corpus.split("few", documents + [Document("empty", b"")])
        assert corpus.held_out == (min(documents, key=smallest_first),)
        assert len(corpus.train) == 2
        assert repr(corpus.held_out[0].name) in corpus.notes[0]


def test_a_single_document_is_split_at_the_line_boundary_nearest_to_90_percent() -> None:
    content = b"x" * 79 + b"\n" + b"y" * 11 + b"\n" + b"z" * 8
    corpus = Corpus.split("one", [Document("a.txt", content)])
    assert [d.name for d in corpus.train + corpus.held_out] == ["a.txt[0:92]", "a.txt[92:100]"]
    assert corpus.train[0].content + corpus.held_out[0].content == content
    assert "its last 8 of 100 bytes" in corpus.notes[0]
    assert Corpus.split("one", [Document("a.txt", b"ab\n" + b"c" * 50)]).train[0].content == b"ab\n"
    for unsplittable in (b"one line", b"one line\n", b"\n"):
        with pytest.raises(UserError) as error:
            Corpus.split("one", [Document("a.txt", unsplittable)])
        assert_one_line(error, "'a.txt'", "nothing can be held out")


def test_a_held_out_text_that_training_holds_too_is_told() -> None:
    held = next(name for name in map(str, range(100)) if held_out_by_rule(name))
    kept = next(name for name in map(str, range(100)) if not held_out_by_rule(name))
    assert repr(held) in Corpus.split("leak", [Document(held, b"same"), Document(kept, b"same")]).notes[0]


def test_digest_is_of_names_and_contents(many: Path) -> None:
    first = load_corpus([many])
    assert load_corpus([many]).digest == first.digest
    path = many / "part0" / "file00.txt"
    path.write_bytes(b"text 0\n")
    changed = load_corpus([many])
    path.rename(many / "part0" / "renamed.txt")
    assert len({first.digest, changed.digest, load_corpus([many]).digest}) == 3


def test_summary_and_xz_are_of_the_two_sides(many: Path) -> None:
    corpus = load_corpus([many])
    held_out = b"".join(d.content for d in corpus.held_out)
    assert corpus.xz_bits_per_byte == 8 * len(lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)) / len(held_out)
    assert corpus.summary() == {
        "name": "many",
        "digest": corpus.digest,
        "files": 60,
        "held_out_files": len(corpus.held_out),
        "train_bytes": sum(path.stat().st_size for path in many.rglob("*.txt")) - len(held_out),
        "held_out_bytes": len(held_out),
    }
    json.dumps(corpus.summary())


def test_stdlib_takes_sources_outside_the_excluded_parts(tmp_path: Path) -> None:
    files = {f"m{i}.py": f"x = {i}\n".encode() for i in range(20)} | {"pkg/test.py": b"y = 1\n", "data.txt": b"no", "ext.so": b"\0"}
    excluded = {f"{place}{part}/m.py": b"\0" for part in STDLIB_EXCLUDED for place in ("", "pkg/")}
    names = set(contents(stdlib_corpus(write(tmp_path, files | excluded))))
    assert names == {name for name in files if name.endswith(".py")}


def test_stdlib_source_in_a_declared_encoding_becomes_utf8(tmp_path: Path) -> None:
    latin = "# -*- coding: latin-1 -*-\r\nx = 'é'\r\n"
    root = write(tmp_path, {"a.py": b"a = 1\n", "b.py": latin.encode("latin-1"), "c.py": b"\xef\xbb\xbfc = 1\n"})
    assert contents(stdlib_corpus(root)) == {"a.py": b"a = 1\n", "b.py": latin.encode(), "c.py": b"c = 1\n"}
    for undeclared in (b"\n\nx = '\xe9'\n", b"# coding: nonsense\n'\xe9'\n"):
        with pytest.raises(UserError) as error:
            stdlib_corpus(write(tmp_path, {"d.py": undeclared}))
        assert_one_line(error, str(tmp_path / "d.py"))


def test_without_stdlib_source_a_line_says_how_to_give_a_folder(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "python311.zip"):
        with pytest.raises(UserError) as error:
            stdlib_corpus(root)
        assert_one_line(error, str(root), "--data FOLDER")


@pytest.mark.skipif(not Path(sysconfig.get_path("stdlib"), "os.py").is_file(), reason="no standard-library source on this machine")
def test_the_default_corpus_is_this_machines_stdlib() -> None:
    corpus = load_corpus()
    names = {document.name for document in corpus.train + corpus.held_out}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any(STDLIB_EXCLUDED & set(name.split("/")) for name in names)
    assert [d.name for d in corpus.held_out] == sorted(filter(held_out_by_rule, names))
    assert 0.02 < corpus.held_out_bytes / (corpus.train_bytes + corpus.held_out_bytes) < 0.25
