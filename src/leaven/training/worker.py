"""Trains runs in worker processes with one thread each, and replaces workers that die."""

from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from leaven.data.pool import ctrl_c_blocked, exit_with_parent

Result = TypeVar("Result")


def initialise_worker() -> None:
    """Initialise a worker process: use one thread, and exit when the parent does."""
    import torch

    torch.set_num_threads(1)
    exit_with_parent()


class WorkerPool:
    """A pool of worker processes. If a worker dies, new workers are started."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._workers, get_context("spawn"), initializer=initialise_worker)

    def submit(self, function: Callable[..., Result], *arguments: object, **named: object) -> "Future[Result]":
        with ctrl_c_blocked():  # the executor may start a process
            try:
                return self._executor.submit(function, *arguments, **named)
            except BrokenProcessPool:
                self._executor = self._new()
                return self._executor.submit(function, *arguments, **named)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        processes = list((self._executor._processes or {}).values())  # shutdown forgets them
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
