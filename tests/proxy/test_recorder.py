"""Failing requests as files: which, what they hold, how many, and sending one again."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from openai_proxy import recorder
from openai_proxy.recorder import FailureRecorder
from openai_proxy.replay import run_replay
from tests.proxy.fakes import Proxy, Reply, eventually, running_proxy
from tests.waiting import PATIENCE
from tridentlm.errors import EngineDown, InternalError, InvalidRequest, Overloaded
from tridentlm_client import Delta, End

CHAT = "/v1/chat/completions"
BROKEN = End("error", None, {"prompt_tokens": 5, "completion_tokens": 1}, EngineDown("It died."))
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def chat(proxy: Proxy, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, **fields}
    headers = {"authorization": "Bearer sk-secret", "x-request-id": "a/b", "traceparent": TRACE}
    return httpx.post(proxy.url + CHAT, json=body, headers=headers, timeout=PATIENCE)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for file in sorted(folder.glob("*.json"))]


def seeds(folder: Path) -> list[int]:
    """The seeds on record; none while the recorder is taking a file away."""
    try:
        return [record["body"]["seed"] for record in records(folder)]
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("stream", [True, False])
def test_a_failing_request_is_kept_without_secrets(tmp_path: Path, stream: bool) -> None:
    folder = tmp_path / "failures"
    with running_proxy(record_failures=str(folder), api_key="sk-secret") as proxy:
        proxy.session.reply = lambda s: Reply(steps=[Delta("a", 1), BROKEN])
        asked = {"user": "someone", "metadata": {"k": "v"}, "X_API_Key": "sk-other", "top_p": 0.5}
        assert chat(proxy, stream=stream, **asked).status_code == (200 if stream else 503)
    [record] = records(folder)
    assert record["body"] == {
        "messages": [{"role": "user", "content": "Hi"}],
        "seed": 7,
        "stream": stream,
        "top_p": 0.5,
    }
    assert record["left_out"] == ["X_API_Key", "metadata", "user"]
    assert record["path"] == CHAT
    assert record["error"]["message"] == "It died."
    assert (record["request_id"], record["traceparent"]) == ("a/b", TRACE)
    [file] = folder.iterdir()
    assert b"secret" not in file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_the_client_or_the_load_is_to_blame_for_is_not_kept(tmp_path: Path) -> None:
    with running_proxy(record_failures=str(tmp_path)) as proxy:
        assert chat(proxy).status_code == 200
        assert chat(proxy, temperature=-1).status_code == 400
        proxy.session.reply = lambda s: Reply(refusal=Overloaded("Full."))
        assert chat(proxy).status_code == 503
        assert httpx.get(proxy.url + "/nowhere", timeout=PATIENCE).status_code == 404
    assert records(tmp_path) == []


def test_a_fault_of_the_proxy_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "openai_proxy")
    with running_proxy(record_failures=str(tmp_path)) as proxy:
        monkeypatch.setattr(type(proxy.session), "submit", None)
        assert chat(proxy).status_code == 500
    [record] = records(tmp_path)
    assert record["status"] == 500


def test_the_oldest_go_and_large_ones_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_FILES", 3)
    monkeypatch.setattr(recorder, "MAX_BODY", 2000)
    with running_proxy(record_failures=str(tmp_path)) as proxy:
        proxy.session.reply = lambda s: Reply(refusal=InternalError("No."))
        for seed in range(5):
            chat(proxy, seed=seed)
        chat(proxy, stop=["a" * 900] * 3)
        eventually(lambda: seeds(tmp_path) == [2, 3, 4])
        monkeypatch.setattr(recorder, "MAX_BYTES", 10)
        chat(proxy, seed=9)
        eventually(lambda: seeds(tmp_path) == [9])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidRequest) as caught:
        FailureRecorder(str(file / "below"))
    assert caught.value.param == "record_failures"


@pytest.mark.parametrize("stream", [True, False])
def test_a_record_is_sent_again(tmp_path: Path, stream: bool) -> None:
    with running_proxy(record_failures=str(tmp_path), api_key="k") as proxy:
        proxy.session.reply = lambda s: Reply(steps=[Delta("a", 1), BROKEN])
        headers = {"authorization": "Bearer k"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, "stream": stream}
        httpx.post(proxy.url + CHAT, json=body, headers=headers, timeout=PATIENCE)
        eventually(lambda: seeds(tmp_path) == [7])
        [file] = tmp_path.glob("*.json")
        lines: list[str] = []
        assert run_replay(file, proxy.url, "k", lines.append) == 1
        assert any("It died." in line for line in lines)
        proxy.session.reply = lambda s: Reply()
        assert run_replay(file, proxy.url, "k", lines.append) == 0
        assert run_replay(file, proxy.url, "wrong", lines.append) == 1
        assert {s.sampling["seed"] for s in proxy.session.submissions} == {7}


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for content in ("", "[]", '{"path": "/"}'):
        file.write_text(content)
        with pytest.raises(InvalidRequest):
            run_replay(file, "http://127.0.0.1:1", "", print)
