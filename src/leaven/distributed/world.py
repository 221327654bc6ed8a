"""This process among those of a run: which it is, and what all of them settle together."""

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from leaven.distributed.rendezvous import private_store
from leaven.recipe.errors import Lost, Settled
from leaven.recipe.layout import Layout

AXES = ("pp", "replicate", "shard", "tp")
"""Of the mesh, from the slowest wires to the fastest. Data parallelism has two: ranks that hold the same pieces of
parameters and optimiser, and ranks that share them out."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run; one alone has no group, and everything here is then for nothing.

    ``mesh`` has the :data:`AXES`; ``store`` is for what the processes tell each other outside of the steps, from any
    thread.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    store: "dist.Store | None" = None  # type: ignore[name-defined]

    @property
    def first(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    def place(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis) if self.mesh is not None else 0

    def degree(self, axis: str) -> int:
        return self.mesh.size(AXES.index(axis)) if self.mesh is not None else 1

    @property
    def dp_rank(self) -> int:
        return self.place("replicate") * self.degree("shard") + self.place("shard")

    @property
    def dp(self) -> int:
        return self.degree("replicate") * self.degree("shard")

    @property
    def reads_first(self) -> bool:
        """Whether this is the first of the processes that read the same samples."""
        return self.place("pp") == 0 and self.place("tp") == 0

    @property
    def distinct(self) -> tuple[int, ...]:
        """What tells this process from the others, for what they must not do alike; nothing for one alone."""
        return () if self.mesh is None else (self.rank,)

    def sum_(self, values: Tensor) -> Tensor:
        """In place, over all processes; the same bits on each."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def everyone(self, values: list[float]) -> list[list[float]]:
        """What each process has, by rank."""
        own = torch.zeros(self.size, len(values), dtype=torch.float64)
        own[self.rank] = torch.tensor(values, dtype=torch.float64)
        found: list[list[float]] = self.sum_(own).tolist()
        return found

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them at least."""
        if self.mesh is None:
            return flag
        return bool(self.sum_(torch.tensor(float(flag))))

    def shared(self, value: T) -> T:
        """That of the first process."""
        if self.mesh is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def sign(self, what: str) -> None:
        """Leave word of what this process is about to do, for the others to read if it never comes back."""
        if self.store is not None:
            self.store.set(f"sign/{self.rank}", json.dumps([time.time(), what]))

    def barrier(self) -> None:
        self.any(False)


ALONE = World()


@contextmanager
def joined(layout: Layout, device: torch.device) -> Iterator[World]:
    """Be one of the processes that torchrun has started, laid out as the recipe says; alone without a group.

    Raises:
        Lost: if what is done inside fails because others are gone, or have not come for ``layout.timeout_seconds``.
    """
    if layout.ranks == 1:
        yield ALONE
        return
    timeout = timedelta(seconds=layout.timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    try:
        store = private_store(store, rank, size, timeout)
    except TimeoutError as error:
        raise Lost(f"rank {rank} of {size}: {error} within {layout.timeout_seconds} s") from None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    world = World(rank, size, mesh_of(layout, device), store)
    try:
        yield world
        world.barrier()  # the store may live in the first process, and others may still read in it
    except Exception as error:
        if isinstance(error, RuntimeError) and _of_wires(error):
            raise Lost(_who_is_missing(world, error)) from error
        if not isinstance(error, Settled):
            error.add_note(f"rank {rank}")  # the others do not know of it
        raise
    finally:
        dist.destroy_process_group()


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """ZeRO 0 replicates everything; above, what is sharded is sharded over ``dp // dp_replicate`` ranks."""
    replicas = layout.dp if layout.zero == 0 else layout.dp_replicate
    sizes = (layout.pp, replicas, layout.dp // replicas, layout.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


def world_size() -> int:
    """Of the processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Of this process among those that torchrun has started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def _of_wires(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is of the wires between processes."""
    if error is None:
        return False
    wires = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return wires or _of_wires(error.__cause__ or error.__context__)


def _who_is_missing(world: World, error: RuntimeError) -> str:
    """This process's side of it, and the process that has given no sign for longest."""
    collective = next(
        (frame.name for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.name in _COLLECTIVES),
        "a collective",
    )
    signs = {}
    with suppress(Exception):  # the store may be gone with its process
        for other in range(world.size):
            when, what = json.loads(world.store.get(f"sign/{other}")) if world.store else (0.0, "")
            signs[other] = (time.time() - float(when), what)
    said = f"rank {world.rank} of {world.size} waited in {collective} in vain"
    own = signs.pop(world.rank, None)
    if own is not None:
        said += f", {own[1]}"
    if signs:  # this process waits; of the others, the one whose sign is oldest
        last = max(signs, key=lambda other: signs[other][0])
        seconds, what = signs[last]
        said += f"; the process that is behind is rank {last}, whose last sign, {seconds:.0f} s ago, was {what}"
    return f"{said} ({str(error).partition(chr(10))[0][:200]})"


_COLLECTIVES = {
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "recv",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
    "wait",
    "wait_tensor",
}
