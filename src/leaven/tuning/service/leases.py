"""Which of the commands that work on a study are alive, as seen by another of them.

A command's id is its host, its process (see :func:`process`) and a number, because a process may run several
searches. On the same boot of the same machine the kernel says whether it lives. On another machine a heartbeat does:
a counter in the store that the command keeps raising. When it stood still for ``lease_seconds`` of the observer's own
clock, the command is taken for dead; times of two machines are never compared. One that was taken for dead wrongly,
because it was cut off or asleep, finds its trials closed, and drops them.
"""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from optuna.storages import BaseStorage

BEATS = 4  # in a lease
LEAVING = 2.0  # seconds that a last beat is waited for
_BEAT = "beat:"  # and the id: an attribute of the study

_numbers = itertools.count()
_here: set[str] = set()  # ids of this process that are alive


def node(pid: int, number: int = 0) -> str:
    """An id of a process of this machine."""
    return f"{socket.gethostname()}:{process(pid)}:{number}"


def gone(owner: str) -> bool:
    """Whether the owner of a trial is known to be gone: it was of this boot of this machine, and is not there."""
    identity = ":".join(owner.split(":")[-4:-1])
    if identity == process(os.getpid()):
        return owner not in _here
    return _ended(identity)


class Leases:
    """This command's own counter, and a view of the others'. Use it in a ``with``: the counter has a thread."""

    def __init__(
        self, store: BaseStorage, study: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = node(os.getpid(), next(_numbers))
        self._store, self._study, self._seconds, self._clock = store, study, seconds, clock
        self._seen: dict[str, tuple[int, float]] = {}  # by owner: the counter, and for how long it stood still
        self._looked = clock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Leases":
        _here.add(self.node)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(LEAVING)  # a store that is away may hold it for longer
        _here.discard(self.node)

    def dead(self, owners: set[str]) -> set[str]:
        """Which owners of running trials are dead; to be asked now and then: the time in between is what counts."""
        # A pause of this process, or of the store, is not held against the others.
        now = self._clock()
        passed, self._looked = min(now - self._looked, self._seconds / BEATS), now
        elsewhere = {owner for owner in owners if owner != self.node and not gone(owner)}
        beats = self._store.get_study_system_attrs(self._study) if elsewhere else {}
        seen = {}
        for owner in elsewhere:
            count = int(beats.get(_BEAT + owner, 0))
            before, still = self._seen.get(owner, (count, -passed))
            seen[owner] = (count, still + passed if count == before else 0.0)
        self._seen = seen
        silent = {owner for owner, (_, still) in seen.items() if still >= self._seconds}
        return silent | {owner for owner in owners if owner != self.node and gone(owner)}

    def _beat(self) -> None:
        count = 0
        while not self._done.is_set():
            count += 1
            # With the store gone for good the loop of the search ends too, and says so. Until then it may come back.
            with suppress(Exception):
                self._store.set_study_system_attr(self._study, _BEAT + self.node, count)
            self._done.wait(self._seconds / BEATS)


def process(pid: int) -> str:
    """A process among those of all machines and times: ``boot/namespace:pid:start``, the first two of one container
    on one boot of one machine. Where there is no /proc only the number is known, and nothing follows from it."""
    return f"{_boot()}:{pid}:{_started(pid)}"


def _ended(identity: str) -> bool:
    """Whether a process is known to have ended: it ran since this boot of this machine, and is not there, or is a
    zombie."""
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
