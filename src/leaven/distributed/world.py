"""This process among those of a run: which it is, and what all of them settle together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

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

    def barrier(self) -> None:
        self.any(False)


ALONE = World()


@contextmanager
def joined(layout: Layout, device: torch.device, timeout: timedelta) -> Iterator[World]:
    """Be one of the processes that torchrun has started, laid out as the recipe says."""
    if layout.ranks == 1:
        yield ALONE
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield World(rank, size, mesh_of(layout, device), store)
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
