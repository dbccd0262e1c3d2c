"""The fields of a chat request that concern the chat template, tools among them.

They travel together as the template's arguments: what a request sets by name goes before the same
name in its `chat_template_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tridentlm.errors import InvalidRequest

from openai_proxy import parameters

FIELDS = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }
)
MAX_TOOLS = 512


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The functions that the model may call; `schemas` go to the chat template as they came.

    `strict`: one of them asks for arguments that fit its schema, which is not enforced.
    """

    schemas: list[dict[str, Any]]
    names: tuple[str, ...]
    parallel: bool
    strict: bool


def tools_of(body: Mapping[str, Any]) -> ToolRequest | None:
    """None without tools, or with tool_choice none: the model then does not hear of them.

    Raises InvalidRequest, also for a call that is demanded: without a grammar nothing can force it.
    """
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(
            'tool_choice must be "none" or "auto": a call can only be demanded with '
            "grammar-constrained decoding, which this server does not have yet.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    parallel = body.get("parallel_tool_calls")
    parallel = parallel is None or parameters.flag(body, "parallel_tool_calls")
    tools = body.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS}.", param="tools")
    functions = [_function_of(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if choice == "none":
        return None
    return ToolRequest(
        schemas=tools,
        names=tuple(function["name"] for function in functions),
        parallel=parallel,
        strict=any(function.get("strict") for function in functions),
    )


def _function_of(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f'{where} must be an object of type "function".', param=where)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name.", param=f"{where}.function")
    if not function["name"] or len(function["name"]) > 128:
        name = f"{where}.function.name"
        raise InvalidRequest(f"{name} must have 1 to 128 characters.", param=name)
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        name = f"{where}.function.parameters"
        raise InvalidRequest(f"{name} must be an object.", param=name)
    return function


def template_kwargs(body: Mapping[str, Any], tools: ToolRequest | None) -> dict[str, Any]:
    """What the chat template gets beside the messages. Raises InvalidRequest."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest(
            "chat_template_kwargs must be an object.", param="chat_template_kwargs"
        )
    kwargs = dict(given or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        if body.get(name) is not None:
            kwargs[name] = parameters.flag(body, name)
    if tools is not None:
        kwargs["tools"] = tools.schemas
    if kwargs.get("continue_final_message") and kwargs.get("add_generation_prompt"):
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return kwargs


def template_of(body: Mapping[str, Any], trusted: bool) -> str | None:
    """The request's own template. A template is a program: it must be allowed by the operator."""
    template = body.get("chat_template")
    if template is None:
        return None
    if not trusted:
        raise InvalidRequest(
            "chat_template is refused unless the server runs with --trust-request-chat-template.",
            param="chat_template",
            code="unsupported_parameter",
        )
    if not isinstance(template, str):
        raise InvalidRequest("chat_template must be a string.", param="chat_template")
    return template
