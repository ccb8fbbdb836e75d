"""Conversations → XTML segments, K3's chat format (K3 report appendix F).

    <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>

`<|open|>`, `<|close|>`, `<|sep|>` and `<|end_of_msg|>` are control tokens; tag names, attributes and bodies are ordinary text.
The result is a list of segments rather than a string, because a string can't tell a control token from a user who spells it:
`Tokenizer.encode_segments` gives control ids to special segments only.

Order: tool declaration, thinking effort, the messages, tool choice, response format, generation prefix.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from openk3.errors import UserError
from openk3.text.checks import check_messages, check_response_format, check_tool_choice, check_tools
from openk3.text.instructions import EFFORTS, Instructions

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt that is encoded on its own.

    special: `text` is made of control tokens. assistant: counts for the loss. pieces: where more token boundaries fall inside
    `text` (the parts of a tag's attributes); empty means none.
    """

    text: str
    special: bool = False
    assistant: bool = False
    pieces: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool call of an assistant message: `arguments`, or `raw` where they aren't a JSON text."""

    id: str | None
    name: str
    arguments: dict[str, Any]
    raw: str | None


class _Writer:
    """Collects segments; `assistant` marks what it adds from now on."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.assistant = False

    def control(self, text: str) -> None:
        self.segments.append(Segment(text, special=True, assistant=self.assistant))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, assistant=self.assistant))

    def open(self, tag: str, **attributes: Any) -> None:
        pieces = [tag]
        for key, value in attributes.items():
            if value is not None:
                pieces += [f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"']
        self.control("<|open|>")
        self.segments.append(Segment("".join(pieces), assistant=self.assistant, pieces=tuple(piece for piece in pieces if piece)))
        self.control("<|sep|>")

    def close(self, tag: str) -> None:
        self.control("<|close|>")
        self.text(tag)
        self.control("<|sep|>")

    def end_message(self) -> None:
        self.close("message")
        self.control("<|end_of_msg|>")
        self.assistant = False

    def option(self, kind: str, body: str) -> None:
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()

    def content(self, content: str | list[dict] | None) -> None:
        if isinstance(content, str):
            return self.text(content)
        for part in content or ():
            if part["type"] == "text":
                self.text(part["text"])
            elif "tokens" in part:
                self.control("<|media_begin|>")
                self.text(f"image {part['width']}x{part['height']}")
                self.control("<|media_content|>")
                self.control("<|media_pad|>" * part["tokens"])
                self.control("<|media_end|>")
            else:
                self.control(IMAGE_PLACEHOLDER)


def render(
    messages: Sequence[dict],
    tools: Sequence[dict] | None = None,
    *,
    thinking: bool = True,
    add_generation_prompt: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | dict | None = None,
    response_format: dict | None = None,
    instructions: Instructions | None = None,
) -> list[Segment]:
    """Renders messages of OpenAI's shape.

    messages: role system, user, assistant or tool; content a string or a list of text and image parts. An image part that has
        width, height (original pixels) and tokens (vision features) is expanded, any other becomes the placeholder segment.
        Assistant messages take reasoning_content and tool_calls. A system message with `tools` declares more tools. `"partial":
        true` on the last assistant message leaves it open to be continued.
    thinking: every assistant message has a think channel (empty where no reasoning was given); False: none has, and reasoning
        is left out.
    thinking_effort: low, medium, high or max; None writes no effort message. K3's own default is max.
    tool_choice: none, auto, required, or a named function, which the prompt words as required.
    response_format: {"type": "text" | "json_object" | "json_schema", …}.
    instructions: the checkpoint's wording of the option messages.
    Raises UserError, which names the place, for anything malformed.
    """
    words = instructions or Instructions()
    check_messages(messages)
    declared: set[str] = set()
    check_tools(tools, "tools", declared)
    for i, message in enumerate(messages):
        check_tools(message.get("tools"), f"messages[{i}].tools", declared)
    tool_choice = check_tool_choice(tool_choice, declared)
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise UserError(f"thinking_effort {thinking_effort!r} isn't one of {', '.join(EFFORTS)}")
    schema = check_response_format(response_format)

    out = _Writer()
    if tools:
        out.option("tool-declare", _fenced(words.tools, tools))
    if thinking and thinking_effort:
        out.option("thinking-effort", words.thinking_effort.replace("{effort}", thinking_effort))
    _render_messages(out, messages, thinking, words)
    if tool_choice == "required":
        out.option("tool-choice", words.tool_choice_required)
    elif tool_choice == "none":
        out.option("tool-choice", words.tool_choice_none)
    if schema is not None:
        out.option("response-format", _fenced(words.json_schema, schema))
    elif response_format and response_format["type"] == "json_object":
        out.option("response-format", words.json_object)
    if add_generation_prompt and not messages[-1].get("partial"):
        out.open("message", role="assistant")
        out.open(generation_channel(messages, thinking))
    return out.segments


def generation_channel(messages: Sequence[dict], thinking: bool = True) -> str:
    """The channel that `render` leaves open for the model, "think" or "response": where a parser of its output begins."""
    last = messages[-1]
    return "think" if thinking and not (last.get("partial") and last.get("content")) else "response"


def _render_messages(out: _Writer, messages: Sequence[dict], thinking: bool, words: Instructions) -> None:
    calls: list[_Call] = []
    results = 0  # tool results since the last assistant message
    for role, run in groupby(enumerate(messages), key=lambda entry: entry[1]["role"]):
        if role == "tool":
            for i, message, name in _in_call_order(list(run), calls):
                results += 1
                name = name or message.get("tool") or message.get("name") or (calls[results - 1].name if results <= len(calls) else None)
                if not name:
                    raise UserError(f"messages[{i}]: no call for this tool result; give tool_call_id of a preceding call, or name")
                out.open("message", role="tool", tool=name, index=results)
                out.content(message["content"])
                out.end_message()
            continue
        for i, message in run:
            if role == "system" and message.get("tools"):
                out.option("tool-declare", _fenced(words.dynamic_tools, message["tools"]))
                continue
            out.open("message", role=role, name=message.get("name") or None)
            if role == "assistant":
                calls, results = list(_calls(message, f"messages[{i}]")), 0
                stays_open = generation_channel([message], thinking) if message.get("partial") else None
                _render_assistant(out, message, calls, thinking, stays_open)
                if stays_open:
                    return
            else:
                out.content(message["content"])
            out.end_message()


def _render_assistant(out: _Writer, message: dict, calls: list[_Call], thinking: bool, stays_open: str | None) -> None:
    out.assistant = True
    if thinking:
        out.open("think")
        out.text(message.get("reasoning_content") or message.get("reasoning") or "")
        if stays_open == "think":
            return
        out.close("think")
    out.open("response")
    out.content(message.get("content"))
    if stays_open == "response":
        return
    out.close("response")
    if not calls:
        return
    out.open("tools")
    for index, call in enumerate(calls, start=1):
        out.open("call", tool=call.name, index=index)
        if call.raw is not None:
            out.open("json", type="object")
            out.text(call.raw)
            out.close("json")
        for key, value in call.arguments.items():
            out.open("argument", key=key, type=_type_of(value))
            out.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            out.close("argument")
        out.close("call")
    out.close("tools")


def _in_call_order(run: list[tuple[int, dict]], calls: list[_Call]) -> list[tuple[int, dict, str | None]]:
    """A run of tool results with the names of their calls, in the calls' order; as it is if an id matches none of them."""
    first = {call.id: at for at, call in reversed(list(enumerate(calls)))}
    placed = []
    for i, message in run:
        id = message.get("tool_call_id")
        if id is None or id not in first:
            return [(i, message, None) for i, message in run]
        placed.append((first[id], i, message))
    return [(i, message, calls[at].name) for at, i, message in sorted(placed, key=lambda entry: entry[:2])]


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


def _fenced(before: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"a tool or a schema isn't plain JSON: {error}") from None
    return f"{before}```json\n{text}\n```"


def _calls(message: dict, where: str) -> Iterator[_Call]:
    for i, call in enumerate(message.get("tool_calls") or ()):
        at = f"{where}.tool_calls[{i}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UserError(f"{at}: expected a function with a name and arguments")
        if not isinstance(call.get("id"), str | None):
            raise UserError(f"{at}: id must be a string, not {type(call['id']).__name__}")
        arguments, raw = _arguments(function.get("arguments"), at)
        yield _Call(call.get("id"), function["name"], arguments, raw)


def _arguments(arguments: Any, where: str) -> tuple[dict[str, Any], str | None]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}, None
    raw = arguments if isinstance(arguments, str) else None
    try:
        value = arguments if raw is None else json.loads(raw)
        json.dumps(value, allow_nan=False)  # NaN and 1e999 aren't JSON, though Python reads them
    except (TypeError, ValueError, RecursionError) as error:
        if raw is not None:
            return {}, raw
        raise UserError(f"{where}: arguments aren't plain JSON: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: arguments must be a JSON object, not {type(value).__name__}")
    return value, None
