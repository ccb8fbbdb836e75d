"""What the model writes, token by token → reasoning, content and tool calls.

Structure is decided by token id: only the control ids open, close or separate tags, so a model may spell `<|sep|>` in an answer.
Every id is handled alone, so any split of the stream gives the same result. A marker is a control id, a tag header in text,
and a separator; the header is held back until it's decided, and everything else flows on at once, arguments too.

Models slip, and an answer must survive: a header ends at its separator or at the next control token, or where its text can't
be a tag any more; opening response or tools ends thinking; an outer tag's close ends what is open inside. No control token ever
reaches a text. A call that the stream's end cuts off is left out of the message.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from openk3.text.tokenizer import Tokenizer

_PLAIN_TAGS = ("think", "response", "tools")
_TAGS_WITH_ATTRIBUTES = ("call", "argument", "json", "message")
_TAGS = _PLAIN_TAGS + _TAGS_WITH_ATTRIBUTES  # none begins another
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')
_ESCAPE = re.compile(r"&(amp|quot);")


@dataclass(frozen=True, slots=True)
class Event:
    """kind: reasoning, content (text: the delta); tool_call (a call begins: index from 0, id, name), arguments (text: a delta of
    its arguments' JSON text), tool_call_end; done (reason: stop, tool_calls, length, or what `finish` was told)."""

    kind: str
    text: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    reason: str | None = None


@dataclass(slots=True)
class _Call:
    index: int
    id: str
    name: str
    parts: list[str] = field(default_factory=list)  # of the arguments' JSON text
    children: int = 0
    raw: bool = False  # a json child gives the whole text
    complete: bool = False


class ChatParser:
    """One generation's parser; a new one for each request.

    channel: where the prompt stops, "think" or "response" (`openk3.text.generation_channel`); without it, by `thinking`.
    call_id: index and name of a call → its id.
    Attributes: `finish_reason` (None while more may come), `channel` (the region that text would go to now), `reasoning_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = True,
        *,
        channel: str | None = None,
        call_id: Callable[[int, str], str] = lambda index, name: f"call_{index}",
    ):
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._call_id = call_id
        # think, response, message (between channels), tools, call, argument, json
        self.channel = channel or ("think" if thinking else "response")
        self.finish_reason: str | None = None
        self.reasoning_tokens = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._header: tuple[str, str] | None = None  # ("open" or "close", its text so far)
        self._fresh = True  # nothing but a message's opening tag was seen
        self._answered = self.channel == "response"  # a response or tools region was opened
        self._stray = ""  # text between channels that may turn out to be an answer
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self._call: _Call | None = None  # the open one
        self._value: str | None = None  # how the open argument's text enters the JSON: "string", "raw", None: not at all
        self._pending: list[tuple[Event, list[str]]] = []

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Events of the next ids; neighbouring deltas are joined. Ids after the message's end are ignored."""
        tokenizer = self._tokenizer
        for id in ids:
            if self.finish_reason:
                break
            if not tokenizer.is_control(id):
                self.reasoning_tokens += self.channel == "think" and self._header is None
                self._on_text(self._utf8.decode(tokenizer.bytes_of(id)))
                continue
            self._on_text(self._utf8.decode(b"", final=True))
            if id in tokenizer.stop_ids:
                self._end("stop")
            elif id in (tokenizer.open_id, tokenizer.close_id):
                self._settle()
                if not self.finish_reason:
                    self._header = ("open" if id == tokenizer.open_id else "close", "")
            elif id == tokenizer.sep_id:
                self._settle()
        return self._take()

    def finish(self, reason: str = "stop") -> list[Event]:
        """The stream ended: "stop", or "length" where a limit cut it, or any other word, which becomes the finish_reason."""
        if not self.finish_reason:
            self._on_text(self._utf8.decode(b"", final=True))
            self._end(reason)
        return self._take()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message so far, OpenAI's shape; tool_calls only if there are complete ones."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._thinking or self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if calls := [call for call in self._calls if call.complete]:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.parts)}} for call in calls
            ]
        return message

    def _on_text(self, text: str) -> None:
        if not text:
            return
        if self._header is None:
            return self._on_body(text)
        kind, text = self._header[0], self._header[1] + text
        self._header = (kind, text)
        if any(tag.startswith(text) for tag in _TAGS):
            return
        tag = next((tag for tag in _TAGS if text.startswith(tag)), None)
        if kind == "open" and tag in _TAGS_WITH_ATTRIBUTES:
            if text[len(tag)] == " ":
                return
            tag = None
        self._header = None
        if tag is None:  # no marker: its text belongs to the body
            self._on_body(text)
        else:  # a marker without its separator
            self._on_marker(kind, tag, {})
            if not self.finish_reason:
                self._on_body(text[len(tag) :])

    def _settle(self, at_end: bool = False) -> None:
        """Ends the header being read. What is only the beginning of a marker is dropped."""
        if self._header is None:
            return
        (kind, text), self._header = self._header, None
        tag = next((tag for tag in _TAGS if text.startswith(tag)), None)
        if tag is None or (at_end and kind == "open"):
            return
        self._on_marker(kind, tag, {key: _ESCAPE.sub(_unescape, value) for key, value in _ATTRIBUTE.findall(text[len(tag) :])})

    def _on_marker(self, kind: str, tag: str, attributes: dict[str, str]) -> None:
        fresh, self._fresh = self._fresh, False
        if kind == "open":
            if tag in _PLAIN_TAGS:
                self._end_call()
                self.channel = tag
                self._answered |= tag != "think"
            elif tag == "call":
                self._end_call()
                self._begin_call(attributes.get("tool", ""))
            elif tag == "message":
                if fresh:
                    self._fresh = True
                else:  # the model runs on into a next message
                    self._end_call()
                    self._end("stop")
            elif self._call:
                self._end_argument()
                self._begin_argument(tag, attributes)
        elif tag == "message":
            self._end_call()
            self._end("stop")
        elif tag == "tools":
            if self.channel not in ("think", "response"):
                self._end_call()
                self.channel = "message"
        elif tag == "call":
            if self.channel in ("call", "argument", "json"):
                self._end_call()
                self.channel = "tools"
        elif tag == self.channel:
            if tag in ("argument", "json"):
                self._end_argument()
            else:
                self.channel = "message"

    def _on_body(self, text: str) -> None:
        self._fresh = False
        match self.channel:
            case "think":
                self._reasoning.append(text)
                self._emit(Event("reasoning"), text)
            case "response":
                self._content.append(text)
                self._emit(Event("content"), text)
            case "message" if not self._answered:
                # The model began to answer without opening response.
                self._stray += text
                if answer := self._stray.lstrip():
                    self.channel, self._answered = "response", True
                    self._on_body(answer)
            case "argument" | "json" if self._value:
                self._add_arguments(text if self._value == "raw" else json.dumps(text, ensure_ascii=False)[1:-1])

    def _begin_call(self, name: str) -> None:
        self._answered = True
        self.channel = "call" if name else "tools"  # what is in a call without a name is dropped
        if name:
            index = len(self._calls)
            self._call = _Call(index, self._call_id(index, name), name)
            self._calls.append(self._call)
            self._emit(Event("tool_call", index=index, id=self._call.id, name=name))

    def _begin_argument(self, tag: str, attributes: dict[str, str]) -> None:
        call, self.channel, self._value = self._call, tag, None
        assert call
        if call.raw or (tag == "json" and call.children) or (tag == "argument" and "key" not in attributes):
            return
        call.children += 1
        if tag == "json":
            call.raw, self._value = True, "raw"
            return
        self._value = "string" if attributes.get("type", "string") == "string" else "raw"
        before = "{" if call.children == 1 else ", "
        self._add_arguments(f"{before}{json.dumps(attributes['key'], ensure_ascii=False)}: " + ('"' if self._value == "string" else ""))

    def _end_argument(self) -> None:
        if self._value == "string":
            self._add_arguments('"')
        self._value = None
        if self.channel in ("argument", "json"):
            self.channel = "call"

    def _end_call(self) -> None:
        if call := self._call:
            self._end_argument()
            if not call.raw or not call.parts:
                self._add_arguments("}" if call.parts else "{}")
            call.complete = True
            self._emit(Event("tool_call_end", index=call.index))
        self._call = None

    def _add_arguments(self, text: str) -> None:
        assert self._call
        self._call.parts.append(text)
        self._emit(Event("arguments", index=self._call.index), text)

    def _end(self, reason: str) -> None:
        self._settle(at_end=True)
        if self.finish_reason:
            return
        if reason == "stop" and any(call.complete for call in self._calls):
            reason = "tool_calls"
        self.finish_reason = reason
        self._emit(Event("done", reason=reason))

    def _emit(self, event: Event, text: str = "") -> None:
        if text and self._pending and self._pending[-1][0] == event:
            self._pending[-1][1].append(text)
        else:
            self._pending.append((event, [text]))

    def _take(self) -> list[Event]:
        taken, self._pending = self._pending, []
        return [Event(event.kind, "".join(parts), event.index, event.id, event.name, event.reason) for event, parts in taken]


def _unescape(match: re.Match[str]) -> str:
    return "&" if match[1] == "amp" else '"'


def parse_message(tokenizer: Tokenizer, ids: Iterable[int], thinking: bool = True, *, reason: str = "stop") -> dict[str, Any]:
    """The assistant message of a whole generation; `reason` as for `ChatParser.finish`."""
    parser = ChatParser(tokenizer, thinking)
    parser.feed(ids)
    parser.finish(reason)
    return parser.message
