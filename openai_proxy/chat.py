"""The fields of a chat request that concern the chat template.

They travel together as the template's arguments: what a request sets by name goes before the same
name in its `chat_template_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tridentlm.errors import InvalidRequest

from openai_proxy import parameters

FIELDS = frozenset(
    {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"}
)


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
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
