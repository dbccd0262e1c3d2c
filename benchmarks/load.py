"""A checkpoint of random weights, written as shards with an index, then loaded: seconds and memory.

    python -m benchmarks.load --model benchmarks/models/qwen3-8b --folder DISK [--tp 2] [--keep]

The files are dropped from the page cache before they are read, first by plain reads (the floor) and
then by the loader, in a process of its own. Its extra memory is its peak, less what it had before
and less the weights themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.record import write
from tridentlm.models import loading
from tridentlm.models.checkpoint import INDEX, SafetensorsFolder
from tridentlm.models.config import ModelConfig
from tridentlm.models.shard import Shard
from tridentlm.models.weights import layout

SHARD_BYTES = 2 * 10**9
BLOCK_BYTES = 16 * 2**20


def make(config: ModelConfig, folder: Path) -> None:
    """Writes every tensor of the model in bfloat16."""
    torch.manual_seed(0)
    noise = torch.empty(2**25).uniform_(-0.05, 0.05).bfloat16()
    places: dict[str, str] = {}
    for number, names in enumerate(_shards(config)):
        file = f"model-{number:05}.safetensors"
        tensors = {}
        for name, shape in names.items():
            size = math.prod(shape)
            tensors[name] = noise.repeat(-(-size // len(noise)))[:size].clone().view(shape)
        save_file(tensors, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def _shards(config: ModelConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    names: dict[str, tuple[int, ...]] = {}
    for parts in layout(config).values():
        for part in parts:
            names[part.name] = part.shape
            if 2 * sum(map(math.prod, names.values())) >= SHARD_BYTES:
                yield names
                names = {}
    if names:
        yield names


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(folder: Path) -> float:
    """Seconds that the same bytes take without a loader."""
    block = bytearray(BLOCK_BYTES)
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


def load(folder: Path, config: ModelConfig, tp: int) -> dict[str, float]:
    """What rank 0 of `tp` needs to load its part in bfloat16; sizes in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = _resident("VmHWM")
    started = time.perf_counter()
    made = loading.load(
        config,
        SafetensorsFolder(folder),
        torch.bfloat16,
        torch.device("cpu"),
        shard=Shard(0, tp),
    )
    seconds = time.perf_counter() - started
    weights = sum(tensor.nbytes for tensor in made.values())
    extra = _resident("VmHWM") - before - weights
    return {"seconds": seconds, "weights": weights, "before": before, "extra": extra}


def _resident(name: str) -> int:
    """VmRSS or VmHWM, its peak: all resident memory, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def measure(folder: Path, config: ModelConfig, tp: int) -> dict[str, Any]:
    drop_from_cache(folder)
    plain = read_plainly(folder)
    drop_from_cache(folder)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(load, (folder, config, tp))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    largest = max(2 * math.prod(part.shape) for parts in layout(config).values() for part in parts)
    return {
        "checkpoint_gb": round(size / 1e9, 2),
        "tp": tp,
        "seconds": round(found["seconds"], 1),
        "plain_read_seconds": round(plain, 1),
        "weights_gb": round(found["weights"] / 1e9, 2),
        "extra_peak_mb": round(found["extra"] / 1e6),
        "largest_tensor_mb": round(largest / 1e6),
        "process_before_mb": round(found["before"] / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--folder", type=Path, required=True, help="where the files are written")
    parser.add_argument("--tp", type=int, default=1, help="load the part of one of so many ranks")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--make-only", action="store_true", help="write the files alone")
    options = parser.parse_args()
    config = ModelConfig.from_folder(options.model)
    folder = options.folder / options.model.name
    if not (folder / INDEX).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make(config, folder)
    if options.make_only:
        return
    result = measure(folder, config, options.tp)
    print(json.dumps(result))
    tp = f"-tp{options.tp}" if options.tp > 1 else ""
    write(f"load-{options.model.name}{tp}", {"model": options.model.name, **result})
    if not options.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
