from __future__ import annotations

import importlib.metadata
import io
import socket
from pathlib import Path

import pytest
from rich.console import Console

from openai_proxy import doctor


def findings() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def report() -> tuple[int, str]:
    console = Console(width=200, file=io.StringIO(), record=True)
    code = doctor.run_doctor(console.print)
    return code, console.export_text()


def test_here_serve_can_work() -> None:
    code, text = report()
    assert code == 0
    assert text.strip().endswith("serve can work")


def test_every_part_is_reported_with_its_version() -> None:
    found = findings()
    assert importlib.metadata.version("torch") in found["torch"].found
    assert found["tritonclient"].found == importlib.metadata.version("tritonclient")
    assert {"Python", "numpy", "tritonserver", "Python backend", "libpython"} <= found.keys()
    assert {"CPU", "memory", "/dev/shm", "ports", "model cache", "GPU"} <= found.keys()


def test_without_a_server_it_fails_and_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_ROOT", "/nowhere")
    code, text = report()
    assert code == 1
    assert "/nowhere" in text
    assert "serve cannot work: tritonserver" in text


def test_a_cache_that_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDENTLM_CACHE", "/proc/cache")
    code, text = report()
    assert code == 1
    assert "/proc/cache cannot be written; set TRIDENTLM_CACHE" in text
    assert findings()["model cache"].level == "fail"


def test_a_missing_library_comes_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tritonclient":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    finding = findings()["tritonclient"]
    assert (finding.level, finding.advice) == ("fail", "pip install tritonclient")


def test_numpy_2_with_an_old_server_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "2.2.0" if name == "numpy" else real(name)
    )
    finding = findings()["numpy"]
    assert finding.level == "fail"
    assert "numpy<2" in finding.advice


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", (port,))
        assert str(port) in findings()["ports"].found


def test_bfloat16_on_a_cpu_without_it_is_called_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu sse avx2\n")
    monkeypatch.setattr(doctor, "CPUINFO", cpuinfo)
    assert "float32 is the default" in findings()["CPU"].advice
    cpuinfo.write_text("flags\t\t: fpu amx_bf16 avx2\n")
    assert findings()["CPU"].advice == ""
