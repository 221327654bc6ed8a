"""Whether a process is still there, asked on the machine that it ran on."""

import os
from pathlib import Path


def identity(pid: int) -> str:
    """A process among those of all machines and times: ``boot/namespace:pid:start``, the first two of one container
    on one boot of one machine. Where there is no /proc only the number is known, and ``gone`` says nothing."""
    return f"{_boot()}:{pid}:{_started(pid)}"


def gone(identity: str) -> bool:
    """Whether a process is known to be gone: it was of this boot of this machine, and is not there, or is a corpse
    that its parent has not looked at."""
    boot, pid, start = identity.split(":") if identity.count(":") == 2 else ("", "", "")
    return boot != "" and boot == _boot() and _started(int(pid)) != start


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the boot: its number alone may be of a later one. Empty if it is gone."""
    try:
        # Fields 3 and 22 of stat (man 5 proc), after the name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]
