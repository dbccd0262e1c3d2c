"""The Triton model repository: where this installation has it, and a whole copy of it elsewhere.

A checkout has the repository as a folder. A wheel carries its configurations and `model.py` files
as data beside this module and the engine as an installed package; a copy joins the two again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import tridentlm
from tridentlm.errors import InvalidRequest
from tridentlm.hub import cache_dir

HERE = Path(__file__).resolve().parent
ENGINE_PACKAGE = Path("engine", "1", "tridentlm")
_MODEL_PARAMETER = re.compile(r'(key: "model" value \{ string_value: )"[^"]*"')
_PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*\{\s*string_value:\s*"((?:[^"\\]|\\.)*)"')


def ready_repository() -> Path:
    """A complete repository to serve from: the checkout's own, else a copy in the cache."""
    source = _source()
    if (source / ENGINE_PACKAGE).exists():
        return source
    target = cache_dir() / "repository" / f"{tridentlm.__version__}-{_fingerprint(source)}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch, "repository")
            _copy(made)
            if not target.exists():
                os.replace(made, target)
    return target


def write_repository(target: Path, model: str = "") -> Path:
    """Writes the whole repository to `target`, with `model` as the engine's model when given.

    Raises InvalidRequest when `target` is a file, or a folder that is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidRequest(f"{target} is not an empty folder.", param="directory")
    _copy(target)
    if model:
        config = target / "engine" / "config.pbtxt"
        text, found = _MODEL_PARAMETER.subn(
            lambda match: f'{match.group(1)}"{_escape(model)}"', config.read_text()
        )
        assert found == 1, "engine/config.pbtxt has one parameter `model`"
        config.write_text(text)
    return target


def engine_parameters(repository: Path) -> dict[str, str]:
    """The parameters of the repository's engine/config.pbtxt, the third place of its settings.

    Raises InvalidRequest when `repository` is not one of ours.
    """
    config = repository / "engine" / "config.pbtxt"
    if not config.is_file():
        raise InvalidRequest(f"{repository} has no engine/config.pbtxt.", param="repository")
    found = _PARAMETER.findall(config.read_text())
    return {name: re.sub(r"\\(.)", r"\1", value) for name, value in found}


def _source() -> Path:
    inside = HERE / "model_repository"
    return inside if inside.exists() else HERE.parent / "model_repository"


def _copy(target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    source = _source()
    for model in sorted(p for p in source.iterdir() if (p / "config.pbtxt").exists()):
        shutil.copytree(model, target / model.name, ignore=ignore, dirs_exist_ok=True)
    if not (target / ENGINE_PACKAGE).exists():
        package = Path(tridentlm.__file__).resolve().parent
        shutil.copytree(package, target / ENGINE_PACKAGE, ignore=ignore)


def _fingerprint(source: Path) -> str:
    digest = hashlib.sha256()
    for root in (source, Path(tridentlm.__file__).resolve().parent):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
