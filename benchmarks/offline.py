"""256 requests at once through the engine in this process: tokens a second, against the floor.

    python -m benchmarks.offline --model benchmarks/models/qwen3-0.6b --load-format dummy [--runs 3]

The job (seed 0): 256 prompts of 100 to 1,024 random ids, then 256 answers of 100 to 1,024 tokens;
temperature 0.6, EOS ignored, prefix cache empty before each run. Any other setting of the engine
follows as `name=value`. The floor is the time that the hardware's measured rates allow; with --tp
that of so many GPUs which exchange nothing. --profile tells what the GPU's time goes to.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import profiled
from benchmarks.record import write
from tridentlm.config import PREFIX, EngineSettings, resolve_settings
from tridentlm.core.extras import Logprobs
from tridentlm.core.plan import I32, StepPlan
from tridentlm.core.request import Request
from tridentlm.core.runner import PendingStep, Runner
from tridentlm.engine import Engine, build_runner
from tridentlm.hub import resolve_model
from tridentlm.models.config import ModelConfig
from tridentlm.startup import settle

LARGEST_ID = 10_000
PREFILL_STEPS, DECODE_STEPS = 8, 32
"""Of those that are profiled."""
BYTES_PER_SECOND, FLOPS = 4.3e12, 790e12
"""One H200: a device-to-device copy, counting both ways, and an 8192^3 bf16 product, measured."""


@dataclass(frozen=True)
class Job:
    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def make(cls, requests: int = 256, shortest: int = 100, longest: int = 1024) -> Job:
        """Prompts and answers of `shortest` to `longest` tokens; the defaults are the job."""
        rng = random.Random(0)
        span = (shortest, longest)
        prompts = [
            [rng.randint(0, LARGEST_ID) for _ in range(rng.randint(*span))] for _ in range(requests)
        ]
        return cls(prompts, [rng.randint(*span) for _ in range(requests)])

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        return sum(self.lengths)

    def requests(self, vocab_size: int, first_id: int) -> Iterator[Request]:
        for index, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            yield Request(
                id=first_id + index,
                prompt=np.array(prompt, np.int32) % vocab_size,
                max_tokens=length,
                temperature=0.6,
                seed=index,
            )


@dataclass
class Clock:
    """Where the host's time goes, in seconds, and a runner that takes it."""

    runner: Runner
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0
    steps: int = 0
    decodes: int = 0
    """Rows of the last step, if all are decodes."""

    def __post_init__(self) -> None:
        runner = self.runner
        self.limits, self.close = runner.limits, runner.close
        self.device, self.dtype = runner.device, runner.dtype

    def launch(self, plan: StepPlan) -> PendingStep:
        started = time.perf_counter()
        pending = self.runner.launch(plan)
        self.launch_seconds += time.perf_counter() - started
        self.steps += 1
        self.decodes = plan.num_rows if plan.num_rows == len(plan.token_ids) else 0
        return _Waited(self, pending)


@dataclass(frozen=True)
class _Waited:
    clock: Clock
    pending: PendingStep

    def collect(self) -> I32:
        started = time.perf_counter()
        tokens = self.pending.collect()
        self.clock.wait_seconds += time.perf_counter() - started
        return tokens

    def logprobs(self) -> Logprobs | None:
        return self.pending.logprobs()


@dataclass(frozen=True)
class Sizes:
    """Weights of all layers: those that every token meets, and one expert of each sparse layer."""

    shared: float
    expert: float
    count: int
    per_token: int

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        hidden, experts = config.hidden_size, config.experts
        heads, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        attention = config.num_layers * hidden * (2 * heads + 2 * kv)
        sparse = len(experts.layers) if experts else 0
        dense = (config.num_layers - sparse) * 3 * hidden * config.intermediate_size
        if experts is None:
            return cls(attention + dense, 0, 1, 1)
        shared = attention + dense + sparse * hidden * experts.count
        expert = sparse * 3 * hidden * experts.size
        return cls(shared, expert, experts.count, experts.per_token)

    @property
    def of_a_token(self) -> float:
        return self.shared + self.per_token * self.expert

    def read(self, tokens: int) -> float:
        """Of a step of `tokens`, whose experts are chosen evenly and independently."""
        spared = (1 - self.per_token / self.count) ** tokens
        return self.shared + self.count * (1 - spared) * self.expert


def floor_seconds(config: ModelConfig, job: Job, kv_bytes: int) -> float:
    """Prefill at the matrix rate, each decode step at the slower of weights and products, and KV.

    All requests decode together from their first token, as if memory held them all.
    """
    heads, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    sizes, head = Sizes.of(config), config.hidden_size * config.vocab_size
    body = sizes.of_a_token
    prompts, lengths = (np.array(x) for x in ([len(p) for p in job.prompts], job.lengths))
    causal = 2 * config.num_layers * heads * float((prompts**2).sum())
    total = (2 * body * prompts.sum() + causal + 2 * head * len(prompts)) / FLOPS
    token_bytes = 2 * config.num_layers * kv * kv_bytes
    for step in range(1, int(lengths.max())):
        live = lengths > step
        context = int((prompts[live] + step).sum())
        weights = 2 * (sizes.read(int(live.sum())) + head)
        products = 2 * (body + head) * int(live.sum()) / FLOPS
        total += max(weights / BYTES_PER_SECOND, products)
        total += context * token_bytes / BYTES_PER_SECOND
    return float(total)


def run(engine: Engine, clock: Clock, job: Job, first_id: int) -> dict[str, Any]:
    engine.flush_cache()
    clock.launch_seconds = clock.wait_seconds = 0.0
    clock.steps = received = 0
    started = time.perf_counter()
    for request in job.requests(engine.limits.vocab_size, first_id):
        engine.add(request)
    with_all_rows: list[tuple[float, float]] = []  # seconds of scheduling and of launching
    while engine.has_work:
        clock.decodes, began = 0, time.perf_counter()
        before = clock.launch_seconds, clock.wait_seconds
        output = engine.step()
        received += 0 if output is None else len(output.ids)
        launched = clock.launch_seconds - before[0]
        if clock.decodes == len(job.prompts):
            spent = time.perf_counter() - began - (clock.wait_seconds - before[1])
            with_all_rows.append((spent - launched, launched))
    seconds = time.perf_counter() - started
    assert received == job.tokens_out, f"{received} tokens instead of {job.tokens_out}"
    schedule = seconds - clock.launch_seconds - clock.wait_seconds
    parts = {"schedule": schedule, "launch": clock.launch_seconds, "wait": clock.wait_seconds}
    with_all: dict[str, float] = {"steps": len(with_all_rows)}
    if with_all_rows:
        median = np.round(1e3 * np.median(with_all_rows, 0), 3).tolist()
        with_all |= dict(zip(("schedule_ms", "launch_ms"), median, strict=True))
    return {
        "tok_s": round(job.tokens_out / seconds, 1),
        "seconds": round(seconds, 3),
        "steps": clock.steps,
        "step_ms": {name: round(1e3 * spent / clock.steps, 3) for name, spent in parts.items()},
        "with_all_rows": with_all,
    }


def profile(engine: Engine, job: Job, device: str, steps: int, folder: Path) -> dict[str, Any]:
    """One more run, of which the first steps and some in the middle of `steps` are profiled."""
    engine.flush_cache()
    for request in job.requests(engine.limits.vocab_size, 10**6):
        engine.add(request)
    told = {"prefill": profiled(engine, PREFILL_STEPS, device, folder / "prefill.json.gz")}
    for _ in range(steps // 2 - PREFILL_STEPS):
        engine.step()
    told["decode"] = profiled(engine, DECODE_STEPS, device, folder / "decode.json.gz")
    engine.shut_down()
    return told


def engine_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("settings", nargs="*", help="any setting of the engine: name=value")
    return parser


def engine_settings(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> EngineSettings:
    """The settings that the command line of an `engine_parser` asks for."""
    environ = {"MODEL": arguments.model, "LOAD_FORMAT": arguments.load_format}
    environ["TP"] = str(arguments.tp)
    environ |= dict(setting.upper().split("=", 1) for setting in arguments.settings)
    unknown = environ.keys() - {field.name.upper() for field in fields(EngineSettings)}
    if unknown:
        parser.error(f"unknown setting: {', '.join(unknown).lower()}")
    return resolve_settings(
        {}, {PREFIX + k: v.lower() if k != "MODEL" else v for k, v in environ.items()}
    )


def main() -> None:
    parser = engine_parser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--name", default="", help="of the result's file; default: by the model")
    parser.add_argument("--profile", type=Path, help="a folder: profiles more steps into it")
    parser.add_argument("--requests", type=int, default=256, help="another number of them")
    parser.add_argument("--longest", type=int, default=1024, help="prompt and answer, in tokens")
    arguments = parser.parse_args()
    settings = engine_settings(parser, arguments)
    started = time.perf_counter()
    runner, model = build_runner(settings)
    load_seconds = time.perf_counter() - started
    clock, job = Clock(runner), Job.make(arguments.requests, longest=arguments.longest)
    engine = Engine.from_settings(clock, settings)
    settle()
    runs = []
    for index in range(arguments.runs):
        runs.append(run(engine, clock, job, index * len(job.prompts)))
        print(json.dumps(runs[-1]), flush=True)
    config = ModelConfig.from_folder(resolve_model(settings).path)
    floor = floor_seconds(config, job, 1 if settings.kv_dtype == "fp8" else 2) / settings.tp
    floor_tok_s = job.tokens_out / floor
    median = statistics.median(run["tok_s"] for run in runs)
    result = {
        "benchmark": "offline",
        "model": model,
        "load_format": settings.load_format,
        "dtype": runner.dtype,
        "kv_dtype": runner.dtype if settings.kv_dtype == "auto" else settings.kv_dtype,
        "gpu": gpu_name(runner.device),
        "tp": settings.tp,
        "tok_s": median,
        "requests": arguments.requests,
        "longest": arguments.longest,
        "floor_tok_s": round(floor_tok_s),
        "share_of_floor": round(median / floor_tok_s, 3),
        "startup_seconds": {"total": round(load_seconds, 1)}
        | {k: round(v, 1) for k, v in getattr(runner, "startup_seconds", {}).items()},
        "settings": arguments.settings,
        "runs": runs,
    }
    print(
        json.dumps({name: result[name] for name in ("tok_s", "share_of_floor", "startup_seconds")})
    )
    name = arguments.name or result_name("offline", model, settings)
    if not arguments.name and job != Job.make():
        name += f"_{arguments.requests}x{arguments.longest}"
    print(write(name, result))
    if arguments.profile:
        steps = runs[-1]["steps"]
        result["profile"] = profile(engine, job, runner.device, steps, arguments.profile)
        print(json.dumps({"profile": result["profile"]}))
        write(name, result)
    engine.close()


def result_name(benchmark: str, model: str, settings: EngineSettings) -> str:
    ranks = f"_tp{settings.tp}" if settings.tp > 1 else ""
    return f"{benchmark}_{model.lower()}{ranks}"


def gpu_name(device: str) -> str:
    if device != "cuda":
        return "none"
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
