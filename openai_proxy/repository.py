"""The Triton model repository: where this installation has it, and whole copies of it elsewhere.

A checkout has the repository as a folder. A wheel carries its configurations and `model.py` files
as data beside this module and the engine as an installed package; a copy joins the two again.

A copy may hold several models over the one package:

    engine/ submit/ tokenizer/ relay/ generate/                the first model, and the package
    b_engine/ b_submit/ b_tokenizer/ b_relay/ b_generate/      the next, named after its model

Each engine's config.pbtxt then names its model, and goes before the environment.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import tridentlm
from tridentlm.config import OWN_FIRST, PRECEDENCE, read_parameters
from tridentlm.errors import InvalidRequest
from tridentlm.hub import cache_dir

HERE = Path(__file__).resolve().parent
ENGINE_PACKAGE = Path("engine", "1", "tridentlm")
ENSEMBLE_ROLES = ("generate", "submit")
_MODEL_PARAMETER = re.compile(r'(key: "model" value \{ string_value: )"[^"]*"')
_GENERAL_PARAMETER = re.compile(r'^parameters \{ key: "max_\w+".*\n', re.MULTILINE)
_OWN_NAME = re.compile(r'^(name: ")', re.MULTILINE)
_OTHERS_NAME = re.compile(r'(model_name: "|key: "engine" value \{ string_value: ")')
_ENTRY = """\
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "engine" / "1"))
"""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The settings that make one of several models: those of `EngineSettings` by these names."""

    model: str = ""
    served_model_name: str = ""
    tokenizer: str = ""


def ready_repository(models: Sequence[ModelChoice] = ()) -> Path:
    """A complete repository to serve from: the checkout's own, else a copy in the cache.

    With more than one model always a copy, made for them.
    """
    source, several = _source(), len(models) > 1
    if not several and (source / ENGINE_PACKAGE).exists():
        return source
    name = f"{tridentlm.__version__}-{_fingerprint(source)}"
    if several:
        choices = repr([astuple(choice) for choice in models])
        name += f"-{hashlib.sha256(choices.encode()).hexdigest()[:12]}"
    target = cache_dir() / "repository" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = write_repository(Path(scratch, "repository"), models if several else ())
            if not target.exists():
                os.replace(made, target)
    return target


def write_repository(target: Path, models: Sequence[ModelChoice] = ()) -> Path:
    """Writes the whole repository to `target`; without `models` for the default model.

    Raises InvalidRequest when `target` is a file, or a folder that is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidRequest(f"{target} is not an empty folder.", param="directory")
    _copy(target)
    roles = sorted(path.name for path in target.iterdir())
    taken: set[tuple[str, int]] = set()
    for number, choice in enumerate(models):
        prefix = _prefix(choice, taken) if number else ""
        for role in roles if number else ():
            _write_beside(target, role, prefix)
        _configure(target / f"{prefix}engine" / "config.pbtxt", choice, several=len(models) > 1)
    return target


def engine_configs(repository: Path) -> list[dict[str, str]]:
    """The parameters of every engine's config.pbtxt, the third place of its settings.

    Raises InvalidRequest when `repository` is not one of ours.
    """
    found = _by_role(repository).get("engine", [])
    if not found:
        raise InvalidRequest(f"{repository} holds no engine of tridentlm.", param="repository")
    return [read_parameters(repository / name / "config.pbtxt") for name in found]


def ensembles(repository: Path) -> list[str]:
    """The models to load; Triton loads the others for them."""
    roles = _by_role(repository)
    return [name for role in ENSEMBLE_ROLES for name in roles.get(role, ())]


def _by_role(repository: Path) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for config in sorted(repository.glob("*/config.pbtxt")):
        role = read_parameters(config).get("tridentlm_role", "")
        roles.setdefault(role, []).append(config.parent.name)
    return roles


def _prefix(choice: ModelChoice, taken: set[tuple[str, int]]) -> str:
    """What a further model's folders begin with: its name, as far as Triton likes it."""
    name = choice.served_model_name.split(",")[0].strip() or Path(choice.model).stem
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"
    number = next(n for n in range(1, len(taken) + 2) if (plain, n) not in taken)
    taken.add((plain, number))
    return f"{plain}_" if number == 1 else f"{plain}-{number}_"


def _write_beside(target: Path, role: str, prefix: str) -> None:
    """Writes the model of `role` once more, for the engine of that prefix."""
    source, copy = target / role, target / f"{prefix}{role}"
    (copy / "1").mkdir(parents=True)
    text = (source / "config.pbtxt").read_text()
    text = _OTHERS_NAME.sub(rf"\g<1>{prefix}", _OWN_NAME.sub(rf"\g<1>{prefix}", text))
    (copy / "config.pbtxt").write_text(text)
    for file in (source / "1").glob("*"):
        if file.name == "model.py":
            text = file.read_text()
            if role == "engine":
                text = text.replace("from tridentlm", f"{_ENTRY}\nfrom tridentlm", 1)
            (copy / "1" / file.name).write_text(text)
        elif file.is_file():
            shutil.copyfile(file, copy / "1" / file.name)


def _configure(config: Path, choice: ModelChoice, *, several: bool) -> None:
    """Writes a model's settings into its engine's configuration."""
    text, found = _MODEL_PARAMETER.subn(
        lambda match: f'{match.group(1)}"{_escape(choice.model)}"', config.read_text()
    )
    assert found == 1, "an engine's config.pbtxt has one parameter `model`"
    if several:
        # What holds for all engines comes from the flags or the environment.
        text = _GENERAL_PARAMETER.sub("", text)
        text += _parameter(PRECEDENCE, OWN_FIRST)
    for name in ("served_model_name", "tokenizer"):
        if getattr(choice, name):
            text += _parameter(name, getattr(choice, name))
    config.write_text(text)


def _parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{_escape(value)}" }} }}\n'


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
