"""Eight requests of 64 tokens through the whole stack, against transformers' batched generate.

    python -m benchmarks.cpu_batch [--runs 3] [--model PATH]

Both hold the same weights in float32 on this machine's CPU and take turns; the server idles while
transformers runs, and the other way round. Rates count from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write
from tests.server.reference import Reference
from tests.server.service import Service
from tridentlm.config import EngineSettings
from tridentlm.hub import resolve_model
from tridentlm.text import Tokenizer
from tridentlm_client.load import run_load

REQUESTS, TOKENS = 8, 64


def transformers_rate(reference: Reference, prompts: list[list[int]]) -> float:
    """Tokens a second of one batched generate, left-padded to the longest prompt."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        output = reference.model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
    return (output.shape[1] - longest) * len(prompts) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="")
    arguments = parser.parse_args()
    files = resolve_model(EngineSettings(model=arguments.model))
    tokenizer = Tokenizer.load(files)
    texts = [f"Stream number {i}. Count on." for i in range(REQUESTS)]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    reference = Reference(files.path)
    runs: list[dict[str, float]] = []
    flags = ["--model", arguments.model] if arguments.model else []
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), *flags) as service:
        asyncio.run(run_load(service.url, REQUESTS, 4))
        transformers_rate(reference, prompts)
        for _ in range(arguments.runs):
            ours = asyncio.run(run_load(service.url, REQUESTS, TOKENS)).tok_s
            theirs = round(transformers_rate(reference, prompts), 2)
            runs.append({"tok_s": ours, "transformers_tok_s": theirs})
            print(json.dumps(runs[-1]), flush=True)
    result: dict[str, Any] = {
        "benchmark": "cpu_batch",
        "model": files.name,
        "dtype": "float32",
        "requests": REQUESTS,
        "tokens": TOKENS,
        "tok_s": statistics.median(run["tok_s"] for run in runs),
        "transformers_tok_s": statistics.median(run["transformers_tok_s"] for run in runs),
        "ratio": round(
            statistics.median(run["tok_s"] / run["transformers_tok_s"] for run in runs), 3
        ),
        "runs": runs,
    }
    print(json.dumps({name: result[name] for name in ("tok_s", "transformers_tok_s", "ratio")}))
    print(write("cpu_batch", result))


if __name__ == "__main__":
    main()
