"""Describes the device and the machine: names, peak speed (for the MFU), used and free memory, cores and versions.

The MFU is the model FLOPs per second (:mod:`leaven.planning.flops`) divided by the device's peak.
"""

import ctypes
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import psutil
import torch

from leaven import __version__
from leaven.errors import InputError, out_of_memory
from leaven.planning.accelerators import Accelerator
from leaven.planning.hardware import known_device, parse_cluster
from leaven.planning.this_machine import cores, processor
from leaven.recipe.files import cache_folder
from leaven.recipe.recipe import Recipe
from leaven.storage import json_object, read, write_text

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEASURING_SECONDS = 0.5
TIMES_FP32 = "times_fp32.json"  # file in the cache folder with the results of `times_fp32`
EMULATED = 1.25  # a dtype counts as emulated if a matmul takes more than so many times as long as in fp32
FIXED_WORK_SIZE = {"cpu": 256, "cuda": 4096}
DEVICES = ("cuda", "mps", "cpu")  # the best first
_CGROUP = Path("/sys/fs/cgroup")
# The default dtype and the precisions of matmuls before each block of `plain_torch` that runs now, in any thread. The
# first are the program's.
_BEFORE: list[tuple[torch.dtype, str | None, list[str]]] = []
_BEFORE_LOCK = Lock()


@dataclass(frozen=True)
class Peak:
    flops: float  # FLOP/s
    source: str  # where the number comes from: a data sheet or a measurement
    # If the device only emulates the recipe's dtype: the time of a matmul in this dtype divided by its time in fp32.
    emulated: float | None = None


def mfu_convention(peak: Peak) -> str:
    """Return a line of text that defines the MFU."""
    return (
        "tokens/s x model FLOPs per token / peak. Model FLOPs per token: 6 per weight in a matmul, including the "
        "unembedding, plus 12 x layers x heads x d_head x seq_len for attention; the causal MFU counts half of the "
        f"attention. Peak: {peak.flops / 1e12:.3g} TFLOP/s, {peak.source}"
    )


def known_peak(device: torch.device, compute: str) -> Peak | None:
    """Return the dense peak speed of a device from its data sheet, or None if unknown. The peak in fp32 counts as
    unknown, because a GPU may run fp32 as TF32."""
    name = device_name(device)
    known = known_device(name)
    tflops = known.peak("bf16" if compute == "bf16" else "fp16") if known and compute != "fp32" else None
    return Peak(tflops * 1e12, f"data sheet of {name}") if tflops else None


def default_device() -> torch.device:
    """Return the device (cuda, mps or cpu) that ``--device`` or LEAVEN_DEVICE names, or the best device of this
    machine. Raise InputError if this machine or this build of torch lacks the device."""
    there = [name for name in DEVICES if _lacking(name) is None]
    name = os.environ.get("LEAVEN_DEVICE") or there[0]
    if name not in DEVICES:
        raise InputError(f"there is no device {name!r}; use --device {' or '.join(there)}")
    lacking = _lacking(name)
    if lacking is not None:
        raise InputError(f"device {name}: {lacking}; use --device {' or '.join(there)}")
    return torch.device(name)


def _lacking(name: str) -> str | None:
    """Return why this machine cannot use a device, or None."""
    if name == "cpu":
        return None
    built, found = (
        (torch.version.cuda is not None or torch.version.hip is not None, torch.cuda.is_available())
        if name == "cuda"
        else (torch.backends.mps.is_built(), torch.backends.mps.is_available())
    )
    if not built:
        return f"torch {torch.__version__} is built without {name}"
    return None if found else f"torch finds no {name} device on this machine"


def require_device(recipe: Recipe, device: torch.device) -> None:
    """Raise InputError if the device does not support the recipe's dtype or compilation."""
    if device.type != "mps":
        return
    if recipe.precision.compute == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise InputError(
            "[precision] compute bf16 needs macOS 14 or newer on mps; use --set precision.compute=fp32 or "
            "--device cpu"
        )
    if recipe.layout.compile:
        raise InputError(
            "[layout] compile: leaven does not compile for mps; use --set layout.compile=false or --device cpu"
        )


def device_name(device: torch.device) -> str:
    """Return the name of a CUDA device. For cpu, return the processor model; for mps, add " GPU" to it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()} GPU" if device.type == "mps" else processor()


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return a device's entry in the planner's table of accelerators, or None."""
    return parse_cluster("cpu").accelerator if device.type == "cpu" else known_device(device_name(device))


def device_peak(device: torch.device, compute: str) -> Peak:
    """Return a device's peak speed from its data sheet. Without a data sheet, measure it in ``compute`` or in fp32,
    whichever is faster."""
    known = known_peak(device, compute)
    if known is not None:
        return known
    threads = torch.get_num_threads()
    times = times_fp32(device, compute, threads)
    best = "fp32" if times > 1 else compute
    slower = f" ({compute} is slower{': emulated' if times > EMULATED else ''})" if times > 1 else ""
    source = f"fastest {best} matmul measured on this device{slower}; no data sheet is known"
    return Peak(best_matmul(device, DTYPES[best], threads), source, times if times > EMULATED else None)


def times_fp32(device: torch.device, compute: str, threads: int) -> float:
    """Return the time of a matmul in ``compute`` divided by its time in fp32. Ratios from 0.8 to 2 are not
    cached on disk, because other work on the machine may change them."""
    if compute == "fp32":
        return 1.0
    key = f"{device_name(device)}, torch {torch.__version__}, {threads} threads, {compute}"
    remembered: dict[str, Any] = {}
    with suppress(OSError, InputError):
        remembered = json_object(read(cache_folder() / TIMES_FP32)) or {}
    times = remembered.get(key)
    if not isinstance(times, float):
        times = best_matmul(device, torch.float32, threads) / best_matmul(device, DTYPES[compute], threads)
        if 0.8 <= times <= 2:
            return times
        with suppress(OSError, InputError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            write_text(cache_folder() / TIMES_FP32, json.dumps(remembered | {key: times}, indent=1))
    return times


@cache
def best_matmul(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the FLOP/s of the fastest square matmul, measured in half a second and cached. ``threads`` is
    torch's current number of threads."""
    began, best, size, seconds = time.perf_counter(), 0.0, 256, 0.0
    # The next size takes eight times as long, and is multiplied three times.
    while size <= 16_384 and time.perf_counter() - began + 3 * 8 * seconds < MEASURING_SECONDS:
        a = torch.ones(size, size, device=device, dtype=dtype)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            a @ a
            wait(device)
            times.append(time.perf_counter() - start)
        seconds = min(times)
        best = max(best, 2 * size**3 / seconds)
        size *= 2
    return best


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block with torch's defaults, which the calling program may have changed: fp32 tensors, exact fp32
    matmuls, gradients, and no autocast. Raise InputError if torch's default device is not the CPU.

    All threads share the default dtype and the precisions of matmuls. If blocks overlap in several threads, the last
    to end restores the program's settings.
    """
    if (device := torch.get_default_device()).type != "cpu":
        raise InputError(
            f"torch's default device is {device}; call torch.set_default_device('cpu') first, because leaven chooses "
            "the device of a run itself"
        )
    matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _BEFORE_LOCK:
        of_all = None
        with suppress(RuntimeError):  # the program has set the precision of one backend
            of_all = torch.get_float32_matmul_precision()
        _BEFORE.append((torch.get_default_dtype(), of_all, [each.fp32_precision for each in matmuls]))
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast(default_device().type, enabled=False),
        ):
            yield
    finally:
        with _BEFORE_LOCK:
            # The program's settings if no other block runs, otherwise the plain ones.
            dtype, of_all, precisions = _BEFORE.pop()
            torch.set_default_dtype(dtype)
            if of_all is not None:
                torch.set_float32_matmul_precision(of_all)
            for each, precision in zip(matmuls, precisions, strict=True):
                each.fp32_precision = precision


def time_fixed_work(device: torch.device) -> float:
    """Return the seconds that a matmul of a fixed size takes (the fastest of five), to compare devices."""
    a, times = torch.ones(FIXED_WORK_SIZE[device.type], FIXED_WORK_SIZE[device.type], device=device), []
    for _ in range(5):
        wait(device)
        began = time.perf_counter()
        a @ a
        wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def unless_out_of_memory(
    work: Callable[[], T], device: torch.device, cleanup: Callable[[], None] = lambda: None
) -> T | None:
    """Return the result of ``work()``, or None if it runs out of memory. ``cleanup`` is called in any case."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    finally:
        cleanup()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    return None


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes since :func:`reset_peak_memory`: on the accelerator, or by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # which reports no peak; its allocator keeps the memory that it takes
        return torch.mps.driver_allocated_memory()
    try:
        import resource  # not on Windows
    except ImportError:
        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def held_memory(device: torch.device) -> int:
    """Return the bytes of memory in use now: on the accelerator, or by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return psutil.Process().memory_info().rss


def reset_peak_memory(device: torch.device) -> None:
    """Reset the result of :func:`peak_memory` to the memory in use now. On a CPU, this works only on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    if device.type == "mps":
        torch.mps.empty_cache()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def free_memory(device: torch.device) -> int:
    """Return the bytes that a run can still allocate on this device, within the memory limit of a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + (
            torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    limits = (
        _cgroup_room("memory.max", "memory.current", ""),
        _cgroup_room("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/"),
    )
    return min([psutil.virtual_memory().available, *(room for room in limits if room is not None)])


def _cgroup_room(limit: str, usage: str, folder: str) -> int | None:
    """Return the bytes that a Linux control group can still use, or None without a limit."""
    try:
        cached = re.search(r"^inactive_file (\d+)", (_CGROUP / f"{folder}memory.stat").read_text(), re.MULTILINE)
        room = int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None
    return room + (int(cached[1]) if cached else 0)


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of software, but nothing that identifies this machine."""
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "leaven": __version__,
    }


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step. By default, glibc returns large blocks, and the system
    clears their pages again. On a CPU, this takes 5 to 37% of a step (docs/log.md). Blocks above 128 MiB are
    not kept, because that would fragment memory."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # constants of malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**27) or libc.mallopt(mmap_threshold, 2**25)  # the most in old versions
