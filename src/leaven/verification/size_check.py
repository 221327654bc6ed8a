"""Train small models of several widths and depths for a few steps, and compare their measurements."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from leaven.documents.checks import CheckDocument, VerdictCurve, VerdictRow
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.verification.batches import Prepare, corpus
from leaven.verification.foreign import BATCH_TOKENS, ForeignFamily, foreign
from leaven.verification.model_instance import ModelInstance, RunScale
from leaven.verification.small_models import (
    DEPTHS,
    EXPERT_DEPTHS,
    TIMES,
    WIDTH,
    CheckStart,
    SmallModels,
    calibrated,
    small_recipe,
)
from leaven.verification.verdict import curve, geometric_mean, slope, verdict

WHY_NO_CHANGE = "  <- is the lr 0, or the gradient 0 in these steps?"
NOT_FINITE = "not finite: lower the lr?"

Measured = TypeVar("Measured")  # the measurements that a check makes of one module or parameter in one run
Means = Mapping[str, Sequence[float]]  # by name of a number: its geometric mean over seeds at each size
Slopes = Mapping[str, float | None]  # by name: slope of log2 mean over log2 size; None if a mean is 0 or not finite


@dataclass(frozen=True)
class SizeAxis:
    """A series of scales in which only the width or only the depth grows."""

    name: str  # width | depth
    scales: tuple[RunScale, ...]
    where: str = ""  # text after the name in a table, e.g. " at depth 16"

    @property
    def title(self) -> str:
        return self.name + self.where

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(scale, self.name) for scale in self.scales)


@dataclass(frozen=True)
class SizeCheck(ABC, Generic[Measured]):
    """A check over model sizes. Subclasses say what is measured in a model, and when a module passes."""

    family: SmallModels | ForeignFamily  # makes the models
    widths: Sequence[int]
    depths: Sequence[int]
    steps: int  # training steps
    seeds: int = 3
    lr_factor: float = 1.0  # multiplies every lr
    changed: Sequence[str] = ()  # differences from the user's recipe, listed in the document's settings

    name: ClassVar[str]
    quantity: ClassVar[str]  # description of the number by which a module is judged
    start: ClassVar[CheckStart]  # settings with which small models behave like large ones, see `calibrated`
    start_normed: ClassVar[CheckStart]  # the same for models whose branches end in a norm
    parts: ClassVar[tuple[str, ...]]  # the names of the numbers that are measured for each module
    drawn: ClassVar[tuple[str, ...]]  # the names in ``parts`` that are drawn as curves over the size

    @classmethod
    def of(
        cls,
        subject: Recipe | str,
        prepare: Prepare,
        *,
        widths: Sequence[int] | None,
        depths: Sequence[int] | None,
        batch_tokens: int | None,
        source: str | None,
        alpha: float | None,
        grow_heads: bool,
        **options: Any,
    ) -> Self:
        """Return the check of a recipe, or of a user's factory function ``module:factory``.

        The arguments are the options of ``leaven check coordinates``. Raise InputError if there are fewer than two
        sizes, or a size or option does not fit the recipe or factory.
        """
        experts = not isinstance(subject, str) and subject.model.experts is not None
        wide, deep = widths or [WIDTH * times for times in TIMES], depths or (EXPERT_DEPTHS if experts else DEPTHS)
        if len(set(wide)) == len(set(deep)) == 1:
            raise InputError("the check fits slopes, which need at least two sizes; give more --widths or --depths")
        if isinstance(subject, str):
            if grow_heads:
                raise InputError(
                    f"{subject}: --grow-heads is only for recipes; leave it out, and add the heads in the factory"
                )
            scale = RunScale(min(wide), min(deep))
            family = foreign(subject, scale, prepare, source=source, batch_tokens=batch_tokens, alpha=alpha)
            return cls(family, wide, deep, **options)
        recipe, changed = (subject, ()) if widths else small_recipe(subject)
        if not widths:
            wide = [recipe.model.d_model * times for times in TIMES]
        start = cls.start if recipe.model.norm_placement == "pre" else cls.start_normed
        recipe = calibrated(recipe, min(wide), min(deep), start)
        seq_len = recipe.model.seq_len
        tokens = prepare(recipe.data, recipe.model.vocab_size)
        batches = corpus(tokens, seq_len, max((batch_tokens or BATCH_TOKENS) // seq_len, 1))
        return cls(SmallModels(recipe, batches, grow_heads), wide, deep, changed=changed, **options)

    @abstractmethod
    def record(self, instance: ModelInstance) -> Mapping[str, Measured]:
        """Train a model and return the measurements of its modules or parameters, by their labels."""

    @abstractmethod
    def judge(
        self, axis: SizeAxis, module: str, lines: Sequence[Sequence[Measured]], means: Means, slopes: Slopes
    ) -> VerdictRow:
        """Return the verdict on a module as a row. ``lines`` has the measurements by size, then by seed."""

    def value(self, measured: Measured, part: str, axis: SizeAxis) -> float:
        """Return the attribute ``part`` of ``measured``. Subclasses may also use ``axis``."""
        value: float = getattr(measured, part)
        return value

    def axes(self) -> tuple[SizeAxis, ...]:
        """Return the axes with several sizes: widths at the smallest depth, and depths at the smallest width."""
        least = RunScale(min(self.widths), min(self.depths))
        width = SizeAxis("width", tuple(RunScale(size, least.depth) for size in sorted(set(self.widths))))
        depth = SizeAxis("depth", tuple(RunScale(least.width, size) for size in sorted(set(self.depths))))
        return tuple(axis for axis in (width, depth) if len(axis.scales) > 1)

    def exact_rows(self) -> Sequence[VerdictRow]:
        """Return rows that are computed without training."""
        return ()

    def _measure(self, scale: RunScale, seed: int, labels: set[str]) -> Mapping[str, Measured]:
        """Train and measure a model. If ``labels`` is empty, fill it with the labels of the model's parameters, such
        as ``mlp.out``."""
        instance = self.family.build(scale, seed)
        found = {str(instance.label(name)) for name, _ in instance.model.named_parameters()}
        if not labels:
            labels |= found
        if missing := labels - found:
            raise InputError(
                f"{self.family.name}: the smallest model has a parameter {min(missing)}, but the model of width "
                f"{scale.width} and depth {scale.depth} does not; put the blocks into an nn.ModuleList or "
                "nn.Sequential of their own, so that all other parameters have the same names at every size"
            )
        return self.record(instance)

    def run(self, on_model: Callable[[int, int], None] = lambda done, total: None) -> CheckDocument:
        """Run the check. Raise InputError if a model cannot be built, or lacks a parameter of the smallest model.

        ``on_model`` is called with the number of finished sizes and the number of all sizes.
        """
        axes = self.axes()
        curves: list[VerdictCurve] = []
        wanted = sorted({scale for axis in axes for scale in axis.scales}, key=lambda s: (s.width, s.depth))
        measured: dict[RunScale, list[Mapping[str, Measured]]] = {}
        labels: set[str] = set()  # of the smallest model's parameters
        for scale in wanted:
            measured[scale] = [self._measure(scale, seed, labels) for seed in range(self.seeds)]
            on_model(len(measured), len(wanted))
        rows = [*self.exact_rows()]
        for axis in axes:
            for module in measured[axis.scales[0]][0]:
                lines = [[run[module] for run in measured[scale]] for scale in axis.scales]
                values = {
                    part: [[self.value(line, part, axis) for line in seeds] for seeds in lines] for part in self.parts
                }
                means = {part: [geometric_mean(seeds) for seeds in values[part]] for part in self.parts}
                slopes = {part: slope(axis.sizes, means[part]) for part in self.parts}
                row = self.judge(axis, module, lines, means, slopes)
                few = self.seeds == 1 and len(axis.sizes) == 2  # a wrong slope may be noise
                if row.passed is False and few and row.beyond != math.inf:
                    note = f"inconclusive: two sizes and one seed are too few to judge ({row.note})"
                    row = row.model_copy(update={"undecided": True, "note": note})
                rows.append(row)
                curves += [curve(module, axis.title, part, axis.sizes, values[part]) for part in self.drawn]
        more = ["--seeds 3"]  # options for a clearer result
        for option, sizes in (("--widths", sorted(set(self.widths))), ("--depths", sorted(set(self.depths)))):
            if len(sizes) == 2:
                more.append(f"{option} {sizes[0]},{sizes[1]},{2 * sizes[1]}")
        return verdict(
            self.name,
            self.family.name,
            self.quantity,
            rows,
            curves=curves,
            settings={
                "rule": self.family.rule,
                "widths": list(self.widths),
                "depths": list(self.depths),
                "steps": self.steps,
                "seeds": self.seeds,
                "lr_factor": self.lr_factor,
                "changed for the check": list(self.changed) or None,
            },
            advice=f"Give more: {' '.join(more)}",
            options=more,
        )
