"""A tiny model with random weights, which writes whatever a grammar lets it write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factory import make_tiny_model
from tridentlm import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("grammar") / "tiny")


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", max_running=16, num_pages=1024, threads=1) as llm:
        yield llm
