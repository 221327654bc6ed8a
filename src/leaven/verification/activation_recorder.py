"""Record the outputs of modules in a forward pass, and the attention logits.

No module returns the attention logits, so calls of ``torch.nn.functional.scaled_dot_product_attention`` and of
leaven's ``causal_attention`` are intercepted.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leaven.errors import InputError
from leaven.interop.multipliers import ROWS
from leaven.model.kernels import causal_attention
from leaven.recipe.shape import BRANCH_ENDS

POSITIONS = 256
"""At most this many rows of an output, such as tokens, are recorded. Their RMS is within a few percent of the RMS of
all rows. For attention logits and probabilities, all rows of the first sequence are recorded."""

LOGITS = "logits"


def tensor_of(output: Any) -> Tensor | None:
    """Return the tensor in a module's output: the output itself, its item 0, its ``logits`` or its
    ``last_hidden_state``. Return None if none of these is a tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return None


class ActivationRecorder(TorchFunctionMode):
    """A context manager that records module outputs and attention logits. :meth:`take` returns them.

    ``label`` maps a module's name to the label of its output, or to None (not recorded). Outputs with the same label
    are stacked in the order of computation. If a container returns the output of one of its modules, this output is
    recorded once, for the inner module. Two kinds of outputs are not recorded:

    - Outputs inside ``experts``, because the router chooses their rows.
    - In a parametrized model, outputs of whole residual branches, such as ``layers.3.mlp``, because the branch's
      multiplier is applied to them. The output of the branch's last matrix is recorded before the multiplier.
    """

    def __init__(self, model: nn.Module, label: Callable[[str], str | None]) -> None:
        super().__init__()
        self._labels = {
            module: None if "experts" in name.split(".")[:-1] else label(name)
            for name, module in model.named_modules()
        }
        self._branches = _branches(model)
        self._running: list[tuple[nn.Module, int]] = []
        self._seen: list[Tensor] = []
        self._of_matrices: list[Tensor] = []  # outputs of modules with a matrix that is no embedding
        self._found: dict[str, list[Tensor]] = {}
        self._hooks = ExitStack()
        self.containers: set[str] = set()  # labels of modules that computed a new output from those of their children
        self.trained: set[str] = set()  # labels of outputs that require a gradient
        self.head_sizes: dict[str, int] = {}  # by label, the head dimension of attention logits
        # Labels of modules with a matrix, of attention logits, and of modules that read the output of a module with a
        # matrix (but not of an embedding), such as a norm on queries.
        self.matrices = {name for module, name in self._labels.items() if _has_matrix(module)}

    def __enter__(self) -> "ActivationRecorder":
        for module in self._labels:
            # `_end` runs before other hooks, to see the output without a branch multiplier. `_passed_on` runs last
            # and marks the multiplied output as seen, so that a container that returns it is not recorded.
            end = module.register_forward_hook(self._end, prepend=True)
            passed_on = module.register_forward_hook(self._passed_on)
            for handle in (module.register_forward_pre_hook(self._begin), end, passed_on):
                self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def take(self) -> dict[str, Tensor]:
        """Return and forget the recorded outputs by label, each of shape (calls, rows, features).

        Raise InputError if outputs with the same label have different shapes.
        """
        found, self._found, self._seen, self._of_matrices = self._found, {}, [], []
        for name, samples in found.items():
            shapes = {f"{tuple(sample.shape)}" for sample in samples}
            if len(shapes) > 1:
                raise InputError(
                    f"{name}: the members of an nn.ModuleList or nn.Sequential are compared as blocks, but their "
                    f"outputs have the shapes {' and '.join(sorted(shapes))}; remove them from the list, and store "
                    "each as an attribute of its own"
                )
        return {name: torch.stack(samples) for name, samples in found.items()}

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._running.append((module, len(self._seen)))
        name = self._labels[module]
        if name is not None and inputs and isinstance(inputs[0], Tensor):
            storage = inputs[0].untyped_storage().data_ptr()
            if any(storage == tensor.untyped_storage().data_ptr() for tensor in self._of_matrices):
                self.matrices.add(name)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        _, seen_before = self._running.pop()
        name, tensor = self._labels[module], tensor_of(output)
        if name is None or tensor is None or not tensor.is_floating_point() or module in self._branches:
            return
        if any(tensor is seen for seen in self._seen):
            return
        if len(self._seen) > seen_before:
            self.containers.add(name)
        if tensor.requires_grad:
            self.trained.add(name)
        if _has_matrix(module) and not isinstance(module, nn.Embedding):  # the embedding begins the residual stream
            self._of_matrices.append(tensor)
        self._seen.append(tensor)
        # Attention probabilities depend on the position. With another number of heads, a sample of their rows would
        # have other positions, so all rows of the first sequence are kept.
        probabilities = isinstance(module, nn.Dropout) and tensor.dim() == 4
        self._found.setdefault(name, []).append(
            tensor.detach()[0].flatten(0, 1).float().clone() if probabilities else _sample(tensor)
        )

    def _passed_on(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if (tensor := tensor_of(output)) is not None:
            self._seen.append(tensor)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in {F.scaled_dot_product_attention, causal_attention} and self._running:
            query, key = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            if (name := self._labels[self._running[-1][0]]) is not None:
                label = f"{name}.{LOGITS}"
                self._found.setdefault(label, []).append(_attention_logits(query, key, kwargs.get("scale")))
                self.matrices.add(label)
                self.head_sizes[label] = query.shape[-1]
                if query.requires_grad or key.requires_grad:
                    self.trained.add(label)
        return function(*args, **kwargs)


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _branches(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside blocks that contain the last matrix of a branch, such as ``layers.3.mlp``."""
    ends = [row.name.split(".")[:-1] for row in getattr(model, ROWS, ()) if row.module in BRANCH_ENDS]
    around = {".".join(end[:n]) for end in ends for n in range(1, len(end)) if any(map(str.isdigit, end[: n - 1]))}
    return {module for name, module in model.named_modules() if name in around}


def _sample(tensor: Tensor) -> Tensor:
    """Return at most `POSITIONS` evenly spaced rows of an output, (rows, features), in fp32."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    return rows[:: max(len(rows) // POSITIONS, 1)][:POSITIONS].float().clone()


def _attention_logits(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return the first sequence's attention logits, (heads x T, T). Masked logits are 0."""
    query, key = query.detach()[0].float(), key.detach()[0].float()
    key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    logits = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return logits.tril().flatten(0, 1)
