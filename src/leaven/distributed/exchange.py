"""Exchanges values between the processes of a run. Unlike collectives, this works from any thread."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from secrets import token_hex
from typing import Any, TypeVar

from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.errors import InputError, ProcessLost, Settled

T = TypeVar("T")

_LONGEST_PAUSE = 0.5  # seconds between two polls of the store


class Exchange:
    """Exchanges values through torch's key-value store, in rounds. All processes take part in each step of a round:

    1. :meth:`gather` (optional): every process sends a value to the first process.
    2. :meth:`broadcast`: the first process sends one value to all.

    All processes must construct an exchange at the same point of the program, in their main threads. ``timeout`` is
    how long the first process waits for the values of a round.
    """

    def __init__(self, group: ProcessGroup = SINGLE_PROCESS, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.group, self._timeout = group, timeout.total_seconds()
        self._nonce, self._round = group.broadcast(token_hex(4)), 0
        # A request waits for earlier requests on the same connection, so an exchange has its own connection.
        self._store: Any = group.store.clone() if group.store is not None else None
        self._until = float("inf")

    @property
    def name(self) -> str:
        """The name of the current round of the exchange. It is the same on all processes, and new after a restart."""
        return f"{self._nonce}-{self._round}"

    def gather(self, value: Any) -> list[Any]:
        """Send a JSON value to the first process. There, return the values by rank, with None for late values. On
        other processes, return []."""
        if self.group.size == 1:
            return [value]
        if not self.group.is_first:
            self._store.set(self._key(self.group.rank), json.dumps(value))
            return []
        keys = [self._key(rank) for rank in range(1, self.group.size)]
        self._wait(keys)
        values = [value]
        for key in keys:
            there = self._store.check([key])
            values.append(json.loads(self._store.get(key)) if there else None)
            self._store.delete_key(key)
        return values

    def broadcast(self, value: Any) -> Any:
        """Send ``value`` of the first process to all processes as JSON, and return it. This ends the current
        round. Raise ProcessLost if the value does not arrive within twice the timeout."""
        key = self._key("answer")
        if self.group.size > 1 and self.group.is_first:
            self._store.set(key, json.dumps(value))
        elif self.group.size > 1:
            if not self._wait([key], 2):
                raise ProcessLost("rank 0 does not answer; it may have been killed, so look at its output")
            value = json.loads(self._store.get(key))
        self._round += 1
        return value

    def shorten_timeout(self, seconds: float) -> None:
        """End every wait at most ``seconds`` from now, including waits in other threads."""
        self._until = time.monotonic() + seconds

    def _wait(self, keys: list[str], timeouts: float = 1) -> bool:
        """Return whether the store has all ``keys`` within ``timeouts`` timeouts, or less after
        :meth:`shorten_timeout`. The store is polled, because a blocking call could not be shortened."""
        until, pause = time.monotonic() + timeouts * self._timeout, 0.002
        while not self._store.check(keys):
            if time.monotonic() > min(until, self._until):
                return False
            time.sleep(pause)
            pause = min(1.3 * pause, _LONGEST_PAUSE)
        return True

    def _key(self, name: int | str) -> str:
        return f"exchange/{self.name}/{name}"


def rank_zero_first(group: ProcessGroup, work: Callable[[], T]) -> T:
    """Return ``work()`` on every process. The first process runs it before the others and leaves files for them. If
    it raises InputError, all do. If it does not finish within 60 days, the others raise ProcessLost."""
    exchange, done, refused = Exchange(group, timedelta(days=30)), list[T](), None
    if group.is_first:
        try:
            done.append(work())
        except InputError as error:
            refused = str(error)
    refused = exchange.broadcast(refused)
    if refused is not None:
        raise Settled(refused)
    return done[0] if group.is_first else work()
