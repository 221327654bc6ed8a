"""Track the memory of tensors from allocation to release, by part: weights, gradients, activations and so on."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leaven.distributed.compat import resizes_seen, shapes_apart

_PLAIN = {Tensor, nn.Parameter, FakeTensor}

aten, fsdp = torch.ops.aten, torch.ops.fsdp
_READ, _WAIT = aten._local_scalar_dense.default, torch.ops._c10d_functional.wait_tensor.default


@dataclass(eq=False)
class Allocation:
    """A torch storage, used by one or more tensors."""

    part: str  # what the memory is used for
    size: int = 0  # current number of bytes


BytesByPart = Counter[str]
"""The number of bytes by part, such as "activations"."""


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that records the memory of tensors created inside it, by part, such as "activations".

    Only parameters and tensors of the class ``of`` are recorded; ``of`` is an argument of the constructor. New
    tensors count as "activations": :meth:`within` sets another part for new tensors, and :meth:`mark` one for
    existing tensors. In the context, ``item()`` of a fake tensor returns 1.
    """

    def __init__(self, of: type[Tensor] = FakeTensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of
        self._allocations: dict[int, Allocation] = {}
        self._part = "activations"  # the part of new tensors
        self._paused = 0  # number of open contexts in which nothing is recorded
        self._start: list[tuple[Allocation, int]] = []  # allocations and their bytes at :meth:`begin`
        self._moves: list[tuple[Allocation, int]] = []  # changes of bytes since then, in order

    def __enter__(self) -> "AllocationTracker":
        self._patches = ExitStack()
        self._patches.enter_context(resizes_seen(self._resized))
        self._patches.enter_context(shapes_apart(self._not_counting))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Inside this context, count new tensors as ``part``."""
        self._part, before = part, self._part
        try:
            yield
        finally:
            self._part = before

    def mark(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count the memory of these tensors as ``part``, from their creation on."""
        for tensor in tensors:
            self._allocation(tensor).part = part

    def begin(self) -> None:
        """Start the period in which :meth:`peak` looks for the largest total."""
        self._start = [(entry, entry.size) for entry in self._allocations.values()]
        self._moves = []

    def now(self) -> BytesByPart:
        """Return each part's allocated bytes now."""
        return _sum((entry, entry.size) for entry in self._allocations.values())

    def peak(self) -> BytesByPart:
        """Return the bytes of each part at the moment of the largest total since :meth:`begin`."""
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
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a wrapper, whose inner tensors are dispatched separately
        fake = FakeTensor in types
        if func is _READ and fake:
            return 1
        # Waiting for a collective returns a new tensor if the tensor is fake, and the same tensor if it is real.
        result = args[0] if func is _WAIT and fake else func(*args, **(kwargs or {}))
        if self._paused:
            return result
        for tensor in tree_leaves(result):
            if type(tensor) in {self._of, nn.Parameter} and tensor.device.type != "meta":
                self._allocation(tensor)
        if func is aten._to_copy.default and self._is(args[0], "weights"):
            self.mark([result], "gathered")
        elif func is aten.clone.default and self._is(args[0], "weights"):
            self.mark([result], "buffers")  # a copy of the weights, made to measure the update
        elif func is fsdp.all_gather_copy_in.default:
            self.mark(result, "gathered")
        elif func is fsdp.chunk_cat.default:
            self.mark(args[0], "grads")
            self.mark([(kwargs or {})["out"]], "buffers")
        return result

    def _is(self, tensor: Tensor, part: str) -> bool:
        return tensor.untyped_storage()._cdata in self._allocations and self._allocation(tensor).part == part

    def _allocation(self, tensor: Tensor) -> Allocation:
        storage = tensor.untyped_storage()
        entry = self._allocations.get(storage._cdata)
        if entry is None:
            entry = self._allocations[storage._cdata] = Allocation(self._part)
            weakref.finalize(storage, self._gone, storage._cdata).atexit = False
            self._set(entry, storage.nbytes())
        return entry

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._allocations.get(storage._cdata)
        if entry is not None:
            entry.part = "gathered"
            self._set(entry, storage.nbytes())

    def _gone(self, storage: int) -> None:
        self._set(self._allocations.pop(storage), 0)

    def _set(self, entry: Allocation, size: int) -> None:
        self._moves.append((entry, size - entry.size))
        entry.size = size

    @contextmanager
    def _not_counting(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


def _sum(moves: Iterable[tuple[Allocation, int]]) -> BytesByPart:
    found = BytesByPart()
    for entry, size in moves:
        found[entry.part] += size
    return found
