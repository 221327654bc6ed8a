"""Measure how long the search for a layout takes on one core: `python benchmarks/plan_speed.py`.

Prints the median and range of nine runs, in seconds of processor time of one thread. Each run starts with empty
caches, as a command does. The time of imports is not included (see benchmarks/start_up.py).
"""

import gc
import platform
import statistics
import time
from functools import _lru_cache_wrapper
from typing import Any

from leaven.planning.hardware import parse_cluster
from leaven.planning.layouts import Job
from leaven.planning.plan import ClusterPlan, plan
from leaven.recipe.batch import Batch
from leaven.recipe.shape import ModelShape

GPT: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tied_embeddings": True,
    "bias": True,
}


def shape(sizes: str, **more: Any) -> ModelShape:
    """Return the shape for "layers d_model heads kv_heads d_ff vocabulary seq_len"."""
    layers, width, heads, kv_heads, d_ff, vocab, seq_len = map(int, sizes.split())
    named = {"n_layers": layers, "d_model": width, "n_heads": heads, "n_kv_heads": kv_heads, "d_head": width // heads}
    return ModelShape.model_validate(named | {"d_ff": d_ff, "vocab_size": vocab, "seq_len": seq_len} | more)


# (shape, cluster, sequences per batch): the 1T model of Narayanan et al. 2021 (arXiv 2104.04473, Table 1), Llama 3
# 405B and 8B, and a small GPT. 3,840 has many divisors, so the last search is one of the largest.
CASES: dict[str, tuple[ModelShape, str, int]] = {
    "1T on 3,072 A100": (shape("128 25600 160 160 102400 51200 2048", **GPT), "3072xA100-80GB", 3072),
    "405B on 16,384 H100": (shape("126 16384 128 8 53248 128256 8192"), "16384xH100-80GB", 2048),
    "8B on 8 H100": (shape("32 4096 32 8 14336 128256 8192"), "8xH100-80GB", 1024),
    "125M on 64 H100": (shape("12 768 12 12 2048 32768 1024"), "64xH100-80GB", 512),
    "8B on 16,384 H100": (shape("32 4096 32 8 14336 128256 8192"), "16384xH100-80GB", 4096),
    "8B on 3,840 H100": (shape("32 4096 32 8 14336 128256 8192"), "3840xH100-80GB", 3840),
}


def planned(model: ModelShape, gpus: str, sequences: int) -> tuple[float, ClusterPlan]:
    """Return the seconds of one plan, starting with empty caches, and the plan."""
    for cached in [thing for thing in gc.get_objects() if isinstance(thing, _lru_cache_wrapper)]:
        if cached.__module__.startswith("leaven.planning") and "accelerators" not in cached.__module__:
            cached.cache_clear()
    began = time.process_time()
    found = plan(Job(model, Batch(tokens=sequences * model.seq_len), parse_cluster(gpus)), 10**12)
    return time.process_time() - began, found


if __name__ == "__main__":
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for name, (model, gpus, sequences) in CASES.items():
        runs = [planned(model, gpus, sequences) for _ in range(9)]
        times, found = sorted(seconds for seconds, _ in runs), runs[0][1]
        print(
            f"{name:<20} {statistics.median(times):6.3f}   {times[0]:.3f} .. {times[-1]:.3f}   "
            f"{len(found.exploration.fitting):6,} fit   {found.chosen.arrangement}"
        )
