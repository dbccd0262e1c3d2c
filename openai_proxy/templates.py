"""What follows from a model's chat template: how its answers are to be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from openai_proxy.output import OutputFormat
from openai_proxy.protocol import Job
from openai_proxy.reasoning import CLOSING, leaves_open, reasoning_for_template
from openai_proxy.settings import ProxySettings, format_for
from openai_proxy.structured import Wanted, check
from openai_proxy.textservice import TextLike
from openai_proxy.tools import TOOL_PARSERS, parser_for_template
from tridentlm.errors import InvalidRequest

MAX_KEPT = 256
MAX_KEY_BYTES = 16384


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """`tool_parser`: None when the template shows no format that we know. `opened`: its prompt ends
    inside thoughts. `closed`: it ends behind them, so that there are none."""

    tool_parser: str | None
    reasoning: bool
    opened: bool
    closed: bool


class Templates:
    """Asks an engine's tokenizer once for each model and set of template arguments."""

    def __init__(self, settings: ProxySettings, text: TextLike) -> None:
        self._settings = settings
        self._text = text
        self._known: dict[tuple[str, bytes], TemplateInfo] = {}

    async def prepare(self, job: Job) -> Job:
        """`job` with its output format and grammar.

        Raises InvalidRequest for tools and for forms of answers that cannot be served.
        """
        if job.wanted is not None:
            await _check(job, job.wanted)
        if not job.chat:
            return _constrained(job, job.form)
        submission = job.submissions[0]
        kwargs = dict(submission.chat_template_kwargs)
        kwargs.pop("tools", None)
        continued = bool(kwargs.pop("continue_final_message", False))
        kwargs.pop("add_generation_prompt", None)
        info = await self._info(job.model, kwargs, submission.chat_template)
        if job.tools is None and not info.reasoning:
            return _constrained(job, job.form)
        kind = None if job.tools is None else self._tool_parser(info)
        opened = info.opened
        if continued:
            opened = leaves_open(str((submission.messages or [{}])[-1].get("content")))
        output = OutputFormat(
            reasoning=info.reasoning and (opened or not continued),
            opened=opened,
            tool_parser=kind,
            names=() if job.tools is None else job.tools.names,
            parallel=job.tools is None or job.tools.parallel,
        )
        grammar = await _grammar_of(job, kind)
        if grammar is not None and output.reasoning and not info.closed:
            grammar = {**grammar, "thoughts": "open" if opened else "maybe"}
        job = _constrained(job, grammar)
        if kind is None and not output.reasoning:
            return job
        if kind is not None and TOOL_PARSERS[kind].special_marks:
            # The marks of calls are special tokens here: they must not be left out of the text.
            job = _with_sampling(job, skip_special_tokens=False)
        return replace(job, output=output)

    def _tool_parser(self, info: TemplateInfo) -> str:
        if info.tool_parser is None:
            raise InvalidRequest(
                "tools: the format of this model's tool calls is not known from its chat template; "
                "the server can be told with --tool-parser.",
                param="tools",
                code="unsupported_parameter",
            )
        return info.tool_parser

    async def _info(
        self, model: str, kwargs: Mapping[str, Any], template: str | None
    ) -> TemplateInfo:
        asked = {"chat_template_kwargs": kwargs, "chat_template": template}
        try:
            key = (model, orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))
        except TypeError as error:
            raise InvalidRequest(
                f"chat_template_kwargs cannot be written as JSON: {error}.",
                param="chat_template_kwargs",
            ) from None
        info = self._known.get(key)
        if info is None:
            info = self._derive(model, await self._text.ask("describe", asked))
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            if len(key[1]) <= MAX_KEY_BYTES:
                self._known[key] = info
        return info

    def _derive(self, model: str, found: Mapping[str, Any]) -> TemplateInfo:
        template = found["chat_template"] or ""
        settings = self._settings
        tool_parser = format_for(settings.tool_parser, model) or parser_for_template(template)
        thinks = format_for(settings.reasoning_parser, model) or (
            "think" if reasoning_for_template(template) else "none"
        )
        return TemplateInfo(
            tool_parser=None if tool_parser == "none" else tool_parser,
            reasoning=thinks == "think",
            opened=leaves_open(found["generation_prompt"]),
            closed=CLOSING in found["generation_prompt"],
        )


async def _grammar_of(job: Job, kind: str | None) -> dict[str, Any] | None:
    """The form that tools and the fields for it ask for together. Raises InvalidRequest."""
    if job.tools is None or kind is None or not (job.tools.strict or job.form):
        return job.form
    grammar = job.tools.grammar(kind, job.form)
    await _check(job, Wanted(grammar, "tools"))
    return grammar


async def _check(job: Job, wanted: Wanted) -> None:
    try:
        await check(wanted)
    except InvalidRequest as error:
        raise job.localized(error) from None


def _constrained(job: Job, grammar: dict[str, Any] | None) -> Job:
    return job if grammar is None else _with_sampling(job, grammar=grammar)


def _with_sampling(job: Job, **more: Any) -> Job:
    submissions = [replace(s, sampling={**s.sampling, **more}) for s in job.submissions]
    return replace(job, submissions=submissions)
