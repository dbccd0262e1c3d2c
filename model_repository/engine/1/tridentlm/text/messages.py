"""The structure of chat messages, checked in one place for the tokenizer and the proxy."""

from __future__ import annotations

from typing import Any

import orjson

from tridentlm.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of `messages`, each with a known `role` and `content` as one string.

    Text parts of a content list are joined with newlines, as vLLM does. Content may be missing only
    from an assistant's message with `tool_calls`, and becomes "". Tool calls' arguments become
    objects, as chat templates expect; the role `function` becomes `tool`. Other keys pass through.

    Raises InvalidRequest with `param` such as `messages[2].content[0]`.
    """
    if not isinstance(messages, list):
        raise InvalidRequest("messages must be a list of objects.", param="messages")
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with role and content.", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}; got {role!r}.", param=f"{where}.role"
        )
    content = message.get("content")
    checked = dict(message)
    if role == "function":
        checked["role"] = "tool"
    if role == "assistant":
        calls = _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
        if calls:
            checked["tool_calls"] = calls
            content = "" if content is None else content
    checked["content"] = _text(content, f"{where}.content")
    return checked


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list of objects.", param=where)
    return [_check_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _check_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be an object with a function.", param=where)
    if not isinstance(function.get("name"), str):
        name = f"{where}.function.name"
        raise InvalidRequest(f"{name} must be a string.", param=name)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
    if not isinstance(arguments, dict):
        name = f"{where}.function.arguments"
        raise InvalidRequest(f"{name} must be the JSON of an object.", param=name)
    return {**call, "function": {**function, "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts.", param=where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type.", param=where)
    if kind != "text":
        raise InvalidRequest(
            f"{where}: parts of type {kind!r} are not supported, this model takes text.",
            param=where,
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string.", param=f"{where}.text")
    return str(part["text"])
