"""Measure leaven on one accelerator: `python benchmarks/accelerator.py --out FILE.json`, in nine minutes on an H100.

There are several parts, each a process with a time limit:

- mfu: time, MFU and memory of steps of examples/350m.toml and of a model with 1 B parameters, eager and compiled.
- profile: the kernels of a compiled step, and the share of time in which the device is idle.
- plan: what `leaven plan` predicts for the steps of `mfu`.
- waits: calls in a step that wait for the device, and where in the code they are made.
- layouts: the overhead of ZeRO 1 to 3 on one rank, where nothing is sharded, over a training without process group.
- fp8: the matrix products of the forward pass in fp8 and in bf16, an upper bound for the gain from fp8.
- auto: the micro-batch that `micro_batch = "auto"` chooses.

Steps are run by leaven's engine on random tokens. As in the trainer, the metrics of a step are read after the next
step has been issued. Each part writes rows of results to FILE as they are measured; a row that fails contains its
error. Parts in FILE that are not run again are kept. Lists of three numbers are median, minimum and maximum. `--tiny`
tests the benchmark in a minute, also with `--device cpu`, where operators are listed instead of kernels.
"""

import argparse
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import leaven
from leaven.planning.calibration import predicted
from leaven.planning.flops import flops_per_token
from leaven.planning.memory import GIB
from leaven.planning.plan import plan_recipe
from leaven.planning.trainable import layout_cautions
from leaven.recipe.files import read_recipe, write_text
from leaven.recipe.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from leaven.distributed.process_group import ProcessGroup
    from leaven.training.engine import Training
    from leaven.training.metrics import Step

Row = dict[str, Any]

EXAMPLE = Path(__file__).parents[1] / "examples" / "350m.toml"
SHAPES: dict[str, dict[str, int]] = {  # differences from examples/350m.toml
    "350m": {},
    "1b": dict(n_layers=16, d_model=2_048, n_heads=16, n_kv_heads=16, d_head=128, d_ff=5_632, seq_len=2_048),
}
TINY = dict(n_layers=2, d_model=64, n_heads=2, n_kv_heads=2, d_head=32, d_ff=96, seq_len=32, vocab_size=128)
BATCH_TOKENS = {"350m": 262_144, "1b": 131_072}
MICRO_BATCH = {"350m": 32, "1b": 8}  # sequences
MFU_ARMS = {
    f"{case}, {'compiled' if compiled else 'eager'}, micro-batch {micro_batch}": (case, micro_batch, compiled)
    for case, micro_batch, compiled in (
        ("350m", 32, True),
        ("1b", 8, True),
        ("350m", 32, False),
        ("1b", 8, False),
        ("350m", 64, True),
    )
}
WARM_UP, STEPS = 2, 5
WAIT_WARNING = "called a synchronizing CUDA operation"
FP8_MAX = 448.0  # largest float8_e4m3fn

# (category, pattern): the first pattern that matches a kernel's name decides. Blocks are compiled, so all kernels
# other than matmuls, attention and triton are for the loss, embedding, final norm, sums of gradients or the update.
CATEGORIES = (
    ("compiled (norms, rotation, gating, casts)", r"^triton"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"adam"),
    ("clipping and norms", r"multi_tensor_apply|foreach"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|\bmm\b|addmm"),
    ("softmax and loss", r"softmax|scatter|gather|exp_kernel"),
    ("copies and casts", r"memcpy|memset|copy|fill|cat"),
    ("other elementwise and sums", r"elementwise|vectorized|reduce|norm|index|embedding"),
)


@dataclass(frozen=True)
class Setting:
    """The arguments of a part, passed to its process as JSON."""

    part: str
    device: str
    tiny: bool
    out: str

    @property
    def torch_device(self) -> "torch.device":
        import torch

        return torch.device(self.device)

    def recipe(self, case: str, micro_batch: int | str, compiled: bool, **changes: Any) -> Recipe:
        shape, batch = (TINY, 8 * TINY["seq_len"]) if self.tiny else (SHAPES[case], BATCH_TOKENS[case])
        if self.tiny and micro_batch != "auto":
            micro_batch = 2
        own = {f"model.{key}": value for key, value in shape.items()}
        own |= {"name": case, "batch.tokens": batch, "batch.micro_batch": micro_batch, "layout.compile": compiled}
        return read_recipe(EXAMPLE).replace(own | changes)


# ---- steps of the engine


def training_of(setting: Setting, recipe: Recipe, group: "ProcessGroup | None" = None) -> "Training":
    """Return a training of the recipe on random tokens, as many as one batch needs."""
    import numpy as np

    from leaven.data.shards import ShardedTokens, Shards
    from leaven.data.tokens import TokenSet
    from leaven.distributed.process_group import SINGLE_PROCESS
    from leaven.training.engine import Training

    vocab_size, count = recipe.model.vocab_size, recipe.batch.tokens + 1
    ids = ShardedTokens([np.random.default_rng(0).integers(vocab_size, size=count, dtype=np.uint32)])
    source = Shards(ids, ids, count, count, "random", ())
    tokens = TokenSet(("random",), (Fraction(1),), (source,), vocab_size, 0, "random", Path())
    return Training(recipe, tokens, setting.device, group or SINGLE_PROCESS)


def take_steps(training: "Training", count: int) -> "list[Step]":
    ahead, done = training.issue(), []
    for _ in range(count - 1):
        before, ahead = ahead, training.issue()
        done.append(before())
    return [*done, ahead()]


def timed_steps(setting: Setting, recipe: Recipe, group: "ProcessGroup | None" = None) -> Row:
    """Build a training, warm up, and time a few steps by events on the device."""
    import torch

    from leaven.training.device import peak_memory, reset_peak_memory

    device, began = setting.torch_device, time.perf_counter()
    training = training_of(setting, recipe, group)
    built = time.perf_counter()
    training.issue()()
    first = time.perf_counter()
    take_steps(training, WARM_UP)
    reset_peak_memory(device)
    start = time.perf_counter()
    steps = take_steps(training, STEPS)
    wall = (time.perf_counter() - start) / STEPS
    times = sorted(1e3 * step.seconds for step in steps)
    speed = recipe.batch.tokens / (statistics.median(times) / 1e3)
    row = {
        "micro_batch": training.micro_batch,
        "batch_tokens": recipe.batch.tokens,
        "params": recipe.model.params,
        "step_ms": [statistics.median(times), times[0], times[-1]],
        "wall_ms": 1e3 * wall,
        "tokens_per_second": speed,
        "tflops": speed * flops_per_token(recipe.model) / 1e12,
        "tflops_causal": speed * flops_per_token(recipe.model, "causal") / 1e12,
        "loss": steps[-1].loss,
        "build_seconds": built - began,
        "first_step_seconds": first - built,  # including compilation
        "peak_gib": peak_memory(device) / GIB,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        row |= {"reserved_gib": torch.cuda.max_memory_reserved(device) / GIB, "device_gib": (total - free) / GIB}
        row["allocation_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return row


def attempt(arm: str, work: Callable[..., Row], *arguments: object) -> Row:
    """Return the row of ``work``, or a row with its error; free the memory afterwards."""
    import torch

    began = time.perf_counter()
    try:
        row = work(*arguments)
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}"[:2_000]}
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"arm": arm} | row | {"seconds": time.perf_counter() - began}


def seconds_of(work: Callable[[], object], device: "torch.device") -> float:
    """Return the median seconds of a call, over rounds of about 50 ms."""
    from leaven.training.device import wait

    def of(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            work()
        wait(device)
        return (time.perf_counter() - began) / count

    of(3)
    count = min(200, max(1, round(0.05 / of(3))))
    return statistics.median(of(count) for _ in range(5))


# ---- the parts


def mfu(setting: Setting) -> Iterator[Row]:
    import torch

    from leaven.training.device import best_matmul, known_peak

    device, best = setting.torch_device, 0.0
    peak, threads = known_peak(device, "bf16"), torch.get_num_threads()

    def square(size: int) -> Row:
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        return {"tflops": 2e-12 * size**3 / seconds_of(lambda: torch.mm(a, b), device)}

    for size in [64] if setting.tiny else [4_096, 8_192, 16_384]:
        row = attempt(f"matmul {size}", square, size)
        best = max(best, row.get("tflops", 0.0))
        yield row
    yield attempt("leaven's best_matmul", lambda: {"tflops": best_matmul(device, torch.bfloat16, threads) / 1e12})

    for arm, (case, micro_batch, compiled) in MFU_ARMS.items():
        row = attempt(arm, timed_steps, setting, setting.recipe(case, micro_batch, compiled))
        if "tflops" in row:
            row["share_of_matmul"] = row["tflops"] / best if best else None
            row["mfu"] = 1e12 * row["tflops"] / peak.flops if peak else None
            row["mfu_causal"] = 1e12 * row["tflops_causal"] / peak.flops if peak else None
        yield row


def profile(setting: Setting) -> Iterator[Row]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cuda = setting.device == "cuda"
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    counted = {"kernel", "gpu_memcpy", "gpu_memset"} if cuda else {"cpu_op"}

    def of() -> Row:
        training = training_of(setting, setting.recipe("350m", MICRO_BATCH["350m"], True))
        take_steps(training, WARM_UP)
        plain = statistics.median(step.seconds for step in take_steps(training, 3))
        with profiler(activities=activities):  # warm up the profiler
            take_steps(training, 1)
        with profiler(activities=activities) as watched:
            steps = take_steps(training, 2)
        with tempfile.TemporaryDirectory() as folder:
            watched.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        kernels = [
            (each["name"], float(each["ts"]), float(each["dur"])) for each in events if each.get("cat") in counted
        ]
        return {"step_ms_unprofiled": 1e3 * plain} | by_kernel(kernels, [step.seconds for step in steps], plain)

    yield attempt("350m, compiled", of)


def by_kernel(kernels: list[tuple[str, float, float]], step_seconds: list[float], plain: float) -> Row:
    """Return the time by kernel and category; ``kernels`` are (name, start, duration) in microseconds."""
    busy, until = 0.0, float("-inf")
    for _, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        busy += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
    times: dict[str, list[float]] = {}
    for name, _, duration in kernels:
        times.setdefault(name, []).append(duration / 1e3 / len(step_seconds))
    total, categories, rows = sum(map(sum, times.values())), dict[str, float](), []
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        ms, kind, count = sum(each), category(name), len(each) / len(step_seconds)
        categories[kind] = categories.get(kind, 0.0) + ms
        rows.append({"ms": ms, "share": ms / total, "count": count, "category": kind, "name": name[:200]})
    step_ms, busy_ms = 1e3 * statistics.mean(step_seconds), busy / 1e3 / len(step_seconds)
    return {
        "step_ms": step_ms,
        "busy_ms": busy_ms,
        "idle_share": 1 - busy_ms / step_ms,
        "idle_share_unprofiled": 1 - busy_ms / (1e3 * plain),  # assumes the same kernel times without profiler
        "launches": len(kernels) / len(step_seconds),
        "categories": {kind: {"ms": ms, "share": ms / total} for kind, ms in categories.items()},
        "kernels": rows[:25],
    }


def category(kernel: str) -> str:
    return next((kind for kind, pattern in CATEGORIES if re.search(pattern, kernel.lower())), "other")


def plan(setting: Setting) -> Iterator[Row]:
    from leaven.training.device import accelerator_of

    accelerator = accelerator_of(setting.torch_device)
    assert accelerator is not None, "this device is not in the planner's table"
    gpus = "cpu" if accelerator.name == "cpu" else f"1x{accelerator.name}"
    rows = json.loads(Path(setting.out).read_text())["parts"].get("mfu", {}).get("rows", [])
    measured = {row["arm"]: row | {"step_ms": row["step_ms"][0]} for row in rows if "step_ms" in row}

    def of(arm: str, recipe: Recipe) -> Row:
        layout = f"mbs={recipe.batch.micro_batch},compile={str(recipe.layout.compile).lower()}"
        found, planned = measured.get(arm, {}), plan_recipe(recipe, gpus, layout)
        tensors = predicted(recipe.model, planned.chosen.arrangement, accelerator.name, "bf16")
        said = {
            "step_ms": 1e3 * planned.chosen.time.step,
            "device_gib": planned.chosen.memory.total / GIB,  # including context and reserve
            "peak_gib": tensors.memory_gib if tensors else None,  # tensors only
        }
        ratios = {key: found[key] / value for key, value in said.items() if value and found.get(key)}
        parts = {part: 1e3 * seconds for part, seconds in vars(planned.chosen.time).items()}
        more = {"mfu": planned.speed.mfu, "time_ms": parts, "memory_gib": planned.chosen.memory.parts_gib}
        return said | {f"measured_over_{key}": ratio for key, ratio in ratios.items()} | more

    for arm, own in MFU_ARMS.items():
        yield attempt(arm, of, arm, setting.recipe(*own))

    def free() -> Row:
        chosen = plan_recipe(setting.recipe("350m", "auto", True), gpus).chosen
        return {"step_ms": 1e3 * chosen.time.step, "layout": str(chosen.arrangement)}

    yield attempt("350m, as leaven plan chooses", free)


def waits(setting: Setting) -> Iterator[Row]:
    import torch

    cuda, package = setting.device == "cuda", str(Path(leaven.__file__).parent) + os.sep
    shallow = {"model.n_layers": 2 if setting.tiny else 4}
    arms: dict[str, tuple[bool, Row]] = {
        "eager": (False, {}),
        "compiled": (True, {}),
        "eager, isolated documents": (False, {"data.documents": "isolated"}),
        "eager, noise scale in every step": (False, {"stability.noise_scale_every_tokens": 1}),
    }

    def watched(work: Callable[[], object]) -> list[str]:
        """Return the code lines of calls that wait for the device; in backward, the line that calls backward."""
        places: list[str] = []

        def show(message: Warning | str, *_: object) -> None:
            if WAIT_WARNING in str(message):
                stack = traceback.extract_stack()
                own = [frame for frame in stack if frame.filename.startswith(package)] or stack[:-1]
                places.append(f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno} {own[-1].line}")

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                if cuda:
                    torch.cuda.set_sync_debug_mode("default")
        return places

    def control() -> None:
        if cuda:
            torch.ones((), device="cuda").item()
        else:
            warnings.warn(WAIT_WARNING, stacklevel=1)

    def of(compiled: bool, changes: Row) -> Row:
        training = training_of(setting, setting.recipe("350m", MICRO_BATCH["350m"], compiled, **changes))
        take_steps(training, WARM_UP)
        pending: list[Callable[[], Step]] = []
        places = watched(lambda: pending.extend(training.issue() for _ in range(3)))
        for done in pending:
            done()
        counts = {place: places.count(place) for place in dict.fromkeys(places)}
        return {"steps": len(pending), "waits": len(places), "places": counts, "control": len(watched(control))}

    for arm, (compiled, changes) in arms.items():
        yield attempt(arm, of, compiled, shallow | changes)


def layouts(setting: Setting) -> Iterator[Row]:
    import torch.distributed as dist

    from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup, join_process_group, mesh_of

    device = setting.torch_device
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")

    def of(zero: int | None) -> Row:
        smaller = {} if setting.tiny else {"batch.tokens": 131_072}
        recipe = setting.recipe("350m", MICRO_BATCH["350m"], True, **smaller, **{"layout.zero": zero or 0})
        if zero is None:
            return timed_steps(setting, recipe)
        with join_process_group(recipe.layout, device) as group:
            trainer = {"trainer_has_group": group is not SINGLE_PROCESS}
        cautions = {"cautions": layout_cautions(recipe)}
        return trainer | cautions | timed_steps(setting, recipe, ProcessGroup(0, 1, mesh_of(recipe.layout, device)))

    yield attempt("no process group", of, None)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for zero in (3, 1, 2, 0):
        yield attempt(f"one rank, ZeRO {zero}", of, zero)
    dist.destroy_process_group()


def fp8(setting: Setting) -> Iterator[Row]:
    import torch
    import torch.nn.functional as F

    from leaven.model.loss import CHUNK_ELEMENTS

    device = setting.torch_device

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax().float() / FP8_MAX
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

    compiled = torch.compile(cast, dynamic=False)

    def of(m: int, n: int, k: int, products: int) -> Row:
        """Return the row of one matmul; ``products`` matmuls share the cast of their input."""
        x, weight = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
        (x8, x_scale), (weight8, weight_scale) = cast(x), cast(weight)
        whole = F.ScalingType.TensorWise

        def product() -> torch.Tensor:
            return F.scaled_mm(x8, weight8.t(), x_scale, whole, weight_scale, whole, use_fast_accum=True)

        expected = (x @ weight.t()).float()
        off = (product().float() - expected).norm() / expected.norm()
        bf16, lower = seconds_of(lambda: torch.mm(x, weight.t()), device), seconds_of(product, device)
        casting, flops = seconds_of(lambda: compiled(x), device), 2e-12 * m * n * k
        return {
            "m_n_k": [m, n, k],
            "bf16_us": 1e6 * bf16,
            "fp8_us": 1e6 * lower,
            "cast_us": 1e6 * casting,  # cast of the input; weights are cast only once per step
            "bf16_tflops": flops / bf16,
            "fp8_tflops": flops / lower,
            "fp8_with_cast_tflops": flops / (lower + casting / products),
            "relative_difference": float(off),
        }

    for case in SHAPES:
        model = setting.recipe(case, MICRO_BATCH[case], True).model
        tokens = (2 if setting.tiny else MICRO_BATCH[case]) * model.seq_len
        chunk = min(tokens, CHUNK_ELEMENTS[setting.device] // model.vocab_size)
        d, layers, chunks = model.d_model, model.n_layers, -(-tokens // chunk)
        sums = {"bf16_us": 0.0, "fp8_us": 0.0, "fp8_with_casts_us": 0.0}
        # (name, m, n, k, matmuls with the same input, repetitions in a forward pass)
        for arm, m, n, k, products, times in (
            ("query, key and value", tokens, d, d, 3, layers),
            ("attention out", tokens, d, d, 1, layers),
            ("gate and in", tokens, model.d_ff, d, 2, layers),
            ("mlp out", tokens, d, model.d_ff, 1, layers),
            ("unembedding", chunk, model.vocab_size, d, 1, chunks),
        ):
            row = attempt(f"{case}, {arm}", of, m, n, k, products)
            yield row
            once = {key: row.get(key, float("nan")) for key in ("bf16_us", "fp8_us", "cast_us")}
            sums["bf16_us"] += times * products * once["bf16_us"]
            sums["fp8_us"] += times * products * once["fp8_us"]
            sums["fp8_with_casts_us"] += times * (products * once["fp8_us"] + once["cast_us"])
        yield {"arm": f"{case}, all of a forward pass"} | sums


def auto(setting: Setting) -> Iterator[Row]:
    from leaven.training.micro_batch import choose_micro_batch

    def of() -> Row:
        training = training_of(setting, setting.recipe("350m", "auto", True))
        return asdict(choose_micro_batch(training))

    yield attempt("350m", of)


# (function, time limit in seconds)
PARTS: dict[str, tuple[Callable[[Setting], Iterator[Row]], float]] = {
    "mfu": (mfu, 280),
    "profile": (profile, 100),
    "plan": (plan, 40),
    "waits": (waits, 90),
    "layouts": (layouts, 150),
    "fp8": (fp8, 70),
    "auto": (auto, 100),
}


# ---- processes


def child(setting: Setting) -> None:
    """Print the rows of a part as JSON, one per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries go to standard error
    import torch

    from leaven.training.device import device_name, machine

    torch.manual_seed(0)
    about = machine() | {"device": device_name(setting.torch_device), "cuda": torch.version.cuda}
    print(json.dumps({"machine": about}), file=answers, flush=True)
    for row in PARTS[setting.part][0](setting):
        print(json.dumps(row), file=answers, flush=True)


def measure(setting: Setting, limit: float, on_row: Callable[[Row], None]) -> str | None:
    """Run a part in its process; return why it failed, or None."""
    command = [sys.executable, __file__, "--part", json.dumps(asdict(setting))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop)
    timer.start()
    try:
        for line in process.stdout:
            on_row(json.loads(line))
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return f"stopped after {limit:.0f} s" if stopped.is_set() else f"exit code {code}" if code else None


def show(row: Row) -> None:
    """Print the numbers of a row; FILE has the rest."""
    values = {key: value[0] if key == "step_ms" and isinstance(value, list) else value for key, value in row.items()}
    words = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
    print("  ", *(f"{key}={word}" for key, word in words.items() if not isinstance(word, dict | list | tuple)))
    for key in ("categories", "places"):
        for name, value in row.get(key, {}).items():
            print("     ", name, value)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write; its other parts are kept")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=530.0, help="limit for all parts together")
    parser.add_argument("--tiny", action="store_true", help="test the benchmark in a minute")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return child(Setting(**json.loads(args.part)))
    names = [name.strip() for name in args.parts.split(",")]
    for name in names:
        if name not in PARTS:
            parser.error(f"--parts: no {name!r}; there are {', '.join(PARTS)}")
    if args.out is None:
        parser.error("--out: missing")
    began, document = time.monotonic(), {"parts": {}}
    if args.out.exists():
        document = json.loads(args.out.read_text())
    for name in names:
        limit = min(PARTS[name][1], args.seconds - (time.monotonic() - began))
        print(f"{name}:", flush=True)
        part: Row = {"rows": [], "error": None, "seconds": 0.0}
        document["parts"][name] = part
        start = time.monotonic()

        def on_row(row: Row, part: Row = part) -> None:
            if "machine" in row:
                document.update(row)
            else:
                part["rows"].append(row)
                show(row)
            write_text(args.out, json.dumps(document, indent=1))

        write_text(args.out, json.dumps(document, indent=1))
        setting = Setting(name, args.device, args.tiny, str(args.out))
        part["error"] = measure(setting, limit, on_row) if limit > 10 else "no time was left"
        part["seconds"] = time.monotonic() - start
        write_text(args.out, json.dumps(document, indent=1))
        print(f"   {part['seconds']:.0f} s" + (f", {part['error']}" if part["error"] else ""), flush=True)


if __name__ == "__main__":
    main()
