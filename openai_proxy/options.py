"""Command-line flags made from the settings classes, so that a setting is declared once.

A field `max_model_len` of a settings class becomes the flag `--max-model-len` with the field's type
and its default in the help. A flag that is not given is None: the environment then has its say.
MODEL_FLAGS can be repeated, for several models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from openai_proxy.repository import ModelChoice
from tridentlm.errors import InvalidRequest

KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
MODEL_FLAGS = tuple(spec.name for spec in fields(ModelChoice))

ENGINE_HELP = {
    "model": "Hugging Face folder, .gguf file or Hub id, once for each model to serve; "
    "default: SmolLM2-135M-Instruct.",
    "served_model_name": "Name of the model in the API, with aliases after commas; default: from "
    "the model. With several models once for each, in their order.",
    "tokenizer": "Folder of the tokenizer, when it is not the model's.",
    "device": "auto, cpu or cuda.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "quantize": "none, or fp8: rounds the weights of linear layers to e4m3 as they are loaded.",
    "kv_dtype": "auto (the model's) or fp8 (e4m3, CUDA only): the numbers in the KV cache.",
    "load_format": "auto, or dummy: random weights for a folder's config.json.",
    "backend": "auto, torch or flashinfer (CUDA only).",
    "tp": "Tensor parallelism: processes that share the model, on CUDA one per visible GPU.",
    "rank_timeout": "Seconds that a process of those may be behind the others at the start.",
    "page_size": "Tokens in a page of the KV cache; 0: 64 with flashinfer, else 16.",
    "num_pages": "Pages of the KV cache; 0: from the memory.",
    "kv_memory_gb": "Memory of the KV cache in GiB; 0: from the hardware.",
    "max_model_len": "Longest prompt and answer together, in tokens; 0: the model's.",
    "max_running": "Requests that run at once.",
    "max_queue": "Requests that wait; more are refused with 503.",
    "max_queued_tokens": "Prompt tokens of requests without a first token; 0: no limit.",
    "session_share": "Share of all places, running and queued, that one session may take.",
    "user_share": "Share of all places that requests with the same `user` may take.",
    "max_step_tokens": "Tokens of one step (the chunk of a prefill); 0: from the hardware.",
    "max_mixed_tokens": "Prompt tokens of a step in which others decode; 0: from the hardware.",
    "prefix_cache": "radix (reuse the KV of prompts and answers) or null.",
    "admission": "optimistic (preempts when the KV cache is full) or reserve (for max_tokens).",
    "policy": "Who is admitted next: fcfs, priority or longest-prefix.",
    "steps_in_flight": "Steps launched before the oldest is collected; 0: 2 on CUDA, else 1.",
    "cuda_graph_max_batch": "Largest batch that runs as a CUDA Graph; 0: no graphs at all.",
    "cuda_graph_max_tokens": "Tokens of the largest step with prompts that runs by CUDA Graphs; "
    "0: 512 on one GPU, none on several; 1: none.",
    "threads": "CPU threads of the engine; 0: torch's choice.",
    "runner": "model, or simulated (no weights, fixed step time).",
    "step_ms": "Time of a step of the simulated runner, in ms.",
    "drain_seconds": "How long running requests may go on after SIGTERM.",
    "session_timeout": "Seconds without an acknowledgement after which a client is gone.",
}
ALONE_HELP = {
    "triton_metrics": "URL of Triton's metrics, merged into /metrics.",
    "drain_seconds": ENGINE_HELP["drain_seconds"],
}
PROXY_HELP = {
    "host": "Address of the OpenAI API.",
    "port": "Port of the OpenAI API.",
    "workers": "Processes of the proxy.",
    "api_key": "Key that clients must send; better given as TRIDENTLM_API_KEY.",
    "max_body_mb": "Largest request body in MiB.",
    "timeout": "Seconds after which a request is ended, unless it says otherwise; 0: none.",
    "log_json": "Access log as JSON.",
    "trust_request_chat_template": "Let requests bring their own chat_template, a program.",
    "tool_parser": "hermes, llama3_json, mistral, none: form of tool calls; default: by template. "
    "MODEL=FORMAT,...: for one of several models.",
    "reasoning_parser": "How thoughts are marked: think, none; default: by the chat template. "
    "MODEL=FORMAT,...: for one of several models.",
    "sse_keep_alive": "Seconds of silence after which a stream gets a comment; 0: never.",
    "max_stored_responses": "Answers of /v1/responses that are kept in memory; 0: none.",
    "record_failures": "Folder for failing requests (the last 100), to be sent again by replay.",
    "cors_origins": "Origins that may call from a browser, comma separated; *: all.",
}
CONNECTION_HELP = {
    "triton": "HOST:PORT of Triton's gRPC.",
    "engine": "Name of the only engine in Triton to use; default: every one that is found there.",
    "submit": "Name of its submit ensemble; default: by the engine's name.",
    "tokenizer_model": "Name of its tokenizer model; default: by the engine's name.",
    "tls": "TLS to Triton with the system's certificates.",
    "tls_ca": "PEM file with the authority that signed Triton's certificate.",
    "tls_cert": "PEM file with our certificate, for mutual TLS.",
    "tls_key": "PEM file with its key.",
}

Command = Callable[..., None]


def with_flags(
    *groups: tuple[str, type, Mapping[str, str]],
) -> Callable[[Command], Command]:
    """Turns a command's **settings into one flag per field named in the groups' help tables.

    A group is (title, settings class, {field: help}). The command gets every flag as a keyword,
    None where it was not given.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        flags = {flag.name: flag for group in groups for flag in _flags(*group)}
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__dict__["__signature__"] = own.replace(parameters=[*kept, *flags.values()])
        command.__annotations__ = {p.name: p.annotation for p in [*kept, *flags.values()]}
        return command

    return decorate


def chosen(settings: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `given` that were on the command line and are fields of `settings`."""
    names = {spec.name for spec in fields(settings)}
    return {name: given[name] for name in given if name in names and given[name] is not None}


def model_choices(given: dict[str, Any]) -> list[ModelChoice]:
    """Takes MODEL_FLAGS, lists, out of `given`: the models that they mean, at least one.

    With one model every --served-model-name is one more name of it. Raises InvalidRequest when the
    numbers do not match.
    """
    models, names, tokenizers = (list(given.pop(flag, None) or ()) for flag in MODEL_FLAGS)
    if len(models) < 2:
        names = [",".join(names)] if names else []
    for flag, values in (("served_model_name", names), ("tokenizer", tokenizers)):
        if len(values) not in (0, max(len(models), 1)):
            raise InvalidRequest(
                f"--{flag.replace('_', '-')} is given {len(values)} times for {len(models)} "
                "models: give it once for each, in their order, or not at all.",
                param=flag,
            )
    rows = list(zip_longest(models, names, tokenizers, fillvalue="")) or [("", "", "")]
    if len(rows) > 1:
        # The repository that is made of them is read from another place.
        rows = [(_absolute(m), name, _absolute(t)) for m, name, t in rows]
    return [ModelChoice(*row) for row in rows]


def _absolute(path: str) -> str:
    found = Path(path).expanduser()
    return str(found.resolve()) if path and found.exists() else path


def _flags(title: str, settings: type, helps: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    known = {spec.name: spec for spec in fields(settings)}
    for name, text in helps.items():
        default = known[name].default
        shown = "" if default in ("", False, 0) else f" [default: {default}]"
        option = typer.Option(
            "--" + name.replace("_", "-"), help=text + shown, rich_help_panel=title
        )
        kind: Any = KINDS[str(known[name].type)]
        if name in MODEL_FLAGS:
            kind = list[kind]
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
