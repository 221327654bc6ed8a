"""A pool of processes, so that a test does not start Python and import torch for each rank."""

import faulthandler
import gc
import os
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.pipelining", "leaven.training.trainer"]
PRELOAD += ["leaven.verification.dry_run", "tests.distributed.cases"]
TIMEOUT = 300.0
"""Seconds for one case, far more than any takes, so that a hang becomes an error."""


class Pool:
    """Ranks, each with one process. If a case fails or hangs, its processes are killed, and the next case gets new
    processes."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._ranks: list[ProcessPoolExecutor] = []

    def __call__(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return ``function(*arguments)`` of each rank, with the environment variables that torchrun sets.

        Raises:
            RuntimeError: with the traceback of the ranks that failed, or the numbers of the ranks that hang.
        """
        while len(self._ranks) < ranks:
            self._ranks.append(ProcessPoolExecutor(1, self._context, initializer=_start))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        there = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
        }
        futures = [
            process.submit(_run, there | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, function, arguments)
            for rank, process in enumerate(self._ranks[:ranks])
        ]
        if wait(futures, TIMEOUT, FIRST_EXCEPTION).not_done:
            wait(futures, 5.0)  # the others may fail because of the first
        failures = []
        for rank, future in enumerate(futures):
            error = future.exception() if future.done() else TimeoutError("no answer")
            if error is not None:
                failures.append(f"rank {rank}: {''.join(traceback.format_exception(error))}")
        if failures:
            self.close()
            raise RuntimeError("\n".join(failures))
        return [future.result() for future in futures]

    def close(self) -> None:
        for rank in self._ranks:
            for process in (rank._processes or {}).values():
                process.kill()
            rank.shutdown()
        self._ranks = []


# The fast path's cache is newer than torch 2.11.
_clear_fast_path: Callable[[], None] = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)


def _start() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that a collection between cases looks only at the objects of a case


def _run(environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.environ.update(environment)
    faulthandler.dump_traceback_later(0.8 * TIMEOUT)  # shows where a rank hangs
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
        _release_threads()


def _release_threads() -> None:
    """End the threads of a case's process groups: twelve for each case, which otherwise live as long as the process.
    A group ends its threads when it is garbage-collected. Reference cycles of the model keep destroyed groups alive,
    and so do the device meshes in DTensor's caches. So the caches are emptied first, and then the registry of groups
    in each mesh that is left."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    _clear_fast_path()
    _redistribute._gen_transform_infos.cache_clear()
    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            getattr(mesh, "_pg_registry", {}).clear()
