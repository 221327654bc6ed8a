"""What the numbers were measured on, and what a training asks of it."""

import ctypes
import os
import platform
from importlib.metadata import version
from typing import Any

from leaven import __version__
from leaven.planning.accelerators import physical_memory
from leaven.planning.calibration import processor


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB and versions: names of kinds, never of this machine."""
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_gib": round(physical_memory() / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "leaven": __version__,
    }


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Let the process keep what it frees for the next step, up to 2 GiB and blocks up to 128 MiB.

    The C library gives large blocks back at once and gets them again as pages to be filled with zeros, in every step:
    5 to 37% of a step on a processor (measured: docs/log.md). Larger blocks stay as they are, for they would leave
    holes. Where the library is not glibc, nothing changes.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # names of malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**27) or libc.mallopt(mmap_threshold, 2**25)  # the most that old ones take
