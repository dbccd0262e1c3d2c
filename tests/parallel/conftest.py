from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.factory import make_tiny_model
from tridentlm.config import EngineSettings


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank for each core
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def settings_of(folder: Path, tp: int, num_pages: int = 400) -> EngineSettings:
    """A small engine on the CPU, `tp` ranks with a thread each."""
    return EngineSettings(
        model=str(folder),
        device="cpu",
        threads=1,
        tp=tp,
        page_size=4,
        num_pages=num_pages,
        max_running=16,
        max_step_tokens=128,
    )
