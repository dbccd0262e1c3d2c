"""The offline job through Triton: by one session, by plain gRPC streams and by the OpenAI proxy.

    python -m benchmarks.serving --model benchmarks/models/qwen3-0.6b --load-format dummy \\
        [--offline benchmarks/results/offline_qwen3-0.6b.json] [--runs 3] [--workers 4]

The 256 requests of `benchmarks.offline` go to `tridentlm serve` at one moment: through a session of
`tridentlm_client`, as 256 gRPC streams of tritonclient on the engine, and as completions of the
proxy, the prefix cache empty before each run. With --offline the rates are also shares of that
result. A folder without a tokenizer gets one in which every id is a word. Any other setting of the
engine follows as `name=value`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as triton

from benchmarks.offline import Job, gpu_name
from benchmarks.record import write
from tests.server.service import Service
from tridentlm.errors import TridentError
from tridentlm.models.config import ModelConfig
from tridentlm_client import Session, Stream, Submission
from tridentlm_client.load import load_with

LEAST_SHARE = {"session": 0.96, "grpc": 0.90, "proxy": 0.90}


@dataclass
class Ears:
    """The moments at which each stream's tokens came; gaps are between a stream's arrivals."""

    gaps: list[float] = field(default_factory=list)
    tokens: int = 0

    def heard(self, count: int, last: float) -> float:
        now = time.perf_counter()
        self.tokens += count
        if last:
            self.gaps.append(now - last)
        return now

    def result(self, job: Job, seconds: float) -> dict[str, Any]:
        assert self.tokens == job.tokens_out, f"{self.tokens} tokens instead of {job.tokens_out}"
        gaps = np.array(self.gaps) * 1e3
        p50, p99 = np.percentile(gaps, (50, 99))
        return {
            "tok_s": round(job.tokens_out / seconds, 1),
            "gap_p50_ms": round(float(p50), 2),
            "gap_p99_ms": round(float(p99), 2),
        }


def sampling(job: Job, index: int) -> dict[str, Any]:
    return {
        "max_tokens": job.lengths[index],
        "temperature": 0.6,
        "seed": index,
        "ignore_eos": True,
    }


async def by_session(service: Service, job: Job) -> dict[str, Any]:
    ears = Ears()

    async def read(stream: Stream) -> None:
        last = 0.0
        while deltas := await stream.read():
            last = ears.heard(sum(delta.count for delta in deltas), last)

    session = Session(service.grpc)
    await session.start(60)
    submissions = [
        Submission(input_ids=prompt, sampling=sampling(job, i))
        for i, prompt in enumerate(job.prompts)
    ]
    started = time.perf_counter()
    outcomes = await session.submit(submissions)
    for outcome in outcomes:
        if isinstance(outcome, TridentError):
            raise outcome
    await asyncio.gather(*(read(o) for o in outcomes if isinstance(o, Stream)))
    seconds = time.perf_counter() - started
    await session.close()
    return ears.result(job, seconds)


async def by_grpc(service: Service, job: Job) -> dict[str, Any]:
    ears = Ears()

    async def one(client: triton.InferenceServerClient, index: int) -> None:
        ids = grpc.InferInput("input_ids", [len(job.prompts[index])], "INT32")
        ids.set_data_from_numpy(np.array(job.prompts[index], np.int32))
        options = grpc.InferInput("sampling", [1], "BYTES")
        packed = json.dumps(sampling(job, index)).encode()
        options.set_data_from_numpy(np.array([packed], np.object_))

        async def requests() -> Any:
            yield {"model_name": "engine", "inputs": [ids, options], "request_id": str(index)}

        last = 0.0
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            tokens = result.as_numpy("token_ids")
            if tokens is not None and len(tokens):
                last = ears.heard(len(tokens), last)

    async with triton.InferenceServerClient(service.grpc) as client:
        started = time.perf_counter()
        await asyncio.gather(*(one(client, index) for index in range(len(job.prompts))))
        return ears.result(job, time.perf_counter() - started)


async def by_proxy(service: Service, job: Job) -> dict[str, Any]:
    bodies = [{"prompt": prompt, **sampling(job, i)} for i, prompt in enumerate(job.prompts)]
    result = await load_with(service.url, bodies, chat=False)
    if result.failures:
        raise SystemExit(f"a stream failed: {result.failures[0]}")
    assert result.tokens == job.tokens_out, f"{result.tokens} tokens instead of {job.tokens_out}"
    names = ("tok_s", "gap_p50_ms", "gap_p99_ms", "ttft_p50_ms")
    return {name: getattr(result, name) for name in names}


DOORS: dict[str, Callable[[Service, Job], Awaitable[dict[str, Any]]]] = {
    "session": by_session,
    "grpc": by_grpc,
    "proxy": by_proxy,
}


async def flush(service: Service) -> None:
    session = Session(service.grpc)
    await session.start(60)
    await session.flush_cache()
    await session.close()


async def measure(service: Service, job: Job, runs: int) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    for name, door in DOORS.items():
        results = []
        for _ in range(runs):
            await flush(service)
            results.append(await door(service, job))
            print(name, json.dumps(results[-1]), flush=True)
        median = statistics.median(result["tok_s"] for result in results)
        measured[name] = {"tok_s": median, "runs": results}
    return measured


def word_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer in which each id is one word, for models that are only a config.json."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    made = tokenizers.Tokenizer(models.BPE({f"Ġw{i}": i for i in range(vocab_size)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="of the proxy")
    parser.add_argument("--offline", type=Path, help="a result of benchmarks.offline")
    parser.add_argument("settings", nargs="*", help="name=value")
    arguments = parser.parse_args()
    flags = ["--load-format", arguments.load_format, "--workers", str(arguments.workers)]
    for setting in arguments.settings:
        name, value = setting.split("=", 1)
        flags += ["--" + name.replace("_", "-"), value]
    job, model = Job.make(), Path(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        if model.is_dir() and not (model / "tokenizer.json").is_file():
            word_tokenizer(Path(folder), ModelConfig.from_folder(model).vocab_size)
            flags += ["--tokenizer", folder]
        flags += ["--model", arguments.model]
        with Service(Path(folder), *flags) as service:
            status = service.status()
            doors = asyncio.run(measure(service, job, arguments.runs))
    result: dict[str, Any] = {
        "benchmark": "serving",
        "model": status["model"],
        "load_format": arguments.load_format,
        "dtype": status["dtype"],
        "kv_dtype": "fp8" if "kv_dtype=fp8" in arguments.settings else status["dtype"],
        "gpu": gpu_name(status["device"]),
        "workers": arguments.workers,
        "settings": arguments.settings,
        "tok_s": doors["session"]["tok_s"],
        "runs": doors,
    }
    if arguments.offline:
        offline = json.loads(arguments.offline.read_text())["tok_s"]
        result["offline_tok_s"] = offline
        for name, door in doors.items():
            door["share_of_offline"] = round(door["tok_s"] / offline, 4)
            wanted = LEAST_SHARE[name]
            print(f"{name}: {door['share_of_offline']:.1%} of offline (wanted {wanted:.0%})")
    print(write(f"serving_{status['model'].lower()}", result))


if __name__ == "__main__":
    main()
