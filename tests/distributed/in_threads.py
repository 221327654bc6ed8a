"""Process groups whose processes are threads of this process, with a store between them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from leaven.distributed.process_group import ProcessGroup

T = TypeVar("T")


class ThreadRendezvous:
    """Gives every thread the values of all threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self._brought = threading.Barrier(size, timeout=60), [None] * size

    def all(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self.barrier.wait()
        brought = list(self._brought)
        self.barrier.wait()
        return brought


@dataclass(frozen=True)
class InThread(ProcessGroup):
    """A process group whose processes are threads. It has no mesh, but its collectives work."""

    rendezvous: ThreadRendezvous = field(default_factory=lambda: ThreadRendezvous(1))

    def any(self, flag: bool) -> bool:
        return any(self.rendezvous.all(self.rank, flag))

    def broadcast(self, value: T) -> T:
        first: T = self.rendezvous.all(self.rank, value)[0]
        return first


def together(size: int, body: Callable[[ProcessGroup], T], store: Any = None) -> list[T]:
    """Run ``body`` on ``size`` processes. Return their results by rank, or raise the first error."""
    rendezvous, store = ThreadRendezvous(size), store or dist.HashStore()

    def run(rank: int) -> T:
        try:
            return body(InThread(rank, size, store=store, rendezvous=rendezvous))
        except BaseException:
            rendezvous.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
