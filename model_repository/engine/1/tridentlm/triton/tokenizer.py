"""The `tokenizer` model: text, chat messages or a batch of submissions -> token ids.

It answers with everything the engine needs in four tensors, because a step after the decoupled
engine could not take tensors from before it:

    generate:  input_ids int32[n]            sampling {fields}            stream  op "relayed"
    submit:    input_ids int32[sum of n_i]   sampling [{uid, n, ...}...]  stream  op "submit"

Asked directly with `op` (see `TextOps`), it answers with one JSON object in `answer` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import triton_python_backend_utils as pb_utils

from tridentlm.config import resolve_settings
from tridentlm.errors import InvalidRequest
from tridentlm.protocol import Op
from tridentlm.startup import settle
from tridentlm.triton import tensors
from tridentlm.triton.textops import TextOps
from tridentlm.triton.watchdog import exit_with_server

SCALARS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "timeout",
)
PARAMETERS_ONLY = (
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "logprobs",
    "prompt_logprobs",
    "echo",
)
TEXT_PARAMETERS = (
    *("text_input", "messages", "sampling", "stop", "stream"),
    *SCALARS,
    *PARAMETERS_ONLY,
)


def read_options(request: Any) -> dict[str, Any]:
    """Text, sampling fields and `stream` of a plain request, from tensors or request parameters.

    A tensor goes before a parameter, a single field before the `sampling` JSON. Raises
    InvalidRequest for an unknown request parameter, so that a misspelt name is not lost, and for a
    grammar that no answer can be held to.
    """
    given = {n: v for n, v in tensors.parameters(request).items() if not n.startswith("triton_")}
    for name in given:
        if name not in TEXT_PARAMETERS:
            raise InvalidRequest(f"Unknown parameter: {name}.", param=name)
    for name in ("text_input", "messages", "sampling"):
        value = tensors.string(request, name)
        if value is not None:
            given[name] = value
    stops = tensors.strings(request, "stop")
    if stops is not None:
        given["stop"] = stops
    for name in ("stream", *SCALARS):
        values = tensors.array(request, name)
        if values is not None and values.size:
            given[name] = values[0].item()
    sampling = tensors.json_object(given.pop("sampling", None) or "{}", "sampling")
    options: dict[str, Any] = {
        name: given.pop(name) for name in ("text_input", "messages") if name in given
    }
    options["stream"] = given.pop("stream", True)
    options["sampling"] = sampling | given
    if options["sampling"].get("grammar") is not None:
        from tridentlm import grammar

        grammar.check(options["sampling"]["grammar"])
    return options


class TritonPythonModel:
    """Stateless; several instances run side by side."""

    def initialize(self, args: dict[str, str]) -> None:
        from tridentlm.hub import resolve_model
        from tridentlm.text import Tokenizer

        exit_with_server()
        tensors.check_package_version(Path(args["model_repository"]) / args["model_version"] / "x")
        settings = resolve_settings(tensors.engine_parameters(args))
        self._tokenizer = Tokenizer.load(resolve_model(settings))
        self._ops = TextOps(self._tokenizer)
        settle()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            op = tensors.string(request, "op")
            if op is not None:
                body = tensors.json_object(tensors.string(request, "request") or "{}", "request")
                answer = tensors.text_tensor("answer", orjson.dumps(self._ops.run(op, body)))
                return pb_utils.InferenceResponse([answer])
            submissions = tensors.strings(request, "request")
            if submissions is not None:
                uids = tensors.strings(request, "uid") or []
                if len(uids) != len(submissions):
                    raise InvalidRequest("request and uid must have the same length.", param="uid")
                return self._submit(submissions, uids)
            return self._generate(read_options(request))
        except Exception as error:
            return tensors.error_response(tensors.as_trident_error(error))

    def _generate(self, options: dict[str, Any]) -> Any:
        stream = options.pop("stream")
        if not isinstance(stream, bool):
            raise InvalidRequest("stream must be true or false.", param="stream")
        sampling = options.pop("sampling")
        if "messages" in options:
            options["messages"] = _parse_messages(options["messages"])
        ids = self._encode(
            {"prompt" if name == "text_input" else name: value for name, value in options.items()}
        )
        return _response(ids, sampling, stream, Op.RELAYED)

    def _submit(self, submissions: list[str], uids: list[str]) -> Any:
        ids: list[int] = []
        entries: list[dict[str, Any]] = []
        for text, uid in zip(submissions, uids, strict=True):
            try:
                submission = tensors.json_object(text, "request")
                tokens = self._encode(submission)
            except Exception as error:
                entries.append({"uid": uid, "error": tensors.as_trident_error(error).payload()})
                continue
            ids += tokens
            entries.append(
                {
                    "uid": uid,
                    "n": len(tokens),
                    "sampling": submission.get("sampling") or {},
                    "return_token_ids": bool(submission.get("return_token_ids")),
                }
            )
        return _response(ids, entries, True, Op.SUBMIT)

    def _encode(self, source: Mapping[str, Any]) -> list[int]:
        """Token ids of the one of prompt, messages and input_ids that is given."""
        given = [n for n in ("prompt", "messages", "input_ids") if source.get(n) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(
                f"Give exactly one of text and messages, not {found}.", param="prompt"
            )
        value = source[given[0]]
        if given[0] == "messages":
            return self._ops.encode_chat(source)
        if given[0] == "prompt":
            if not isinstance(value, str):
                raise InvalidRequest("The prompt must be a string.", param="prompt")
            return self._tokenizer.encode(value)
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
            raise InvalidRequest(
                "Token ids must be a list of non-negative integers.", param="prompt"
            )
        return value


def _parse_messages(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"messages is not valid JSON: {error}.", param="messages") from None


def _response(ids: list[int], sampling: Any, stream: bool, op: str) -> Any:
    # Triton passes an empty tensor on badly; the engine reads lengths from `sampling`, or refuses.
    if not ids and op == Op.RELAYED:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("input_ids", np.array(ids or [0], dtype=np.int32)),
            tensors.text_tensor("sampling", orjson.dumps(sampling)),
            pb_utils.Tensor("stream", np.array([stream])),
            tensors.text_tensor("op", op),
        ]
    )
