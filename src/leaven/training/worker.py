"""Trains runs in worker processes with one thread each, and replaces workers that die."""

from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from leaven.data.pool import ctrl_c_blocked, exit_with_parent
from leaven.recipe.recipe import Recipe

Result = TypeVar("Result")


def start() -> None:
    """Initialise a worker process: use one thread, and exit when the parent does."""
    import torch

    torch.set_num_threads(1)
    exit_with_parent()


def run_in(folder: Path, recipe: Recipe) -> float | None:
    """Train a recipe in a run folder. Return the validation loss, or None if the run diverged (see events.jsonl)."""
    from leaven.data.tokens import prepare
    from leaven.training.loop import Diverged
    from leaven.training.micro_batch import by_rule_of_thumb
    from leaven.training.trainer import train

    tokens = prepare(recipe.data, recipe.model.vocab_size)
    try:
        # Runs side by side would disturb each other's timings.
        return train(by_rule_of_thumb(recipe, folder), tokens, folder, history=False).loss
    except Diverged:
        return None


class Pool:
    """A pool of worker processes. If a worker dies, new workers are started."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._workers, get_context("spawn"), initializer=start)

    def submit(self, function: Callable[..., Result], *arguments: object, **named: object) -> "Future[Result]":
        with ctrl_c_blocked():  # the executor may start a process
            try:
                return self._executor.submit(function, *arguments, **named)
            except BrokenProcessPool:
                self._executor = self._new()
                return self._executor.submit(function, *arguments, **named)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        processes = list((self._executor._processes or {}).values())  # shutdown forgets them
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
