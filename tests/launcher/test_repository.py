from __future__ import annotations

from pathlib import Path

import pytest
from tridentlm.errors import InvalidRequest

from openai_proxy.repository import (
    ENGINE_PACKAGE,
    engine_parameters,
    ready_repository,
    write_repository,
)

MODELS = {"engine", "generate", "relay", "submit", "tokenizer"}


def test_a_written_repository_is_complete(tmp_path: Path) -> None:
    target = write_repository(tmp_path / "models")
    assert {path.name for path in target.iterdir()} == MODELS
    for name in MODELS:
        assert (target / name / "config.pbtxt").is_file()
        assert (target / name / "1").is_dir()
    original = ready_repository() / ENGINE_PACKAGE
    sources = {path.relative_to(original) for path in original.rglob("*.py")}
    copied = target / ENGINE_PACKAGE
    assert {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()} == sources


def test_the_model_is_written_into_the_engines_parameters(tmp_path: Path) -> None:
    odd = 'folder with "quotes" and \\ in it'
    target = write_repository(tmp_path / "models", model=odd)
    assert engine_parameters(target)["model"] == odd
    assert engine_parameters(ready_repository())["model"] == ""


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(InvalidRequest, match="not an empty folder"):
        write_repository(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_a_folder_that_is_no_repository_of_ours_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=str(tmp_path)):
        engine_parameters(tmp_path)
