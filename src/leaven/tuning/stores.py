"""Where studies are kept."""

from pathlib import Path

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend


class StoreGone(Exception):
    """A store that was there went away, and did not come back."""


def open_store(where: str | Path | BaseStorage | None) -> BaseStorage:
    """The Optuna storage at a journal file or a URL; in memory without."""
    if where is None:
        return InMemoryStorage()
    if isinstance(where, BaseStorage):
        return where
    if isinstance(where, str) and "://" in where:
        return optuna.storages.get_storage(where)
    return JournalStorage(JournalFileBackend(str(where)))
