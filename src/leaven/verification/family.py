"""Families: one model at any width and depth, with its optimiser and its data. Checks know nothing else of a model.

A recipe is a family. So is any ``module:factory``, a function of yours::

    def factory(width: int, depth: int):
        model = MyModel(width, depth)                 # nn.Module: token ids (sequences, positions) -> logits
        groups = leaven.parametrize(model, base=MyModel(64, 2), hyperparameters={"lr": 4e-3})
        return model, groups                          # groups for torch.optim.AdamW, or an optimiser

The random state is seeded before each call. A third thing returned is a function ``batch(seed, step) -> (inputs,
targets)``; without it the model is fed sequences with some structure to learn.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaven.data.stream import Stream
from leaven.model.initialise import build_model, name_seed
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterTable, resolve
from leaven.scaling.transfer import transfer
from leaven.training.optimiser import Optimiser
from leaven.verification.probe import tensor_of

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet

Batch = tuple[Tensor, Tensor]
Batches = Callable[[int, int], Batch]
"""(seed, step) -> inputs and targets, token ids (sequences, positions)."""


@dataclass(frozen=True)
class Member:
    """One model of a family. ``label`` gives the line that a module or parameter stands in, None for no line."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Batch]
    label: Callable[[str], str | None]

    def loss(self, step: int) -> Tensor:
        """Mean cross-entropy in nats of the batch of a step."""
        inputs, targets = self.batch(step)
        logits = tensor_of(self.model(inputs))
        assert logits is not None, "the model gives no tensor"
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def scale_lr(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


class Family(Protocol):
    @property
    def name(self) -> str: ...

    def build(self, width: int, depth: int, seed: int) -> Member:
        """A fresh model of this width and depth.

        Raises:
            InputError: if the family has no such member.
        """
        ...


@dataclass(frozen=True)
class RecipeFamily:
    """A recipe and all its transfers in width and depth: wider by more heads, or by larger ones with ``grow_heads``.

    ``table`` gives a recipe's parameter table.
    """

    recipe: Recipe
    batches: Batches
    table: Callable[[Recipe], ParameterTable] = resolve
    grow_heads: bool = False

    @property
    def name(self) -> str:
        return self.recipe.name

    def build(self, width: int, depth: int, seed: int) -> Member:
        shape = self.recipe.model
        moved = transfer(
            self.recipe,
            width=width,
            depth=depth,
            d_head=width // shape.n_heads if self.grow_heads else None,
            n_kv_heads=shape.n_kv_heads if self.grow_heads else None,
        )
        table = self.table(moved)
        model = build_model(moved.model, table, seed)
        optimiser = Optimiser.build(model, table, moved.hyperparameters.optimizer)
        return Member(model, optimiser.adam, partial(self.batches, seed), _own_label)


@dataclass(frozen=True)
class ForeignFamily:
    """A factory somebody else wrote; see the top of this file."""

    name: str
    factory: Callable[..., Any]
    sequences: int = 8
    seq_len: int = 64

    def build(self, width: int, depth: int, seed: int) -> Member:
        torch.manual_seed(seed)
        made = self.factory(width, depth)
        if not (isinstance(made, tuple) and len(made) in {2, 3} and isinstance(made[0], nn.Module)):
            raise InputError(f"{self.name}: it should return (model, groups or optimiser), or those and batches")
        model, optimizer = made[:2]
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = torch.optim.AdamW(optimizer)
        batches = made[2] if len(made) == 3 else self._batches(model)
        return Member(model, optimizer, partial(batches, seed), plain_label)

    def _batches(self, model: nn.Module) -> Batches:
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not sizes:
            raise InputError(f"{self.name}: no torch.nn.Embedding to read the vocabulary off; return batches as well")
        return synthetic(sizes[0], self.seq_len, self.sequences)


def calibrated(recipe: Recipe, width: int, depth: int, hidden: float) -> Recipe:
    """The recipe with its base at a width and depth, and with initial values that are near the limit of large models.

    Exponents depend on neither, but how soon they show does. Here the embedding starts at RMS 1, hidden weights at
    ``hidden`` / sqrt(width) and the readout at 1/width. With a small embedding the stream at depth 2 is nearly all
    branches, whose sum falls with depth as L^(1/2 - alpha), and the gradients inside the blocks are off by as much.
    With a large readout the gain of the final norm has a gradient of order N^-2 first, and the logits stay initial
    for longer.
    """
    std = hidden * width**-0.5
    starts = {"embedding": 1.0, "positions": 1.0, "unembedding": 1 / width}
    changes: dict[str, object] = {
        f"hyperparameters.modules.{module}.init_std": starts.get(module, std) / std for module in recipe.model.modules
    }
    if recipe.model.tied_embeddings:
        changes["hyperparameters.modules.embedding.init_std"] = 1 / width / std
    base = {"width": width, "depth": depth, "batch_tokens": recipe.batch.tokens, "tokens": recipe.data.tokens}
    return recipe.replace(changes | {"hyperparameters.init_std": std, "scaling.base": base})


def foreign(entry: str) -> ForeignFamily:
    """The family of ``module:factory``, looked up from the working directory as ``python -m`` does.

    Raises:
        InputError: if there is no such module or no such function in it.
    """
    module, _, name = entry.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in {module, module.partition(".")[0]}:
            raise
        raise InputError(f"{entry}: no module {module} from here; give module:factory, or a recipe file") from None
    except AttributeError:
        raise InputError(f"{entry}: {module} has no {name}; give module:factory") from None
    return ForeignFamily(entry, factory)


def corpus(recipe: Recipe, tokens: "TokenSet", batch_tokens: int) -> Batches:
    """Batches of a recipe's own text, of about ``batch_tokens`` tokens each."""
    seq_len = recipe.model.seq_len
    count = max(batch_tokens // seq_len, 1)

    def batch(seed: int, step: int) -> Batch:
        windows = torch.from_numpy(Stream(tokens.train, seq_len, seed).batch(step * count, count))
        return windows[:, :-1], windows[:, 1:]

    return batch


def synthetic(vocab_size: int, seq_len: int, sequences: int) -> Batches:
    """Text of a chain: seven times in ten a token is followed by the one it always is, else by a Zipf-like one."""
    chain = torch.Generator().manual_seed(name_seed(0, "chain"))
    successor = torch.randperm(vocab_size, generator=chain)
    zipf = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)

    def batch(seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(name_seed(seed, "text", step))
        drawn = torch.multinomial(zipf, sequences * (seq_len + 1), replacement=True, generator=generator)
        windows = drawn.view(sequences, seq_len + 1)
        follows = torch.rand(windows.shape, generator=generator) < 0.7
        for position in range(1, seq_len + 1):
            expected = successor[windows[:, position - 1]]
            windows[:, position] = torch.where(follows[:, position], expected, windows[:, position])
        return windows[:, :-1], windows[:, 1:]

    return batch


def plain_label(name: str) -> str:
    """A dotted name without its inner numbers: all layers stand in one line; ``.weight`` is left out."""
    first, *rest = name.split(".")
    parts = [first, *(part for part in rest if not part.isdigit())]
    return ".".join(parts[:-1] if parts[-1] == "weight" else parts) or "output"


def _own_label(name: str) -> str:
    """As a person names leaven's own modules: a block's output is the residual stream, the model's the logits."""
    plain = plain_label(name)
    named = {"output": "unembedding", "layers": "residual"}
    return named.get(plain, plain.removeprefix("layers."))
