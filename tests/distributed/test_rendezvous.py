"""How processes agree on a prefix in a store to which dead processes have written."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from leaven.distributed.process_group import private_store

SHORT = timedelta(seconds=0.1)


def met(store: Any, size: int, timeout: timedelta = timedelta(seconds=20)) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: private_store(store, rank, size, timeout), range(size)))


def test_each_start_has_a_prefix_of_its_own() -> None:
    store = HashStore()
    for _ in range(3):
        first, *others = met(store, 4)
        assert not first.check(["address"])  # the address of an earlier start
        first.set("address", "here")
        assert all(other.get("address") == b"here" for other in others)


@pytest.mark.parametrize("dead", [[0], [1], [0, 2], [1, 2]])
def test_a_rendezvous_that_died_is_ignored(dead: list[int]) -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:  # some ranks connect, and no proposal is confirmed
        tried = [threads.submit(private_store, store, rank, 3, SHORT) for rank in range(3) if rank not in dead]
        assert all(isinstance(attempt.exception(), TimeoutError) for attempt in tried)
    first, *others = met(store, 3)
    first.set("key", "value")
    assert all(other.get("key") == b"value" for other in others)


def test_a_proposal_without_full_agreement_is_ignored() -> None:
    store = HashStore()
    met(store, 3)
    name = json.loads(store.get("proposal"))["name"]
    store.set("agreed/1", json.dumps("another"))
    again = met(store, 3)
    assert json.loads(store.get("confirmed")) != name
    again[0].set("key", "value")
    assert again[2].get("key") == b"value"


def test_the_error_names_missing_ranks() -> None:
    with pytest.raises(TimeoutError, match="rank 1, 2 did not connect"):
        private_store(HashStore(), 0, 3, SHORT)
    with pytest.raises(TimeoutError, match="rank 0 did not connect"):
        private_store(HashStore(), 1, 3, SHORT)
