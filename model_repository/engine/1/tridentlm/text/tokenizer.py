"""The tokenizer of one model: text and chat messages to token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.text.conversion import converted
from tridentlm.text.detokenizer import IncrementalDetokenizer, detokenizer_factory
from tridentlm.text.messages import check_messages
from tridentlm.text.pieces import TokenTexts

RESERVED = ("messages", "conversations", "chat_template", "return_assistant_tokens_mask")


class Tokenizer:
    """Immutable after loading; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`special_tokens`: what chat templates may name, such as bos_token.

        Raises InvalidRequest for a tokenizer whose text cannot be streamed exactly.
        """
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._factories = {skip: detokenizer_factory(backend, skip) for skip in (False, True)}
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = backend.get_vocab_size()
        self.texts = TokenTexts(backend)

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """Reads the tokenizer, the chat template and every EOS id that the model's files name.

        Raises InvalidRequest when there is no usable tokenizer.
        """
        backend, extras = converted(files.tokenizer_path)
        eos = set(extras["eos_token_ids"])
        if files.kind == "hf":
            eos |= _eos_ids(files.path / "config.json")
            eos |= _eos_ids(files.path / "generation_config.json")
        return cls(
            backend,
            chat_template=extras["chat_template"],
            special_tokens=extras["special_tokens"],
            eos_token_ids=eos,
        )

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer itself adds."""
        return self._encode(text, "prompt", add_special_tokens=add_special_tokens)

    def encode_chat(
        self, messages: Any, template: str | None = None, /, **template_kwargs: Any
    ) -> list[int]:
        """The ids of a conversation through `template`, or the model's own chat template.

        `template_kwargs` go to the template; `add_generation_prompt` defaults to true. Raises
        InvalidRequest for bad messages, a missing template, one that refuses, or one that would
        leave out the `tools`.
        """
        text = self.render_chat(messages, template, **template_kwargs)
        return self._encode(text, "messages", add_special_tokens=False)

    def render_chat(
        self, messages: Any, template: str | None = None, /, **template_kwargs: Any
    ) -> str:
        """The text that `encode_chat` encodes."""
        chat = check_messages(messages)
        template = self._chat_template if template is None else template
        if template is None:
            raise InvalidRequest("This model has no chat template.", param="messages")
        for name in RESERVED:
            if name in template_kwargs:
                raise InvalidRequest(
                    f"chat_template_kwargs must not hold {name}.", param="chat_template_kwargs"
                )
        if "developer" not in template:
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"
        if template_kwargs.get("tools") and "tools" not in template:
            raise InvalidRequest("The chat template has no place for tools.", param="tools")
        options = self._special_tokens | template_kwargs
        continued = bool(options.get("continue_final_message"))
        if options.setdefault("add_generation_prompt", not continued) and continued:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="chat_template_kwargs",
            )
        try:
            rendered, _ = render_jinja_template([chat], chat_template=template, **options)
        except Exception as error:
            # Templates are programs from the model's files, and what the caller sends can fail them
            # in any way; none of it may take the server down.
            raise InvalidRequest(
                f"The chat template refused these messages: {error}", param="messages"
            ) from error
        return str(rendered[0])

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens' ids by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json."""
        return str(self._backend.to_str())

    def tokens(self, ids: Iterable[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id; None for an id that it does not hold."""
        return [self._backend.id_to_token(i) for i in ids]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """For one request; its whole text equals `decode` of all its ids."""
        return self._factories[skip_special_tokens]()

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            # Lone surrogates: JSON may spell them, Rust's strings cannot hold them.
            raise InvalidRequest("The text is not valid Unicode.", param=param) from None


def _eos_ids(path: Path) -> set[int]:
    """`eos_token_id` of a config file: missing, null, a number or a list."""
    if not path.is_file():
        return set()
    config = json.loads(path.read_bytes())
    value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return set() if value is None else set(value) if isinstance(value, list) else {value}
