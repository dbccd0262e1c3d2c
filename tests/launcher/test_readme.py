"""What the README tells a user to type works, against a service with the simulated runner."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.service import START_SECONDS, Command, Service
from tests.launcher.test_serve import answers
from tests.waiting import PATIENCE, free_ports, wait_until

pytestmark = pytest.mark.server

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
CURL = re.findall(r"^    (curl .*(?:\n {6}.*)*)", README, re.M)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service("--max-model-len=100")  # the simulated model ends at a length alone
    try:
        yield made
    finally:
        made.stop()


def here(text: str, service: Service) -> str:
    """The README's text with this service's ports in place of the default ones."""
    ports = {":8000": service.port, ":8100": service.http, ":8101": service.grpc}
    for default, port in ports.items():
        text = text.replace(default, f":{port}")
    return text


def test_the_readme_has_the_examples() -> None:
    assert len(CURL) == 2
    assert len(PYTHON) == 4


@pytest.mark.parametrize("example", CURL)
def test_a_curl_line_is_answered(example: str, service: Service) -> None:
    script = here(example, service).replace("curl ", "curl --silent --show-error --fail ", 1)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    events = [line for line in done.stdout.splitlines() if line.startswith("data:")]
    assert len(events) > 3
    assert '"error"' not in done.stdout


@pytest.mark.parametrize("example", PYTHON)
def test_a_python_example_prints_an_answer(example: str, service: Service) -> None:
    command = [sys.executable, "-c", here(example, service)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 5


def test_a_chat_in_the_terminal_answers(service: Service) -> None:
    target = f"127.0.0.1:{service.grpc}"
    command = [sys.executable, "-m", "openai_proxy.cli", "chat", "--triton", target]
    done = subprocess.run(
        [*command, "--max-tokens", "8"],
        input="Hello\n/exit\n",
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout) > 20


def test_a_repository_of_ones_own_with_plain_triton_and_a_proxy_in_front(tmp_path: Path) -> None:
    """`tridentlm repository`, tritonserver with no other argument than ports, `tridentlm proxy`."""
    models = tmp_path / "models"
    assert Command(["repository", str(models)]).wait() == 0
    http, grpc, metrics, port = free_ports(4)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    simulated = {"TRIDENTLM_RUNNER": "simulated"}
    triton = Command(["triton", "--", "--model-repository", str(models), *ports], simulated)
    proxy = Command(["proxy", "--triton", f"127.0.0.1:{grpc}", "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), START_SECONDS, "answers", triton, proxy)
        assert proxy.end()[0] == 0, proxy.output
        assert triton.end()[0] == 0, triton.output
    finally:
        proxy.stop()
        triton.stop()
