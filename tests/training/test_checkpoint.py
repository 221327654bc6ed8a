import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file
from tests.distributed.cut_up import saved, steps, whole_checkpoint

import leaven.training.checkpoint as module
from leaven.errors import InputError
from leaven.training.checkpoint import Checkpoint, CheckpointManager, Progress, read_checkpoint, write_checkpoint
from leaven.training.rewind import Rewind
from leaven.training.run_folder import checkpoints, tokens_of


def checkpoint(step: int, rewinds: tuple[Rewind, ...] = ()) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {"w": torch.randn(100, 100, generator=generator)}
    state = {"guard": {"values": [0.1, 1 / 3], "since": None}}
    return Checkpoint(Progress(step, step * 256, 1.0), tensors, {"exp_avg.w": tensors["w"] * 2}, state, rewinds)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    rewinds = (Rewind(512, 512, 1024, lr=0.5, lr_tokens=100, attempt=1, found_step=4),)
    written = checkpoint(3, rewinds)
    assert write_checkpoint(tmp_path, written).name == "tokens-000000000000768"
    found = whole_checkpoint(tmp_path)
    assert (found.progress, found.state, found.rewinds) == (written.progress, written.state, rewinds)
    assert torch.equal(found.model["w"], written.model["w"])
    assert torch.equal(found.optimizer["exp_avg.w"], written.optimizer["exp_avg.w"])


@pytest.mark.parametrize("damage", ["truncate", "remove", "no json", "list"])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    newest = write_checkpoint(tmp_path, checkpoint(2))
    tensors, state = newest / "model.safetensors", newest / "state.json"
    match damage:
        case "truncate":
            tensors.write_bytes(tensors.read_bytes()[:20_000])
        case "remove":
            tensors.unlink()
        case "no json":
            state.write_bytes(state.read_bytes()[:-9])
        case "list":
            state.write_bytes(b"[1, 2]")
    found, damaged = read_checkpoint(tmp_path)
    assert found.progress.step == 1
    assert damaged == [newest]


def test_a_read_error_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk or a missing permission can be repaired. Using the checkpoint before would lose its steps for
    good."""
    for step in (1, 2):
        write_checkpoint(tmp_path, checkpoint(step))

    def fails(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "_fingerprint", fails)
    with pytest.raises(InputError, match=r"512: cannot be read: Input/output error; make it readable and run"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("function", ["leaven.training.checkpoint.read_state", "leaven.storage.require_file"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, step: int
) -> None:
    """A run writes another checkpoint and removes the newest one: before its first file is opened, or between the two
    times that a file of tensors is opened."""
    newest = [write_checkpoint(tmp_path, checkpoint(n)) for n in range(1, step + 1)][-1]
    original = resolve_name(function)

    def removes(path: Path) -> Any:
        if function.endswith("require_file"):
            original(path)
        if newest.exists():
            write_checkpoint(tmp_path, checkpoint(3))
            shutil.rmtree(newest)
        return original(path) if function.endswith("read_state") else None

    monkeypatch.setattr(function, removes)
    found, damaged = read_checkpoint(tmp_path)
    assert (found.progress.step, damaged) == (3, [])


def test_checkpoints_that_are_always_removed_too_early_are_read_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, checkpoint(1))

    def removes(path: Path) -> NoReturn:
        write_checkpoint(tmp_path, checkpoint(tokens_of(path) // 256 + 1))
        shutil.rmtree(path)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(module, "read_state", removes)
    with pytest.raises(InputError, match="checkpoints were removed while they were read, 10 times; run the same"):
        read_checkpoint(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["tokens-000000000002816"]


def test_any_flipped_bit_is_detected(tmp_path: Path) -> None:
    newest = write_checkpoint(tmp_path, checkpoint(2))
    draw = random.Random(0)
    for _ in range(100):
        file = draw.choice(sorted(newest.iterdir()))
        content = bytearray(file.read_bytes())
        at, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        content[at] ^= bit
        file.write_bytes(content)
        found, _ = read_checkpoint(tmp_path)
        # A flipped bit may turn white space of the JSON into other white space, which changes no value.
        if found is not None:
            assert file.name == "state.json"
            assert chr(content[at]).isspace()
        content[at] ^= bit
        file.write_bytes(content)
    assert read_checkpoint(tmp_path)[0] is not None


@pytest.mark.skipif(os.name == "nt", reason="permissions")
@pytest.mark.parametrize("umask", [0o007, 0o022, 0o077])
def test_the_umask_decides_who_can_read_a_checkpoint(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = write_checkpoint(tmp_path / "checkpoints", checkpoint(1))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    files = dict.fromkeys(("state.json", "model.safetensors", "optimizer.safetensors"), 0o666 & ~umask)
    assert modes == files | {folder.name: 0o777 & ~umask}


def test_undone_checkpoints_are_ignored(tmp_path: Path) -> None:
    back = Rewind(to_tokens=600, skip_from=600, skip_to=700)
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, checkpoint(step))
    found, damaged = read_checkpoint(tmp_path, (back,))
    assert (found.progress.step, damaged) == (2, [])
    write_checkpoint(tmp_path, checkpoint(3, (back,)))  # in the place of the undone one
    found = whole_checkpoint(tmp_path, rewinds=(back,))
    assert found.progress.step == 3
    assert read_checkpoint(tmp_path, (back, Rewind(100, 0, 0)))[0] is None


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    made = CheckpointManager(tmp_path, every_tokens=256, keep=2, keep_every_tokens=None)
    yield made
    made.close()


def save(manager: CheckpointManager, step: int, good: int | None = None) -> None:
    assert saved(manager, checkpoint(step), good and 256 * good).error is None


@pytest.mark.parametrize(
    ("every", "keep", "keep_every", "saved", "kept"),
    [
        (1, 2, None, [(1, 1), (2, 2), (3, 3)], [2, 3]),
        (1, 2, None, [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3)], [3, 5, 6]),  # suspicious since step 4
        (1, 2, None, [(3, 3), (4, 3), (5, 3), (6, 3), (7, 7)], [6, 7]),
        (1, 1, 3, [(n, n) for n in (1, 2, 4, 5, 6, 7, 8, 11, 12)], [4, 6, 11, 12]),
        # A checkpoint of a stop (steps 3 and 5) replaces no scheduled one, and is not the last good one.
        (2, 2, None, [(0, 0), (2, 2), (3, 3)], [0, 2, 3]),
        (2, 2, None, [(0, 0), (2, 2), (3, 3), (4, 4), (5, 5)], [2, 4, 5]),
        (2, 2, None, [(0, 0), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)], [4, 6]),
        (2, 1, None, [(2, 2), (3, 3), (4, 3)], [2, 4]),
        (2, 1, 3, [(2, 2), (3, 3), (4, 4), (6, 6), (8, 8)], [4, 6, 8]),  # step 3 is that of a stop
    ],
)
def test_which_checkpoints_are_kept(
    tmp_path: Path, every: int, keep: int, keep_every: int | None, saved: list[tuple[int, int]], kept: list[int]
) -> None:
    """``saved`` are pairs of a step of 256 tokens and the last good step."""
    manager = CheckpointManager(tmp_path, 256 * every, keep, keep_every and 256 * keep_every)
    for step, good in saved:
        save(manager, step, good)
    manager.close()
    assert steps(tmp_path) == kept


@pytest.mark.parametrize("target", [6, 7])
def test_checkpoints_kept_for_good_stay_if_a_rewind_makes_others_rarer(tmp_path: Path, target: int) -> None:
    """A rewind to one that is kept for good, or to a damaged one after it."""
    for to, every, due in ((0, 1, range(1, 8)), (6, 4, [8])):
        manager = CheckpointManager(tmp_path, 256 * every, 1, 2 * 256)
        manager.clear(
            to * 256, checkpoints(tmp_path)[-1:] if target > to > 0 else (), [Rewind((to and target) * 256, 0, 0)]
        )
        for step in due:
            save(manager, step, step)
        manager.close()
    assert steps(tmp_path) == [2, 4, 6, 8]


def test_the_state_at_the_call_is_written(tmp_path: Path, manager: CheckpointManager) -> None:
    """Training continues at once. It changes its tensors in place while a thread writes the checkpoint."""
    go, write = threading.Event(), module.write_checkpoint

    def slowly(*arguments: Any) -> Path:
        assert go.wait(60)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_checkpoint", slowly)
        one = checkpoint(1)
        manager.save(one, 256)
        assert manager.outcome(wait=False) is None
        one.model["w"].zero_()
        go.set()
        saved = manager.outcome(wait=True)
    assert saved is not None
    assert manager.outcome(wait=True) is None  # each result is returned once
    found = whole_checkpoint(tmp_path)
    assert torch.equal(found.model["w"], checkpoint(1).model["w"])


def test_clear_renames_damaged_and_removes_undone_checkpoints(tmp_path: Path, manager: CheckpointManager) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, checkpoint(step))
    (tmp_path / ".tokens-000000000000999.0badcafe-1.tmp").mkdir()  # of a run that was killed
    with pytest.raises(
        InputError, match=r"512 appeared after the checkpoints were listed .* run the same command again"
    ):
        manager.clear(256, [checkpoints(tmp_path)[-1]])  # a sound one, which no rewind has undone
    assert len(checkpoints(tmp_path)) == 3
    manager.clear(256, [checkpoints(tmp_path)[-1]], [Rewind(256, 0, 0)])
    assert {path.name for path in tmp_path.iterdir()} == {f"damaged-tokens-{768:015}", f"tokens-{256:015}"}


def test_a_checkpoint_that_is_damaged_twice_is_renamed_twice(tmp_path: Path, manager: CheckpointManager) -> None:
    for _ in range(3):
        write_checkpoint(tmp_path, checkpoint(1))
        manager.clear(0, checkpoints(tmp_path))
    name = f"damaged-tokens-{256:015}"
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}-2", f"{name}-3"}


def test_a_checkpoint_is_not_removed_as_it_is_written(tmp_path: Path, manager: CheckpointManager) -> None:
    """Not even if it is not a scheduled one, and a damaged one, which could not be renamed, is newer."""
    for step in (1, 5, 6):
        write_checkpoint(tmp_path, checkpoint(step))
    manager.save(checkpoint(4), good_tokens=0)
    saved = manager.outcome(wait=True)
    assert saved is not None
    assert saved.path in checkpoints(tmp_path)


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_damaged_one(
    tmp_path: Path, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, checkpoint(step))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before it
        manager.clear(256, rewinds=[Rewind(256, 0, 0)])
    assert [tokens_of(path) for path in checkpoints(tmp_path)] == [256]
    manager.clear(256, rewinds=[Rewind(256, 0, 0)])
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_while_old_checkpoints_are_listed_does_not_fail_a_save(
    tmp_path: Path, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(module, "checkpoints", fails)
    save(manager, 1)


def test_a_handwritten_checkpoint_is_read(tmp_path: Path) -> None:
    """The checkpoint has the format of the first version."""
    folder = tmp_path / "tokens-000000000000512"
    folder.mkdir()
    tensors = {"model": {"w": torch.arange(6.0).view(2, 3)}, "optimizer": {"step.w": torch.tensor(2.0)}}
    state: dict[str, Any] = {"step": 2, "tokens": 512, "seconds": 0.5, "format": 2, "rewinds": [], "state": {}}
    state["files"] = {}
    for kind, those in tensors.items():
        file = folder / f"{kind}.safetensors"
        save_file(those, file)
        digest = blake2b(file.read_bytes(), digest_size=16).hexdigest()
        state["files"][file.name] = {"bytes": file.stat().st_size, "blake2b": digest}
    digest = blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
    (folder / "state.json").write_text(json.dumps(state | {"blake2b": digest}, indent=1))
    found = whole_checkpoint(tmp_path)
    assert found.progress == Progress(2, 512, 0.5)
    assert dict(found.model).keys() == {"w"}
    assert torch.equal(found.model["w"], tensors["model"]["w"])
    assert torch.equal(found.model.piece("w", (1, 1), (1, 2)), torch.tensor([[4.0, 5.0]]))
    assert float(found.optimizer["step.w"]) == 2


def test_tensors_stay_readable_when_the_checkpoint_is_removed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1))
    found, _ = read_checkpoint(tmp_path)
    shutil.rmtree(path)
    assert torch.equal(found.model["w"], checkpoint(1).model["w"])
