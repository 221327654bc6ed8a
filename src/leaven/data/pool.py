"""Tokenise batches of text in one or several processes. The results come in the order of the batches."""

import errno
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process

from leaven.data.tokenizer import Encoded, Encoder, TextPiece, parallel_tokenizers
from leaven.errors import InputError
from leaven.planning.this_machine import cores

PieceBatch = list[TextPiece]
Work = tuple[int, PieceBatch]
"""A shard number and a batch of text."""
Done = tuple[int, tuple[Encoded, Encoded]]
"""The shard number of a batch, and its (training tokens, validation tokens)."""

BYTES_A_PROCESS = 2**24
"""Smallest number of bytes of text per process, by default. Encoding them takes several times as long as starting a
process."""

NO_SEMAPHORE = {errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.ENOSYS}
"""Values of errno if no semaphore can be created, because /dev/shm is full, missing or not writable."""

_encoder: Encoder


def encode_in_order(encoder: Encoder, work: Iterator[Work], n_bytes: int, processes: int | None) -> Generator[Done]:
    """Yield (shard number, tokens) for each batch of text in ``work``, in order.

    Close this generator to end its processes.

    Args:
        n_bytes: number of bytes in all batches together.
        processes: number of worker processes; by default one per core, or fewer for little text. With 1, no worker
            starts: this process encodes, with threads on all cores.

    Raise InputError if a process cannot start or dies.
    """
    processes = processes or max(1, min(cores(), n_bytes // BYTES_A_PROCESS))
    if processes == 1:
        with parallel_tokenizers():
            for shard, batch in work:
                yield shard, encoder.encode(batch)
        return
    others = active_children()
    executor = new_processes(processes, _start, encoder)
    waiting: deque[tuple[int, Future[tuple[Encoded, Encoded]]]] = deque()
    try:
        for shard, batch in work:
            with signals_blocked():  # submit may start a process
                waiting.append((shard, executor.submit(_encode, batch)))
            if len(waiting) >= 2 * processes:
                number, future = waiting.popleft()
                yield number, future.result()
        for number, future in waiting:
            yield number, future.result()
    except BrokenProcessPool:
        raise InputError(
            "a tokenising process died (it was killed or ran out of memory); finished shards are kept, so "
            "run the same command again to continue"
        ) from None
    finally:
        # After an error or Ctrl-C, processes may still be working.
        for process in active_children():
            if process not in others:
                process.kill()
        executor.shutdown(cancel_futures=True)


def new_processes(count: int, initialise: Callable[..., None], *arguments: object) -> ProcessPoolExecutor:
    """Return an executor whose processes first call ``initialise(*arguments)``, or raise InputError."""
    try:
        with signals_blocked():  # this also starts the process that tracks the semaphores
            return ProcessPoolExecutor(count, get_context("spawn"), initializer=initialise, initargs=arguments)
    except OSError as error:
        if error.errno not in NO_SEMAPHORE:
            raise
        raise InputError(
            f"no worker process can start, because /dev/shm cannot be written ({error.strerror}); make room in it, "
            "or mount it so that it can be written (in a container: --tmpfs /dev/shm)"
        ) from None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP in this thread until the ``with`` block ends. Do nothing on Windows.
    Processes started in the block never receive these signals. Their parent must end them with SIGKILL."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(encoder: Encoder) -> None:
    global _encoder  # noqa: PLW0603
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder
    exit_with_parent()


def exit_with_parent() -> None:
    """Start a thread that ends this process as soon as its parent process has ended."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _encode(batch: PieceBatch) -> tuple[Encoded, Encoded]:
    return _encoder.encode(batch)
