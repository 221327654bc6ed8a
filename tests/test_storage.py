"""Safe writing: whatever is killed, torn or out of room, a reader finds the old content or the new."""

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from tests.errors import refused

from leaven import storage
from leaven.errors import InputError

OLD, NEW = b"old" * 1_000, b"new" * 200_000


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs code with `storage`, `sys` and `Path` at hand."""
    head = "import os, resource, signal, sys\nfrom pathlib import Path\nfrom leaven import storage\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


KILLED = """
folder, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if moment == "before the sync": os.fsync = die
if moment == "before the rename": Path.replace = Path.rename = die
if moment == "after the rename": storage.sync_folder = die
try:
    if moment == "in the middle":
        with storage.replacing(folder / "file") as file: file.write(b"new"); file.flush(); die()
    storage.write(folder / "file", b"new" * 200_000)
finally: die()
"""


@pytest.mark.parametrize("moment", ["in the middle", "before the sync", "before the rename", "after the rename"])
def test_a_killed_write_leaves_the_old_file_or_the_new_one(tmp_path: Path, moment: str) -> None:
    (tmp_path / "file").write_bytes(OLD)
    assert python(KILLED, tmp_path, moment).wait() == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == (NEW if moment == "after the rename" else OLD)
    storage.write(tmp_path / "file", OLD)
    assert names(tmp_path) == ["file"]


FOLDER_KILLED = """
folder, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if moment == "before the rename": Path.rename = die
with storage.written_folder(folder / "it") as made:
    for name in "abc":
        (made / name).write_text(name)
        if moment == name: die()
die()
"""


@pytest.mark.parametrize("moment", ["b", "before the rename", "after"])
def test_a_killed_folder_is_whole_or_absent(tmp_path: Path, moment: str) -> None:
    assert python(FOLDER_KILLED, tmp_path, moment).wait() == -signal.SIGKILL
    if moment == "after":
        assert names(tmp_path / "it") == ["a", "b", "c"]
        return
    assert not (tmp_path / "it").exists()
    (tmp_path / "it").mkdir()  # an empty one may be there
    with storage.written_folder(tmp_path / "it") as made:
        (made / "d").touch()
    assert names(tmp_path) == ["it"]
    assert names(tmp_path / "it") == ["d"]


@pytest.mark.skipif(not hasattr(os, "getgroups"), reason="groups of files")
def test_an_empty_folder_keeps_its_link_and_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, link = tmp_path / "shared", tmp_path / "link"
    shared.mkdir()
    shared.chmod(0o2770)
    groups = {os.getgid(), *os.getgroups(), *([1] if os.getuid() == 0 else [])}
    os.chown(shared, -1, max(groups))
    before = shared.stat()
    link.symlink_to(shared)
    with storage.written_folder(link) as made:
        (made / "file").touch()
    after = shared.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)
    assert (shared / "file").stat().st_gid == before.st_gid
    assert link.is_symlink()
    assert names(tmp_path) == ["link", "shared"]
    link.unlink()
    link.symlink_to("nowhere")
    with refused("link exists already"):
        storage.require_free(link)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with refused(". is the current folder, which cannot be replaced; give a new folder in it, such as model"):
        storage.require_free(Path())


def test_an_error_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ZeroDivisionError), storage.replacing(tmp_path / "file") as file:
        file.write(bytes([1 // 0]))
    with pytest.raises(ZeroDivisionError), storage.written_folder(tmp_path / "folder"):
        raise ZeroDivisionError
    with pytest.raises(InputError, match="exists already"), storage.written_folder(tmp_path / "full"):
        pass
    with pytest.raises(FileNotFoundError):
        storage.write(tmp_path / "not there" / "file", NEW)
    with pytest.raises(FileNotFoundError):
        storage.append(tmp_path / "lines", b"{}\n", create=False)
    assert names(tmp_path) == ["file", "full"]
    assert (tmp_path / "file").read_bytes() == OLD


OVER_AND_OVER = """
path = Path(sys.argv[1])
for number in range(100_000):
    storage.write(path, str(number % 10).encode() * 300_000)
    if number == 0: print("begun", flush=True)
"""


def test_two_writers_of_a_file_and_kills_at_any_moment(tmp_path: Path) -> None:
    """No reader sees a part, and no writer removes what the other is writing."""
    chance = random.Random(0)
    path = tmp_path / "file"
    lasting = python(OVER_AND_OVER, path)
    for _ in range(3):
        writer = python(OVER_AND_OVER, path)
        assert writer.stdout is not None
        writer.stdout.readline()
        until = time.monotonic() + chance.uniform(0.05, 0.2)
        while time.monotonic() < until:
            content = path.read_bytes()
            assert content == content[:1] * 300_000
        writer.kill()
        writer.communicate()
    assert lasting.poll() is None
    lasting.kill()
    lasting.communicate()
    storage.write(path, OLD)
    assert names(tmp_path) == ["file"]


FULL = """
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for attempt in (
    lambda: storage.write(folder / "file", b"new" * 200_000),
    lambda: storage.append_json(folder / "lines", {"long": "x" * 20_000}),
):
    try: attempt()
    except OSError as error: print(error.strerror)
"""


@pytest.mark.parametrize("limit", [10_000, 17])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_full_disk_costs_only_what_is_being_written(tmp_path: Path, end: bytes, limit: int) -> None:
    """A limit on the size of files stands in for the full disk: the write fails in the same place."""
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "lines").write_bytes(b'{"n": 1}\n{"n": 2}' + end)  # 17 bytes without the end
    output, error = python(FULL, tmp_path, limit).communicate()
    assert output.splitlines() == ["File too large"] * 2, error
    assert names(tmp_path) == ["file", "lines"]
    assert (tmp_path / "file").read_bytes() == OLD
    assert read(tmp_path / "lines") == ([1, 2], [])


@pytest.mark.kills
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_without_room(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        storage.write(tmp_path / "file", OLD)
        with pytest.raises(OSError, match="No space left"):  # noqa: PT012 - the line that no longer fits
            for number in range(10_000):
                storage.append_json(tmp_path / "lines", {"n": number, "long": "x" * 100})
        with pytest.raises(OSError, match="No space left"):
            storage.write(tmp_path / "file", NEW)
        assert names(tmp_path) == ["file", "lines"]
        assert (tmp_path / "file").read_bytes() == OLD
        assert read(tmp_path / "lines") == (list(range(number)), [])
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def read(path: Path) -> tuple[list[Any], list[int]]:
    found = storage.read_json_lines(path)
    return [line["n"] for line in found.documents], found.damaged


def test_the_next_append_repairs_a_line_torn_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert read(path) == ([], [])
    lines = [json.dumps({"n": n, "of": "ä 🍞"}, ensure_ascii=False).encode() + b"\n" for n in (1, 2)]
    for size in range(len(lines[1]) + 1):
        path.write_bytes(lines[0] + lines[1][:size])
        whole = [1, 2] if size >= len(lines[1]) - 1 else [1]  # one that only lacks its end is whole
        assert read(path) == (whole, [])
        storage.append_json(path, {"n": 3})
        assert read(path) == ([*whole, 3], [])
        assert path.read_bytes().endswith(b'\n{"n": 3}\n')
    path.write_bytes(lines[0] + b'{"n": "' + b"x" * 200_000)  # longer than a block that is read
    storage.append_json(path, {"n": 3})
    assert read(path) == ([1, 3], [])


def test_a_file_with_a_second_name_stays_as_it_is_under_this_name(tmp_path: Path) -> None:
    path, backup = tmp_path / "lines", tmp_path / "backup"
    path.write_bytes(b'{"n": 1}\n')
    os.link(path, backup)
    path.chmod(0o664)
    storage.append_json(path, {"n": 2})
    assert (read(path), read(backup)) == (([1, 2], []), ([1], []))
    assert path.stat().st_mode == backup.stat().st_mode
    backup.unlink()
    os.link(path, backup)
    with storage.open_to_write(path) as file:
        file.truncate(0)
    assert (read(path), read(backup)) == (([], []), ([1, 2], []))
    assert names(tmp_path) == ["backup", "lines"]


def test_a_line_without_an_object_is_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"n": 1}\n\n\xff\xfe\n[1]\n{"n": \n' + b"[" * 50_000 + b'\n{"n": 2}\nnull')
    assert read(path) == ([1, 2], [3, 4, 5, 6])
    storage.append_json(path, {"n": 3})
    assert read(path) == ([1, 2, 3], [3, 4, 5, 6])


APPENDING = """
path, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(first, last):
    with storage.lock(path.with_name("lock")):
        storage.append_json(path, {"n": number})
"""


def test_two_processes_append_under_a_lock_and_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for writer in [python(APPENDING, path, first, first + 100) for first in (0, 100)]:
        _, error = writer.communicate()
        assert writer.returncode == 0, error
    found, damaged = read(path)
    assert (sorted(found), damaged) == (list(range(200)), [])


HOLDING = """
with storage.lock(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_lock_that_cannot_be_made_names_its_folder_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/an/absolute/runs/mine/.lock")

    monkeypatch.setattr("filelock.FileLock.acquire", read_only)
    with pytest.raises(OSError, match="Read-only") as error, storage.lock(Path("runs/mine/.lock")):
        pass
    assert (error.value.errno, error.value.filename) == (errno.EROFS, "runs/mine")


def test_a_lock_excludes_and_ends_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()  # left by an earlier process
    with storage.lock(lock, seconds=0), pytest.raises(TimeoutError), storage.lock(lock, seconds=0):
        pass
    holder = python(HOLDING, lock)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(TimeoutError), storage.lock(lock, seconds=0.1):
        pass
    holder.kill()
    holder.communicate()
    with storage.lock(lock, seconds=0):
        pass


def test_a_disk_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    monkeypatch.setattr(storage, "EMPTY_LOCK_SECONDS", 0.3)
    lock = tmp_path / "lock"
    with pytest.warns(UserWarning, match="flock not supported"), storage.lock(lock):
        pass
    line = pytest.raises(InputError, match="remove the file if no process uses this folder")
    lock.touch()  # copied from a disk with flock, or held by a machine that has flock
    with pytest.warns(UserWarning, match="flock"), line, storage.lock(lock):
        pass
    lock.write_text("12741\nnode17\n4592\n")  # of a process on another machine, perhaps killed
    with pytest.warns(UserWarning, match="flock"), line, storage.lock(lock, seconds=0):
        pass
    ended = Timer(0.8, lock.unlink)  # the process releases it after more than EMPTY_LOCK_SECONDS
    ended.start()
    with pytest.warns(UserWarning, match="flock"), storage.lock(lock):
        ended.join()


def test_a_disk_that_cannot_flush_folders_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", of_folders)
    storage.write_text(tmp_path / "file", "text")
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path)
    with refused("is the root of a disk, which cannot be replaced; give a new folder in it, such as"):
        storage.require_free(tmp_path)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As a device is: a report to /dev/null by root once made a plain file of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    storage.write(pipe, b"page")
    assert os.read(reader, 100) == b"page"
    os.close(reader)
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_only_regular_files_of_a_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"four")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert storage.read(tmp_path / name, most=4) == b"four"
    for path, error in (
        ("pipe", "a pipe or a device"),
        ("file", "larger than 3 bytes"),
        ("/dev/zero", "a pipe or a de"),
    ):
        with pytest.raises(OSError, match=error):
            storage.read(tmp_path / path, most=3)
    with pytest.raises(IsADirectoryError):
        storage.read(tmp_path)
    for name in ("a\0b", "\ud800"):  # no file can have this name
        with pytest.raises(FileNotFoundError):
            storage.read(tmp_path / name)


def test_a_link_is_not_written_to_and_a_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    with refused("link: this is a link to target"):
        storage.write_text(tmp_path / "link", "new")
    with refused("pipe: cannot be written: a pipe that nobody reads"):
        storage.write_text(tmp_path / "pipe", "new")
    (tmp_path / "folder").mkdir()
    for name, kind in (("link", "a link to target"), ("pipe", "a pipe or a device"), ("folder", "a folder")):
        with refused(f"{name}: this is {kind}"):
            storage.append(tmp_path / name, b"new")
        with refused(f"{name}: this is {kind}"), storage.lock(tmp_path / name):
            pass
    (tmp_path / "away").symlink_to("unmounted")
    with refused("away: a link to unmounted, which is not a folder"):
        storage.make_folder(tmp_path / "away")
    assert (tmp_path / "target").read_text() == "old"


def test_a_disk_without_room_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert not storage.is_full(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    assert storage.is_full(tmp_path)


def test_half_a_surrogate_pair_is_refused_in_files_that_are_read_again_and_escaped_in_pages(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'c\\udcff' is not valid Unicode"):
        storage.write_text(tmp_path / "recipe.toml", "c\udcff")
    assert not list(tmp_path.iterdir())
    storage.write_page(tmp_path / "page.html", "<!doctype html>c\udcff")
    assert r">c\udcff" in (tmp_path / "page.html").read_text()


def test_a_page_that_was_edited_is_not_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for text in ("1\n", "2"):
        storage.write_page(page, f"<!doctype html>{text}")
        page.write_bytes(page.read_bytes().replace(b"\n", b"\r\n"))  # as git may do
    storage.write_page(page, "<!doctype html>2")
    written = page.read_text()
    for edited in (f"{written}<p>my notes</p>", written.replace("2", "3", 1), "<!doctype html>mine", "mine"):
        page.write_text(edited)
        with pytest.raises(InputError, match=r"page\.html was not written by leaven, or was edited since; rename it"):
            storage.write_page(page, "<!doctype html>4")
        assert page.read_text() == edited


def test_a_path_that_cannot_be_looked_at_is_no_link_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Any, **_: Any) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    (tmp_path / "link").symlink_to("away")
    with pytest.raises(InputError, match=r"link is a link to away, which is missing .*; bring it back"):
        storage.require_target(tmp_path / "link" / "file", "bring it back")
    monkeypatch.setattr(os, "lstat", stale)
    monkeypatch.setattr(os, "stat", stale)
    storage.require_target(tmp_path / "link" / "file", "bring it back")


def test_a_json_key_that_is_there_twice_is_refused() -> None:
    nested, outer = '{"text": "a", "meta": {"text": "b", "text": "c"}}', '{"text": "a", "lr": 1, "lr": 2}'
    for text in (nested, outer):
        with pytest.raises(InputError, match="2 times; keep one"):
            storage.foreign_json(text)
    # With keys, only these keys of the outermost object count.
    assert storage.foreign_json(nested, ("text",)) == {"text": "a", "meta": {"text": "c"}}
    assert storage.foreign_json(outer, ("text",)) == {"text": "a", "lr": 2}
    with pytest.raises(InputError, match='key "lr" 2 times'):
        storage.foreign_json(outer, ("text", "lr"))
    assert storage.foreign_json('[{"a": 1}, 2]', ("a",)) == [{"a": 1}, 2]
