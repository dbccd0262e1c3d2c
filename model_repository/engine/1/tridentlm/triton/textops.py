"""What the tokenizer model does for a proxy beside feeding the engine, free of Triton's tensors.

tokenize    {prompt, add_special_tokens} or {messages, ...}  -> {tokens, token_strs?}
detokenize  {tokens, skip_special_tokens}                    -> {prompt}
describe    {chat_template_kwargs, chat_template}            -> {chat_template,
                                                                 generation_prompt}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tridentlm.errors import InvalidRequest
from tridentlm.text.tokenizer import Tokenizer

_PROBE = "a probe of the generation prompt"


class TextOps:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def run(self, op: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises InvalidRequest for an unknown `op` and for what cannot be done."""
        ops = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "describe": self._describe,
        }
        if op not in ops:
            raise InvalidRequest(f"op must be one of {', '.join(ops)}; got {op!r}.", param="op")
        return ops[op](body)

    def encode_chat(self, source: Mapping[str, Any]) -> list[int]:
        """The ids of `source["messages"]` with its chat_template and chat_template_kwargs."""
        template, kwargs = _template_of(source)
        return self._tokenizer.encode_chat(source["messages"], template, **kwargs)

    def _tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if body.get("messages") is not None:
            tokens = self.encode_chat(body)
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise InvalidRequest("prompt must be a string.", param="prompt")
            special = body.get("add_special_tokens") is not False
            tokens = self._tokenizer.encode(prompt, add_special_tokens=special)
        answer: dict[str, Any] = {"tokens": tokens}
        if body.get("return_token_strs"):
            answer["token_strs"] = self._tokenizer.tokens(tokens)
        return answer

    def _detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise InvalidRequest("tokens must be a list of token ids.", param="tokens")
        if any(type(i) is not int or not 0 <= i < 2**31 for i in tokens) or (
            None in self._tokenizer.tokens(tokens)
        ):
            raise InvalidRequest(
                "tokens must hold ids of the tokenizer's vocabulary only.", param="tokens"
            )
        skip = body.get("skip_special_tokens") is True
        return {"prompt": self._tokenizer.decode(tokens, skip_special_tokens=skip)}

    def _describe(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat template, and what it puts between the last message and the answer."""
        template, kwargs = _template_of(body)
        own = self._tokenizer.chat_template if template is None else template
        if own is None:
            return {"chat_template": None, "generation_prompt": ""}
        kwargs = {k: v for k, v in kwargs.items() if k not in _PROMPT_OPTIONS}
        probe = [{"role": "user", "content": _PROBE}]
        try:
            text = self._tokenizer.render_chat(probe, template, **kwargs)
        except InvalidRequest:
            # A template that wants other messages refuses the probe, not the request.
            text = ""
        return {"chat_template": own, "generation_prompt": text.rpartition(_PROBE)[2]}


_PROMPT_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools")


def _template_of(source: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    template, kwargs = source.get("chat_template"), source.get("chat_template_kwargs") or {}
    if template is not None and not isinstance(template, str):
        raise InvalidRequest("chat_template must be a string.", param="chat_template")
    if not isinstance(kwargs, dict):
        raise InvalidRequest(
            "chat_template_kwargs must be an object.", param="chat_template_kwargs"
        )
    return template, kwargs
