"""Hostile files, folders and arguments (cases.toml) give one line and an exit code; nothing is written."""

import os
import resource
import shlex
import shutil
import signal
import stat
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cli.conftest import Verb

from leaven.cli import main

DATA = tomllib.loads((Path(__file__).with_name("cases.toml")).read_text())
SECONDS = 10  # of processor time of a command in this process; most need 0.01
WAITING_SECONDS = 100  # on a busy machine
LONG = {"LONG": "a" * 5000, "NESTED": "[" * 500, "NINES": "9" * 5000, "DOTS": ".".join("a" * 3000)}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {}  # by name: the case, the command, and a part of its message
for each in DATA["case"]:
    commands = DATA["verbs"][each["run"]] if isinstance(each["run"], str) else each["run"]
    texts = each["says"] if isinstance(each["says"], list) else [each["says"]] * len(commands)
    CASES |= {
        f"{each['name']}: {command[:60]}": (each, command, text)
        for command, text in zip(commands, texts, strict=True)
    }


def build(path: Path, content: Any, tiny: str) -> None:
    """Write one file of a case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() or path.is_symlink():
        path.unlink()
    match content:
        case str():
            path.write_text(content)
        case {"recipe": [old, new]}:
            assert old in tiny
            path.write_text(tiny.replace(old, new, 1))
        case {"repeat": [first, part, times, last]}:
            path.write_text(first + part * times + last)
        case {"hex": digits}:
            path.write_bytes(bytes.fromhex(digits))
        case {"sparse": size}:
            with path.open("wb") as file:
                os.truncate(file.fileno(), size)
        case {"zst": [byte, size]}:
            import pyarrow

            block = byte.encode() * 10**7
            with pyarrow.output_stream(str(path), compression="zstd") as stream:
                for _ in range(size // len(block)):
                    stream.write(block)
        case {"fifo": True}:
            os.mkfifo(path)
        case {"folder": True}:
            path.mkdir()
        case {"link": target}:
            path.symlink_to(target)
        case _:
            raise AssertionError(f"{path.name}: {content}")


def contents(folder: Path) -> dict[str, Any]:
    """Return the kind of each path below a folder, and of each file the size and the bytes, or the time if large."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        at = path.lstat()
        if stat.S_ISDIR(at.st_mode):  # a lock that was created and removed changes its size and time
            found[str(path.relative_to(folder))] = at.st_mode
            continue
        small = stat.S_ISREG(at.st_mode) and at.st_size < 10**6
        found[str(path.relative_to(folder))] = at.st_mode, at.st_size, path.read_bytes() if small else at.st_mtime_ns
    return found


class Late(BaseException):
    """A command takes too long. Not an Exception, which the command line would report."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise Late where the block computes for longer than `SECONDS`, or waits for longer than `WAITING_SECONDS`."""

    def late(*_: object) -> None:
        raise Late

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def limited(words: list[str]) -> tuple[int, str, str]:
    """Run a command in a copy of this process, which may take 3 GB more memory and 20 seconds more."""
    received, sent = Pipe(duplex=False)

    def run() -> None:
        held = psutil.Process().memory_info().data
        resource.setrlimit(resource.RLIMIT_DATA, (held + 3 * 10**9,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        sys.argv = ["leaven", *words]
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            main()
        sent.send((int(stopped.value.code or 0), out.getvalue(), err.getvalue()))

    process = get_context("fork").Process(target=run)  # starting Python anew would take most of the time
    process.start()
    sent.close()
    code, out, err = received.recv()  # EOFError if the process was killed
    process.join()
    return code, out, err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
@pytest.mark.parametrize("name", CASES)
def test_hostile_input_gives_one_line_and_writes_nothing(
    name: str,
    leaven: Verb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tiny_text: str,
) -> None:
    case, command, says = CASES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(tiny_text)
    if case.get("with") == "run":
        shutil.copytree(request.getfixturevalue("scaled_run"), tmp_path / "RUN")
    elif case.get("with") == "model":
        shutil.copytree(request.getfixturevalue("exported"), tmp_path / "MODEL")
    for path, content in case.get("files", {}).items():
        build(tmp_path / path, content, tiny_text)
    before = contents(tmp_path)
    words = []
    for word in shlex.split(command):
        key, equals, value = word.rpartition("=")
        words.append(f"{LONG.get(key, key)}{equals}{LONG.get(value, value)}")
    if case.get("limit"):
        code, out, err = limited(words)
    else:
        with bounded():
            code, out, err = leaven(*words)
    assert (code, out) == (case.get("code", 2), ""), err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    assert len(line) < 6_000
    assert says
    assert says in line
    assert case.get("never", "\0") not in line
    assert contents(tmp_path) == before
