"""Checkpoints of several processes: any split is read in any other, and incomplete or damaged ones are not used."""

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.distributed.cut_up import names, rows, same, whole_checkpoint, write_all
from tests.distributed.in_threads import together
from torch import Tensor

from leaven.distributed.exchange import Exchange
from leaven.distributed.pieces import Place, cut
from leaven.distributed.process_group import ProcessGroup
from leaven.errors import InputError
from leaven.training import checkpoint
from leaven.training.checkpoint import (
    Checkpoint,
    NotSaved,
    Progress,
    read_checkpoint,
    write_checkpoint,
)
from leaven.training.checkpoint_tensors import SavedBlock, SavedTensor, merged
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
    """Return blocks that together form a tensor. Blocks may be empty, and need not form a grid."""
    blocks: list[Block] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1)) if shape else 0):
        offset, size = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        rest = size[dim] - at
        blocks.append((offset, (*size[:dim], at, *size[dim + 1 :])))
        blocks.append(((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], rest, *size[dim + 1 :])))
    return blocks


@pytest.mark.long
@settings(max_examples=40)
@given(data=st.data())
def test_any_split_is_read_in_any_other(data: st.DataObject) -> None:
    size, readers = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    owned: list[dict[str, tuple[Tensor, Place]]] = [{} for _ in range(size)]
    for name, tensor in TENSORS.items():
        shape = tuple(tensor.shape)
        blocks = data.draw(cuttings(shape, size))
        for rank, (offset, part) in zip(data.draw(st.permutations(range(size))), blocks, strict=False):
            owned[rank][name] = cut(tensor, offset, part), Place(shape, offset)

    def write(group: ProcessGroup) -> Path:
        mine = owned[group.rank]
        model = {name: piece for name, (piece, _) in mine.items()}
        optimizer = {f"exp_avg.{name}": -piece for name, (piece, _) in mine.items()}
        places = {name: place for name, (_, place) in mine.items()}
        places |= {f"exp_avg.{name}": place for name, place in places.items()}
        return write_checkpoint(
            folder, Checkpoint(Progress(1, 256), model, optimizer, places=places), Exchange(group)
        )

    wanted = {name: data.draw(cuttings(tuple(tensor.shape), 4)) for name, tensor in TENSORS.items()}

    def read(group: ProcessGroup) -> None:
        found = whole_checkpoint(folder, group=group)
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


def fault_of(shape: tuple[int, ...], blocks: list[Block]) -> str | None:
    saved = [{"w": SavedTensor("float32", shape, (SavedBlock("file", *block),))} for block in blocks]
    try:
        merged([{"w": SavedTensor("float32", shape, ())}, *saved])
    except ValueError as error:
        return str(error)
    return None


@settings(max_examples=200)
@given(data=st.data())
def test_blocks_are_complete_if_every_element_counts_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    blocks = data.draw(cuttings(shape, 6))
    if data.draw(st.booleans()):
        blocks.pop(data.draw(st.integers(0, len(blocks) - 1)))
    if data.draw(st.booleans()):
        ends = [sorted(data.draw(st.tuples(st.integers(0, most), st.integers(0, most)))) for most in shape]
        blocks.append((tuple(start for start, _ in ends), tuple(end - start for start, end in ends)))
    count = torch.zeros(shape)
    for offset, part in blocks:
        cut(count, offset, part).add_(1)
    expected = "w: a part of this tensor is saved by no process" if (count == 0).any() else None
    assert fault_of(shape, blocks) == ("w: a part of this tensor is saved twice" if (count > 1).any() else expected)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (4096, 1)])
def test_thousands_of_blocks_are_checked_in_less_than_a_second(rows: int, columns: int) -> None:
    blocks: list[Block] = [((4 * row, 8 * column), (4, 8)) for row in range(rows) for column in range(columns)]
    began = time.process_time()
    assert fault_of((4 * rows, 8 * columns), blocks) is None
    assert time.process_time() - began < 1  # about 0.1 s; comparing all pairs would take 10 s


def test_files_and_state_of_several_processes(tmp_path: Path) -> None:
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
    found = whole_checkpoint(tmp_path)
    assert (found.progress, found.rewinds) == (Progress(3, 768, 1.0), back)
    assert found.state == {"guard": {"since": None}}
    assert float(found.optimizer["step.w"]) == 3


def test_only_the_files_of_a_piece_are_read(tmp_path: Path) -> None:
    path = write_all(tmp_path, 1, 4)
    found = whole_checkpoint(tmp_path)
    found.model._files.clear()  # as if other processes had checked these files
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


def overlapping(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    return replace(checkpoint, model={"w": torch.zeros(5, 100)}) if rank == 1 else checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shifted(1, 1), "w: a part of this tensor is saved twice"),
        (shifted(2, 1), r"w: block \(\(9, 13\), \(0, 100\)\) is not within \(12, 100\)"),
        (overlapping, "w: a part of this tensor is saved twice"),
        (without_number, "step.w: no process saves this tensor; rank 0 has a replica"),
        (doubled, r"w: the blocks of this tensor differ in dtype or shape: float32 \(12, 100\) and float64"),
    ],
)
def test_parts_that_do_not_make_a_whole_tensor_are_not_saved(
    tmp_path: Path, change: Callable[[Checkpoint, int], Checkpoint], message: str
) -> None:
    def body(group: ProcessGroup) -> str:
        with pytest.raises(NotSaved, match=message) as error:
            write_checkpoint(tmp_path, change(rows(1, group.rank, 3), group.rank), Exchange(group))
        return str(error.value)

    assert len(set(together(3, body))) == 1
    assert names(tmp_path) == []


def test_a_process_that_answers_too_late_fails_the_save_on_all(tmp_path: Path) -> None:
    """The files of the late process are removed, and it gets the same error as the others."""

    def body(group: ProcessGroup) -> str:
        exchange = Exchange(group)
        if group.is_first:
            threading.Thread(target=lambda: (there(exchange, 1), exchange.shorten_timeout(0))).start()
        if group.rank == 2:
            there(exchange, "answer")
        with pytest.raises(NotSaved) as error:
            write_checkpoint(tmp_path, rows(1, group.rank, 3), exchange)
        return str(error.value)

    def there(exchange: Exchange, who: int | str) -> None:
        while not exchange._store.check([exchange._key(who)]):
            time.sleep(0.01)

    assert set(together(3, body)) == {"rank 2: does not answer"}
    assert names(tmp_path) == []


def test_processes_that_write_to_different_folders_fail_the_save(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> str:
        folder = tmp_path / f"node{group.rank // 2}"
        with pytest.raises(NotSaved) as error:
            write_checkpoint(folder, rows(1, group.rank, 4), Exchange(group))
        return str(error.value)

    (said,) = set(together(4, body))
    assert said.startswith("rank 2: model-00003-of-00004.safetensors is not the file that rank 0 reads")
    assert names(tmp_path / "node0") == names(tmp_path / "node1") == []


@pytest.mark.parametrize("damage", ["flip", "remove", "exchange", "state"])
def test_all_processes_skip_a_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    write_all(tmp_path, 1, 3)
    newest = write_all(tmp_path, 2, 4)
    file = newest / "optimizer-00003-of-00004.safetensors"
    content = file.read_bytes()
    match damage:
        case "flip":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "remove":
            file.unlink()
        case "exchange":  # files of another rank, each whole
            shutil.copy(newest / "optimizer-00004-of-00004.safetensors", file)
        case "state":
            (newest / "state.json").write_text((newest / "state.json").read_text().replace("[6, 0]", "[3, 0]"))

    def body(group: ProcessGroup) -> None:
        found, damaged = read_checkpoint(tmp_path, group=group)
        assert found is not None
        assert found.progress.step == 1
        same(found.model["w"], rows(1, 0, 1).model["w"])
        assert damaged == [newest]

    together(3, body)


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_checkpoint_that_one_process_sees_late_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    newest, seen, misses = write_all(tmp_path, 1, 2), checkpoint._seen, threading.local()
    monkeypatch.setattr(checkpoint, "SEEN_AFTER", seconds)
    monkeypatch.setattr(checkpoint, "_seen", lambda path: "missing" if next(misses.left, None) else seen(path))

    def body(group: ProcessGroup) -> Any:
        misses.left = iter([1, 1] * (group.rank == 1))
        try:
            return read_checkpoint(tmp_path, group=group)[1]
        except InputError as error:
            return f"{type(error).__name__}: {error}"

    said = (
        f"does not see {newest} as rank 0 does; give all ranks the same run folder (is its disk mounted everywhere?)"
    )
    first, second = together(2, body)
    if seconds:
        assert (first, second) == ([], [])
    else:
        assert first.startswith(f"Settled: another rank {said}")
        assert second.startswith(f"InputError: rank 1 {said}")


def test_checkpoints_that_only_another_process_sees_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the run folder is not mounted on the machine of the first process."""
    write_all(tmp_path, 1, 2)
    monkeypatch.setattr(checkpoint, "SEEN_AFTER", 0)

    def body(group: ProcessGroup) -> str:
        with pytest.raises(InputError) as refused:
            read_checkpoint(tmp_path / "not mounted" if group.is_first else tmp_path, group=group)
        return str(refused.value)

    first, second = together(2, body)
    assert first.startswith("another rank does not see")
    assert second.startswith(f"rank 1 does not see {tmp_path} as rank 0 does")


def test_all_processes_read_the_checkpoint_that_the_first_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may show a folder to one machine later than to another."""
    for step in (1, 2):
        write_all(tmp_path, step, 2)

    def body(group: ProcessGroup) -> int:
        ahead = tmp_path if group.is_first else tmp_path / "not yet there"
        found = whole_checkpoint(ahead, group=group)
        return found.progress.step

    assert together(2, body) == [2, 2]
