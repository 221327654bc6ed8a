"""What the processes of a run settle outside of the steps: through the store, no collective, from any thread."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from secrets import token_hex
from typing import Any, TypeVar

from leaven.distributed.world import ALONE, World
from leaven.recipe.errors import InputError, Lost, Settled

T = TypeVar("T")

_SECOND_THOUGHTS = 0.5  # s between two looks at the store, once it has been looked at often


class Unheard(Lost):
    """The first process does not answer."""


class Exchange:
    """Rounds in which every process tells the first something, and the first tells all what it makes of it.

    Every process makes one, at the same time and from its main thread, and then goes through the same rounds:
    :meth:`gathered`, :meth:`decided`. ``name`` is the round's, the same for all; no round of another start of the run
    has it.
    """

    def __init__(self, world: World = ALONE, patience: timedelta = timedelta(minutes=30)) -> None:
        self.world, self._patience = world, patience.total_seconds()
        self._nonce, self._round = world.shared(token_hex(4)), 0
        # A connection of its own: a request waits for those before it on the same one.
        self._store: Any = world.store.clone() if world.store is not None else None
        self._until = float("inf")

    @property
    def name(self) -> str:
        return f"{self._nonce}-{self._round}"

    def gathered(self, mine: Any) -> list[Any]:
        """Tell the first process something that JSON holds. For it: what all told, by rank, None of one that has told
        nothing in time; nothing for the others."""
        if self.world.size == 1:
            return [mine]
        if not self.world.first:
            self._store.set(self._key(self.world.rank), json.dumps(mine))
            return []
        keys = [self._key(rank) for rank in range(1, self.world.size)]
        self._wait(keys)
        told = [mine]
        for key in keys:
            there = self._store.check([key])
            told.append(json.loads(self._store.get(key)) if there else None)
            self._store.delete_key(key)
        return told

    def decided(self, value: Any) -> Any:
        """What the first process makes of it, which JSON holds; the round ends.

        Raises:
            Unheard: if it does not say so in time. It waits for the others itself: that is given twice the time.
        """
        key = self._key("decided")
        if self.world.size > 1 and self.world.first:
            self._store.set(key, json.dumps(value))
        elif self.world.size > 1:
            if not self._wait([key], 2):
                raise Unheard("rank 0 does not answer; has it been killed?")
            value = json.loads(self._store.get(key))
        self._round += 1
        return value

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this from now on, whatever is being waited for in another thread."""
        self._until = time.monotonic() + seconds

    def _wait(self, keys: list[str], patience: float = 1) -> bool:
        """Whether all are there before the time is up. Asks again and again: a wait in the store could not be cut
        short."""
        until, pause = time.monotonic() + patience * self._patience, 0.002
        while not self._store.check(keys):
            if time.monotonic() > min(until, self._until):
                return False
            time.sleep(pause)
            pause = min(1.3 * pause, _SECOND_THOUGHTS)
        return True

    def _key(self, who: int | str) -> str:
        return f"exchange/{self.name}/{who}"


def first_alone(world: World, work: Callable[[], T]) -> T:
    """What work gives to each process: the first one does it alone, however long it takes, and the others then, when
    what it has left on the disk is there.

    Raises:
        InputError: the first one's, for all.
    """
    exchange, value, said = Exchange(world, timedelta(days=30)), None, None
    if world.first:
        try:
            value = work()
        except InputError as error:
            said = str(error)
    said = exchange.decided(said)
    if said is not None:
        raise Settled(said)
    return work() if value is None else value
