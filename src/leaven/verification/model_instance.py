"""One model that a check trains, and the settings of one training run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaven.verification.activation_recorder import tensor_of
from leaven.verification.batches import Batches, TokenBatch

Quantity = Literal["lr", "weight_decay", "init_std"]
"""A hyperparameter that a check sweeps."""

ScaleAxis = Literal["width", "depth", "batch", "tokens"]


@dataclass(frozen=True)
class RunScale:
    """The scale of a training run. Batch and tokens are relative to those of the model family."""

    width: int
    depth: int
    batch: float = 1.0  # batch size / batch size of the family
    tokens: float = 1.0  # tokens of the run / tokens of a run of the family


@dataclass(frozen=True)
class RunSetting:
    """The scale and hyperparameters of one training run."""

    scale: RunScale
    # The value of ``quantity``. For a recipe, it is the value before scaling. For a user's factory function, it is a
    # multiple of the factory's own value.
    value: float
    seed: int = 0
    quantity: Quantity = "lr"  # the hyperparameter that is set
    ruled: bool = True  # whether the scaling rule adapts hyperparameters to the batch and tokens

    @property
    def ruled_scale(self) -> RunScale:
        """The scale to which the scaling rule adapts the hyperparameters: without ``ruled``, only width and depth."""
        return self.scale if self.ruled else RunScale(self.scale.width, self.scale.depth)


@dataclass(frozen=True)
class ModelInstance:
    """A model with its optimizer and batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    seed: int  # seed of the batches
    label: Callable[[str], str | None]  # from the name of a module or parameter to its label, or None (left out)

    def loss(self, step: int) -> Tensor:
        """Return the mean cross-entropy on the batch of a step, in nats per token."""
        return self.loss_of(self.batches(self.seed, step))

    def loss_of(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross-entropy on a batch, in nats per token."""
        inputs, targets = batch
        logits = self.logits(inputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().to(logits.device))

    def logits(self, inputs: Tensor) -> Tensor:
        found = tensor_of(self.model(inputs.to(next(self.model.parameters()).device)))
        assert found is not None, "the model returns no tensor"
        return found

    def scale_lr(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


def block_labels(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the name of a module or parameter to its label, which is the same in all blocks.

    For example, ``layers.3.mlp.0.weight`` has the label ``layers.mlp.0``. The label of the whole model is
    ``output``. Blocks are the members of an ``nn.ModuleList``, and those of an ``nn.Sequential`` if they all have the
    same type and have submodules. Numbers inside a block stay: ``layers.3.experts.1`` becomes ``layers.experts.1``.
    """
    lists: list[str] = []
    for path, module in model.named_modules():
        if path and _lists_blocks(module) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)

    def label(name: str) -> str:
        for path in lists:
            if name.startswith(f"{path}."):
                _, dot, rest = name.removeprefix(f"{path}.").partition(".")
                name = f"{path}{dot}{rest}"
                break
        *parents, last = name.split(".")
        return ".".join(parents if last == "weight" else [*parents, last]) or "output"

    return label


def _lists_blocks(module: nn.Module) -> bool:
    members = list(module.children())
    alike = len({type(member) for member in members}) == 1 and all(any(member.children()) for member in members)
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and alike)


def own_labels(model: nn.Module) -> Callable[[str], str]:
    """Return a function from names in leaven's transformer to labels, such as ``mlp.in``; blocks: ``residual``."""
    plain, named = block_labels(model), {"output": "unembedding", "layers": "residual"}

    def label(name: str) -> str:
        found = plain(name)
        return named.get(found, found.removeprefix("layers."))

    return label
