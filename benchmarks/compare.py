"""The offline job on this engine and on each peer that is installed, one after the other.

    python -m benchmarks.compare --model benchmarks/models/qwen3-0.6b --load-format dummy

Every engine runs in a process of its own, which takes and frees the whole device, and does the job
--runs times with an empty prefix cache; the ratios are between medians. transformers' `generate`
takes all requests as one padded batch and goes on to the longest; only what was asked for counts.
--requests, --shortest and --longest make the job smaller, for machines without a GPU. Settings
(`name=value`) are for this engine alone: peers run as they come, with weights as the flag says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.offline import Clock, Job, engine_parser, engine_settings, gpu_name, run
from benchmarks.record import write
from tridentlm.engine import Engine, build_runner
from tridentlm.hub import resolve_model
from tridentlm.startup import settle

Rates = list[float]
TEMPERATURE = 0.6


def run_ours(arguments: argparse.Namespace, job: Job) -> Rates:
    settings = engine_settings(engine_parser(), arguments)
    runner, _ = build_runner(settings)
    clock = Clock(runner)
    engine = Engine.from_settings(clock, settings)
    settle()
    runs = (run(engine, clock, job, i * len(job.prompts)) for i in range(arguments.runs))
    return [float(result["tok_s"]) for result in runs]


def run_vllm(arguments: argparse.Namespace, job: Job) -> Rates:
    from vllm import LLM, SamplingParams

    model = LLM(arguments.model, load_format=arguments.load_format, skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    params = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False)
        for n in job.lengths
    ]

    def once() -> None:
        model.reset_prefix_cache()
        model.generate(prompts, params, use_tqdm=False)

    return timed(once, job, arguments.runs)


def run_minisgl(arguments: argparse.Namespace, job: Job) -> Rates:
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    model = LLM(
        arguments.model,
        use_dummy_weight=arguments.load_format == "dummy",
        cache_type="naive",
        cuda_graph_max_bs=256,
    )
    params = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in job.lengths
    ]
    model.generate([job.prompts[0]], params[0])
    return timed(lambda: model.generate(job.prompts, params), job, arguments.runs)


def run_transformers(arguments: argparse.Namespace, job: Job) -> Rates:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if arguments.load_format == "dummy":
        config = AutoConfig.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    model = model.to(device).eval()
    width = max(map(len, job.prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in job.prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in job.prompts], device=device)
    longest = max(job.lengths)

    def once() -> None:
        with torch.inference_mode():
            out = model.generate(
                ids % model.config.get_text_config().vocab_size,
                attention_mask=mask,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
        assert out.shape[1] == width + longest

    return timed(once, job, arguments.runs)


PEERS: dict[str, Callable[[argparse.Namespace, Job], Rates]] = {
    "vllm": run_vllm,
    "minisgl": run_minisgl,
    "transformers": run_transformers,
}


def timed(once: Callable[[], object], job: Job, runs: int) -> Rates:
    rates = []
    for _ in range(runs):
        started = time.perf_counter()
        once()
        rates.append(round(job.tokens_out / (time.perf_counter() - started), 1))
    return rates


def in_child(name: str, arguments: argparse.Namespace, job: Job) -> Rates:
    """The rates of one engine. Raises what it raised there."""
    function = run_ours if name == "tridentlm" else PEERS[name]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (arguments, job))


def main() -> None:
    parser = engine_parser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="default: those installed")
    arguments = parser.parse_args()
    found = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    peers = found if arguments.peers is None else arguments.peers
    if missing := [name for name in peers if name not in found]:
        parser.error(f"not installed: {', '.join(missing)}")
    settings = engine_settings(parser, arguments)
    job = Job.make(arguments.requests, arguments.shortest, arguments.longest)
    engines: dict[str, Any] = {}
    for name in ["tridentlm", *peers]:
        runs = in_child(name, arguments, job)
        engines[name] = {"tok_s": statistics.median(runs), "runs": runs}
        ratio = engines["tridentlm"]["tok_s"] / engines[name]["tok_s"]
        engines[name]["ours_to_this"] = round(ratio, 3)
        print(name, json.dumps(engines[name]), flush=True)
    model = resolve_model(settings).name
    result = {
        "benchmark": "compare",
        "model": model,
        "load_format": arguments.load_format,
        "gpu": gpu_name("cuda" if torch.cuda.is_available() else "cpu"),
        "requests": arguments.requests,
        "tokens_in": sum(map(len, job.prompts)),
        "tokens_out": job.tokens_out,
        "settings": arguments.settings,
        "engines": engines,
    }
    print(write(f"compare_{model.lower()}", result))


if __name__ == "__main__":
    main()
