"""A real `tridentlm serve` for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.service import Service


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Triton, two proxy workers and the engine process, with 5 ms steps and no model."""
    folder = tmp_path_factory.mktemp("simulated")
    with Service(folder, "--runner", "simulated", "--workers", "2") as service:
        yield service


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Service]:
    """A service of its own for a test that breaks it; not started yet."""
    service = Service(tmp_path, "--runner", "simulated")
    yield service
    service.stop()
