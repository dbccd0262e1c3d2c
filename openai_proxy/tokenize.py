"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from openai_proxy import chat, parameters
from openai_proxy.exchange import Exchange
from openai_proxy.generate import ProxyState
from openai_proxy.models import ServedModel
from openai_proxy.settings import ProxySettings
from tridentlm.errors import InvalidRequest
from tridentlm.text.messages import check_messages

TOKENIZE_FIELDS = chat.FIELDS | {
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "return_token_strs",
}
DETOKENIZE_FIELDS = frozenset({"model", "tokens", "skip_special_tokens"})


class TokenizeEndpoint:
    """POST /tokenize, or /detokenize with `detokenize`; works while the engine is down."""

    def __init__(self, settings: ProxySettings, state: ProxyState, *, detokenize: bool) -> None:
        self._settings = settings
        self._state = state
        self._detokenize = detokenize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        body = await exchange.read_json(self._settings.max_body_bytes)
        served = self._state.models.choose(body)
        if self._detokenize:
            fields = DETOKENIZE_FIELDS
            answer = await served.text.ask("detokenize", parse_detokenize(body))
        else:
            fields = TOKENIZE_FIELDS
            asked = parse_tokenize(body, self._settings)
            answer = _counted(await served.text.ask("tokenize", asked), served)
        ignored = parameters.unknown_fields(body, fields)
        await exchange.reply(orjson.dumps(answer), self._state.ignored.headers(ignored))


def _counted(answer: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    longest = served.status.get("max_model_len")
    counts = {"count": len(answer["tokens"]), "max_model_len": longest}
    return {**counts, "tokens": answer["tokens"], "token_strs": answer.get("token_strs")}


def parse_tokenize(body: Mapping[str, Any], settings: ProxySettings) -> dict[str, Any]:
    """What to ask the tokenizer. Raises InvalidRequest."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise InvalidRequest("Give exactly one of prompt and messages.", param="prompt")
    asked: dict[str, Any] = {"return_token_strs": parameters.flag(body, "return_token_strs")}
    if body.get("prompt") is not None:
        if not isinstance(body["prompt"], str):
            raise InvalidRequest("prompt must be a string.", param="prompt")
        special = body.get("add_special_tokens")
        asked["add_special_tokens"] = special is None or parameters.flag(body, "add_special_tokens")
        return asked | {"prompt": body["prompt"]}
    if parameters.flag(body, "add_special_tokens"):
        raise InvalidRequest(
            "add_special_tokens works with prompt only: a chat template writes its own.",
            param="add_special_tokens",
        )
    return asked | {
        "messages": check_messages(body["messages"]),
        "chat_template_kwargs": chat.template_kwargs(body, chat.tools_of(body)),
        "chat_template": chat.template_of(body, settings.trust_request_chat_template),
    }


def parse_detokenize(body: Mapping[str, Any]) -> dict[str, Any]:
    """What to ask the tokenizer. Raises InvalidRequest."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or any(type(i) is not int or i < 0 for i in tokens):
        raise InvalidRequest("tokens must be a list of token ids.", param="tokens")
    skip = parameters.flag(body, "skip_special_tokens")
    return {"tokens": tokens, "skip_special_tokens": skip}
