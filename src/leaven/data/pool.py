"""Tokenising in several processes: batches of pieces go out, token ids come back in the order of the batches."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process

from leaven.data.tokenizer import Encoded, Encoder, TextPiece, parallel_tokenizers
from leaven.recipe.errors import InputError

PieceBatch = list[TextPiece]
Work = tuple[int, PieceBatch]
Done = tuple[int, int, tuple[Encoded, Encoded]]
"""The shard that a batch is of, the batch; its shard, its bytes, its two sides."""

BYTES_A_PROCESS = 2**24
"""A process takes half a second to start: about what it encodes in that time, several times over."""

_encoder: Encoder


def processes_for(n_bytes: int) -> int:
    """As many processes as there are cores for this one, where there is enough text to keep them busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, n_bytes // BYTES_A_PROCESS))


@contextmanager
def encoding(encoder: Encoder, processes: int) -> Iterator[Callable[[Iterator[Work]], Iterator[Done]]]:
    """A function from batches to their token ids, in order: here with all cores, or in ``processes`` of one core.

    Raises:
        InputError: while it is used, if a process dies.
    """
    if processes == 1:
        with parallel_tokenizers():
            yield lambda work: ((shard, _size(batch), encoder.encode(batch)) for shard, batch in work)
        return
    others = active_children()
    executor = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(encoder,))
    try:
        yield lambda work: _in_order(executor, work, ahead=2 * processes)
    except BrokenProcessPool:
        raise InputError(
            "a process that was tokenising is gone, killed or out of memory; run the same command again, finished "
            "shards are kept"
        ) from None
    finally:
        # After an error or a Ctrl-C nobody waits for what they are at.
        for process in active_children():
            if process not in others:
                process.terminate()
        executor.shutdown(cancel_futures=True)


def _in_order(executor: ProcessPoolExecutor, work: Iterator[Work], ahead: int) -> Iterator[Done]:
    waiting: deque[tuple[int, int, Future[tuple[Encoded, Encoded]]]] = deque()
    for shard, batch in work:
        waiting.append((shard, _size(batch), _submit(executor, batch)))
        if len(waiting) >= ahead:
            number, size, future = waiting.popleft()
            yield number, size, future.result()
    for number, size, future in waiting:
        yield number, size, future.result()


def _submit(executor: ProcessPoolExecutor, batch: PieceBatch) -> "Future[tuple[Encoded, Encoded]]":
    with ctrl_c_blocked():  # the executor may start a process
        return executor.submit(_encode, batch)


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread and in processes started meanwhile, for good: it is for their parent to handle."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _size(batch: Sequence[TextPiece]) -> int:
    return sum(len(piece.text.encode()) for piece in batch)


def _start(encoder: Encoder) -> None:
    """What a process does first: one thread, and gone when its parent is."""
    global _encoder  # noqa: PLW0603
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(batch: PieceBatch) -> tuple[Encoded, Encoded]:
    return _encoder.encode(batch)
