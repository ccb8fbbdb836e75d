"""The fixed sentences of a chat prompt: what tells the model its tools, its thinking effort, its answer's format.

A model knows the wording it was trained with. openk3's own models use the defaults below; a checkpoint that was trained with
others carries them in `chat_instructions.json`. The released checkpoint has them inside its `encoding_k3.py`: they're read from
that file's syntax tree (it is never run) and recognised by their SHA-256.
"""

import ast
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from openk3.errors import UserError

FILE_NAME = "chat_instructions.json"
RELEASED_FILE_NAME = "encoding_k3.py"
EFFORTS = ("low", "medium", "high", "max")


@dataclass(frozen=True)
class Instructions:
    """One sentence per kind of option message. `tools`, `dynamic_tools` and `json_schema` stand right before a fenced json
    block (line breaks included); `{effort}` in `thinking_effort` is replaced by the effort's name."""

    tools: str = "You can call these tools, given as JSON schemas:\n\n"
    dynamic_tools: str = "From here on you can also call these tools:\n\n"
    thinking_effort: str = "Thinking effort: {effort}."
    tool_choice_required: str = "Your next message must call a tool."
    tool_choice_none: str = "Your next message must not call a tool."
    json_object: str = "Answer with one JSON object and nothing around it."
    json_schema: str = "Answer with JSON that fits this schema and nothing around it:\n"

    @classmethod
    def load(cls, folder: str | Path) -> "Instructions":
        """The wording of the checkpoint in `folder`: its chat_instructions.json, else its encoding_k3.py, else the defaults."""
        folder = Path(folder)
        if (folder / FILE_NAME).exists():
            return cls._from_json(folder / FILE_NAME)
        if (folder / RELEASED_FILE_NAME).exists():
            return cls._from_released(folder / RELEASED_FILE_NAME)
        if (folder / "tiktoken.model").exists():
            raise UserError(f"{folder}: a released vocabulary without its chat wording; copy the released {RELEASED_FILE_NAME} beside it")
        return cls()

    def save(self, folder: str | Path) -> Path:
        """Writes chat_instructions.json, so that a checkpoint keeps the wording it was trained with."""
        path = Path(folder) / FILE_NAME
        aside = path.with_name(path.name + ".partial")
        try:
            aside.write_text(json.dumps(asdict(self), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise UserError(f"{path}: can't write the chat wording: {error.strerror}") from None
        return path

    @classmethod
    def _from_json(cls, path: Path) -> "Instructions":
        try:
            words = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: can't read it as JSON: {error}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(words, dict) or sorted(words) != sorted(names) or not all(isinstance(text, str) for text in words.values()):
            raise UserError(f"{path}: expected an object of texts with exactly the keys {', '.join(names)}")
        return cls(**words)

    @classmethod
    def _from_released(cls, path: Path) -> "Instructions":
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{path}: can't read it as Python: {error}") from None
        templates = [template for node in ast.walk(tree) if (template := _template(node))]
        words = {}
        for name, find in _RELEASED.items():
            found = [text for template in templates if (text := find(template)) is not None]
            if not found:
                raise UserError(f"{path}: K3's wording for {name} isn't in it; write the sentences into {FILE_NAME} beside it")
            words[name] = found[0]
        return cls(**words)


_HOLE = "\0"


def _template(node: ast.AST) -> str | None:
    """The text of a string or f-string, NUL for each value that an f-string fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    return None


def _is(text: str, digest: str) -> bool:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() == digest


def _before_fence(digest: str) -> Callable[[str], str | None]:
    return lambda template: head if _is(head := template.partition("```")[0], digest) else None


def _whole(digest: str) -> Callable[[str], str | None]:
    return lambda template: body if _is(body := template.strip(), digest) else None


def _effort(template: str) -> str | None:
    body = template.strip()
    return body.replace(_HOLE, "{effort}") if all(_is(body.replace(_HOLE, effort), _EFFORT_DIGESTS[effort]) for effort in EFFORTS) else None


def _schema(template: str) -> str | None:
    head, fence, _ = template.partition("```json\n" + _HOLE)
    return head.lstrip() if fence and "response_format=json_schema" in head else None


_EFFORT_DIGESTS = {
    "low": "003035f6bf61ffe6180f4bd5e5a12df1a7cc0cf4550ef78f5591ce8a4537f5fe",
    "medium": "5192c10d0ba2db1baf870bfa41958c87567f920119b4b69bd3930f05d1b0f92e",
    "high": "a8513c631231c09d25027f0e0439194e4290e755fb20932c9f49dd7fa9d6ffc0",
    "max": "20389202b5a9e0b3b556c90431fb62dc2f1bdb13a6e23fb7b516a3c2da848580",
}
# How each released sentence is recognised. The one for json_schema has no published digest: its text names the option.
_RELEASED: dict[str, Callable[[str], str | None]] = {
    "tools": _before_fence("1951792d16cde37e06e7327d3806891601fe5686e6de419db18655e7c7dd83fe"),
    "dynamic_tools": _before_fence("5e74eec6a3b03848c185146faae31415e575ca469103980cc5f9c089d8b1cf1d"),
    "thinking_effort": _effort,
    "tool_choice_required": _whole("e2c3dc236d94164ab96601b3ff7891ad44cdc7d6b38583ab552be33a6bff5f53"),
    "tool_choice_none": _whole("efabd595d24633a14929fd64b8c21542cb13e3e6637ced319c5bec433900a2bb"),
    "json_object": _whole("a88696fd119e35cae2c9cb15ed5a8230bedb9f46e07231f9f85e893e0f993b84"),
    "json_schema": _schema,
}
