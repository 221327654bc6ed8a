"""Exchanges between processes through the store."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.distributed.in_threads import together

from leaven.distributed.exchange import Exchange
from leaven.distributed.process_group import ProcessGroup
from leaven.errors import ProcessLost


def test_gather_and_broadcast() -> None:
    def body(group: ProcessGroup) -> list[Any]:
        exchange, rounds = Exchange(group), []
        for number in range(3):
            gathered = exchange.gather({"rank": group.rank, "round": number})
            rounds.append((exchange.name, gathered, exchange.broadcast(["answer", number, len(gathered)])))
        return rounds

    store = dist.HashStore()
    first, *others = together(4, body, store)
    assert store.num_keys() == 3  # the answers; gathered values are removed
    for number, (name, gathered, answer) in enumerate(first):
        assert gathered == [{"rank": rank, "round": number} for rank in range(4)]
        assert answer == ["answer", number, 4]
        assert {name} == {other[number][0] for other in others}
        assert all(other[number][1:] == ([], answer) for other in others)
    assert len({name for name, _, _ in first}) == 3


def test_values_of_an_earlier_start_are_ignored() -> None:
    """The store outlives the processes, as the store of torchrun does."""
    store = dist.HashStore()
    timeout = timedelta(seconds=0.05)

    def killed(group: ProcessGroup) -> list[Any]:
        exchange = Exchange(group, timeout)
        return exchange.gather("stale") if not group.is_first else []

    def restarted(group: ProcessGroup) -> list[Any]:
        exchange = Exchange(group, timeout)
        return exchange.gather("new") if group.is_first else []

    together(3, killed, store)
    assert together(3, restarted, store)[0] == ["new", None, None]


def test_a_silent_first_process_is_an_error() -> None:
    def body(group: ProcessGroup) -> str:
        exchange = Exchange(group, timedelta(seconds=0.05))
        if group.is_first:
            return "silent"
        with pytest.raises(ProcessLost, match="rank 0 does not answer"):
            exchange.broadcast(None)
        return "waited"

    assert together(2, body) == ["silent", "waited"]


def test_a_wait_can_be_shortened() -> None:
    def body(group: ProcessGroup) -> float:
        exchange = Exchange(group)
        began = time.monotonic()
        threading.Timer(0.05, lambda: exchange.shorten_timeout(0.05)).start()
        if group.is_first:
            assert exchange.gather(0) == [0, None]
        return time.monotonic() - began

    assert together(2, body)[0] < 60  # not half an hour
