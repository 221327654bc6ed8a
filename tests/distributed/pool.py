"""A pool of processes, so that a test does not start Python and import torch for each rank."""

import faulthandler
import gc
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "leaven.training.engine"]
TIMEOUT = 300.0
"""Seconds for one case, far more than any takes, so that a hang becomes an error."""


class Pool:
    """Up to ``size`` ranks. A case that raises or hangs ends the processes; the next one gets new ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return ``function(*arguments)`` of each rank, with the environment variables that torchrun sets.

        Raises:
            RuntimeError: with the traceback of the ranks that raised, or the numbers of those that did not answer.
        """
        while len(self._workers) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        there = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
        }
        waiting = {}
        for rank, (_, connection) in enumerate(self._workers[:ranks]):
            connection.send((there | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, function, arguments))
            waiting[connection] = rank
        results: dict[int, Any] = {}
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), timeout=5.0 if failures else TIMEOUT)
            if not ready:
                failures.append(f"no answer from rank {', '.join(map(str, waiting.values()))}")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    whole, value = connection.recv()
                except EOFError:
                    whole, value = False, "it died"
                if whole:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise RuntimeError("\n".join(failures))
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that a collection between cases looks only at the objects of a case
    with suppress(EOFError):
        while True:
            environment, function, arguments = connection.recv()
            os.environ.update(environment)
            faulthandler.dump_traceback_later(0.8 * TIMEOUT)  # where it hangs, if it does
            try:
                answer = True, function(*arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
            _release_threads()
            connection.send(answer)
    os._exit(0)


def _release_threads() -> None:
    """End the threads of a case's process groups: twelve for each case, which would stay until the process ends.

    A group ends its threads when nothing refers to it. Cycles of the model keep destroyed groups, and so do device
    meshes, which the caches of DTensor keep; a mesh without a registry looks a group up by its name.
    """
    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            getattr(mesh, "_pg_registry", {}).clear()
