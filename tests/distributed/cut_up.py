"""Checkpoints of several processes, each with some rows of a matrix and of its moments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.distributed.in_threads import together
from torch import Tensor

from leaven.distributed.exchange import Exchange
from leaven.distributed.pieces import Place, cut
from leaven.distributed.process_group import ProcessGroup
from leaven.training.checkpoint import (
    Checkpoint,
    CheckpointManager,
    Progress,
    Saved,
    read_checkpoint,
    write_checkpoint,
)
from leaven.training.rewind import Rewind
from leaven.training.run_folder import checkpoints, tokens_of


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
    def body(group: ProcessGroup) -> Path:
        return write_checkpoint(folder, replace(rows(step, group.rank, size), rewinds=rewinds), Exchange(group))

    return together(size, body)[0]


def saved(manager: CheckpointManager, checkpoint: Checkpoint, good_tokens: int | None = None) -> Saved:
    manager.save(checkpoint, checkpoint.progress.tokens if good_tokens is None else good_tokens)
    outcome = manager.outcome(wait=True)
    assert outcome is not None
    return outcome


def steps(folder: Path) -> list[int]:
    return [tokens_of(path) // 256 for path in checkpoints(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def whole_checkpoint(folder: Path, **how: Any) -> Checkpoint:
    """Return the newest checkpoint of a folder in which none is damaged."""
    found, damaged = read_checkpoint(folder, **how)
    assert found is not None
    assert not damaged
    return found
