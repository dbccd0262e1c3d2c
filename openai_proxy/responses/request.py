"""The body of POST /v1/responses as a chat request, and what the answer echoes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openai_proxy import parameters
from openai_proxy.parameters import only
from openai_proxy.protocol import Job, parse_chat
from openai_proxy.responses.items import messages_of
from openai_proxy.responses.store import ResponseStore
from openai_proxy.settings import ProxySettings
from tridentlm.errors import InvalidRequest

PASSED = (parameters.SAMPLING - {"max_tokens"}) | {
    "model",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "chat_template",
    "safety_identifier",
}
FIELDS = PASSED | {
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "store",
    "background",
    "tools",
    "tool_choice",
    "text",
    "stream_options",
    "include",
    "top_logprobs",
}
LOGPROBS = "message.output_text.logprobs"
OFF: dict[str, Callable[[Any], bool]] = {
    "truncation": only("disabled"),
    "reasoning": lambda value: isinstance(value, dict) and not any(value.values()),
    "max_tool_calls": only(),
    "prompt": only(),
    "conversation": only(),
    "service_tier": only("auto", "default"),
    "context_management": only([]),
}
_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


@dataclass(slots=True)
class ResponseSpec:
    """`echo` are the request's fields in the answer; `messages` the whole conversation so far."""

    echo: dict[str, Any]
    messages: list[dict[str, Any]]
    store: bool
    background: bool
    id: str = field(default_factory=lambda: "resp_" + os.urandom(16).hex())
    created: int = field(default_factory=lambda: int(time.time()))


def parse_response(
    body: Mapping[str, Any], model: str, settings: ProxySettings, store: ResponseStore
) -> Job:
    """A chat's `Job` whose `context` is a ResponseSpec. Raises InvalidRequest, ModelNotFound."""
    _refuse(body)
    spec = _spec_of(body, model, store)
    chat = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat["messages"] = list(spec.messages)
    instructions = spec.echo["instructions"]
    if instructions is not None:
        chat["messages"].insert(0, {"role": "system", "content": instructions})
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["tools"], chat["tool_choice"] = _chat_tools(body), _chat_choice(body)
    chat["response_format"] = _chat_format(body)
    chat["logprobs"], chat["top_logprobs"] = _asks_logprobs(body), body.get("top_logprobs")
    try:
        job = parse_chat(chat, model, settings)
    except InvalidRequest as error:
        raise _renamed(error) from None
    ignored = parameters.unknown_fields(body, FIELDS | OFF.keys())
    return replace(job, ignored=ignored + job.ignored, context=spec, renamed=_PARAMS)


def _refuse(body: Mapping[str, Any]) -> None:
    parameters.refuse_unbuilt(body, FIELDS | OFF.keys())
    for name, off in OFF.items():
        if body.get(name) is not None and not off(body[name]):
            raise _unsupported(name)
    text = body.get("text")
    if text is not None:
        if not isinstance(text, dict):
            raise InvalidRequest("text must be an object.", param="text")
        if text.get("verbosity") not in (None, "medium"):
            raise _unsupported("text.verbosity")


def _unsupported(what: str, param: str = "") -> InvalidRequest:
    message = f"{what} is not supported by this server."
    return InvalidRequest(message, param=param or what, code="unsupported_parameter")


def _spec_of(body: Mapping[str, Any], model: str, store: ResponseStore) -> ResponseSpec:
    background = parameters.flag(body, "background")
    if background and parameters.flag(body, "stream"):
        raise InvalidRequest("background and stream exclude each other.", param="background")
    kept = body.get("store")
    kept = store.works if kept is None else parameters.flag(body, "store")
    if kept and not store.works:
        raise store.refusal("store")
    if background and not kept:
        raise InvalidRequest("background needs store: true.", param="background")
    messages = messages_of(body.get("input"))
    previous = body.get("previous_response_id")
    if previous is not None:
        messages = [*store.conversation(previous), *messages]
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise InvalidRequest("instructions must be a string.", param="instructions")
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidRequest("metadata must be an object.", param="metadata")
    echo = {
        "background": background,
        "instructions": instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": metadata or {},
        "model": model,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": previous,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": kept,
        "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
        "truncation": "disabled",
        "user": body.get("user"),
    }
    return ResponseSpec(echo, messages, kept, background)


def _asks_logprobs(body: Mapping[str, Any]) -> bool:
    include = body.get("include") or []
    if not isinstance(include, list):
        raise InvalidRequest("include must be a list of strings.", param="include")
    for name in include:
        if name != LOGPROBS:
            raise _unsupported(f"include: {name!r}", "include")
    if body.get("top_logprobs") and not include:
        raise InvalidRequest(f'top_logprobs needs include: ["{LOGPROBS}"].', param="top_logprobs")
    return bool(include)


def _chat_tools(body: Mapping[str, Any]) -> Any:
    """Flat function tools as chat's nested ones; anything else is left for chat to refuse."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def _chat_choice(body: Mapping[str, Any]) -> Any:
    """A flat tool_choice as chat's nested one."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        return choice
    listed = choice.get("tools")
    tools = [
        {"type": "function", "function": each} if isinstance(each, dict) else each
        for each in (listed if isinstance(listed, list) else [])
    ]
    return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _chat_format(body: Mapping[str, Any]) -> Any:
    """`text.format` as chat's response_format."""
    form = (body.get("text") or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form


def _renamed(error: InvalidRequest) -> InvalidRequest:
    # Items and messages are not one to one: their numbers are left out.
    head = (error.param or "").partition("[")[0]
    if head in _PARAMS:
        error.param = _PARAMS[head]
        error.message = error.message.replace(head, _PARAMS[head])
    return error
