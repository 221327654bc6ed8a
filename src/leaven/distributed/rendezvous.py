"""Gives the processes of a run a new shared key-value store at every start or restart of the run.

When torchrun restarts the processes of a run, it keeps the old key-value store. In this store, the new processes
would read entries of dead processes, for example addresses, and would hang or fail to connect. Therefore the new
processes first agree on a new prefix for all their keys.
"""

import json
import time
from datetime import timedelta
from secrets import token_hex
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

_PAUSE = 0.02  # s between two polls of the store


def private_store(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a store with a new key prefix. Only the ``size`` processes of this start of the run share it.

    Each process writes a new random word. The first process reads one word for each rank, and proposes a prefix
    together with the words that it has read. Another process agrees if the proposal contains its own word. When all
    processes have agreed, the first process confirms the proposal. If a word comes from a dead process, the living
    process of the same rank does not agree, so the proposal is never confirmed.

    Raises:
        TimeoutError: if ranks are missing; the message names them.
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
        time.sleep(_PAUSE)
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
        time.sleep(_PAUSE)
    others = range(1, size)
    late = [rank for rank in others if _read(store, f"hello/{rank}") is None]
    late = late or [rank for rank in others if _read(store, f"agreed/{rank}") != proposal["name"]]
    raise TimeoutError(f"rank {', '.join(map(str, late))} did not connect")


def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None
