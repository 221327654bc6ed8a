"""Every storage that a process has, from when it is made until it is gone, by part."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leaven.distributed.compat import resizes_seen, shapes_apart

GRAIN = 512
"""Bytes that an accelerator's allocator rounds up to."""

aten, fsdp = torch.ops.aten, torch.ops.fsdp
_READ = {aten._local_scalar_dense.default}
_WAITS = {torch.ops._c10d_functional.wait_tensor.default}


@dataclass(eq=False)
class Entry:
    """A storage: the bytes that it has now, and what it is a part of."""

    part: str
    size: int = 0


Parts = Counter[str]
"""Bytes by part."""


class Ledger(TorchDispatchMode):
    """Notes down what fake tensors inside of it take, and changes nothing; a number that is read off one is 1.

    A part may be given when a storage is made (:meth:`within`) or later (:meth:`mark`): what counts is the last word.
    So gradients are known as such, which are made as any tensor is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[int, Entry] = {}
        self._part, self._apart = "activations", 0
        self._start: list[tuple[Entry, int]] = []
        self._moves: list[tuple[Entry, int]] = []

    def __enter__(self) -> "Ledger":
        self._patches = ExitStack()
        self._patches.enter_context(resizes_seen(self._resized))
        self._patches.enter_context(shapes_apart(self._not_counting))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        super().__exit__(*exception)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """What is made meanwhile is of this part."""
        self._part, before = part, self._part
        try:
            yield
        finally:
            self._part = before

    def mark(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            self._entry(tensor).part = part

    def begin(self) -> None:
        """Forget what was there for a while only: :meth:`peak` is of what comes now."""
        self._start = [(entry, entry.size) for entry in self._entries.values()]
        self._moves = []

    def now(self) -> Parts:
        """What is there."""
        return _sum((entry, entry.size) for entry in self._entries.values())

    def peak(self) -> Parts:
        """The most that was there at one time since :meth:`begin`."""
        level = highest = sum(size for _, size in self._start)
        at = 0
        for number, (_, change) in enumerate(self._moves, start=1):
            level += change
            if level > highest:
                highest, at = level, number
        return _sum((*self._start, *self._moves[:at]))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # it is made of plain ones, which come here by themselves
        if func in _READ and types:
            return 1
        # What waits for a collective gives a new tensor of what is fake, and of what is real the same one.
        result = args[0] if func in _WAITS else func(*args, **(kwargs or {}))
        if not self._apart:
            for tensor in tree_leaves(result):
                if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                    self._entry(tensor)
        return result

    def _entry(self, tensor: Tensor) -> Entry:
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None:
            entry = self._entries[storage._cdata] = Entry(self._part)
            weakref.finalize(storage, self._gone, storage._cdata).atexit = False
            self._set(entry, storage.nbytes())
        return entry

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._entries:
            self._set(self._entries[storage._cdata], storage.nbytes())

    def _gone(self, storage: int) -> None:
        self._set(self._entries.pop(storage), 0)

    def _set(self, entry: Entry, size: int) -> None:
        size = -(-size // GRAIN) * GRAIN
        self._moves.append((entry, size - entry.size))
        entry.size = size

    @contextmanager
    def _not_counting(self) -> Iterator[None]:
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1


def _sum(moves: Iterable[tuple[Entry, int]]) -> Parts:
    found = Parts()
    for entry, size in moves:
        found[entry.part] += size
    return found
