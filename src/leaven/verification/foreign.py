"""Checks of a user's own torch model. ``module:factory`` names a factory function that makes the model::

    def factory(width: int, depth: int, seed: int = 0, ratios: leaven.Ratios = leaven.Ratios()):
        model = MyModel(width, depth)                 # nn.Module: token ids (sequences, positions) -> logits
        groups = leaven.parametrize(model, base=MyModel(64, 2), hyperparameters={"lr": 4e-3}, ratios=ratios)
        return model, groups                          # groups for torch.optim.AdamW, or an optimizer

The parameters ``seed`` and ``ratios`` are optional. The factory may return a function
``batch(seed, step) -> (inputs, targets)`` as a third result. docs/concepts/checks.md describes the factory
and the training of its models. The result of a run is its validation loss: the mean loss on the batches with
seed `HELD_OUT`, on which no model is trained. A run has diverged if the ``DivergenceMonitor`` ended it, or if
its result is at least 1 nat above the loss of a uniform guess.
"""

import importlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leaven import storage
from leaven.data.tokens import TokenSet, prepare
from leaven.errors import InputError
from leaven.recipe.data import Data
from leaven.recipe.schedule import Schedule
from leaven.scaling.cells import Ratios
from leaven.training.early_stopping import DivergenceMonitor, divergence_limit
from leaven.training.loop import Diverged, Loop, PlainTraining
from leaven.training.muon import MuonWithAdamW
from leaven.training.outcome import Outcome
from leaven.verification.batches import HELD_OUT, Batches, Prepare, corpus, sequences, synthetic
from leaven.verification.model_instance import ModelInstance, Quantity, RunScale, RunSetting, ScaleAxis, block_labels
from leaven.verification.recipe_family import RecipeFamily, RecipeTrial

MADE_UP = "made-up"  # the source of synthetic token ids
SOURCE = "python-stdlib"
LEAST_VOCABULARY = 257  # 256 bytes and end-of-text
SEQ_LEN = 64
BATCH_TOKENS = 512
TOKENS = 131_072
VALIDATION_TOKENS = 32_768


@dataclass(frozen=True)
class ForeignFamily:
    """The models that a user's factory function makes at any width and depth."""

    name: str  # module:factory
    vocab_size: int
    source: str | None  # where the text comes from; None if the factory returns batches
    sequences: int  # number of sequences in a batch
    seq_len: int  # number of tokens in a sequence
    tokens: int  # number of tokens in a training run
    alpha: float = 1.0  # the model's rule multiplies residual branches by depth^-alpha
    # by scale and seed, a hash of the model that the factory makes with them
    _states: dict[tuple[RunScale, int], str] = field(default_factory=dict, init=False, compare=False, repr=False)
    rule = None
    unit = "multiple of the factory's"

    @property
    def batch_tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def takes_ratios(self) -> bool:
        return "ratios" in inspect.signature(_factory(self.name)).parameters

    def value(self, quantity: Quantity) -> float:
        """Return 1 for "lr": sweeps multiply the lr of the user's model by factors. Otherwise raise InputError."""
        if quantity != "lr":
            raise InputError(
                f"{self.name}: {quantity} of a factory's model cannot be swept, only its lr; give a recipe file"
            )
        return 1.0

    def exponent(self, quantity: Quantity, axis: ScaleAxis) -> float:
        """Return 0, because the factory scales its hyperparameters itself."""
        return 0.0

    def params(self, scale: RunScale) -> int:
        return sum(parameter.numel() for parameter in self.build(scale, 0).model.parameters())

    def build(self, scale: RunScale, seed: int) -> ModelInstance:
        """Return a new model at a scale, with its optimizer and batches."""
        model, optimizer, own = _made(self.name, scale, seed)
        return ModelInstance(model, optimizer, own or self._text, seed, block_labels(model))

    def trial(self, setting: RunSetting) -> "ForeignTrial":
        """Return the training run of a setting. Raise InputError if the batch or model is impossible."""
        scale = setting.scale
        sequences = scale.batch * self.sequences
        if not math.isclose(sequences, round(sequences)):
            raise InputError(
                f"{self.name}: {scale.batch:g} times the batch of {self.sequences} sequences is not a whole number "
                "of sequences; choose other batch ratios or a larger batch"
            )
        at = setting.ruled_scale, setting.seed
        if at not in self._states:
            self._states[at] = self._state(*at)
        key = storage.digest(repr((self, self._states[at], setting)).encode(), 12)
        # The trial is sent to another process, so its family is a copy without the cached text.
        return ForeignTrial(replace(self), setting, key, self._fingerprint)

    @cached_property
    def _tokens(self) -> TokenSet | None:
        """The tokens of the text. None if the factory returns batches, or if the token ids are made up."""
        return None if self.source in {None, MADE_UP} else prepare(_data(str(self.source)), self.vocab_size)

    @property
    def _fingerprint(self) -> str | None:
        return None if self._tokens is None else self._tokens.fingerprint

    @cached_property
    def _text(self) -> Batches:
        if self._tokens is None:
            return synthetic(self.vocab_size, self.seq_len, self.sequences)
        return corpus(self._tokens, self.seq_len, self.sequences)

    def _state(self, scale: RunScale, seed: int) -> str:
        """Return a hash of the model at a scale: initial values, optimizer, losses, gradients and two updates."""
        instance = self.build(scale, seed)
        loss = instance.loss(0)
        loss.backward()  # type: ignore[no-untyped-call]
        found = [type(instance.optimizer).__name__]
        squares = 0.0
        for group in instance.optimizer.param_groups:
            found.append(repr({name: value for name, value in group.items() if name != "params"}))
            for parameter in group["params"]:
                # Norms and losses are rounded, because the order of additions may differ between processes.
                found.append(f"{tuple(parameter.shape)} {parameter.detach().norm().item():.4g}")
                squares += 0.0 if parameter.grad is None else parameter.grad.norm().item() ** 2
        found.append(f"{loss.item():.5g} {math.sqrt(squares):.4g}")
        found.append("{:.3g} {:.4g}".format(*_two_steps(instance)))
        return storage.digest(" ".join(found).encode(), 12)


@dataclass(frozen=True)
class ForeignTrial:
    """A training run of a model from a user's factory function."""

    family: ForeignFamily
    setting: RunSetting
    key: str
    text: str | None = None  # the fingerprint that the tokens must have; None if there is no text

    @property
    def cost(self) -> float:
        # Smaller batches take more steps, and an optimizer step costs about as much as a batch.
        scale = self.setting.scale
        return scale.width**2 * scale.depth * (1 + 1 / scale.batch) * scale.tokens

    def run(self) -> Outcome:
        """Train a new model. Return its outcome, with the loss on held-out tokens.

        The loss is capped at ``divergence_limit``, which is also the loss of a diverged run. Raise InputError if the
        training text has changed since the command began.
        """
        family, setting, scale = self.family, self.setting, self.setting.scale
        if self.text is not None and family._fingerprint != self.text:
            raise InputError(f"the text of {family.source} has changed since this command began; run it again")
        began = time.perf_counter()
        instance = family.build(setting.ruled_scale, setting.seed)
        instance.scale_lr(setting.value)
        count, tokens = round(scale.batch * family.sequences), round(family.tokens * scale.tokens)
        schedule = Schedule(warmup_tokens=tokens // 8)
        final = limit = divergence_limit(family.vocab_size)
        monitor = DivergenceMonitor(family.vocab_size, tokens)

        def loss(done: int) -> Tensor:
            first = done // family.seq_len
            return instance.loss_of(sequences(instance.batches, family.sequences, setting.seed, first, count))

        training = PlainTraining(
            instance.optimizer, loss, count * family.seq_len, tokens, lambda done: schedule.multiplier(done, tokens)
        )
        with suppress(Diverged):
            Loop(training, [monitor]).run()
            instance.model.eval()
            batches = max(VALIDATION_TOKENS // family.batch_tokens, 1)
            with torch.no_grad():
                losses = [instance.loss_of(instance.batches(HELD_OUT, n)).item() for n in range(batches)]
            final = math.fsum(losses) / batches
        return Outcome(
            loss=min(final, limit) if math.isfinite(final) else limit,
            tokens=training.tokens,
            seconds=time.perf_counter() - began,
            curve=monitor.curve,
        )


ModelFamily = RecipeFamily | ForeignFamily
"""The models of a recipe or a factory at any scale."""

CheckTrial = RecipeTrial | ForeignTrial
"""One training run of a model family. ``run()`` trains it and may be called in any process.

On the same text, trials with the same ``key`` have the same loss. ``cost`` is the expected duration relative to other
trials. The loss of a diverged run is finite."""


def foreign(
    entry: str,
    scale: RunScale,
    prepare: Prepare = prepare,
    *,
    source: str | None = None,
    batch_tokens: int | None = None,
    tokens: int | None = None,
    alpha: float | None = None,
) -> ForeignFamily:
    """Return the model family that a user's factory makes.

    Args:
        entry: the factory as ``module:factory``.
        scale: size at which one model is built, to read the vocabulary size.
        prepare: prepares the text for a vocabulary size.
        source: the text, like ``data.source`` in a recipe, or :data:`MADE_UP`; by default :data:`SOURCE`. Must be
            None if the factory returns batches.
        batch_tokens: number of tokens in a batch; None for the default. Must be None if the factory returns batches.
        tokens: number of tokens in a training run; None for the default.
        alpha: the model's rule multiplies residual branches by depth^-alpha; by default 1.

    Raise InputError if the factory, its result or an argument cannot be used, or the vocabulary is too small.
    """
    model, optimizer, own = _made(entry, scale, 0)
    tokens, alpha = tokens or TOKENS, alpha or 1.0
    if own is not None:
        if source is not None or batch_tokens is not None:
            raise InputError(f"{entry} returns its own batches; leave --source and --batch-tokens out")
        inputs, targets = own(0, 0)
        vocab_size = ModelInstance(model, optimizer, own, 0, block_labels(model)).logits(inputs).shape[-1]
        return ForeignFamily(entry, vocab_size, None, len(targets), targets[0].numel(), tokens, alpha)
    size = BATCH_TOKENS if batch_tokens is None else batch_tokens
    if size % SEQ_LEN:
        raise InputError(f"--batch-tokens {size}: give a multiple of {SEQ_LEN}, the number of tokens in a sequence")
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise InputError(
            f"{entry}: the model has no torch.nn.Embedding to read the vocabulary size from; let the "
            "factory return a batch function as its third result"
        )
    source, vocab_size = source or SOURCE, embedding.num_embeddings
    if source != MADE_UP:
        if vocab_size < LEAST_VOCABULARY:
            raise InputError(
                f"{entry}: a vocabulary of {vocab_size} is too small for text, which needs {LEAST_VOCABULARY}; "
                f"enlarge it, let the factory return a batch function as its third result, or give --source {MADE_UP}"
            )
        prepare(_data(source), vocab_size)
    return ForeignFamily(entry, vocab_size, source, size // SEQ_LEN, SEQ_LEN, tokens, alpha)


def _two_steps(instance: ModelInstance) -> tuple[float, float]:
    """Take two optimizer steps. Return the sum of the norms of parameter changes, and the held-out loss."""
    before = [parameter.detach().clone() for parameter in instance.model.parameters()]
    for step in range(2):
        instance.optimizer.zero_grad(set_to_none=True)
        instance.loss(step).backward()  # type: ignore[no-untyped-call]
        instance.optimizer.step()
    pairs = zip(before, instance.model.parameters(), strict=True)
    change = math.fsum((after.detach() - value).norm().item() for value, after in pairs)
    instance.model.eval()
    with torch.no_grad():
        return change, instance.loss_of(instance.batches(HELD_OUT, 0)).item()


def _data(source: str) -> Data:
    return Data(source=source, tokens=1)  # the number of tokens is not used


def _made(entry: str, scale: RunScale, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches | None]:
    factory = _factory(entry)
    ratios = Ratios(batch=scale.batch, tokens=scale.tokens)
    known = inspect.signature(factory).parameters
    if ratios != Ratios() and "ratios" not in known:
        raise InputError(
            f"{entry} has no parameter ratios, so its rule cannot adapt to the batch or run length; "
            "add ratios=leaven.Ratios() and pass it to leaven.parametrize"
        )
    options = {name: value for name, value in (("seed", seed), ("ratios", ratios)) if name in known}
    torch.manual_seed(seed)
    made = factory(scale.width, scale.depth, **options)
    if not (isinstance(made, tuple) and len(made) in {2, 3} and isinstance(made[0], nn.Module)):
        raise InputError(
            f"{entry} must return (model, optimizer) or (model, optimizer, batch); parameter groups can replace the "
            "optimizer"
        )
    model, optimizer, batches = (*made, None)[:3]
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = MuonWithAdamW(optimizer)  # AdamW, if no group is for Muon
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            raise InputError(f"{entry}: the parameter {name} is in no group of the optimizer; add it, or freeze it")
    return model, optimizer, batches


def _factory(entry: str) -> Callable[..., Any]:
    module, _, name = entry.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in {module, module.partition(".")[0]}:
            raise
        raise InputError(f"{entry}: module {module} not found; give module:factory or a recipe file") from None
    except AttributeError:
        raise InputError(f"{entry}: {module} has no {name}; give module:factory") from None
    if not callable(factory):
        raise InputError(f"{entry} is not a function; give module:factory with a function of width and depth")
    return factory
