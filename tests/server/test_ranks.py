"""A model shared by two ranks, through the launcher, Triton and the proxy."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.factory import make_tiny_model
from tests.server.service import Service
from tests.waiting import PATIENCE, wait_until, wait_until_gone

pytestmark = pytest.mark.server


def test_a_killed_rank_is_an_error_to_its_requests_and_the_service_comes_back(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    flags = ["--model", str(folder), "--tp", "2", "--device", "cpu", "--threads", "1"]
    service = Service(tmp_path, *flags, "--num-pages", "400")
    with service:
        text = service.chat(temperature=0).json()["choices"][0]["message"]["content"]
        engine = service.engine_process()
        (follower,) = engine.children()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500, "stream": True}
        body |= {"ignore_eos": True}
        with httpx.stream(
            "POST", f"{service.url}/v1/chat/completions", json=body, timeout=PATIENCE
        ) as answer:
            stream = answer.iter_lines()
            next(stream)
            follower.kill()
            last = [line for line in stream if line][-2:]
        assert "error" in last[0]
        assert last[1] == "data: [DONE]"
        wait_until(lambda: not service.ready(), PATIENCE, "not ready")
        wait_until(service.ready, 2 * PATIENCE, "ready again")
        assert service.chat(temperature=0).json()["choices"][0]["message"]["content"] == text
        ranks = [service.engine_process(), *service.engine_process().children()]
        assert len(ranks) == 2
        assert engine not in ranks
    wait_until_gone(ranks)
