"""The recipe: one immutable, validated, complete description of a training run."""

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from leaven import storage
from leaven.recipe.base import Part
from leaven.recipe.batch import Batch, BatchSchedule, Count
from leaven.recipe.data import Data
from leaven.recipe.hyperparameters import Hyperparameters, Multipliers
from leaven.recipe.init_std import require_one_rule
from leaven.recipe.layout import Layout
from leaven.recipe.schedule import Schedule
from leaven.recipe.shape import Depth, ModelShape, Width

RuleName = Literal["standard", "mup", "completep", "complete-d-p"]
BATCH_RULES = ("complete-d-p",)
"""Scaling rules that change hyperparameters with the batch size."""


class Start(Part):
    """Where training starts: from random weights, or from the weights of a given model.

    Loaded weights are divided by the rule's output multipliers, so that the new model computes the same function as
    the given one (:func:`leaven.scaling.table.folding`).
    """

    # A folder in Hugging Face's format, with a model of the recipe's shape; None draws random weights.
    weights: str | None = Field(default=None, min_length=1)

    @property
    def folder(self) -> Path | None:
        return storage.expanded(self.weights) if self.weights else None


class Base(Part):
    """The base: the model size, batch and run length for which the recipe's hyperparameters are written."""

    width: Width  # d_model
    depth: Depth  # n_layers
    batch_tokens: Count
    tokens: Count  # training tokens
    d_ff: Width | None = None  # None: d_ff / d_model is the same as in the recipe's model
    d_head: Width | None = None  # None: d_head is the same as in the recipe's model
    n_kv_heads: Width | None = None  # None: n_heads / n_kv_heads is the same as in the recipe's model


class Scaling(Part):
    """How hyperparameters change from the base to this recipe. Without a base, they do not change."""

    rule: RuleName = "complete-d-p"
    # completep and complete-d-p multiply each residual branch by r^-alpha, and the lr inside the blocks by
    # r^(alpha-1), where r = (layers of this recipe) / (layers of the base). Twice the layers of the base with
    # alpha = 1: branches / 2, lr unchanged.
    alpha: float = Field(default=1.0, ge=0.5, le=1)
    # The exponent t in lr ~ (training tokens)^-t of complete-d-p; published values are 0.3 to 0.5.
    token_exponent: float = Field(default=0.5, ge=0, le=1)
    # 95% interval of the token exponent that ``leaven check duration`` measured; None: not measured. ``leaven
    # transfer`` warns if token_exponent is outside.
    token_exponent_interval: tuple[float, float] | None = Field(default=None, strict=False)
    # Whether the weight decay of hidden weights is multiplied by depth^(1-alpha). With alpha < 1 the lr of hidden
    # weights falls with depth, and this factor keeps lr x decay x steps constant. CompleteP and Complete(d)P have no
    # such factor.
    scale_decay_with_depth: bool = False
    base: Base | None = None


class Precision(Part):
    """The precision of the matrix products. Weights, gradients, Adam's moments, softmax and loss are always fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"  # dtype of the matrix products; fp16 uses a loss scale


class Stability(Part):
    """Loss spikes (:mod:`leaven.training.spikes`), checkpoints, and measurements of the gradient noise scale."""

    # rollback: return to a checkpoint before the spike and skip the data of the spike; skip: do not apply a step
    # whose loss or gradient norm is an outlier; stop: end the run; off: do nothing.
    on_spike: Literal["rollback", "skip", "stop", "off"] = "rollback"
    max_rollbacks: int = Field(default=3, gt=0)  # rollbacks for one spike; after that the run stops
    rollback_lr: float = Field(default=1.0, gt=0, le=1)  # factor on the lr after a rollback
    rollback_lr_tokens: int | None = Field(default=None, gt=0)  # tokens over which the lr returns to its full value
    checkpoint_every_tokens: int | None = Field(default=None, gt=0)  # None: 1/10 of the run
    keep: int = Field(default=2, gt=0)  # number of newest checkpoints that are kept
    # The first checkpoint of each interval of this length, except the first interval, is never deleted.
    keep_every_tokens: int | None = Field(default=None, gt=0)
    noise_scale_every_tokens: int | None = Field(default=None, gt=0)  # None: it is not measured

    @model_validator(mode="after")
    def _validate_rollback_lr(self) -> "Stability":
        if (self.rollback_lr < 1) != (self.rollback_lr_tokens is not None):
            raise ValueError(
                "rollback_lr (below 1) and rollback_lr_tokens go together: after a rollback the lr is multiplied by "
                "rollback_lr and returns to its full value over rollback_lr_tokens; set both or neither"
            )
        return self


class EvaluationSettings(Part):
    """How often the validation loss is computed, and on how many tokens. A finished run ends with an evaluation."""

    tokens: int = Field(default=131_072, gt=0)  # spread evenly over the validation split; all of it if it has fewer
    every_tokens: int | None = Field(default=None, gt=0)  # tokens between evaluations; None: 1/10 of the run


class Average(Part):
    """An average of the weights over steps, which a run computes, validates and saves beside the weights.

    Without a half-life, the average is uniform. Otherwise it is an exponential moving average, uniform at first.
    """

    half_life_tokens: int | None = Field(default=None, gt=0)
    last: float = Field(default=1.0, gt=0, le=1)  # average only over this last share of the run

    @model_validator(mode="after")
    def _not_empty(self) -> "Average":
        if self.half_life_tokens is None and self.last == 1:
            raise ValueError(
                "a uniform average over the whole run includes its early weights; set last below 1, such as "
                "last = 0.2 for the last fifth of the run, or half_life_tokens, or remove [average]"
            )
        return self

    def share(self, before: int, tokens: int, horizon: int) -> float:
        """Return the share of the current weights in the average after a step; 0 before the average begins.

        The step goes from ``before`` to ``tokens`` trained tokens. The run ends at ``horizon``.
        """
        start = (1 - self.last) * horizon
        if tokens <= start:
            return 0.0
        alike = (tokens - max(before, start)) / (tokens - start)
        if self.half_life_tokens is None:
            return alike
        return max(alike, 1 - math.exp2((before - tokens) / self.half_life_tokens))


Octaves = Annotated[float, Field(ge=-64, le=64)]  # n octaves are a factor of 2^n


def _both_sides(value: Any) -> Any:
    """Return a search range in octaves as (low, high). A single number n means (-n, n)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = (-value, value)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(
            'not a search range; write "hyperparameters.lr" = 2 to search 2 octaves down and up (1/4 to 4 times the '
            'recipe\'s value), or "hyperparameters.lr" = [-1, 3]; quote the path'
        )
    low, high = value
    if isinstance(low, int | float) and isinstance(high, int | float) and not low < 0 < high:
        raise ValueError(
            f"the range {low:g} to {high:g} octaves must begin below 0 (the recipe's own value) and end above 0; "
            "write for example [-1, 3]"
        )
    return (low, high)


Ends = Annotated[
    tuple[Octaves, Octaves],
    BeforeValidator(_both_sides),
    PlainSerializer(lambda ends: ends[1] if ends[0] == -ends[1] else ends),
]


class Tuning(Part):
    """The table ``[tuning]``: the search space of ``leaven tune``. ``leaven train`` ignores this table."""

    # Comma-separated names of values to search, or of sets of values. The option ``--space`` overrides them.
    space: str | None = Field(default=None, min_length=1)
    # More values to search, or ranges of values in ``space``. A key is a path of the recipe, such as
    # ``hyperparameters.lr``, or a pattern with ``*``; the last matching key applies. A number is the distance from
    # the recipe's value, in octaves (factors of 2), or in steps of 0.1 if the value may be 0 (dropout, min_lr_ratio).
    octaves: dict[str, Ends] = {}

    @model_validator(mode="after")
    def _not_empty(self) -> "Tuning":
        if self.space is None and not self.octaves:
            raise ValueError(
                'this table is empty; write space = "per-module" in it, add [tuning.octaves], or remove [tuning]'
            )
        return self


NOT_NUMBERS = {"name", "why", "layout", "tuning"}  # parts of a recipe that change at most the last bits of the loss
BY_REWIND = "by --rewind-to"  # in [why], the mark of a value that `leaven train --rewind-to` changed during the run
_DURING_A_RUN = re.compile(rf"since [\d,]+ tokens(?:, {BY_REWIND})?; before: ")


class Recipe(Part):
    """The complete description of a training run.

    The hyperparameters are those of the base (:class:`Base`). :mod:`leaven.scaling.table` converts them to the
    size of this run.
    """

    name: str = Field(min_length=1, pattern=r"^\w[\w.\-]*$")
    model: ModelShape
    data: Data
    start: Start = Start()
    batch: Batch
    schedule: Schedule = Schedule()
    hyperparameters: Hyperparameters
    scaling: Scaling = Scaling()
    precision: Precision = Precision()
    layout: Layout = Layout()
    stability: Stability = Stability()
    evaluation: EvaluationSettings = EvaluationSettings()
    average: Average | None = None
    tuning: Tuning | None = None
    why: dict[str, str] = {}  # the reason for a value of the recipe, by the dotted path of the value

    added: ClassVar = ("average",)

    @model_validator(mode="after")
    def _validate_parts(self) -> "Recipe":
        seq_len = self.model.seq_len
        for tokens in {size for _, size in self.batch.sizes}:
            if tokens < seq_len:
                raise ValueError(
                    f"a batch of {tokens:,} tokens is smaller than one sequence of {seq_len:,}; "
                    f"set [batch] tokens to at least {seq_len} or shorten [model] seq_len"
                )
            if tokens % seq_len:
                lower = tokens // seq_len * seq_len
                raise ValueError(
                    f"a batch of {tokens:,} tokens is not a whole number of sequences of {seq_len:,}; "
                    f"use {lower:,} or {lower + seq_len:,}"
                )
        if self.batch.rule == "scaled" and self.scaling.rule not in BATCH_RULES:
            key = "ramp.rule" if self.batch.ramp else "stages_rule"
            raise ValueError(
                f'[batch] {key} = "scaled": scaling rule {self.scaling.rule} does not scale anything with the batch; '
                f'set {key} to "fixed", or scaling.rule to {BATCH_RULES[0]}'
            )
        if self.schedule.warmup_tokens > self.data.tokens:
            raise ValueError(
                f"warmup_tokens {self.schedule.warmup_tokens:,} is longer than the run; set warmup_tokens to at "
                f"most {self.data.tokens:,}"
            )
        self.hyperparameters.require_modules(self.model.roles)
        try:
            base = self.base_shape
        except ValueError as error:
            raise ValueError(f"scaling.base: {error}") from None
        require_one_rule(
            self.hyperparameters.init,
            self.scaling.rule,
            wider=base.model_copy(update={"n_layers": self.model.n_layers}) != self.model,
            deeper=base.n_layers != self.model.n_layers,
        )
        return self

    @cached_property
    def batches(self) -> BatchSchedule:
        return BatchSchedule(self.batch.sizes)

    @property
    def steps(self) -> int:
        return self.batches.first_step_at(self.data.tokens)

    @property
    def base(self) -> Base:
        """The scale at which the hyperparameters hold: ``scaling.base``, or else this recipe's scale."""
        return self.scaling.base or Base(
            width=self.model.d_model,
            depth=self.model.n_layers,
            batch_tokens=self.batch.tokens,
            tokens=self.data.tokens,
        )

    @property
    def base_shape(self) -> ModelShape:
        """The shape of the model at the base. :meth:`ModelShape.scaled` chooses sizes that the base leaves out."""
        base = self.scaling.base
        if base is None:
            return self.model
        return self.model.scaled(
            base.width, base.depth, d_ff=base.d_ff, d_head=base.d_head, n_kv_heads=base.n_kv_heads
        )

    @property
    def without_muon(self) -> "Recipe":
        if self.hyperparameters.optimizer != "muon":
            return self
        return self.replace({"hyperparameters.optimizer": "adamw", "hyperparameters.muon": None})

    @property
    def of_new_run(self) -> "Recipe":
        """The recipe without reasons that say when its values changed during a run."""
        return self.replace({"why": {path: why for path, why in self.why.items() if not _DURING_A_RUN.match(why)}})

    def replace(self, changes: Mapping[str, Any]) -> "Recipe":
        """Return a copy of the recipe with other values at dotted paths, or raise ValidationError.

        None removes an optional table such as ``tuning``. ``{}`` gives a table its defaults.
        """
        document = self.model_dump()
        for path, value in changes.items():
            set_path(document, path, value)
        return Recipe.model_validate(document)


def set_path(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry at a dotted path in nested dicts to a copy of ``value``."""
    keys = split_path(path)
    for key in keys[:-1]:
        document = document.setdefault(key, {})
    document[keys[-1]] = deepcopy(value)  # a later call may change the copy


def split_path(path: str) -> list[str]:
    """Return the keys of a dotted path. A module such as ``mlp.out`` is one key, and so is a path after ``why.`` or
    ``tuning.octaves.``."""
    prefix = "hyperparameters.modules."
    if path.startswith(prefix):
        module, _, leaf = path.removeprefix(prefix).replace('"', "").rpartition(".")
        return ["hyperparameters", "modules", module, leaf] if module else ["hyperparameters", "modules", leaf]
    for table in ("why", "tuning.octaves"):
        if path.startswith(f"{table}."):
            return [*table.split("."), path.removeprefix(f"{table}.").replace('"', "")]
    return path.split(".")


def short_path(path: str) -> str:
    """Remove ``hyperparameters.modules.`` or ``hyperparameters.`` from the beginning of a path."""
    return path.removeprefix("hyperparameters.").removeprefix("modules.")


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping from dotted paths to values. An empty mapping stays as the value {}."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


Difference = tuple[str, Any, Any]  # dotted path, value in the first recipe, value in the second


def differences(a: Recipe, b: Recipe) -> list[Difference]:
    """Return the differences between two recipes that can change the loss by more than its last bits."""
    return differing(*(recipe.model_dump(exclude=NOT_NUMBERS) for recipe in (a, b)))


def effective_differences(a: Recipe, b: Recipe) -> list[Difference]:
    """Return `differences`, where a module that only one recipe has counts as a module with multipliers of 1."""
    documents = [recipe.model_dump(exclude=NOT_NUMBERS) for recipe in (a, b)]
    ones = dict.fromkeys([*a.hyperparameters.modules, *b.hyperparameters.modules], Multipliers().model_dump())
    for document in documents:
        document["hyperparameters"]["modules"] = ones | document["hyperparameters"]["modules"]
    return differing(*documents)


def rearrangement(a: Recipe, b: Recipe) -> list[Difference]:
    """Return the differences in layout and micro-batch. They change only the last bits of the loss."""
    return differing(*(recipe.model_dump(include={"layout": True, "batch": {"micro_batch"}}) for recipe in (a, b)))


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return (path, value in ``a``, value in ``b``) wherever nested mappings differ. A missing value is None."""
    flat_a, flat_b = flatten(a), flatten(b)
    paths = dict.fromkeys([*flat_a, *flat_b])
    return [(path, flat_a.get(path), flat_b.get(path)) for path in paths if flat_a.get(path) != flat_b.get(path)]
