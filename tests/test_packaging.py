"""The built wheel is complete, and the Dockerfile's steps do what they say where they can run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("LICENSE", "README.md", "pyproject.toml", "client", "model_repository", "openai_proxy")
MODELS = {"engine", "generate", "relay", "submit", "tokenizer"}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), continued lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `COPY . /src` copies: the files that .dockerignore lets through."""
    target = tmp_path_factory.mktemp("src")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new virtual environment in which the Dockerfile's pip step has run.

    The environment borrows the dependencies of this one by a .pth file; .ci/run resolves them anew.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=True, symlinks=True)
    (step,) = [run for run in arguments("RUN") if "pip" in run]
    python = home / "bin" / "python3"
    purelib = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    Path(purelib, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = step.replace("/src", str(source))
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "EXTRAS": "", **environment()}
    done = subprocess.run(["sh", "-ec", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return python.parent


def environment() -> dict[str, str]:
    """The Dockerfile's ENV for the pip step, and pip's own settings of this machine."""
    pairs = [pair.split("=", 1) for line in arguments("ENV") for pair in line.split()]
    pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HOME"))}
    return {**pip, **{name: value for name, value in pairs if name.startswith("PIP_")}}


def test_the_image_is_pinned_does_not_run_as_root_and_knows_its_health() -> None:
    (base,) = arguments("FROM")
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", base)
    assert arguments("USER") == ["tridentlm"]
    assert "/health/ready" in arguments("HEALTHCHECK")[0]
    caches = dict(pair.split("=", 1) for line in arguments("ENV") for pair in line.split())
    (volume,) = arguments("VOLUME")
    for name in ("TRIDENTLM_CACHE", "HF_HOME", "FLASHINFER_WORKSPACE_BASE"):
        assert caches[name].startswith(volume)
    assert arguments("ENTRYPOINT") == ['["tridentlm"]']
    assert arguments("CMD")[0].startswith('["serve", "--host", "0.0.0.0"')


def test_the_context_is_what_the_build_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(SHIPPED)


def test_the_installed_command_writes_a_whole_repository(installed: Path, tmp_path: Path) -> None:
    target = tmp_path / "models"
    command = [str(installed / "tridentlm"), "repository", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in target.iterdir()} == MODELS
    original = ROOT / "model_repository"
    expected = {
        path.relative_to(original)
        for path in original.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {p.relative_to(target) for p in target.rglob("*") if p.is_file()} == expected


def test_an_installed_serve_would_start_from_a_copy_in_the_cache(
    installed: Path, tmp_path: Path
) -> None:
    code = (
        "from openai_proxy.repository import ready_repository, ENGINE_PACKAGE;"
        "import tridentlm; print(tridentlm.__file__);"
        "first = ready_repository(); assert first == ready_repository();"
        "assert (first / ENGINE_PACKAGE / 'errors.py').is_file(); print(first)"
    )
    env = {"PATH": str(installed), "TRIDENTLM_CACHE": str(tmp_path)}
    command = [str(installed / "python3"), "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    package, repository = done.stdout.split()
    assert package.startswith(str(installed.parent))
    assert repository.startswith(str(tmp_path / "repository"))


def test_the_installed_doctor_runs(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "tridentlm"), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
