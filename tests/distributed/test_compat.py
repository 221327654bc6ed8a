"""Private names of torch that leaven uses still work."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from tests.distributed.pool import Pool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard, distribute_tensor

from leaven.distributed.compat import (
    all_gather,
    local_place,
    pretend,
    quiet_about_views,
    reduce_scatter,
    resizes_seen,
    shapes_apart,
    stage_backward,
)
from leaven.distributed.lean_stage import LeanStage


def collectives() -> tuple[Tensor, Tensor]:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mine = torch.full((2, 3), float(rank))
    return all_gather(mine.T.contiguous().T, group), reduce_scatter(torch.arange(8.0).view(4, 2) * (rank + 1), group)


def test_all_gather_and_reduce_scatter(ranks: Pool) -> None:
    everything = torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3)
    for rank, (whole, part) in enumerate(ranks(2, collectives)):
        assert torch.equal(whole, everything)
        assert torch.equal(part, 3 * torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2])


def places(rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    pretend(rank, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for shape, how in (((5, 4), [Shard(0), Shard(1)]), ((1, 3), [Shard(0), Shard(0)])):
        found.append(local_place(distribute_tensor(torch.empty(shape), mesh, how)))
    return found


def test_pretending_to_be_a_rank_and_where_its_part_lies(ranks: Pool) -> None:
    """The second of the rows' ranks, the first of the columns': the last two rows of five, the first two columns of
    four. Of a single row it has nothing."""
    ((rows, alone),) = ranks(1, places, 2)
    assert rows == ((2, 2), (3, 0))
    assert alone[0] == (0, 3)


class View(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


def warned(quiet: bool) -> list[str]:
    pretend(0, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if quiet:
            quiet_about_views()
        module = fully_shard(View(2, 2), mesh=init_device_mesh("cpu", (2,)))
        module(torch.ones(1, 2))
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


def test_quiet_about_views_and_nothing_else(ranks: Pool) -> None:
    """torch began to warn with 2.13."""
    assert len(ranks(1, warned, False)[0]) == (torch.__version__ >= "2.13")
    assert ranks(1, warned, True)[0] == []


def test_stage_backward_gives_the_inputs_gradients_and_adds_to_the_parameters() -> None:
    x, w = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    grad = torch.randn(3, 2)
    expected_x, expected_w = torch.autograd.grad(x @ w, (x, w), grad)
    (found,) = stage_backward((x @ w,), (grad,), (x,))
    assert found is not None
    torch.testing.assert_close(found, expected_x)
    assert w.grad is not None
    torch.testing.assert_close(w.grad, expected_w)


def test_resizes_are_seen_inside_the_block_only() -> None:
    storage, sizes = torch.ones(4).untyped_storage(), list[int]()
    with resizes_seen(lambda storage: sizes.append(storage.nbytes())):
        storage.resize_(0)
        storage.resize_(32)
    storage.resize_(8)
    assert sizes == [0, 32]


def propagated() -> list[int]:
    """How often something is set apart: of an operation that is new to DTensor, and of one that it knows."""
    pretend(0, 2)
    times = [0]

    @contextmanager
    def count() -> Iterator[None]:
        times[-1] += 1
        yield

    x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    with FakeTensorMode(allow_non_fake_inputs=True), shapes_apart(count):
        x.exp()
    times.append(0)
    x.sin()
    return times


def test_shape_inference_of_a_dtensor_is_apart(ranks: Pool) -> None:
    inside, after = ranks(1, propagated)[0]
    assert inside > 0
    assert after == 0


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
