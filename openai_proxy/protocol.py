"""Request bodies of the two POST endpoints -> `Job`: what to submit and how to answer.

Written by hand on the dicts of orjson: a pydantic model costs 0.6 to 1 ms a request. The models in
`schemas` document the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openai_proxy import chat, logprobs, parameters
from openai_proxy.chat import ToolRequest
from openai_proxy.output import OutputFormat
from openai_proxy.settings import ProxySettings
from openai_proxy.structured import Wanted, wanted_of
from tridentlm.errors import (
    EngineDown,
    InvalidRequest,
    RequestTimeout,
    TridentError,
)
from tridentlm.text.messages import check_messages
from tridentlm_client import End, Submission

CHAT_FIELDS = (
    parameters.SERVED | chat.FIELDS | logprobs.CHAT_FIELDS | {"messages", "max_completion_tokens"}
)
COMPLETION_FIELDS = parameters.SERVED | logprobs.COMPLETION_FIELDS | {"prompt"}
COMPLETION_MAX_TOKENS = 16
MAX_N = 128
MAX_CHOICES = 1024
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request. `submissions` are its choices in order, `n` for each prompt; `chat`
    tells the two formats apart; `ignored` names the body's unknown fields. `output`: how the text
    is to be cut, None for plain text. `wanted`: the form that it must have. `context` belongs to
    the endpoint, `renamed` gives its names for the parameters that errors blame.
    """

    chat: bool
    model: str
    submissions: list[Submission]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout: float | None
    ignored: list[str]
    tools: ToolRequest | None = None
    output: OutputFormat | None = None
    wanted: Wanted | None = None
    context: object = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def tells_logprobs(self) -> bool:
        sampling = self.submissions[0].sampling
        return "logprobs" in sampling or "prompt_logprobs" in sampling

    @property
    def form(self) -> dict[str, Any] | None:
        """The grammar of `wanted`."""
        return None if self.wanted is None else self.wanted.grammar

    def error_of(self, end: End) -> TridentError | None:
        """Why a request failed; None when it ended well."""
        if end.error is not None:
            return self.localized(end.error)
        if end.finish_reason == "abort" and self.timeout is not None:
            return RequestTimeout(f"The request took longer than its timeout, {self.timeout:g} s.")
        if end.finish_reason == "abort":
            return EngineDown("The server ended this request before it was finished.")
        return None

    def localized(self, error: TridentError) -> TridentError:
        """An engine's error in this endpoint's words: a chat's prompt is its messages."""
        if self.chat and error.param == "prompt":
            error.param = "messages"
        if error.param == "grammar":
            error.param = "tools" if self.wanted is None else self.wanted.param
        error.param = self.renamed.get(error.param or "", error.param)
        return error


def parse_chat(body: Mapping[str, Any], served_model: str, settings: ProxySettings) -> Job:
    """Raises InvalidRequest with `param`."""
    parameters.refuse_unbuilt(body, CHAT_FIELDS)
    messages = check_messages(body.get("messages"))
    tools = chat.tools_of(body)
    submission = Submission(
        messages=messages,
        sampling=parameters.sampling_of(body, None, settings.timeout, logprobs.chat_sampling(body)),
        return_token_ids=parameters.flag(body, "return_token_ids"),
        chat_template_kwargs=chat.template_kwargs(body, tools),
        chat_template=chat.template_of(body, settings.trust_request_chat_template),
    )
    return _job(body, served_model, [submission], CHAT_FIELDS, tools)


def parse_completion(body: Mapping[str, Any], served_model: str, settings: ProxySettings) -> Job:
    """Raises InvalidRequest with `param`."""
    parameters.refuse_unbuilt(body, COMPLETION_FIELDS)
    told = logprobs.completion_sampling(body)
    sampling = parameters.sampling_of(body, COMPLETION_MAX_TOKENS, settings.timeout, told)
    with_ids = parameters.flag(body, "return_token_ids")
    submissions = [
        Submission(
            prompt=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            return_token_ids=with_ids,
        )
        for prompt in _prompts(body.get("prompt"))
    ]
    return _job(body, served_model, submissions, COMPLETION_FIELDS)


def _job(
    body: Mapping[str, Any],
    model: str,
    prompts: list[Submission],
    fields: frozenset[str],
    tools: ToolRequest | None = None,
) -> Job:
    n = parameters.count(body, "n", MAX_N)
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} are more than {MAX_CHOICES} choices.", param="n"
        )
    submissions = [choice for prompt in prompts for choice in _choices(prompt, n)]
    stream = parameters.flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not stream:
        raise InvalidRequest(
            "stream_options can only be used with stream=true.", param="stream_options"
        )
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object.", param="stream_options")
    ignored = parameters.unknown_fields(body, fields)
    ignored += [f"stream_options.{name}" for name in options if name not in _STREAM_OPTIONS]
    continuous = parameters.flag(options, "continuous_usage_stats")
    return Job(
        chat="messages" in fields,
        model=model,
        submissions=submissions,
        n=n,
        stream=stream,
        include_usage=parameters.flag(options, "include_usage"),
        continuous_usage=continuous,
        timeout=submissions[0].sampling.get("timeout"),
        ignored=ignored,
        tools=tools,
        wanted=wanted_of(body),
    )


def _choices(prompt: Submission, n: int) -> list[Submission]:
    """`n` times the same prompt; with a seed, choice i gets seed + i, so that they differ."""
    seed = prompt.sampling.get("seed")
    if n == 1 or seed is None:
        return [prompt] * n
    seeds = [(int(seed) + i) % 2**64 for i in range(n)]
    return [replace(prompt, sampling={**prompt.sampling, "seed": each}) for each in seeds]


def _prompts(value: Any) -> list[str | list[int]]:
    """`prompt` in any of its four forms as a list of texts and id lists."""
    if value is None:
        raise InvalidRequest("prompt is required.", param="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of such "
            "lists, and not empty.",
            param="prompt",
        )
    if _are_ids(value):
        return [value]
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt holds {len(value)} prompts; at most {MAX_CHOICES} are allowed.", param="prompt"
        )
    for prompt in value:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and prompt and _are_ids(prompt)
        ):
            raise InvalidRequest(
                "Each prompt must be a string or a list of token ids (not negative), not empty.",
                param="prompt",
            )
    return value


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**31 for value in values)
