"""Defines the group of processes of a run: how processes join it, and the collectives outside the model."""

import json
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from leaven.errors import InputError, ProcessLost, Settled
from leaven.recipe.layout import Layout

AXES = ("pp", "replicate", "shard", "tp")
"""The axes of the device mesh, from the slowest link to the fastest. Data-parallel ranks along "replicate" have the
same pieces of parameters and optimizer states, and ranks along "shard" different ones."""

EXPERT_AXES = ("pp", "replicate", "shard", "ep", "tp")
"""The axes of the device mesh of routed experts. Ranks along "ep" have different experts, and ranks along "replicate"
and "shard" have the same experts."""

STORE_POLL_SECONDS = 0.02  # pause between two polls of the store

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The group of processes of a run. With a single process, no method communicates."""

    rank: int = 0  # of this process, from 0
    size: int = 1  # number of processes
    mesh: DeviceMesh | None = None  # device mesh with the axes in :data:`AXES`; None for a single process
    store: "dist.Store | None" = None  # type: ignore[name-defined]  # key-value store, for use from any thread
    expert_mesh: DeviceMesh | None = None  # the same processes with the axes in EXPERT_AXES; None if ep is 1

    @classmethod
    def arranged(cls, rank: int, layout: Layout, device: torch.device, store: Any = None) -> "ProcessGroup":
        """Return the group of all ``layout.ranks`` processes. Its device mesh has the dimensions of the layout."""
        # With ZeRO 0, all parameters are replicated; with ZeRO 1 to 3, they are sharded over dp / dp_replicate ranks.
        shards = layout.dp // (layout.dp if layout.zero == 0 else layout.dp_replicate)
        sizes = layout.pp, layout.dp // shards, shards, layout.tp
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        if layout.ep == 1:
            return cls(rank, layout.ranks, mesh, store)
        # Consecutive data-parallel ranks have different experts. The parameters of an expert are sharded over the
        # ranks that have this expert, but over no more ranks than other parameters.
        shards //= math.gcd(shards, layout.ep)
        sizes_of_experts = layout.pp, layout.dp // layout.ep // shards, shards, layout.ep, layout.tp
        experts = init_device_mesh(device.type, sizes_of_experts, mesh_dim_names=EXPERT_AXES)
        return cls(rank, layout.ranks, mesh, store, experts)

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes the run's recipe, metrics and events."""
        return self.rank == 0

    def rank_along(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis) if self.mesh is not None else 0

    def degree(self, axis: str) -> int:
        mesh, axes = (self.expert_mesh, EXPERT_AXES) if axis == "ep" else (self.mesh, AXES)
        return mesh.size(axes.index(axis)) if mesh is not None else 1

    @property
    def dp_rank(self) -> int:
        return self.rank_along("replicate") * self.degree("shard") + self.rank_along("shard")

    @property
    def dp(self) -> int:
        return self.degree("replicate") * self.degree("shard")

    @property
    def is_first_reader(self) -> bool:
        """Whether this process is the first of those that read the same samples."""
        return self.rank_along("pp") == 0 and self.rank_along("tp") == 0

    def all_reduce_(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all processes in place, and return them, bit-identical on all processes."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def all_gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all processes in the order of their ranks."""
        own = torch.zeros(self.size, len(values), dtype=torch.float64)
        own[self.rank] = torch.tensor(values, dtype=torch.float64)
        found: list[list[float]] = self.all_reduce_(own).tolist()
        return found

    def any(self, flag: bool) -> bool:
        if self.mesh is None:
            return flag
        return bool(self.all_reduce_(torch.tensor(float(flag))))

    def broadcast(self, value: T) -> T:
        if self.mesh is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def heartbeat(self, activity: str) -> None:
        """Record what this process is doing, such as "in step 7". If the connection between the processes breaks, the
        error message names the process with the oldest record, and its ``activity``."""
        if self.store is not None:
            self.store.set(f"heartbeat/{self.rank}", json.dumps([time.time(), activity]))

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        self.any(False)


SINGLE_PROCESS = ProcessGroup()


@contextmanager
def join_process_group(layout: Layout, device: torch.device) -> Iterator[ProcessGroup]:
    """Yield the group of all processes that torchrun started, arranged by ``layout``; `SINGLE_PROCESS` for one rank.
    Raise ProcessLost if other processes have died or have not answered for ``layout.timeout_seconds``."""
    if layout.ranks == 1:
        yield SINGLE_PROCESS
        return
    if device.type == "mps":
        raise InputError(
            f"[layout] {layout.ranks} processes cannot use mps, which does not support communication between "
            "processes; use --device cpu, or one process"
        )
    timeout = timedelta(seconds=layout.timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(_of_torchrun("LOCAL_RANK"))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except ValueError as error:  # an environment variable is missing, or no number
        raise InputError(
            f"the processes cannot connect: {str(error).rpartition('rendezvous: ')[2]}; start the run with torchrun "
            f"--nproc-per-node {layout.ranks} -m leaven train ..., which sets RANK, MASTER_ADDR and MASTER_PORT"
        ) from None
    try:
        store = private_store(store, rank, size, timeout)
    except TimeoutError as error:
        raise ProcessLost(
            f"rank {rank} of {size}: {error} within {layout.timeout_seconds} s; look at the output of each "
            "rank that did not connect"
        ) from None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    group = ProcessGroup.arranged(rank, layout, device, store)
    try:
        yield group
        group.barrier()  # the first process may serve the store, which others may still read
    except Exception as error:
        if isinstance(error, RuntimeError) and _is_connection_error(error):
            raise ProcessLost(_describe_loss(group, error)) from error
        if not isinstance(error, Settled):
            error.add_note(f"rank {rank}")  # the other processes do not raise this error
        raise
    finally:
        dist.destroy_process_group()


def private_store(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return ``store`` with a random prefix before every key. Only the ``size`` processes of this start know
    the prefix.

    After a restart by torchrun, the store still has the entries of the dead processes. Processes that read
    such entries hang or fail to connect. So the new processes agree on a prefix:

    1. Each process writes a random word under the key of its rank. This replaces the word of a dead process.
    2. Rank 0 proposes a prefix together with the words of all ranks. When a word changes, it makes a new proposal.
    3. Each other rank agrees to a proposal that contains its own word.
    4. When all other ranks have agreed to the last proposal, rank 0 confirms it.

    After ``timeout``, raise a TimeoutError. On rank 0, its message names the missing ranks.
    """
    word, until = token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", json.dumps(word))
    if rank == 0:
        return _propose(store, word, size, until)
    while time.monotonic() < until:
        proposal = _read(store, "proposal")
        if proposal is not None and proposal["words"][rank : rank + 1] == [word]:
            store.set(f"agreed/{rank}", json.dumps(proposal["name"]))
            if _read(store, "confirmed") == proposal["name"]:
                return PrefixStore(proposal["name"], store)
        time.sleep(STORE_POLL_SECONDS)
    raise TimeoutError("rank 0 did not connect")


def _propose(store: Any, word: str, size: int, until: float) -> Any:
    proposal: dict[str, Any] = {"words": [], "name": ""}
    while time.monotonic() < until:
        words = [word, *(_read(store, f"hello/{rank}") for rank in range(1, size))]
        if None not in words and words != proposal["words"]:
            proposal = {"words": words, "name": token_hex(8)}
            store.set("proposal", json.dumps(proposal))
        if proposal["name"] and all(_read(store, f"agreed/{rank}") == proposal["name"] for rank in range(1, size)):
            store.set("confirmed", json.dumps(proposal["name"]))
            return PrefixStore(proposal["name"], store)
        time.sleep(STORE_POLL_SECONDS)
    others = range(1, size)
    late = [rank for rank in others if _read(store, f"hello/{rank}") is None]
    late = late or [rank for rank in others if _read(store, f"agreed/{rank}") != proposal["name"]]
    raise TimeoutError(f"rank {', '.join(map(str, late))} did not connect")


def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def world_size() -> int:
    """Return the number of processes that torchrun started, or 1 without torchrun."""
    return _of_torchrun("WORLD_SIZE", least=1) if "WORLD_SIZE" in os.environ else 1


def rank() -> int:
    """Return the rank of this process among all processes that torchrun started, or 0 without torchrun."""
    return _of_torchrun("RANK") if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 0


def _of_torchrun(variable: str, least: int = 0) -> int:
    text = os.environ.get(variable)
    with suppress(ValueError):
        if text is not None and (number := int(text)) >= least:
            return number
    wrong = "missing" if text is None else f"{text!r}, not a number {'above 0' if least else 'from 0'}"
    raise InputError(f"the environment variable {variable} is {wrong}; start leaven with torchrun, which sets it")


def _is_connection_error(error: BaseException | None) -> bool:
    if error is None:
        return False
    connection = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return connection or _is_connection_error(error.__cause__ or error.__context__)


def _describe_loss(group: ProcessGroup, error: RuntimeError) -> str:
    """Return a message about a failed collective, and the rank that is behind: the other one with the oldest
    heartbeat."""
    frames, library = traceback.extract_tb(error.__traceback__), os.path.join("torch", "distributed")
    collective = next((frame.name for frame in reversed(frames) if library in frame.filename), "a collective")
    heartbeats = {}
    with suppress(Exception):  # the process that serves the store may have ended
        for other in range(group.size):
            when, activity = json.loads(group.store.get(f"heartbeat/{other}")) if group.store else (0.0, "")
            heartbeats[other] = (time.time() - float(when), activity)
    message = f"rank {group.rank} of {group.size} timed out or lost its connection in {collective}"
    own = heartbeats.pop(group.rank, None)
    if own is not None:
        message += f", {own[1]}"
    if heartbeats:
        last = max(heartbeats, key=lambda other: heartbeats[other][0])
        seconds, activity = heartbeats[last]
        message += f"; rank {last} is behind: its last heartbeat, {seconds:.0f} s ago, was {activity}"
    return f"{message} ({str(error).partition(chr(10))[0][:200]})"
