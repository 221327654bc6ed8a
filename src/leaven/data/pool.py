"""Tokenise in several processes: send out batches of text, and receive their token ids in the same order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process

from leaven.data.tokenizer import Encoded, Encoder, TextPiece, parallel_tokenizers
from leaven.recipe.errors import InputError

PieceBatch = list[TextPiece]
Work = tuple[int, PieceBatch]
Done = tuple[int, tuple[Encoded, Encoded]]
"""Work is (shard, batch), Done is (shard, (training, validation))."""

BYTES_A_PROCESS = 2**24
"""Text for each process. Starting one takes half a second, and encoding this much takes several times as long."""

_encoder: Encoder


def processes_for(n_bytes: int) -> int:
    """Return the number of processes: one per available core, or fewer if there is not enough text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, n_bytes // BYTES_A_PROCESS))


@contextmanager
def encoding(encoder: Encoder, processes: int) -> Iterator[Callable[[Iterator[Work]], Iterator[Done]]]:
    """Return a function that encodes batches in order: in this process with all cores, or in ``processes`` new
    processes.

    Raises:
        InputError: if one of the processes dies.
    """
    if processes == 1:
        with parallel_tokenizers():
            yield lambda work: ((shard, encoder.encode(batch)) for shard, batch in work)
        return
    others = active_children()
    executor = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(encoder,))
    try:
        yield lambda work: _in_order(executor, work, ahead=2 * processes)
    except BrokenProcessPool:
        raise InputError(
            "a tokenising process died (killed, or out of memory); finished shards are kept, run the same command "
            "again to resume"
        ) from None
    finally:
        # After an error or Ctrl-C the results are not needed any more.
        for process in active_children():
            if process not in others:
                process.terminate()
        executor.shutdown(cancel_futures=True)


def _in_order(executor: ProcessPoolExecutor, work: Iterator[Work], ahead: int) -> Iterator[Done]:
    """Encode at most ``ahead`` batches at once, and yield their results in order."""
    waiting: deque[tuple[int, Future[tuple[Encoded, Encoded]]]] = deque()
    for shard, batch in work:
        with ctrl_c_blocked():  # the executor may start a process
            waiting.append((shard, executor.submit(_encode, batch)))
        if len(waiting) >= ahead:
            number, future = waiting.popleft()
            yield number, future.result()
    for number, future in waiting:
        yield number, future.result()


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread during the context, and forever in processes started in it; their parent handles
    it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(encoder: Encoder) -> None:
    """Initialise a process: use one thread, and exit when the parent exits."""
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
