"""What a token costs the proxy, with which options, and where the time goes.

    python -m benchmarks.proxy_cost [--runs 3] [--py-spy PATH]

256 streams of 200 tokens from the simulated engine, at 5 ms steps: user + system time of the one
proxy worker over the run, divided by the tokens. Then at 1 ms steps, to see how many tokens a
second come through and what share of a core they take: the worker's ceiling is their quotient. With
py-spy it samples the worker while plain streams run, and lists the lines that ran most often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import write
from benchmarks.transport import cpu_seconds, simulated
from tests.server.service import Service
from tridentlm_client.load import load_with

STREAMS, TOKENS = 256, 200
FAST_TOKENS, PROFILE_TOKENS, PROFILE_SECONDS = 1000, 2400, 9
TOP = 15
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}Answer with <tool_call>{{ tools | tojson }}</tool_call>{% endif %}",
}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LOGPROBS = {"logprobs": True, "top_logprobs": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage_in_every_chunk": USAGE,
    "token_ids": {"return_token_ids": True},
    "tool_parser": TOOLS,
    "logprobs_5": LOGPROBS,
    "all": {**USAGE, **LOGPROBS, **TOOLS, "return_token_ids": True},
}
FIELDS = ("us_a_token", "tok_s", "core_share", "gap_p50_ms", "gap_p99_ms")


def bodies(tokens: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"Stream number {i}. Count on."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": i,
            **options,
        }
        for i in range(STREAMS)
    ]


def one_run(service: Service, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    proxy = service.find("openai_proxy.cli", "proxy")
    before = cpu_seconds(proxy)
    result = asyncio.run(load_with(service.url, bodies(tokens, options))).to_dict()
    spent = cpu_seconds(proxy) - before
    if result.pop("failures"):
        raise SystemExit("a stream failed")
    result["us_a_token"] = round(spent / result["tokens"] * 1e6, 2)
    result["core_share"] = round(spent / result["seconds"], 3)
    return result


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in FIELDS}


def profile(service: Service, py_spy: str) -> dict[str, Any]:
    """Shares of the event loop's samples, by running line and by function with its callees."""
    pid = service.find("openai_proxy.cli", "proxy").pid
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stacks")
        command = [py_spy, "record", "-p", str(pid), "-f", "raw", "-o", str(file), "-r", "400"]
        sampler = subprocess.Popen(
            [*command, "-d", str(PROFILE_SECONDS)], stdout=subprocess.DEVNULL
        )
        one_run(service, PROFILE_TOKENS, {})
        sampler.wait(60)
        stacks = [line.rsplit(" ", 1) for line in file.read_text().splitlines()]
    lines: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack, count in stacks:
        if "run_proxy " not in stack:
            continue  # gRPC's own thread, which waits
        frames = [_short(frame) for frame in stack.split(";")]
        lines[frames[-1]] += int(count)
        functions.update(dict.fromkeys({f.rpartition(":")[0] for f in frames}, int(count)))
    total = sum(lines.values())

    def top(counter: Counter[str]) -> dict[str, float]:
        shares = ((name, round(count / total, 4)) for name, count in counter.most_common())
        return dict([share for share in shares if share[1] < 0.999][:TOP])

    return {"samples": total, "running_line": top(lines), "function_and_callees": top(functions)}


def _short(frame: str) -> str:
    """`send (uvicorn/protocols/http/httptools_impl.py:500)` without the folders of packages."""
    name, _, where = frame.partition(" (")
    return f"{name} {'/'.join(where.rstrip(')').split('/')[-2:])}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--py-spy", default="")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "proxy_cost", "streams": STREAMS, "tokens": TOKENS}
    with simulated(5.0, "--trust-request-chat-template") as service:
        one_run(service, TOKENS, {})
        for name, options in OPTIONS.items():
            runs = [one_run(service, TOKENS, options) for _ in range(arguments.runs)]
            result[name] = {"median": medians(runs), "runs": runs}
            print(name, json.dumps(medians(runs)), flush=True)
        if arguments.py_spy:
            result["profile_of_plain"] = profile(service, arguments.py_spy)
            print(json.dumps(result["profile_of_plain"], indent=1), flush=True)
    with simulated(1.0) as service:
        one_run(service, TOKENS, {})
        runs = [one_run(service, FAST_TOKENS, {}) for _ in range(arguments.runs)]
        ceiling = statistics.median(run["tok_s"] / run["core_share"] for run in runs)
        result["as_fast_as_it_goes"] = {"median": medians(runs), "runs": runs}
        result["ceiling_tok_s_a_worker"] = round(ceiling)
        print("fast", json.dumps(medians(runs)), "ceiling", round(ceiling), flush=True)
    print(write("proxy_cost", result))


if __name__ == "__main__":
    main()
