"""Start shell commands, and end them together with all processes that they have started, even if leaven is killed.

Each command runs in its own session, so Ctrl-C in the terminal reaches only leaven. A guard process, which runs this
file, reads the ids of running commands from a pipe. The pipe closes when leaven ends or is killed. Then the guard
ends the commands that still run. So that the guard starts quickly, this file imports no other file of leaven.
"""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

# The shell waits for a line before it runs the command, and leaven writes the line once the guard knows the process
# id. If leaven dies before that, the pipe closes, and the shell ends. Every process that a command starts has the
# command's process id in its environment, so that it can be found after the command has ended.
MARK = "LEAVEN_COMMAND"
START = f'read -r start && export {MARK}="${MARK}.$$" && exec /bin/sh -c "$0" </dev/null'
# On Linux, the command adopts the processes whose parents have ended. So they are found even in another session and
# without the mark in their environment. Python ignores two signals; this program restores their defaults.
ADOPT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(36, ctypes.c_ulong(1))  # PR_SET_CHILD_SUBREAPER; it outlasts exec, and is not inherited
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
SHELL = [*([sys.executable, "-ISc", ADOPT] if sys.platform == "linux" else []), "/bin/sh", "-c", START]
GRACE_SECONDS = 10.0  # from SIGTERM until processes are killed


class Commands:
    """A context manager that starts commands. A guard process ends them if leaven dies."""

    def __enter__(self) -> "Commands":
        self._token = uuid.uuid4().hex
        self._guard = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), self._token], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._guard.communicate()

    def start(self, command: str, environment: Mapping[str, str], output: BinaryIO) -> "subprocess.Popen[bytes]":
        """Start a shell command in the current folder, with ``environment`` in addition to leaven's variables. It
        writes to the file ``output``."""
        process = subprocess.Popen(
            [*SHELL, command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | {MARK: self._token},
            start_new_session=True,
            pass_fds=[output.fileno()],  # keeps the file locked until the command ends
        )
        self._tell(f"{process.pid}\n")
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # broken if the shell was killed
            process.stdin.write(b"\n")
        return process

    def end(self, process: "subprocess.Popen[bytes]") -> list[int]:
        """End all processes of a command. Return the ids of processes that still run after ``2 * GRACE_SECONDS``."""
        left = end([process.pid], self._token)
        if not left:
            process.wait()
        self._tell(f"-{process.pid}\n")
        return left

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError, ValueError):  # the guard was killed, or the context is being left
            os.write(self._guard.stdin.fileno(), line.encode())  # one call, so lines of several threads do not mix


def end(leaders: Iterable[int], token: str) -> list[int]:
    """End the commands with the process ids ``leaders``, and all processes that they have started.

    Processes get SIGTERM first, so that launchers such as torchrun can end their workers, and are killed after
    ``GRACE_SECONDS``. After twice this time, return the ids of those that still run. ``token`` is the random id of
    the `Commands` that started them.
    """
    leaders = set(leaders)
    asked = dict[int, psutil.Process]()
    until = time.monotonic() + GRACE_SECONDS
    while found := [process for process in [*asked.values(), *_family(leaders, token)] if _runs(process)]:
        if time.monotonic() > until + GRACE_SECONDS:
            return sorted({process.pid for process in found})
        for process in found:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if time.monotonic() > until:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
            asked[process.pid] = process
        time.sleep(0.02)
    return []


def _family(leaders: set[int], token: str) -> list[psutil.Process]:
    """Return the processes of some commands, some of them several times. ``leaders`` has the process ids of the
    commands. A leader belongs, and so do processes in a leader's session, those whose environment variable ``MARK``
    is ``token.id`` with the id of a leader, and the descendants of all of these."""
    found, marks = [], {f"{token}.{pid}" for pid in leaders}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.pid in leaders or os.getsid(process.pid) in leaders or _mark(process) in marks:
                found += [process, *process.children(recursive=True)]
    return found


def _mark(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):  # a process of another user, or hidden by the system
        return process.environ().get(MARK)
    return None


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _guard() -> None:
    """Read PIDs from standard input: PID at a command's start, -PID at its end. At EOF, end running commands."""
    running = set[int]()
    for line in sys.stdin:
        pid = int(line)
        running = running | {pid} if pid > 0 else running - {-pid}
    end(running, sys.argv[1])


if __name__ == "__main__":
    _guard()
