"""Runs in processes of their own, on one thread each, and a pool of them that outlives any of its workers."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TypeVar

from leaven.recipe.recipe import Recipe

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """A trial's end. A diverged trial has a finite loss, worse than a uniform guess, so that a search can use it."""

    loss: float
    diverged: bool
    tokens: int
    seconds: float
    worker: int


def start(parent: int) -> None:
    """What a worker process does before its first trial: one thread, and gone when its parent is."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def hopeless(vocab_size: int) -> float:
    """The loss that counts as divergence, in nats: one worse than a uniform guess."""
    return math.log(vocab_size) + 1.0


@dataclass
class Course:
    """How a run of ``tokens`` goes, by its mean loss over about the last thirty-second of it: that of one small batch
    of odd text may be above a uniform guess, and so may the first ones at a large init."""

    vocab_size: int
    tokens: int
    done: int = 0
    mean: float = 0.0

    def lost(self, loss: float, batch_tokens: int) -> bool:
        """Take in a step; whether the run has diverged."""
        self.done += batch_tokens
        self.mean += (loss - self.mean) * min(32 * batch_tokens / self.tokens, 1.0)
        return not math.isfinite(loss) or (self.mean > hopeless(self.vocab_size) and self.done > self.tokens / 4)


def run_trial(recipe: Recipe) -> Outcome:
    """Train a recipe from the start and return its validation loss."""
    from leaven.data.tokens import prepare
    from leaven.training.engine import Diverged, Training

    tokens = prepare(recipe.data, recipe.model.vocab_size)
    training = Training(recipe, tokens, device=None)
    limit = hopeless(recipe.model.vocab_size)
    course = Course(recipe.model.vocab_size, recipe.data.tokens)
    try:
        while not training.finished:
            step = training.step()
            if course.lost(step.loss, step.batch_tokens):
                raise Diverged(f"loss above {limit:.2f}")
        loss = training.evaluate()
        diverged = not math.isfinite(loss)
    except Diverged:
        loss, diverged = limit, True
    done = training.progress
    return Outcome(limit if diverged else loss, diverged, done.tokens, done.seconds, os.getpid())


def run_in(folder: Path, recipe: Recipe) -> float | None:
    """Train a recipe in a run folder; its validation loss, or None if it diverged (the folder's events say where)."""
    from leaven.data.tokens import prepare
    from leaven.training.engine import Diverged
    from leaven.training.micro_batch import by_thumb
    from leaven.training.trainer import train

    tokens = prepare(recipe.data, recipe.model.vocab_size)
    try:
        # Runs side by side would time each other.
        return train(by_thumb(recipe, folder), tokens, folder, history=False).loss
    except Diverged:
        return None


class Pool:
    """Worker processes that are replaced when one of them dies."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._workers, get_context("spawn"), initializer=start, initargs=(os.getpid(),))

    def submit(self, function: Callable[..., Result], *arguments: object) -> "Future[Result]":
        # Processes are born here, and inherit what is blocked: a Ctrl-C is for the parent alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(function, *arguments)
        except BrokenProcessPool:
            self._executor = self._new()
            return self._executor.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.terminate()
