"""Process groups of several processes without processes: a thread each, and a store between them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from leaven.distributed.process_group import ProcessGroup

T = TypeVar("T")


class Meeting:
    """Where all come, each with something, and leave with everything."""

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
    """One of them; no mesh, and collectives all the same."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def any(self, flag: bool) -> bool:
        return any(self.meeting.all(self.rank, flag))

    def broadcast(self, value: T) -> T:
        first: T = self.meeting.all(self.rank, value)[0]
        return first


def together(size: int, body: Callable[[ProcessGroup], T], store: Any = None) -> list[T]:
    """What each of ``size`` processes returns, by rank; raises what the first of them raises that does."""
    meeting, store = Meeting(size), store or dist.HashStore()

    def run(rank: int) -> T:
        try:
            return body(InThread(rank, size, None, store, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
