"""Helpers for tests of checks: small models with planted faults, and runs with known losses that are not trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from leaven.documents.checks import CheckDocument, VerdictRow
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterRow, ParameterTable, ratios
from leaven.training.outcome import Outcome
from leaven.verification.batches import synthetic
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.model_instance import RunScale
from leaven.verification.runs import RunStore
from leaven.verification.small_models import CheckStart, SmallModels, calibrated

PROXY = Path(__file__).parent / "proxy.toml"
WIDTHS, DEPTHS = (64, 128, 256), (2, 4, 8)
ENDS = ("attention.out", "mlp.out")
HIDDEN = ("attention.", "mlp.")
SMALL, WIDE = RunScale(16, 2), RunScale(32, 2)

Fault = Callable[[ParameterRow, Recipe], ParameterRow]


@dataclass(frozen=True)
class PlantedModels(SmallModels):
    """Small models whose parameter table is changed by ``fault``, a function of each row and the recipe."""

    fault: Fault | None = None

    def table(self, recipe: Recipe) -> ParameterTable:
        table = super().table(recipe)
        return replace(table, rows=tuple(self.fault(row, recipe) if self.fault else row for row in table.rows))


def family(
    fault: Fault | None = None,
    *,
    start: CheckStart = CoordinateCheck.start,
    rule: str = "complete-d-p",
    alpha: float = 1.0,
    tied_embeddings: bool = False,
    overrides: Sequence[str] = (),
    **more: bool,
) -> PlantedModels:
    """Return the models of proxy.toml with a vocabulary of 256 and sequences of 32 tokens, changed by ``fault``."""
    small = [
        *{each.partition("=")[0]: each for each in overrides}.values(),  # the last of each
        "model.vocab_size=256",
        "model.seq_len=32",
        f"model.tied_embeddings={str(tied_embeddings).lower()}",
    ]
    recipe = read_recipe(PROXY, [*small, f"scaling.rule={rule}", f"scaling.alpha={alpha}"])
    recipe = calibrated(recipe, min(WIDTHS), min(DEPTHS), start)
    return PlantedModels(recipe, synthetic(256, 32, 8), fault=fault, **more)


def failed(document: CheckDocument) -> dict[tuple[str, str], VerdictRow]:
    """Return the rows that failed, by module and axis."""
    return {(row.module, row.axis): row for row in document.rows if row.passed is False}


def fault(modules: str | tuple[str, ...] = "", **values: Callable[[float, Recipe], float]) -> Fault:
    """Return a fault in the modules whose names begin with ``modules``.

    ``values`` has, for each faulty value such as lr, a function of the right value and the recipe.
    """

    def planted(row: ParameterRow, recipe: Recipe) -> ParameterRow:
        if not row.module.startswith(modules):
            return row
        return replace(row, **{name: wrong(getattr(row, name), recipe) for name, wrong in values.items()})

    return planted


def zero(value: float, recipe: Recipe) -> float:
    return 0.0


def zero_if_wide(value: float, recipe: Recipe) -> float:
    return 0.0 if width(recipe) > 1 else value


def times(factor: Callable[[Recipe], float]) -> Callable[[float, Recipe], float]:
    return lambda value, recipe: value * factor(recipe)


def width(recipe: Recipe) -> float:
    return ratios(recipe).width


def depth(recipe: Recipe) -> float:
    return ratios(recipe).depth


def known_losses(loss: Callable[[Recipe], float]) -> type[RunStore]:
    """Return a store that does not train. The loss of a run is ``loss(recipe)``."""

    class KnownLosses(RunStore):
        def run(self, trials):  # type: ignore[no-untyped-def]
            return lambda trial: Outcome(loss(trial.recipe))

    return KnownLosses


def pretend(loss: Callable[[Recipe], float]) -> RunStore:
    return known_losses(loss)(Path("unused"))
