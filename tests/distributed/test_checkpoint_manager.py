"""Checkpoints of several processes that are written while training continues: order, errors and kills."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.cut_up import names, rows, same, saved, steps, whole_checkpoint, write_all
from tests.distributed.in_threads import together
from torch import Tensor

import leaven.training.checkpoint as module
from leaven.distributed.exchange import Exchange
from leaven.distributed.process_group import ProcessGroup
from leaven.errors import ProcessLost
from leaven.training.checkpoint import CheckpointManager, Saved, read_checkpoint, write_checkpoint
from leaven.training.rewind import Rewind


def test_all_processes_get_the_error_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file, full = module.save_file, {"optimizer-00002-of-00003.safetensors"}

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        if path.name in full:
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(module, "save_file", save)

    def body(group: ProcessGroup) -> list[Saved]:
        manager = CheckpointManager(tmp_path, 256, 2, None, group=group)
        outcomes = [saved(manager, rows(1, group.rank, 3))]
        group.barrier()
        if group.is_first:
            assert names(tmp_path) == []
            full.clear()
        group.barrier()
        outcomes += [saved(manager, rows(step, group.rank, 3)) for step in (1, 2, 3)]
        manager.close()
        return outcomes

    first, *others = together(3, body)
    assert others == [first, first]
    assert [outcome.error for outcome in first] == ["rank 1: No space left on device", None, None, None]
    assert names(tmp_path) == ["tokens-000000000000512", "tokens-000000000000768"]


def test_save_returns_after_old_checkpoints_are_removed(tmp_path: Path) -> None:
    """All processes must see the same checkpoints, because these decide where a run rewinds to."""
    done: list[bool] = []

    def tidy() -> None:
        time.sleep(0.1)
        done.append(True)

    def body(group: ProcessGroup) -> int:
        write_checkpoint(tmp_path, rows(1, group.rank, 3), Exchange(group), tidy)
        return len(done)

    assert together(3, body) == [1, 1, 1]


def test_nothing_is_removed_while_a_process_still_reads(tmp_path: Path) -> None:
    for step in (1, 2):
        write_all(tmp_path, step, 2)
    write_checkpoint(tmp_path, rows(3, 0, 1))  # written by one process
    leftover = tmp_path / ".tokens-000000000000512.0badcafe-7.tmp"
    leftover.mkdir()
    (leftover / "model-00001-of-00002.safetensors").write_bytes(b"stale")

    def body(group: ProcessGroup) -> list[int]:
        manager = CheckpointManager(tmp_path, 256, 2, None, group=group)
        if not group.is_first:
            time.sleep(0.1)
            assert steps(tmp_path) == [1, 2, 3]
        manager.clear(300, rewinds=[Rewind(300, 0, 0)])
        return steps(tmp_path)

    assert together(2, body) == [[1], [1]]
    assert names(tmp_path) == ["tokens-000000000000256"]


def test_leftovers_of_a_killed_save_are_not_used(tmp_path: Path) -> None:
    """The save is killed after the tensor files are written and before state.json. The next start has fewer
    processes."""

    class Killed(BaseException):
        pass

    def die(*arguments: Any) -> None:
        raise Killed

    def killed(group: ProcessGroup) -> None:
        exchange = Exchange(group)
        if not group.is_first:
            exchange.shorten_timeout(0)
        with pytest.raises(Killed if group.is_first else ProcessLost):
            write_checkpoint(tmp_path, rows(2, group.rank, 3), exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_commit", die)
        together(3, killed)
    (leftover,) = names(tmp_path)
    assert len(names(tmp_path / leftover)) == 6
    assert read_checkpoint(tmp_path) == (None, [])
    assert len(names(write_all(tmp_path, 2, 2))) == 5
    whole_checkpoint(tmp_path)


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
import leaven.training.checkpoint as module
from leaven.distributed.process_group import ProcessGroup
from tests.distributed.cut_up import rows, saved

class Forked(ProcessGroup):
    def broadcast(self, value):
        if self.is_first:
            self.store.set("shared", value)
        return self.store.get("shared").decode()

def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def child(folder, rank, victim, where):
    store = dist.FileStore(f"{folder}.store", 3)
    manager = module.CheckpointManager(folder, 256, 2, None, group=Forked(rank, 3, None, store))
    assert saved(manager, rows(1, rank, 3)).error is None
    if rank == victim:
        setattr(module, where, die)
    manager.save(rows(2, rank, 3), 512)
    while not Path(f"{folder}.dead").exists():  # the others notice, and give up
        time.sleep(0.01)
    module.GIVE_UP = 1.0 if rank else 0.5
    manager.close()
    try:
        outcome = manager.outcome(wait=True).error
    except RuntimeError as error:
        outcome = str(error)
    Path(f"{folder}-{rank}").write_text(str(outcome))

folders = {}
for number, (victim, where) in enumerate([(1, "sync_file"), (0, "_commit"), (0, "place_folder")]):
    getattr(module, where)  # fail at once if the name is wrong: the wait below would not end
    folder = Path(sys.argv[1]) / str(number)
    for rank in range(3):
        process = os.fork()
        if not process:
            child(folder, rank, victim, where)
            os._exit(0)
        folders[process] = folder
for _ in range(len(folders)):
    process, status = os.wait()
    if os.WIFSIGNALED(status):
        Path(f"{folders[process]}.dead").touch()
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three processes save two checkpoints. One of them is killed during the second, in one of three places."""
    folder, root = tmp_path_factory.mktemp("killed"), Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=True, cwd=root)
    return folder


@pytest.mark.kills
@pytest.mark.parametrize("number", [0, 1, 2])
def test_killed_while_saving(killed: Path, number: int) -> None:
    folder = killed / str(number)
    said: dict[int, Any] = {
        rank: (killed / f"{number}-{rank}").read_text() for rank in range(3) if (killed / f"{number}-{rank}").exists()
    }
    if number == 0:
        assert said[0].startswith("rank 1: does not answer")
        assert sorted(said) == [0, 2]
    else:
        assert all("rank 0 does not answer" in said[rank] for rank in (1, 2))
        assert len([name for name in names(folder) if name.endswith(".tmp")]) == 1
    found = whole_checkpoint(folder)
    assert found.progress.step == 1
    same(found.model["w"], rows(1, 0, 1).model["w"])

    def restarted(group: ProcessGroup) -> str | None:
        manager = CheckpointManager(folder, 256, 2, None, group=group)
        manager.clear(256, rewinds=[Rewind(256, 0, 0)])
        error = saved(manager, rows(2, group.rank, 2)).error  # on fewer processes
        manager.close()
        return error

    assert together(2, restarted) == [None, None]
    assert names(folder) == ["tokens-000000000000256", "tokens-000000000000512"]
