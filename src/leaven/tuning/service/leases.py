"""Find out which of the commands that share a study are still alive. A command is one running search.

The operating system knows which processes of this machine are alive. Every command also sends heartbeats: it
regularly writes the time into the store. A command is dead if its heartbeat has not changed for ``lease_seconds``, by
the clock of this machine. A suspended command may count as dead. When it continues, it drops its results of trials
that others have retried.
"""

import itertools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
from optuna.storages import BaseStorage

LEASE_SECONDS = 60.0  # how long a command on another machine may send no heartbeat before its trials are retried
BEATS = 4  # heartbeats in ``lease_seconds``
LEAVING = 2.0  # seconds to wait for the heartbeat thread at the end
_BEAT = "beat:"  # prefix of the names of the heartbeats in the store; the id of the command follows

_numbers = itertools.count()
_here: set[str] = set()  # ids of running searches of this process


def node(pid: int, number: int = 0) -> str:
    """Return the id of a search in the process ``pid`` of this machine: ``HOST:MACHINE:PID:START:NUMBER``.

    MACHINE is the result of :func:`machine`. START, the start time, tells processes with equal pids apart. NUMBER
    counts the searches of one process.
    """
    return f"{socket.gethostname()}:{machine()}:{pid}:{_started(pid)}:{number}"


def gone(owner: str) -> bool:
    """Return whether the command ``owner`` is known to have ended; False on another machine or of another user."""
    where, pid, start, _ = owner.split(":")[-4:] if owner.count(":") >= 4 else ("", "", "", "")
    if where != machine():
        return False
    if int(pid) == os.getpid() and start == _started(os.getpid()):
        return owner not in _here
    if os.name == "posix":
        try:
            os.kill(int(pid), 0)  # sends nothing
        except PermissionError:
            return False
        except (ProcessLookupError, OverflowError):
            return True
    return _started(int(pid)) != start


class Leases:
    """A context manager. A thread sends this command's heartbeats, and :meth:`dead` reads those of other commands.

    ``clocks`` has the heartbeats that :meth:`dead` has read most recently, by id: Unix times by the sender's clock, 0
    for no heartbeat.
    """

    def __init__(
        self,
        store: BaseStorage,
        study: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.node = node(os.getpid(), next(_numbers))
        self._store, self._study, self._seconds, self._clock, self._now = store, study, seconds, clock, now
        self.clocks: dict[str, float] = {}
        self._still: dict[str, float] = {}  # by owner: how long its heartbeat has not changed, seconds
        self._looked = clock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Leases":
        _here.add(self.node)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join(LEAVING)  # an unreachable store may block it for longer
        _here.discard(self.node)

    def dead(self, owners: set[str]) -> set[str]:
        """Return those commands of ``owners`` that have ended, or that sent no heartbeat for ``lease_seconds``. Call
        this at least four times in ``lease_seconds``; with fewer calls, missing heartbeats are noticed later."""
        # A call counts at most a quarter of the lease, so that a pause of this process or of the store does not make
        # other commands count as dead.
        now = self._clock()
        passed, self._looked = min(now - self._looked, self._seconds / BEATS), now
        others = owners - {self.node}
        ended = {owner for owner in others if gone(owner)}
        beats = self._store.get_study_system_attrs(self._study) if others else {}
        clocks = {owner: float(beats.get(_BEAT + owner, 0.0)) for owner in others}
        self._still = {
            owner: self._still.get(owner, -passed) + passed if clock == self.clocks.get(owner, clock) else 0.0
            for owner, clock in clocks.items()
        }
        self.clocks = clocks
        return ended | {owner for owner, still in self._still.items() if still >= self._seconds}

    def _beat(self) -> None:
        while not self._done.is_set():
            # An unreachable store is ignored here: the loop of the search reports it.
            with suppress(Exception):
                self._store.set_study_system_attr(self._study, _BEAT + self.node, self._now())
            self._done.wait(self._seconds / BEATS)


@cache
def machine() -> str:
    """Return an id of the machine or container in which this process runs. On Linux, the id changes at each boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux; without a network card getnode is random, and then only heartbeats count
        return f"{uuid.getnode():x}"


def _started(pid: int) -> str:
    """Return the start time of a process in hundredths of a second, or "" if the process has ended."""
    try:
        # On Linux, psutil adds the boot time, which changes when the clock is set. Subtract it again.
        boot, process = psutil.boot_time() if psutil.LINUX else 0.0, psutil.Process(pid)
        seconds = process.create_time() - boot
        ended = process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return ""
    return "" if ended else str(round(seconds * 100))
