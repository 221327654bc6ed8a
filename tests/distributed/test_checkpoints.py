"""Checkpoints of many processes: any cutting in, any cutting out; whole or not there, and the same for all."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.distributed.in_threads import together
from torch import Tensor

import leaven.training.checkpoint as module
from leaven.distributed.exchange import Exchange, Unheard
from leaven.distributed.pieces import Place, cut
from leaven.distributed.world import World
from leaven.training.checkpoint import (
    Checkpoint,
    NotSaved,
    Progress,
    checkpoints,
    read_checkpoint,
    tokens_of,
    write_checkpoint,
)
from leaven.training.keeper import Keeper, Saved
from leaven.training.rewind import Rewind

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape

TENSORS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "vector": torch.arange(7),
    "matrix": torch.randn(6, 5),
    "half": torch.randn(3, 4, 2).bfloat16(),
}


@st.composite
def cuttings(draw: st.DrawFn, shape: tuple[int, ...], most: int) -> list[Block]:
    """Blocks that make up a tensor, none or some of them empty; not only grids."""
    blocks: list[Block] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1)) if shape else 0):
        offset, size = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        rest = size[dim] - at
        blocks.append((offset, (*size[:dim], at, *size[dim + 1 :])))
        blocks.append(((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], rest, *size[dim + 1 :])))
    return blocks


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cutting_gives_the_same_bits_in_any_other(data: st.DataObject) -> None:
    size, readers = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    owned: list[dict[str, tuple[Tensor, Place]]] = [{} for _ in range(size)]
    for name, tensor in TENSORS.items():
        shape = tuple(tensor.shape)
        blocks = data.draw(cuttings(shape, size))
        for rank, (offset, part) in zip(data.draw(st.permutations(range(size))), blocks, strict=False):
            owned[rank][name] = cut(tensor, offset, part), Place(shape, offset)

    def write(world: World) -> Path:
        mine = owned[world.rank]
        model = {name: piece for name, (piece, _) in mine.items()}
        optimizer = {f"exp_avg.{name}": -piece for name, (piece, _) in mine.items()}
        places = {name: place for name, (_, place) in mine.items()}
        places |= {f"exp_avg.{name}": place for name, place in places.items()}
        return write_checkpoint(
            folder, Checkpoint(Progress(1, 256), model, optimizer, places=places), Exchange(world)
        )

    wanted = {name: data.draw(cuttings(tuple(tensor.shape), 4)) for name, tensor in TENSORS.items()}

    def read(world: World) -> None:
        found, damaged = read_checkpoint(folder, world=world)
        assert found is not None
        assert not damaged
        assert sorted(found.model) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            same(found.model[name], tensor)
            same(found.optimizer[f"exp_avg.{name}"], -tensor)
            assert found.model.shape(name) == tuple(tensor.shape)
            for offset, shape in wanted[name]:
                same(found.model.piece(name, offset, shape), cut(tensor, offset, shape))

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        together(size, write)
        together(readers, read)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


# Of what follows, each process holds some rows of one matrix, of its moments, and rank 0 a number.


def rows(step: int, rank: int, size: int) -> Checkpoint:
    whole = torch.randn(12, 100, generator=torch.Generator().manual_seed(step))
    own = cut(whole, (rank * 12 // size, 0), (12 // size, 100))
    place = Place((12, 100), (rank * 12 // size, 0))
    number = {"step.w": torch.tensor(float(step))} if rank == 0 else {}
    return Checkpoint(
        Progress(step, step * 256, 1.0),
        {"w": own},
        number | {"exp_avg.w": own * 2},
        {"guard": {"since": None}},
        places={"w": place, "exp_avg.w": place, "step.w": Place((), ())},
    )


def write_all(folder: Path, step: int, size: int, rewinds: tuple[Rewind, ...] = ()) -> Path:
    def body(world: World) -> Path:
        return write_checkpoint(folder, replace(rows(step, world.rank, size), rewinds=rewinds), Exchange(world))

    return together(size, body)[0]


def steps(folder: Path) -> list[int]:
    return [tokens_of(path) // 256 for path in checkpoints(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_there(tmp_path: Path) -> None:
    back = (Rewind(512, 512, 1024, attempt=1),)
    path = write_all(tmp_path, 3, 2, back)
    files = [f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)]
    assert names(tmp_path) == ["tokens-000000000000768"]
    assert names(path) == [*files, "state.json"]
    state = json.loads((path / "state.json").read_text())
    assert sorted(state["files"]) == files
    assert state["tensors"]["model"]["w"] == {
        "dtype": "float32",
        "shape": [12, 100],
        "blocks": [[files[0], [0, 0], [6, 100]], [files[1], [6, 0], [6, 100]]],
    }
    found, _ = read_checkpoint(tmp_path)
    assert found is not None
    assert (found.progress, found.rewinds) == (Progress(3, 768, 1.0), back)
    assert found.state == {"guard": {"since": None}}
    assert float(found.optimizer["step.w"]) == 3


def test_only_the_files_of_a_piece_are_read(tmp_path: Path) -> None:
    path = write_all(tmp_path, 1, 4)
    found, _ = read_checkpoint(tmp_path)
    assert found is not None
    for rank in (1, 4):
        (path / f"model-0000{rank}-of-00004.safetensors").unlink()
    expected = rows(1, 0, 1).model["w"]
    same(found.model.piece("w", (4, 10), (3, 20)), expected[4:7, 10:30])
    assert "w" in found.model
    with pytest.raises(OSError, match="model-00001-of-00004"):
        found.model["w"]


def shifted(rank: int, by: int) -> Callable[[Checkpoint, int], Checkpoint]:
    def change(checkpoint: Checkpoint, own: int) -> Checkpoint:
        place = checkpoint.places["w"]
        moved = Place(place.shape, (place.offset[0] + by, 0))
        return replace(checkpoint, places={**checkpoint.places, "w": moved}) if own == rank else checkpoint

    return change


def without_number(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    return replace(checkpoint, optimizer={"exp_avg.w": checkpoint.optimizer["exp_avg.w"]})


def doubled(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    return replace(checkpoint, model={"w": checkpoint.model["w"].double()}) if rank == 2 else checkpoint


def twice(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    return replace(checkpoint, optimizer=dict(checkpoint.optimizer) | {"step.w": torch.tensor(1.0)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shifted(1, 1), "w: a part of it is owned by nobody"),
        (shifted(0, 4), "w: a part of it is owned by nobody"),
        (shifted(2, 1), r"w: a block of it, \(\(9, 13\), \(0, 100\)\), is not within \(12, 100\)"),
        (shifted(0, -1), r"w: a block of it, \(\(-1, 3\), \(0, 100\)\), is not within"),
        (twice, "step.w: a part of it is owned twice"),
        (without_number, "step.w: owned by nobody; rank 0 holds it for others"),
        (doubled, r"w: its blocks are of different tensors, float32 \(12, 100\) and float64"),
    ],
)
def test_what_is_no_whole_tensor_is_not_saved(
    tmp_path: Path, change: Callable[[Checkpoint, int], Checkpoint], said: str
) -> None:
    def body(world: World) -> str:
        with pytest.raises(NotSaved, match=said) as error:
            write_checkpoint(tmp_path, change(rows(1, world.rank, 3), world.rank), Exchange(world))
        return str(error.value)

    assert len(set(together(3, body))) == 1
    assert names(tmp_path) == []


def test_overlapping_pieces_are_found(tmp_path: Path) -> None:
    """Rows 0 to 6 and 4 to 12: every row is there, two of them twice."""

    def body(world: World) -> None:
        start, end = ((0, 6), (4, 12))[world.rank]
        made = Checkpoint(
            Progress(1, 256), {"w": torch.zeros(end - start, 5)}, {}, places={"w": Place((12, 5), (start, 0))}
        )
        with pytest.raises(NotSaved, match="w: a part of it is owned twice"):
            write_checkpoint(tmp_path, made, Exchange(world))

    together(2, body)


def saved(keeper: Keeper, checkpoint: Checkpoint) -> Saved:
    keeper.save(checkpoint, checkpoint.progress.tokens)
    outcome = keeper.outcome(wait=True)
    assert outcome is not None
    return outcome


def test_the_failure_of_one_is_that_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file, full = module.save_file, {"optimizer-00002-of-00003.safetensors"}

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        if path.name in full:
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(module, "save_file", save)

    def body(world: World) -> list[Saved]:
        keeper = Keeper(tmp_path, 256, 2, None, world=world)
        outcomes = [saved(keeper, rows(1, world.rank, 3))]
        world.barrier()
        if world.first:
            assert names(tmp_path) == []
            full.clear()
        world.barrier()
        outcomes += [saved(keeper, rows(step, world.rank, 3)) for step in (1, 2, 3)]
        keeper.close()
        return outcomes

    first, *others = together(3, body)
    assert others == [first, first]
    assert [outcome.error for outcome in first] == ["rank 1: No space left on device", None, None, None]
    assert names(tmp_path) == ["tokens-000000000000512", "tokens-000000000000768"]


def test_one_that_is_not_heard_of_and_comes_late(tmp_path: Path) -> None:
    """What it then writes does not stay, and it comes to what the others have come to."""

    def body(world: World) -> str:
        exchange = Exchange(world)
        if world.first:
            threading.Thread(target=lambda: (there(exchange, 1), exchange.hurry(0))).start()
        if world.rank == 2:
            there(exchange, "decided")
        with pytest.raises(NotSaved) as error:
            write_checkpoint(tmp_path, rows(1, world.rank, 3), exchange)
        return str(error.value)

    def there(exchange: Exchange, who: int | str) -> None:
        while not exchange._store.check([exchange._key(who)]):
            time.sleep(0.01)

    assert set(together(3, body)) == {"rank 2: nothing heard of it"}
    assert names(tmp_path) == []


def test_a_folder_that_is_not_the_same_for_all(tmp_path: Path) -> None:
    def body(world: World) -> str:
        folder = tmp_path / f"node{world.rank // 2}"
        with pytest.raises(NotSaved) as error:
            write_checkpoint(folder, rows(1, world.rank, 4), Exchange(world))
        return str(error.value)

    (said,) = set(together(4, body))
    assert said.startswith("rank 2: model-00003-of-00004.safetensors is not what rank 0 finds")
    assert names(tmp_path / "node0") == names(tmp_path / "node1") == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "exchange", "state"])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_damaged_one_is_passed_over_by_all(tmp_path: Path, damage: str, readers: int) -> None:
    write_all(tmp_path, 1, 3)
    newest = write_all(tmp_path, 2, 4)
    file = newest / "optimizer-00003-of-00004.safetensors"
    content = file.read_bytes()
    match damage:
        case "flip":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "truncate":
            file.write_bytes(content[:-10])
        case "remove":
            file.unlink()
        case "exchange":  # files of another rank, each whole
            shutil.copy(newest / "optimizer-00004-of-00004.safetensors", file)
        case "state":
            (newest / "state.json").write_text((newest / "state.json").read_text().replace("[6, 0]", "[3, 0]"))

    def body(world: World) -> None:
        found, damaged = read_checkpoint(tmp_path, world=world)
        assert found is not None
        assert found.progress.step == 1
        same(found.model["w"], rows(1, 0, 1).model["w"])
        assert damaged == [newest]

    together(readers, body)


def test_all_read_what_the_first_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may show a folder to one machine later than to another."""
    for step in (1, 2):
        write_all(tmp_path, step, 2)

    def body(world: World) -> int:
        ahead = tmp_path if world.first else tmp_path / "not yet there"
        found, _ = read_checkpoint(ahead, world=world)
        assert found is not None
        return found.progress.step

    assert together(2, body) == [2, 2]


def test_others_hear_of_it_when_the_old_ones_are_gone(tmp_path: Path) -> None:
    """Where a run goes back to depends on which there are: all must see the same."""
    done: list[bool] = []

    def tidy() -> None:
        time.sleep(0.1)
        done.append(True)

    def body(world: World) -> int:
        write_checkpoint(tmp_path, rows(1, world.rank, 3), Exchange(world), tidy)
        return len(done)

    assert together(3, body) == [1, 1, 1]


def test_nothing_is_dropped_while_one_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear, cleared = Keeper._clear, []
    monkeypatch.setattr(Keeper, "_clear", lambda keeper, *rest: (cleared.append(1), clear(keeper, *rest)))
    for step in (1, 2):
        write_all(tmp_path, step, 2)
    write_checkpoint(tmp_path, rows(3, 0, 1))  # of one process: all of them go the same way
    leftover = tmp_path / ".tokens-000000000000512.0badcafe-7.tmp"
    leftover.mkdir()
    (leftover / "model-00001-of-00002.safetensors").write_bytes(b"stale")

    def body(world: World) -> list[int]:
        keeper = Keeper(tmp_path, 256, 2, None, world=world)
        if not world.first:
            time.sleep(0.1)
            assert steps(tmp_path) == [1, 2, 3]
        keeper.clear(300)
        return steps(tmp_path)

    assert together(2, body) == [[1], [1]]
    assert len(cleared) == 1
    assert names(tmp_path) == ["tokens-000000000000256"]


def test_what_a_killed_attempt_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Killed between the files and state.json; the next start has fewer processes."""

    class Killed(BaseException):
        pass

    def die(*arguments: Any) -> None:
        raise Killed

    def killed(world: World) -> None:
        exchange = Exchange(world)
        if not world.first:
            exchange.hurry(0)
        with pytest.raises(Killed if world.first else Unheard):
            write_checkpoint(tmp_path, rows(2, world.rank, 3), exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_commit", die)
        together(3, killed)
    (leftover,) = names(tmp_path)
    assert len(names(tmp_path / leftover)) == 6
    assert read_checkpoint(tmp_path) == (None, [])
    assert len(names(write_all(tmp_path, 2, 2))) == 5
    found, damaged = read_checkpoint(tmp_path)
    assert found is not None
    assert not damaged


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
import leaven.training.checkpoint as module
from leaven.distributed.world import World
from leaven.training import keeper as keeping
from tests.distributed.test_checkpoints import rows, saved

class Forked(World):
    def shared(self, value):
        if self.first:
            self.store.set("shared", value)
        return self.store.get("shared").decode()

def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def child(folder, rank, victim, where):
    store = dist.FileStore(f"{folder}.store", 3)
    keeper = keeping.Keeper(folder, 256, 2, None, world=Forked(rank, 3, None, store))
    assert saved(keeper, rows(1, rank, 3)).error is None
    if rank == victim:
        setattr(module, where, die)
    keeper.save(rows(2, rank, 3), 512)
    while not Path(f"{folder}.dead").exists():  # the others notice, and give up
        time.sleep(0.01)
    keeping.GIVE_UP = 1.0 if rank else 0.5
    keeper.close()
    try:
        outcome = keeper.outcome(wait=True).error
    except RuntimeError as error:
        outcome = str(error)
    Path(f"{folder}-{rank}").write_text(str(outcome))

folders = {}
for number, (victim, where) in enumerate([(1, "_synced"), (0, "_commit"), (0, "_sync_folder")]):
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
    """Three processes, one of which is killed in the middle of the second checkpoint, in three places."""
    folder, root = tmp_path_factory.mktemp("killed"), Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=True, cwd=root)
    return folder


@pytest.mark.parametrize("number", [0, 1, 2])
def test_killed_while_saving(killed: Path, number: int) -> None:
    folder = killed / str(number)
    said: dict[int, Any] = {
        rank: (killed / f"{number}-{rank}").read_text() for rank in range(3) if (killed / f"{number}-{rank}").exists()
    }
    if number == 0:
        assert said[0].startswith("rank 1: nothing heard of it")
        assert sorted(said) == [0, 2]
    else:
        assert all("rank 0 does not answer" in said[rank] for rank in (1, 2))
        assert len([name for name in names(folder) if name.endswith(".tmp")]) == 1
    found, damaged = read_checkpoint(folder)
    assert found is not None
    assert not damaged
    assert found.progress.step == 1
    same(found.model["w"], rows(1, 0, 1).model["w"])

    def restarted(world: World) -> str | None:
        keeper = Keeper(folder, 256, 2, None, world=world)
        keeper.clear(256)
        error = saved(keeper, rows(2, world.rank, 2)).error  # on fewer processes
        keeper.close()
        return error

    assert together(2, restarted) == [None, None]
    assert names(folder) == ["tokens-000000000000256", "tokens-000000000000512"]
