"""Checks of a chat request before it's rendered: each fault is one UserError that names its place, as `messages[2].content[0]`."""

import re
from collections.abc import Sequence
from typing import Any

from openk3.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,255}")


def check_messages(messages: Sequence[dict]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("messages must be a list with at least one message")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise UserError(f"{where}: a message is an object, not {type(message).__name__}")
        role = message.get("role")
        if role not in ROLES:
            raise UserError(f"{where}: role {role!r} isn't one of {', '.join(ROLES)}")
        for key in ("name", "tool", "tool_call_id", "reasoning_content", "reasoning"):
            if not isinstance(message.get(key), str | None):
                raise UserError(f"{where}: {key} must be a string, not {type(message[key]).__name__}")
        for key, owner in (("tools", "system"), ("tool_calls", "assistant"), ("partial", "assistant")):
            if message.get(key) and role != owner:
                raise UserError(f"{where}: only a message of role {owner} has {key}, this one's is {role}")
        if not isinstance(message.get("tool_calls"), list | tuple | None):
            raise UserError(f"{where}: tool_calls must be a list, not {type(message['tool_calls']).__name__}")
        if message.get("partial") and (i < len(messages) - 1 or message.get("tool_calls")):
            raise UserError(f"{where}: only the last message, without tool_calls, can be partial")
        if message.get("tools") and message.get("content"):
            raise UserError(f"{where}: a system message has tools or content, not both")
        if message.get("content") is None and role != "assistant" and not message.get("tools"):
            raise UserError(f"{where}: a message of role {role} needs content")
        _check_content(message.get("content"), f"{where}.content")


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str | None):
        return
    if not isinstance(content, list | tuple):
        raise UserError(f"{where}: expected a string or a list of parts, not {type(content).__name__}")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image", "image_url"):
            raise UserError(f"{where}[{i}]: expected a part of type text, image or image_url, not {kind!r}")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise UserError(f"{where}[{i}]: a text part needs a text")
        sizes = [part[key] for key in ("width", "height", "tokens") if key in part]
        if kind != "text" and sizes and (len(sizes) < 3 or not all(type(size) is int and size > 0 for size in sizes)):
            raise UserError(f"{where}[{i}]: an image's width, height and tokens are given together, as whole numbers above 0")


def check_tools(tools: Any, where: str, declared: set[str]) -> None:
    """Checks a tool list and adds its names to `declared`, which they must not be in yet."""
    if not isinstance(tools, list | tuple | None):
        raise UserError(f"{where}: expected a list, not {type(tools).__name__}")
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise UserError(f'{where}[{i}]: expected {{"type": "function", "function": {{"name": …}}}}')
        name = tool["function"].get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            rule = "up to 256 letters, digits, _ and -, no digit first"
            raise UserError(f"{where}[{i}]: a function's name is {rule}, not {str(name)[:40]!r}")
        if name in declared:
            raise UserError(f"{where}[{i}]: a tool named {name} is declared already")
        declared.add(name)


def check_tool_choice(choice: Any, declared: set[str]) -> str:
    """none, auto or required; a named function counts as required."""
    if choice is None:
        return "auto"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
        if not isinstance(name, str) or name not in declared:
            raise UserError(f"tool_choice names {name!r}, which isn't a declared tool")
        return "required"
    if choice not in ("none", "auto", "required"):
        raise UserError(f"tool_choice {choice!r} isn't none, auto, required or a named function")
    if choice == "required" and not declared:
        raise UserError("tool_choice is required, but no tools are declared")
    return choice


def check_response_format(response_format: Any) -> dict | None:
    """The schema of a json_schema format, else None."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise UserError(f"response_format: type {kind!r} isn't text, json_object or json_schema")
    if kind != "json_schema":
        return None
    spec = response_format.get("json_schema")
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str) or not isinstance(spec.get("schema"), dict):
        raise UserError("response_format.json_schema: expected an object with a name and a schema that is an object")
    if not isinstance(spec.get("strict"), bool | None):
        raise UserError("response_format.json_schema: strict must be true or false")
    return spec["schema"]
