"""The fields of a chat request that concern the chat template, tools among them.

They travel together as the template's arguments: what a request sets by name goes before the same
name in its `chat_template_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai_proxy import parameters
from tridentlm.errors import InvalidRequest

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

    `callable` are those of `functions` that it may call now, `required` says that it must.
    `strict`: what it calls is held to a grammar, either for that or because a function asks for it.
    """

    schemas: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    callable: frozenset[str]
    parallel: bool
    required: bool
    strict: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function["name"] for function in self.functions)

    def grammar(self, format: str, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
        """The form of answers whose calls are written in `format`; or of those without a call."""
        functions = [
            {
                "name": function["name"],
                "parameters": function.get("parameters")
                if self.required or function.get("strict")
                else {"type": "object"},
            }
            for function in self.functions
            if function["name"] in self.callable
        ]
        value = {
            "format": format,
            "functions": functions,
            "parallel": self.parallel,
            "required": self.required,
            "otherwise": otherwise,
        }
        return {"type": "tool_calls", "value": value}


def tools_of(body: Mapping[str, Any]) -> ToolRequest | None:
    """None without tools, or with tool_choice none: the model then does not hear of them.

    Raises InvalidRequest.
    """
    parallel = body.get("parallel_tool_calls")
    parallel = parallel is None or parameters.flag(body, "parallel_tool_calls")
    tools = body.get("tools")
    if tools is None or tools == []:
        tools = []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS}.", param="tools")
    functions = [_function_of(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = frozenset(function["name"] for function in functions)
    required, chosen = _choice_of(body.get("tool_choice"), names)
    if not chosen:
        return None
    one = isinstance(body.get("tool_choice"), dict) and len(chosen) == 1 and required
    return ToolRequest(
        schemas=tools,
        functions=functions,
        callable=chosen,
        parallel=parallel and not one,
        required=required,
        strict=required or chosen != names or any(f.get("strict") for f in functions),
    )


def _choice_of(choice: Any, names: frozenset[str]) -> tuple[bool, frozenset[str]]:
    """Whether a call is demanded, and what may be called."""
    if choice in (None, "auto"):
        return False, names
    if choice == "none":
        return False, frozenset()
    if not names:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if choice == "required":
        return True, names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return True, frozenset([_name_of(choice, names)])
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return mode == "required", frozenset(_name_of(each, names) for each in listed)
    raise InvalidRequest(
        'tool_choice must be "none", "auto", "required", or name functions.', param="tool_choice"
    )


def _name_of(choice: Any, names: frozenset[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest(
            f"tool_choice: no function {name!r} is among the tools.", param="tool_choice"
        )
    return name


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
