"""Measure what docs/evidence/performance.md needs from a GPU, in ten minutes: `python -m benchmarks.accelerator`.

Each part runs in its own process, with its own time limit. Its rows are kept if it fails later or is stopped, and the
file is written after each part. `--rehearse` runs every part with tiny models, on a CPU too: a test of the script
before time on a GPU is spent. `python -m benchmarks.performance FILE` writes the rows into the page.

- steps: time, MFU and peak memory of a step beside `leaven plan`, and where the time goes: examples/350m.toml and a
  Llama of 1.2 B parameters, compiled and eager, with the largest micro-batch that fits
- waits: whether issuing a step makes the host wait for the GPU (torch.cuda.set_sync_debug_mode)
- stacks: stacks of 16 and 64 small trials beside one trial of the engine (benchmarks/stacked.py)
- layouts: FSDP2 with ZeRO 0 to 3 in a process group of one rank, beside the plain trainer
- auto: the micro-batch that `micro_batch = "auto"` chooses, and how long it takes
- fp8: products of linear layers, which leaven computes in bf16, alone in bf16 and in fp8, and the time of a cast with
  its scale: the largest possible gain of fp8
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stacked import engine_speed, recipe_at, stack_speed
from benchmarks.throughput import issue_ahead, llama
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from leaven import __version__
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.planning.arrangement import Arrangement
from leaven.planning.calibration import predicted
from leaven.planning.flops import flops_per_token
from leaven.planning.memory import GIB
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training import device as devices
from leaven.training.engine import Training
from leaven.training.micro_batch import choose_micro_batch
from leaven.training.profiling import random_tokens

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
WARM_UP, STEPS, ROUNDS = 2, 2, 3  # a time is the median of three rounds of two steps
# The groups of a profile; an operation belongs to the first one whose pattern its name contains. The operations are
# kernels on a GPU and torch's operators on a CPU.
GROUPS = {
    "attention": r"flash|fmha|attention|sdpa",
    "compiled elementwise": r"^triton",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|(::|_)(add|b)?mm\b",
    "optimizer and norms of parameters": r"multi_tensor|foreach|adam|lpnorm",
    "loss and softmax": r"softmax|nll|logsumexp|cross_entropy",
    "copies and casts": r"copy|memcpy|memset|cat\b|clone",
    "the rest": "",
}


def recipes(rehearse: bool) -> dict[str, Recipe]:
    """Return the recipes of the parts steps, waits, layouts, auto and fp8."""
    recipe = read_recipe(ROOT / "examples" / "350m.toml")
    large = llama(16, 2_048, 2_048, 32_768, d_head=128, d_ff=8_192)
    found = {"350m": recipe, "1.2b": recipe.replace({"model": large.model_dump(), "batch.tokens": 2**17})}
    if not rehearse:
        return found
    tiny = {"model": llama(1, 64, 32, 128, d_head=32).model_dump(), "batch.tokens": 256, "data.tokens": 2**20}
    return {name: each.replace(tiny | {"schedule.warmup_tokens": 0}) for name, each in found.items()}


def attempt(labels: Row, measure: Callable[..., Row], *values: Any) -> Iterator[Row]:
    """Yield ``labels`` with the result of ``measure(*values)``, or with its error."""
    gc.collect()  # frees the model of the last row
    try:
        yield labels | measure(*values)
    except Exception as error:
        yield labels | {"error": f"{type(error).__name__}: {error}"[:500]}


def seconds_a_step(training: Training, count: int = STEPS) -> float:
    devices.wait(training.device)
    began = time.perf_counter()
    issue_ahead(training, count)
    devices.wait(training.device)
    return (time.perf_counter() - began) / count


def step_row(recipe: Recipe, group: ProcessGroup = SINGLE_PROCESS, profiled: bool = False) -> Row:
    """Return time and memory of a step with the largest of four micro-batches that fits."""
    for tokens in (2**16, 2**15, 2**14, 2**13):
        size = min(tokens, recipe.batch.tokens) // recipe.model.seq_len
        sized = recipe.replace({"batch.micro_batch": size})
        row = devices.unless_out_of_memory(partial(_step_row, sized, group, profiled), devices.default_device())
        if row is not None:
            return {"micro_batch": size} | row
        gc.collect()
    raise MemoryError(f"out of memory with a micro-batch of {size}")


def _step_row(recipe: Recipe, group: ProcessGroup, profiled: bool) -> Row:
    device, began = devices.default_device(), time.perf_counter()
    before = devices.held_memory(device)
    devices.reset_peak_memory(device)
    training = Training(recipe, random_tokens(recipe), group=group)
    seconds_a_step(training, WARM_UP)  # compiles, and creates the optimizer states
    start_up = time.perf_counter() - began
    times = [seconds_a_step(training) for _ in range(ROUNDS)]
    step, batch, compute = median(times), recipe.batch.tokens, recipe.precision.compute
    row = {
        "step_seconds": step,
        "range": [min(times), max(times)],
        "tokens_per_second": batch / step,
        "mfu": batch / step * flops_per_token(recipe.model) / devices.device_peak(device, compute).flops,
        "peak_gib": (devices.peak_memory(device) - before) / GIB,
        "start_up_seconds": start_up,
    }
    how = Arrangement(recipe.layout, *training.split(batch // recipe.model.seq_len))
    accelerator = devices.accelerator_of(device)
    if planned := accelerator and predicted(recipe.model, how, accelerator.name, compute):
        row |= {"planned_step_seconds": planned.step_seconds, "planned_gib": planned.memory_gib}
    return row | (where_time_goes(training, step) if profiled else {})


def where_time_goes(training: Training, step: float) -> Row:
    """Return the share of each group of operations in a step of ``step`` seconds, and the longest operations."""
    on_gpu = training.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
        seconds_a_step(training, 1)
    found = [
        (each.key, (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e6, each.count)
        for each in watched.key_averages()
        if not on_gpu or (each.device_type == DeviceType.CUDA and not getattr(each, "is_user_annotation", False))
    ]
    shares = dict.fromkeys(GROUPS, 0.0)
    for name, seconds, _ in found:
        shares[next(group for group, words in GROUPS.items() if re.search(words, name, re.I))] += seconds / step
    longest = [(name[:100], *rest) for name, *rest in sorted(found, key=lambda each: -each[1])[:12]]
    return {"shares": shares | {"idle": 1 - sum(shares.values())}, "longest": longest}


def steps(rehearse: bool) -> Iterator[Row]:
    for name, recipe in recipes(rehearse).items():
        for compiled in (True, False):
            changed = recipe.replace({"layout.compile": compiled})
            yield from attempt({"model": name, "compiled": compiled}, step_row, changed, SINGLE_PROCESS, True)


def waits(rehearse: bool) -> Iterator[Row]:
    recipe = recipes(rehearse)["350m"].replace({"model.n_layers": 2, "batch.micro_batch": 4})
    recipe = recipe.replace({"batch.tokens": 8 * recipe.model.seq_len})
    cases = [(dtype, "global", False) for dtype in ("bf16", "fp16", "fp32")]
    cases += [("bf16", "per-module", False), ("bf16", "running", False), ("bf16", "global", True)]
    for dtype, mode, compiled in cases:
        changes = {"precision.compute": dtype, "layout.compile": compiled}
        changes |= {"hyperparameters.grad_clip": {"limit": 1.0, "mode": mode}}
        yield from attempt({"dtype": dtype, "clipping": mode, "compiled": compiled}, _issue, recipe.replace(changes))


def _issue(recipe: Recipe) -> Row:
    """Issue a step while torch raises an error if the host waits for the GPU."""
    training = Training(recipe, random_tokens(recipe))
    issue_ahead(training, WARM_UP)
    set_mode = torch.cuda.set_sync_debug_mode if torch.cuda.is_available() else lambda mode: None
    set_mode("error")
    try:
        training.issue()
    finally:
        set_mode("default")
    return {"waits": False}


def stacks(rehearse: bool) -> Iterator[Row]:
    for width in (64,) if rehearse else (128, 256):
        recipe = recipe_at(width, 1 if rehearse else 4, sequences=10, steps=3 if rehearse else 200, dtype="bf16")
        one = None
        for size in (1, 2) if rehearse else (1, 16, 64):
            for row in attempt({"width": width, "trials": size}, _stack_row, recipe, size):
                one = row.get("tokens_per_second") if size == 1 else one
                yield row | ({"in_the_time_of_one": row["tokens_per_second"] / one} if one and "range" in row else {})


def _stack_row(recipe: Recipe, size: int) -> Row:
    """Return the speed of ``size`` trials together. One trial is trained by the engine."""
    began, tokens, device = time.perf_counter(), random_tokens(recipe), devices.default_device().type
    speed = stack_speed(recipe, size, tokens, device) if size > 1 else engine_speed(recipe, tokens, device, False)
    ready = time.perf_counter() - began
    speeds = [speed() for _ in range(ROUNDS)]
    return {"tokens_per_second": median(speeds), "range": [min(speeds), max(speeds)], "ready_seconds": ready}


def layouts(rehearse: bool) -> Iterator[Row]:
    device, recipe = devices.default_device(), recipes(rehearse)["350m"]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    for compiled, arms in ((False, (None, 0, 1, 2, 3, None)), (True, (None, 3))):
        for zero in arms:
            changes = {"layout.compile": compiled, "layout.zero": zero or 0, "batch.tokens": recipe.batch.tokens // 4}
            changed = recipe.replace(changes)
            group = SINGLE_PROCESS if zero is None else ProcessGroup.arranged(0, changed.layout, device)
            name = "plain" if zero is None else f"FSDP2, ZeRO {zero}"
            yield from attempt({"trainer": name, "compiled": compiled}, step_row, changed, group)
    dist.destroy_process_group()


def auto(rehearse: bool) -> Iterator[Row]:
    for name, recipe in recipes(rehearse).items():
        yield from attempt({"model": name}, _choice, recipe.replace({"batch.micro_batch": "auto"}))


def _choice(recipe: Recipe) -> Row:
    choice = choose_micro_batch(Training(recipe, random_tokens(recipe)))
    return {"micro_batch": choice.micro_batch, "seconds": choice.seconds, "why": choice.why}


def fp8(rehearse: bool) -> Iterator[Row]:
    tokens = 64 if rehearse else 2**15
    for name, recipe in recipes(rehearse).items():
        width, inner = recipe.model.d_model, recipe.model.d_ff
        for sizes in ((tokens, width, width), (tokens, width, inner), (tokens, inner, width)):
            yield from attempt({"model": name, "product": " x ".join(map(str, sizes))}, _product, *sizes)


def _product(tokens: int, inputs: int, outputs: int) -> Row:
    device = devices.default_device()
    x, w = (torch.randn(rows, inputs, device=device, dtype=torch.bfloat16) for rows in (tokens, outputs))
    x8, w8, one = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), torch.ones((), device=device)
    scaled = partial(torch._scaled_mm, x8, w8.T, scale_a=one, scale_b=one, out_dtype=x.dtype, use_fast_accum=True)
    works = (lambda: x @ w.T), scaled, lambda: (x * (448 / x.abs().amax())).to(torch.float8_e4m3fn)
    plain, lower, cast = (Timer("work()", globals={"work": work}).timeit(30).median for work in works)
    tflop = 2 * tokens * inputs * outputs / 1e12
    return {"bf16_tflops": tflop / plain, "fp8_tflops": tflop / lower, "cast_of_bf16_time": cast / plain}


# In the order of their worth, with the time limit of each in seconds.
PARTS: dict[str, tuple[Callable[[bool], Iterator[Row]], int]] = {
    "steps": (steps, 240),
    "waits": (waits, 60),
    "stacks": (stacks, 180),
    "layouts": (layouts, 130),
    "auto": (auto, 70),
    "fp8": (fp8, 30),
}


def run(part: str, rehearse: bool, limit: float) -> Row:
    """Run a part in a new process. Return its rows, its seconds and its error, if any."""
    command = [sys.executable, "-m", "benchmarks.accelerator", "--part", part, *["--rehearse"] * rehearse]
    began, error, limit = time.perf_counter(), None, max(limit, 0.1)
    with TemporaryFile("w+") as rows, TemporaryFile("w+") as messages:
        try:
            done = subprocess.run(command, stdout=rows, stderr=messages, cwd=ROOT, timeout=limit, check=False)
            messages.seek(0)
            error = f"exit code {done.returncode}: {messages.read()[-1000:]}" if done.returncode else None
        except subprocess.TimeoutExpired:
            error = f"stopped at its limit of {limit:.3g} s"
        rows.seek(0)
        found = []
        for line in rows:
            with suppress(ValueError):  # a line that a stop has cut off, or a print of a library
                found.append(json.loads(line))
    return {"rows": found, "seconds": time.perf_counter() - began, "error": error}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("accelerator.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=570, help="time limit of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on any device: only tests the script")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.part:
        for row in PARTS[asked.part][0](asked.rehearse):
            print(json.dumps(row), flush=True)
        return 0
    if not (asked.rehearse or torch.cuda.is_available()):
        parser.error("torch finds no CUDA device; --rehearse tests the script without one")
    until = time.monotonic() + asked.seconds
    result: Row = {"date": time.strftime("%Y-%m-%d"), "device": devices.device_name(devices.default_device())}
    result |= {"torch": str(torch.__version__), "leaven": __version__, "rehearsal": asked.rehearse, "parts": {}}
    for name in asked.parts:
        part = run(name, asked.rehearse, min(PARTS[name][1], until - time.monotonic()))
        result["parts"][name] = part
        asked.out.write_text(json.dumps(result, indent=1))
        failed = sum("error" in row for row in part["rows"])
        print(f"{name}: {len(part['rows'])} rows, {failed} failed, {part['seconds']:.0f} s", part["error"] or "")
    return int(any(part["error"] or all("error" in row for row in part["rows"]) for part in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
