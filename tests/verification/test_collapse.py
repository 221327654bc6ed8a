"""Test the collapse check on curves with a known shape and on runs of a recipe, and which curves it refuses."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.verification.families import SMALL, WIDE

from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.outcome import Outcome
from leaven.verification.collapse import LIMIT, Points, collapse, collapse_of_family, deviations, grown
from leaven.verification.foreign import CheckTrial
from leaven.verification.recipe_family import RecipeFamily
from leaven.verification.runs import RunStore

LEVEL = 1.7  # the irreducible loss of the curves below
STEPS = 640


def curve(
    end: float, seed: int = 0, *, noise: float = 0.0, power: float = 0.4, offset: float = 0.0, steps: int = STEPS
) -> Points:
    """Return a loss curve: LEVEL + ``end`` x^-power (1 + ``offset``) + noise, where x is the share of the run."""
    random = np.random.default_rng(seed)
    x = np.arange(1, steps + 1) / steps
    losses = LEVEL + end * x**-power * (1 + offset) + random.normal(0, noise, steps)
    return list(zip((x * steps).tolist(), losses.tolist(), strict=True))


def check(*sizes: Sequence[Points], irreducible: float | None = None) -> CheckDocument:
    return collapse("mine", {f"width {64 * 2**i}": size for i, size in enumerate(sizes)}, irreducible, {"rule": None})


def test_curves_of_one_shape_collapse_and_give_their_irreducible_loss() -> None:
    document = check(
        *([curve(end, 10 * i + seed, noise=0.005) for seed in range(3)] for i, end in enumerate((1.5, 1.0, 0.7)))
    )
    assert document.passed
    (level,) = document.measured
    assert level.value == pytest.approx(LEVEL, abs=0.02)
    assert level.low < LEVEL < level.high  # type: ignore[operator]
    assert [row.axis for row in document.rows] == ["width 64 -> width 128", "width 64 -> width 256"]
    # The normalised curves are x^-power, averaged over intervals and divided by the last average.
    normalised = {each.module: each for each in document.curves if each.quantity == "normalised"}
    at = np.arange(0, 17) / 16
    expected = np.diff(at**0.6) / np.diff(at**0.6)[-1]
    for each in normalised.values():
        assert each.y[4:] == pytest.approx(expected[4:], rel=0.02)


def test_the_deviation_is_that_of_the_two_shapes() -> None:
    document = check([curve(1.0)], [curve(0.8, power=0.7)], irreducible=LEVEL)
    at = np.arange(0, 17) / 16
    base, other = (np.diff(at ** (1 - power))[4:] / np.diff(at ** (1 - power))[-1] - 1 for power in (0.4, 0.7))
    expected = ((other - base) / other[0]).max()
    assert document.rows[0].slope == pytest.approx(expected, abs=0.01)
    assert "the loss is above the base's normalised curve" in document.rows[0].note
    (level,) = document.measured
    assert (level.value, level.low, level.note) == (LEVEL, None, "given")


def test_another_shape_fails_even_with_the_best_irreducible_loss() -> None:
    fault = check(
        [curve(1.5, seed, noise=0.005) for seed in range(3)],
        [curve(1.0, 10 + seed, noise=0.005, power=0.8) for seed in range(3)],
    )
    assert not fault.passed
    assert not fault.rows[0].undecided
    assert fault.fault == "normalised loss curve"


@pytest.mark.long
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_band_covers_the_noise(seeds: int) -> None:
    """The true deviation of curves of one shape is 0 everywhere, so the band should contain 0 in 95% of cases."""
    covered = 0
    for number in range(30):
        document = check(
            *(
                [curve(end, 1000 * number + 10 * i + seed, noise=0.05) for seed in range(seeds)]
                for i, end in enumerate((1.5, 1.0))
            )
        )
        deviation = next(each for each in document.curves if each.quantity == "deviation")
        low, high = np.array([deviation.low, deviation.high], float)
        covered += bool(((low <= 0) & (high >= 0)).all())
    assert covered >= 24


def test_noise_that_hides_the_limit_is_undecided_and_so_is_a_short_single_curve() -> None:
    noisy = check(*([curve(end, seed, noise=0.6) for seed in range(2)] for end in (1.5, 1.0)))
    assert noisy.rows[0].undecided
    assert noisy.rows[0].note == "undecided: the limit is within the noise; give more seeds"
    # A deviation within the limit does not pass if its band reaches beyond the limit.
    (row,) = check(*([curve(end, seed, noise=0.1) for seed in range(2)] for end in (1.5, 1.0))).rows
    assert row.undecided
    assert row.parts["deviation"] < LIMIT < row.parts["deviation, high"]  # type: ignore[operator]
    short = check([curve(1.5, steps=100)], [curve(1.0, steps=100)])
    assert short.rows[0].undecided
    assert short.rows[0].note.startswith("undecided: too few points in a curve")
    assert short.rows[0].parts["deviation, low"] is None
    long = check([curve(1.5)], [curve(1.0)])
    assert long.passed
    assert long.rows[0].note == "the interval has only the noise within a run, not the noise between seeds"


def test_curves_may_have_uneven_points_and_other_units_of_time() -> None:
    thinned = [point for number, point in enumerate(curve(1.0)) if number % 7 == 0 or number > STEPS - 20]
    scaled = [(1000 * time, loss) for time, loss in thinned]
    (row,) = check([curve(1.5)], [scaled]).rows
    assert row.parts["deviation"] == pytest.approx(0, abs=0.01)


def test_a_diverged_run_fails() -> None:
    document = check([curve(1.5)], [[*curve(1.0)[:100], (101, math.nan)]], [curve(0.7)])
    assert [row.passed for row in document.rows] == [False, False]
    assert document.rows[0].note == "a run of width 128 diverged"


def test_a_loss_that_does_not_fall_fails() -> None:
    flat = [(step, 3.0 + 0.001 * step) for step in range(STEPS + 1)]
    same = [(step, 3.0) for step in range(STEPS + 1)]
    for document in (check([curve(1.5)] * 2, [flat] * 2), check([same], [same])):
        assert document.rows[0].note == "the loss does not fall after the first quarter of the run"
        assert not document.rows[0].undecided


@pytest.mark.parametrize(
    ("sizes", "irreducible", "message"),
    [
        ([[curve(1.0)]], None, "mine has curves of one size only"),
        ([[curve(1.0)], [curve(1.0)[:5]]], None, "a curve has 5 points; give curves with 8 points or more"),
        ([[curve(1.0), curve(1.0, steps=320)], [curve(0.5)]], None, "width 64 have the lengths 320 and 640;"),
        ([[curve(1.0)], [curve(0.5)[200:]]], None, "a curve of width 128 starts at 201 and ends at 640, so"),
        ([[curve(1.0)], [[(at, loss - 10) for at, loss in curve(0.5)]]], None, "a final loss is -7.79"),
        ([[curve(1.0)], [[(at, 0.0) for at, _ in curve(0.5)]]], 0.0, "a final loss is 0; give losses in nats"),
        ([[curve(1.0)], [curve(0.5)]], 2.3, "--irreducible 2.3: give less than 2.2"),
    ],
)
def test_curves_that_cannot_be_compared_are_refused(
    sizes: list[list[Points]], irreducible: float | None, message: str
) -> None:
    with pytest.raises(InputError) as refused:
        check(*sizes, irreducible=irreducible)
    assert message in str(refused.value)


class KnownCurves(RunStore):
    """A store that does not train, and returns curves of known shapes: of wide models x^-power, of others x^-0.4."""

    power = 0.4
    diverged = False

    def run(self, trials):  # type: ignore[no-untyped-def]
        def outcome(trial: CheckTrial) -> Outcome:
            wide = trial.recipe.model.d_model > 16  # type: ignore[union-attr]
            end, power = (1.0, self.power) if wide else (1.5, 0.4)
            points = curve(end, int(trial.key, 16) % 1000, noise=0.002, power=power, steps=32)
            return Outcome(9.0 if wide and self.diverged else points[-1][1], curve=tuple(points))  # type: ignore[arg-type]

        return outcome


def test_a_family_grows_with_equal_tokens_for_each_parameter(tiny: Recipe, tmp_path: Path) -> None:
    family = RecipeFamily(tiny)
    small, wide = grown(family, [SMALL, WIDE])
    ratio = family.params(WIDE) / family.params(SMALL)
    assert (small.batch, small.tokens) == (1, 1)
    assert wide.batch == wide.tokens == round(8 * ratio) / 8  # a batch has eight sequences
    document = collapse_of_family(family, [SMALL, WIDE], KnownCurves(tmp_path))
    assert document.passed
    assert (document.subject, document.settings["rule"]) == ("tiny", "complete-d-p")
    store = KnownCurves(tmp_path)
    store.power = 0.9
    assert not collapse_of_family(family, [SMALL, WIDE], store).passed
    store.diverged = True
    document = collapse_of_family(family, [SMALL, WIDE], store)
    assert document.rows[0].note.endswith("diverged")


def test_deviations_are_those_of_the_definition() -> None:
    curves = np.array([[5.0, 4.0, 3.5, 3.0], [4.5, 3.5, 3.2, 2.5]])
    ratio = (2.5 - 1.0) / (3.0 - 1.0)
    expected = [(y - 2.5 - ratio * (base - 3.0)) / 1.0 for base, y in zip(curves[0, 1:], curves[1, 1:], strict=True)]
    assert deviations(curves, np.asarray(1.0))[0] == pytest.approx(expected)
