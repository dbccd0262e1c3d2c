"""A model shared by two ranks, through the launcher, Triton and the proxy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.factory import make_tiny_model
from tests.parallel.test_death import ranks_of
from tests.server.service import Service
from tests.waiting import PATIENCE, free_ports, wait_until, wait_until_gone

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
        (follower,) = ranks_of(engine)
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
        ranks = [service.engine_process(), *ranks_of(service.engine_process())]
        assert len(ranks) == 2
        assert engine not in ranks
    wait_until_gone(ranks)


def test_triton_and_the_launcher_refuse_ranks_that_cannot_work(tmp_path: Path) -> None:
    folder = str(make_tiny_model("llama", tmp_path / "model"))
    reason = "tp is 3, and 4 query heads cannot be divided by it. This model can have tp 1, 2, 4."
    command = [sys.executable, "-m", "openai_proxy.cli"]
    options = {"capture_output": True, "text": True, "timeout": 2 * PATIENCE}
    done = subprocess.run([*command, "serve", "--model", folder, "--tp", "3"], **options)
    assert (done.returncode, done.stderr) == (1, f"tridentlm: {reason}\n")

    repository = Path(__file__).parents[2] / "model_repository"
    ports = zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    flags = [f"--model-repository={repository}", *(f"--{name}-port={port}" for name, port in ports)]
    flags += ["--model-control-mode=explicit", "--load-model=engine"]
    environ = {**os.environ, "TRIDENTLM_MODEL": folder, "TRIDENTLM_TP": "3"}
    done = subprocess.run([*command, "triton", "--", *flags], env=environ, **options)
    assert done.returncode == 1
    assert "load failed for model 'engine'" in done.stderr
    assert reason in done.stderr
