"""Private names of torch that leaven uses still work."""

import inspect

import pytest
import torch
from tests.distributed.pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard, distribute_tensor

from leaven.distributed.compat import local_offset, pretend
from leaven.distributed.pipeline import LeanStage


def places(rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    pretend(rank, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for shape, how in (((5, 4), [Shard(0), Shard(1)]), ((1, 3), [Shard(0), Shard(0)])):
        tensor = distribute_tensor(torch.empty(shape), mesh, how)
        found.append((tuple(tensor.to_local().shape), local_offset(tensor)))
    return found


def test_pretending_to_be_a_rank_and_where_its_part_lies(ranks: Pool) -> None:
    """Rank 2 of a 2 x 2 mesh has the last two of five rows and the first two of four columns. It has no part of a
    single row."""
    ((rows, alone),) = ranks(1, places, 2)
    assert rows == ((2, 2), (3, 0))
    assert alone[0] == (0, 3)


@pytest.mark.parametrize("name", [name for name in vars(LeanStage) if inspect.isfunction(vars(LeanStage)[name])])
def test_methods_that_a_lean_stage_overrides_exist(name: str) -> None:
    """With the same parameters. That torch calls them: test_lean_stage.py."""
    own_names = {"__init__", "_only_shapes"}
    if not hasattr(FSDPModule, "set_manual_backward_finalization"):  # before torch 2.15
        own_names.add("start_gradient_reduction")
    if name in own_names:
        return
    own, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (LeanStage, PipelineStage))
    named = [each for each in own if each not in {"arguments", "named"}]
    assert named == list(theirs)[: len(named)]
