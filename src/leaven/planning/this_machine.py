"""Describe the machine that leaven runs on: its processor, memory and GPUs."""

import os
import platform
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from leaven.documents.catalogue import NumberSource
from leaven.errors import InputError
from leaven.planning.accelerators import Accelerator

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the environment variable with the GPUs that a process may use


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the model name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def this_machine() -> Accelerator:
    """Return the processors of this machine as one accelerator, with speeds guessed from the number of cores."""
    from psutil import virtual_memory  # slow to import

    cores = os.cpu_count() or 1
    rate = 0.05 * cores  # TFLOP/s: 8 lanes (AVX2) x 2 FLOPs x 3 GHz for each logical core
    guess = tuple(
        NumberSource(group=group, text=f"a guess for {cores} cores", confidence="guess")
        for group in ("peak", "memory", "board")
    )
    return Accelerator(
        name="cpu",
        memory_gib=round(virtual_memory().total / 2**30, 1),
        memory_tb_s=0.01 * cores,
        link_gb_s=10.0 * cores,
        network_gb_s=1.0,
        node_size=1,
        power_w=5.0 * cores,
        peaks=(("bf16", rate), ("fp32", rate)),
        sources=guess,
        note="guessed from the number of cores; --measure calibrates the time of a step, but not the peak FLOP/s",
    )


def devices_here() -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``: ``0``, ``1``, ..."""
    if (visible := os.environ.get(VISIBLE)) is None:
        return tuple(map(str, range(gpus_here())))
    # As in CUDA, a negative name such as -1 ends the list.
    names = takewhile(lambda name: not name.startswith("-"), map(str.strip, visible.split(",")))
    return tuple(dict.fromkeys(name for name in names if name))


def devices_of_workers(workers: int | None, each: int = 1) -> tuple[str, ...]:
    """Return ``CUDA_VISIBLE_DEVICES`` for each worker, such as ``0,1``. A worker has ``each`` GPUs of its own.

    By default, there are as many workers as the GPUs allow. Raise InputError if this process has too few GPUs.
    """
    here = devices_here()
    most = len(here) // each
    if (workers or 1) > most:
        raise InputError(
            f"--workers {workers or 'auto'}: at most {most} can run (GPUs here: {len(here)}, GPUs per worker: "
            f"{each}); give fewer workers, list more GPUs in {VISIBLE}, or lower devices in the command file (if any)"
        )
    return tuple(",".join(here[first : first + each]) for first in range(0, (workers or most) * each, each))


def gpus_here() -> int:
    """Return the number of NVIDIA GPUs of this machine, counted by device files, without importing torch."""
    return sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev")) if os.path.isdir("/dev") else 0
