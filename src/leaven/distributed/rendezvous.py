"""The rendezvous of processes that start together, in a store that remembers those before them.

torchrun restarts the processes of a run in place and keeps its store. What the dead have left there (addresses, above
all) is taken for that of the living: a restarted group then hangs, or is refused its connections. So the living first
agree on a prefix of their own, and keep everything under it.
"""

import json
import time
from datetime import timedelta
from secrets import token_hex
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

_PAUSE = 0.02  # s between two looks at the store


def private_store(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A store with a prefix that only the ``size`` processes which call this now share.

    Each writes a new random word. The first proposes the words it sees, each of the others agrees if its own is
    among them, and when all have agreed to the same proposal the first confirms it. A proposal with a word of a dead
    process is never confirmed: the word of a living one is missing in it.

    Raises:
        TimeoutError: naming the ranks that did not come.
    """
    word, until = token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", json.dumps(word))
    if rank == 0:
        return _lead(store, word, size, until)
    while time.monotonic() < until:
        proposal = _read(store, "proposal")
        if proposal is not None and proposal["words"][rank : rank + 1] == [word]:
            store.set(f"agreed/{rank}", json.dumps(proposal["name"]))
            if _read(store, "confirmed") == proposal["name"]:
                return PrefixStore(proposal["name"], store)
        time.sleep(_PAUSE)
    raise TimeoutError(f"rank {rank}: rank 0 did not come within {timeout}")


def _lead(store: Any, word: str, size: int, until: float) -> Any:
    proposal: dict[str, Any] = {"words": [], "name": ""}
    while time.monotonic() < until:
        words = [word, *(_read(store, f"hello/{rank}") for rank in range(1, size))]
        if None not in words and words != proposal["words"]:
            proposal = {"words": words, "name": token_hex(8)}
            store.set("proposal", json.dumps(proposal))
        if proposal["name"] and all(_read(store, f"agreed/{rank}") == proposal["name"] for rank in range(1, size)):
            store.set("confirmed", json.dumps(proposal["name"]))
            return PrefixStore(proposal["name"], store)
        time.sleep(_PAUSE)
    others = range(1, size)
    late = [rank for rank in others if _read(store, f"hello/{rank}") is None]
    late = late or [rank for rank in others if _read(store, f"agreed/{rank}") != proposal["name"]]
    raise TimeoutError(f"rank {', '.join(map(str, late))} did not come")


def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None
