"""Describe the machine that leaven runs on: its processor as an accelerator, its GPUs, and what it can train.

:func:`trainable_here` and :func:`cluster_for` are rough estimates, made without planning a layout.
"""

import math
import os
import platform
from contextlib import suppress
from pathlib import Path

from leaven.documents.catalogue import NumberSource
from leaven.planning.accelerators import Accelerator
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import Recipe

_BYTES_PER_PARAMETER = 16  # weights, gradients and Adam's two moments in fp32
_MAX_SECONDS = 30 * 86_400
_MFU = 0.4  # assumed
_GPU = "H100-80GB"
_GPU_FLOPS = 1e15  # per second, dense bf16
_GPU_BYTES = 60 * 2**30  # of 80 GiB; the rest is for activations


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
    """Return the processors of this machine as one accelerator.

    Memory and number of cores are read from the system. The other numbers are guesses per core (AVX2).
    """
    from psutil import virtual_memory  # slow to import

    cores = os.cpu_count() or 1
    rate = 0.05 * cores  # TFLOP/s: 8 lanes x 2 FLOPs x 3 GHz for two logical cores; bf16 is as fast as fp32
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
        note="guessed from the number of cores; --measure calibrates the time of a step, the peak stays a guess",
    )


def trainable_here(recipe: Recipe) -> bool:
    """Return whether the model and its optimizer states fit on this machine, and training takes under a month."""
    gpus = gpus_here()
    if recipe.layout.ranks > max(gpus, 1):
        return False
    machine = this_machine()
    memory = gpus * _GPU_BYTES if gpus else machine.memory_gib * 2**30
    flops_per_second = gpus * _GPU_FLOPS if gpus else machine.peak_tflops * 1e12
    seconds = flops_per_token(recipe.model) * recipe.data.tokens / (_MFU * flops_per_second)
    return recipe.model.params * _BYTES_PER_PARAMETER < memory and seconds < _MAX_SECONDS


def cluster_for(recipe: Recipe) -> str:
    """Return the smallest cluster that can store the model and train it within a month, as ``COUNTxNAME``.

    The number of GPUs is a power of two, at most the number of sequences in a batch. If the layout of the recipe has
    several ranks, the number of GPUs is the number of ranks.
    """
    if recipe.layout.ranks > 1:
        return f"{recipe.layout.ranks}x{_GPU}"
    for_memory = recipe.model.params * _BYTES_PER_PARAMETER / _GPU_BYTES
    for_time = flops_per_token(recipe.model) * recipe.data.tokens / (_MFU * _GPU_FLOPS * _MAX_SECONDS)
    needed = math.ceil(math.log2(max(for_memory, for_time)))
    most = math.floor(math.log2(max(recipe.batch.tokens // recipe.model.seq_len, 1)))
    return f"{2 ** min(max(needed, 0), most)}x{_GPU}"


def gpus_here() -> int:
    """Return the number of NVIDIA GPUs of this machine, counted by device files so that torch is not imported."""
    return sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev")) if os.path.isdir("/dev") else 0
