"""A real model behind a service, and the same weights in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from tests.factory import make_tiny_model
from tests.server.reference import Reference
from tests.server.service import Service
from tridentlm.config import EngineSettings
from tridentlm.hub import ModelFiles, default_model, resolve_model
from tridentlm.text import Tokenizer


class ModelCase:
    """A service, the tokenizer of its model, the same weights in transformers, and a client."""

    def __init__(self, service: Service, files: ModelFiles) -> None:
        self.service = service
        self.tokenizer = Tokenizer.load(files)
        self.reference = Reference(files.path)
        self.client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
        self.name = self.client.models.list().data[0].id


@contextmanager
def serving(name: str, folder: Path, step_tokens: int) -> Iterator[tuple[Service, ModelFiles]]:
    """The default model for "smollm2", else a tiny one of the family `name`."""
    path = default_model() if name == "smollm2" else make_tiny_model(name, folder / "model")
    files = resolve_model(EngineSettings(model=str(path)))
    flags = ["--model", str(path), "--max-step-tokens", str(step_tokens), "--kv-memory-gb", "1"]
    with Service(folder, *flags) as service:
        yield service, files
