"""Tokenise batches of text in several processes. The results come in the order of the batches."""

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
from leaven.planning.this_machine import cores
from leaven.recipe.errors import InputError

PieceBatch = list[TextPiece]
Work = tuple[int, PieceBatch]
Done = tuple[int, tuple[Encoded, Encoded]]
"""Work is a shard number and a batch of text; Done is a shard number and the encoded training and validation text."""

BYTES_A_PROCESS = 2**24
"""A process is started only if it gets at least this much text. Starting it takes half a second; encoding this much
text takes several times as long."""

_encoder: Encoder


def processes_for(n_bytes: int) -> int:
    """Return how many processes to encode ``n_bytes`` of text with: one per available core, or fewer if there is
    little text."""
    return max(1, min(cores(), n_bytes // BYTES_A_PROCESS))


@contextmanager
def encoding(encoder: Encoder, processes: int) -> Iterator[Callable[[Iterator[Work]], Iterator[Done]]]:
    """Yield a function that encodes batches and returns the results in the same order.

    If ``processes`` is 1, the function encodes in this process, with all cores. Otherwise ``processes`` new processes
    are started.

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
            "a tokenising process died (it was killed or ran out of memory); finished shards are kept, so "
            "run the same command again to continue"
        ) from None
    finally:
        # After an error or Ctrl-C, results are not needed any more.
        for process in active_children():
            if process not in others:
                process.terminate()
        executor.shutdown(cancel_futures=True)


def _in_order(executor: ProcessPoolExecutor, work: Iterator[Work], ahead: int) -> Iterator[Done]:
    """Encode at most ``ahead`` batches at the same time, and yield the results in the order of the batches."""
    waiting: deque[tuple[int, Future[tuple[Encoded, Encoded]]]] = deque()
    for shard, batch in work:
        with ctrl_c_blocked():  # submit may start a process
            waiting.append((shard, executor.submit(_encode, batch)))
        if len(waiting) >= ahead:
            number, future = waiting.popleft()
            yield number, future.result()
    for number, future in waiting:
        yield number, future.result()


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread during the block. Processes that are started in the block never receive Ctrl-C,
    because their parent handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(encoder: Encoder) -> None:
    """Initialise a new process: make it use one thread, and exit when its parent exits."""
    global _encoder  # noqa: PLW0603
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder
    exit_with_parent()


def exit_with_parent() -> None:
    """End this process as soon as the process that started it has ended."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _encode(batch: PieceBatch) -> tuple[Encoded, Encoded]:
    return _encoder.encode(batch)
