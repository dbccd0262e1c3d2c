"""Items of the Responses API: what comes in as chat messages, what goes out as events and items."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from openai_proxy.tools import Piece
from tridentlm.errors import InvalidRequest

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
Event = dict[str, Any]


def messages_of(value: Any) -> list[dict[str, Any]]:
    """`input` as chat messages. Raises InvalidRequest with `param` such as input[2]."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input must be a string or a list of items.", param="input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        _add(messages, item, f"input[{i}]")
    return [message for message in messages if message.keys() != {"role", "reasoning_content"}]


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object.", param=where)
    kind = item.get("type", "message")
    if kind == "message":
        content = _content(item.get("content"), f"{where}.content")
        role = item.get("role")
        if role not in ROLES:
            name = f"{where}.role"
            raise InvalidRequest(f"{name} must be one of {', '.join(ROLES)}.", param=name)
        if role == "assistant":
            _assistant(messages)["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages, joins="tool_calls").setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        call_id = item.get("call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thought = _content(parts, where, ("reasoning_text", "summary_text")) if parts else ""
        messages.append({"role": "assistant", "reasoning_content": thought})
    else:
        raise InvalidRequest(f"{where}: items of type {kind!r} are not supported.", param=where)


def _assistant(messages: list[dict[str, Any]], joins: str = "") -> dict[str, Any]:
    """The assistant's message that an item belongs to: thoughts, text and calls of one turn."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and ("content" not in last or joins):
        return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _content(value: Any, where: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts.", param=where)
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            name = f"{where}[{i}]"
            raise InvalidRequest(f"{name} must be a part with text, not {kind!r}.", param=name)
    return "\n".join(part["text"] for part in value)


def new_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(16).hex()}"


class ItemBuilder:
    """Turns pieces into output items, and tells of each change in OpenAI's events.

    output_item.added -> [content_part.added] -> ...delta -> ...done -> [content_part.done]
    -> output_item.done
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""
        self._held: list[dict[str, Any]] = []

    def hold(self, logprobs: list[dict[str, Any]]) -> None:
        """Log-probabilities of text that the next pieces stand for; only an output_text has any."""
        self._held += logprobs

    def push(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            kind = "call" if piece.kind == "arguments" else piece.kind
            if kind != "content":
                self._held = []
            if piece.kind == "call" or kind != self._open:
                events += self.close()
                events += self._begin(piece)
            if piece.kind != "call":
                events.append(self._extend(piece.text))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the item that is open, if one is."""
        if not self._open:
            return []
        rest = [self._extend("")] if self._held and self._open == "content" else []
        item, kind, self._open = self.items[-1], self._open, ""
        item["status"] = status
        if kind == "call":
            done = self._event("function_call_arguments.done", arguments=item["arguments"])
            return [done | {"name": item["name"]}, self._item_event("done")]
        part = item["content"][0]
        done = self._event(_STEMS[kind] + ".done", content_index=0, text=part["text"])
        if kind == "reasoning":
            return [done, self._item_event("done")]
        part_done = self._event("content_part.done", content_index=0, part=dict(part))
        done["logprobs"] = part["logprobs"]
        return [*rest, done, part_done, self._item_event("done")]

    def _begin(self, piece: Piece) -> list[Event]:
        self._open = piece.kind
        if piece.kind == "call":
            call = {"id": new_id("fc"), "type": "function_call", "status": "in_progress"}
            self.items.append(call | {"call_id": piece.call_id, "name": piece.text})
            self.items[-1]["arguments"] = ""
            return [self._item_event("added")]
        if piece.kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress"}
            self.items.append(item | {"summary": [], "content": [part]})
            return [self._item_event("added", content=[])]
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": new_id("msg"), "type": "message", "status": "in_progress"}
        self.items.append(item | {"role": "assistant", "content": [part]})
        added = self._event("content_part.added", content_index=0, part=part | {"logprobs": []})
        return [self._item_event("added", content=[]), added]

    def _extend(self, text: str) -> Event:
        item = self.items[-1]
        if self._open == "call":
            item["arguments"] += text
            return self._event("function_call_arguments.delta", delta=text)
        part = item["content"][0]
        part["text"] += text
        event = self._event(_STEMS[self._open] + ".delta", content_index=0, delta=text)
        if self._open == "content":
            event["logprobs"], self._held = self._held, []
            part["logprobs"] += event["logprobs"]
        return event

    def _event(self, name: str, **fields: Any) -> Event:
        place = len(self.items) - 1
        where = {"item_id": self.items[-1]["id"], "output_index": place}
        return {"type": "response." + name, **where, **fields}

    def _item_event(self, what: str, **shown: Any) -> Event:
        item = {**self.items[-1], **shown}
        place = len(self.items) - 1
        return {"type": f"response.output_item.{what}", "output_index": place, "item": item}


_STEMS = {"content": "output_text", "reasoning": "reasoning_text"}


def turn_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items as the chat messages with which a conversation goes on."""
    return messages_of(list(items)) if items else []
