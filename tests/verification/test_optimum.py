"""Test the best lr, its interval and its regret on parabolas with a known minimum."""

import numpy as np
import pytest

from leaven.verification import optimum
from leaven.verification.optimum import LossGrid, exponent, shift
from leaven.verification.verdict import slope

LRS = [2.0**octave for octave in range(-10, -3)]


def parabola(best_octave: float, noise: float = 0.0, seed: int = 0) -> LossGrid:
    random = np.random.default_rng(seed)
    means = {lr: 3.0 + 0.05 * (np.log2(lr) - best_octave) ** 2 for lr in LRS}
    return LossGrid.of({lr: [mean + random.normal(0, noise) for _ in range(3)] for lr, mean in means.items()})


def test_shift_and_regret_of_two_parabolas():
    octaves, regret = shift(parabola(-6.5), parabola(-7.5))
    assert (octaves.value, *octaves.ends) == (pytest.approx(-1),) * 3
    assert regret.value == pytest.approx(0.05)


def test_equal_grids_have_exactly_no_shift_and_no_regret():
    base = parabola(-6.3)
    for offset in (0.0, 0.1, 0.7):  # of the loss: changes the last bits of the fitted minimum
        shifted = {lr: [loss + offset for loss in runs.values()] for lr, runs in zip(LRS, base.runs, strict=True)}
        octaves, regret = shift(base, LossGrid.of(shifted))
        assert (octaves.value, regret.value) == (0, 0)


def test_the_optimum_of_an_asymmetric_curve_is_its_lowest_point():
    # A slow fall, a steep rise and a plateau, like real losses over lrs; the lowest point is the fifth.
    losses = dict(zip(LRS, ([loss] * 2 for loss in (4.58, 4.17, 3.81, 3.60, 3.49, 3.61, 3.65)), strict=True))
    assert LossGrid.of(losses).optimum() == pytest.approx(np.log2(LRS[4]), abs=0.1)


def test_the_exponent_of_half_an_octave_per_doubling():
    found = exponent({1: parabola(-6.5), 2: parabola(-7.0), 4: parabola(-7.5)})
    assert (found.value, found.low, found.high) == (pytest.approx(-0.5),) * 3
    covered = 0
    for number in range(20):
        valleys = {2.0**i: parabola(-6.5 - 0.5 * i, 0.02, 100 * number + i) for i in range(3)}
        found = exponent(valleys)
        covered += found.low < -0.5 < found.high
    assert covered >= 17


@pytest.mark.parametrize(("repeated", "least"), [(LRS, 90), (LRS[3:4], 95)], ids=["all values", "one value"])
def test_intervals_of_few_runs_cover_the_truth(
    repeated: list[float], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two runs at the ``repeated`` values. Without Student's t, intervals covered 85% and 70%."""
    monkeypatch.setattr(optimum, "DRAWS", 300)

    def grid(random: np.random.Generator) -> LossGrid:
        means = {lr: 0.05 * (np.log2(lr) + 6.8) ** 2 for lr in LRS}
        noisy = {
            lr: [mean + random.normal(0, 0.01) for _ in range(1 + (lr in repeated))] for lr, mean in means.items()
        }
        return LossGrid.of(noisy)

    covered = 0
    for number in range(100):
        random = np.random.default_rng(number)
        octaves, _ = shift(grid(random), grid(random))
        covered += octaves.low <= 0 <= octaves.high
    assert covered >= least, covered


def test_means_of_unequal_runs_do_not_contain_the_effects_of_seeds():
    """The reference is a least-squares fit with a column for each value and for all seeds but the first."""
    runs = {
        1.0: {"a": 3.0, "b": 3.5, "c": 3.1},
        2.0: {"a": 2.5, "c": 2.7},
        4.0: {"b": 3.6},
        8.0: {"a": 3.9, "b": 4.2},
    }
    cells = [(value, seed, loss) for value, of in runs.items() for seed, loss in of.items()]
    columns = [
        [float(value == each) for each in runs] + [float(seed == each) for each in "bc"] for value, seed, _ in cells
    ]
    fitted = np.linalg.lstsq(np.array(columns), np.array([loss for *_, loss in cells]), rcond=None)[0]
    assert LossGrid.of(runs).means - LossGrid.of(runs).means[0] == pytest.approx(fitted[:4] - fitted[0])
    # If each value has its own seeds, the effects of seeds are not known.
    own = LossGrid.of({value: {f"{value}{seed}": loss for seed, loss in of.items()} for value, of in runs.items()})
    assert own.means == pytest.approx([3.2, 2.6, 3.6, 4.05])


def test_differences_between_seeds_do_not_widen_intervals():
    """An effect of the seed that is the same at all values does not change the interval."""
    of_seed = np.array([0.0, 0.5, -0.4])
    losses = {
        lr: [loss + seed for loss, seed in zip(parabola(-7, 0.01).runs[i].values(), of_seed, strict=True)]
        for i, lr in enumerate(LRS)
    }
    (octaves, regret), (wide, _) = (
        shift(LossGrid.of(each), LossGrid.of(each))
        for each in (losses, {lr: {f"{lr} {i}": loss for i, loss in enumerate(of)} for lr, of in losses.items()})
    )
    plain, plain_regret = shift(parabola(-7, 0.01), parabola(-7, 0.01))
    assert (octaves.low, octaves.high) == pytest.approx((plain.low, plain.high))
    assert regret.high == pytest.approx(plain_regret.high)
    assert wide.high - wide.low > 3 * (octaves.high - octaves.low)


def test_slope():
    assert slope([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert slope([1, 2, 4], [3, 0, 12]) is None
