"""The trust region, its surrogate and its divergence model against closed forms."""

import numpy as np
import pytest

from leaven.tuning.algorithm import surrogate
from leaven.tuning.algorithm.noise import interval_of_mean, pooled, t95
from leaven.tuning.algorithm.trust_region import RISK, TRUST, Axes, Region, region

rng = np.random.default_rng(0)
OPTIMUM = np.array([1.0, -0.5, 0.3, 0.0])
CURVATURE = np.array([1.0, 0.5, 1.5, 1.0])


def valley(x: np.ndarray) -> np.ndarray:
    return 3.0 + ((x - OPTIMUM) ** 2 * CURVATURE).sum(-1) / 2


def axes_of(*names: str) -> Axes:
    return Axes(dict.fromkeys(names, (-3.0, 3.0)))


def look(points: np.ndarray, losses: np.ndarray, noise: float | None = None) -> Region:
    return region(axes_of(*(str(i) for i in range(points.shape[1]))), points, losses, noise)


def terms(x: np.ndarray) -> np.ndarray:
    """The terms of a quadratic: slopes, squares, products."""
    i, j = np.triu_indices(x.shape[1], 1)
    return np.hstack([x, x**2 / 2, x[:, i] * x[:, j]])


def normal_equations(points: np.ndarray, losses: np.ndarray, noise: float, h: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the coefficients of ``terms`` and a constant, by weighted ridge regression."""
    d = points.shape[1]
    features = np.hstack([terms(points), np.ones((len(points), 1))])
    errors = np.sqrt(noise**2 + (0.1 * (losses - losses.min())) ** 2)
    ratio = min(0.5, 8 / d**2)
    widths = np.r_[np.full(2 * d, h), np.full(d * (d - 1) // 2, ratio * h)]
    prior = np.r_[np.zeros(d), np.full(d, h), np.zeros(d * (d - 1) // 2 + 1)]
    left = (features / errors[:, None] ** 2).T @ features + np.diag(np.r_[1 / widths**2, 0.0])
    covariance = np.linalg.inv(left)
    mean = prior + covariance @ ((features / errors[:, None] ** 2).T @ (losses - features @ prior))
    return mean[:-1], covariance[:-1, :-1]


def noisy_trials(d: int) -> tuple[np.ndarray, np.ndarray]:
    points = np.random.default_rng(1).normal(size=(30, d))
    losses = ((points - 0.4) ** 2).sum(1) / 2 + 0.3 * points[:, 0] * points[:, 1]
    return points, losses + np.random.default_rng(2).normal(0, 0.1, 30)


@pytest.mark.long
@pytest.mark.parametrize("d", [2, 4, 9])
def test_the_posterior_is_that_of_the_normal_equations(d: int) -> None:
    points, losses = noisy_trials(d)
    found = surrogate.fit_surrogate(points, losses, 0.1)
    mean, covariance = normal_equations(points, losses, 0.1, found.curvature)
    there, base = np.random.default_rng(3).normal(size=(5, d)), np.random.default_rng(4).normal(size=d)
    np.testing.assert_allclose(found.value(there), terms(there) @ mean, rtol=1e-7)
    np.testing.assert_allclose(found.mean(there), terms(there) @ mean, rtol=1e-7)
    apart = terms(there) - terms(base[None])
    expected = np.sqrt(np.einsum("ij,jk,ik->i", apart, covariance, apart))
    np.testing.assert_allclose(found.deviation(there, base), expected, rtol=1e-7)
    assert found.deviation(base[None], base) == 0
    draws = np.array([found.draw(np.random.default_rng(seed))(there) for seed in range(4000)])
    np.testing.assert_allclose(draws.mean(0), found.value(there), atol=5 * draws.std(0).max() / 4000**0.5)
    np.testing.assert_allclose(draws.std(0), found.deviation(there, np.zeros(d)), rtol=0.1)


def test_the_curvature_has_the_highest_evidence() -> None:
    """The likelihood of the losses with all coefficients integrated out, by the covariance of the losses."""
    points, losses = noisy_trials(3)
    found = surrogate.fit_surrogate(points, losses, 0.1)
    errors = np.sqrt(0.1**2 + (0.1 * (losses - losses.min())) ** 2)

    def evidence(h: float) -> float:
        widths = np.r_[np.full(6, h), np.full(3, 0.5 * h)]
        covariance = (terms(points) * widths**2) @ terms(points).T + np.diag(errors**2)
        inverse = np.linalg.inv(covariance)
        ones, rest = np.ones(30), losses - h * (points**2).sum(1) / 2
        flat = ones @ inverse @ ones  # of the constant, whose prior is flat
        fit = rest @ inverse @ rest - (ones @ inverse @ rest) ** 2 / flat
        return float(-0.5 * (np.linalg.slogdet(covariance)[1] + np.log(flat) + fit))

    grid = found.curvature * 2.0 ** np.arange(-3, 3.1, 0.5)
    assert grid[np.argmax([evidence(h) for h in grid])] == found.curvature


def test_many_values_have_no_interactions() -> None:
    d = surrogate.MOST_WITH_INTERACTIONS + 1
    points = np.random.default_rng(1).normal(size=(60, d))
    found = surrogate.fit_surrogate(points, (points**2).sum(1) + points[:, 0] * points[:, 1], 0.1)
    np.testing.assert_array_equal(found.mean.hessian, np.diag(np.diag(found.mean.hessian)))
    few = surrogate.fit_surrogate(points[:, :2], (points[:, :2] ** 2).sum(1) + points[:, 0] * points[:, 1], 0.1)
    np.testing.assert_allclose(few.mean.hessian, [[2.0, 1.0], [1.0, 2.0]], atol=0.1)


def test_the_minimum_in_a_box_is_that_of_a_fine_grid() -> None:
    quadratic = surrogate.Quadratic(np.array([-1.0, 0.5]), np.array([[2.0, 1.2], [1.2, 1.0]]), 0.1)
    low, high = np.array([-1.0, -0.4]), np.array([0.7, 1.0])
    grid = np.stack(np.meshgrid(*(np.linspace(a, b, 401) for a, b in zip(low, high, strict=True))), -1).reshape(-1, 2)
    np.testing.assert_allclose(quadratic.minimum(np.zeros(2), low, high), grid[np.argmin(quadratic(grid))], atol=0.01)
    far = np.full(2, 50.0)
    np.testing.assert_allclose(
        quadratic.minimum(np.zeros(2), -far, far), -np.linalg.solve(quadratic.hessian, quadratic.slope), atol=1e-4
    )
    # A direction that bends down or hardly at all ends at the box.
    bent = surrogate.Quadratic(np.array([-1.0, 0.5]), np.diag([-1.0, 0.01]), 0.1)
    np.testing.assert_array_equal(bent.minimum(np.zeros(2), low, high), [0.7, -0.4])


def test_divergence_is_attributed_to_what_only_diverged_trials_have() -> None:
    points = np.random.default_rng(1).uniform(-2, 2, (100, 6))
    found = surrogate.fit_divergence(points, points[:, 2] > 1)
    assert np.argmax(found.slopes) == 2
    at = np.zeros(6)
    risks = []
    for at[2] in (0.0, 0.5, 1.5, 2.0):
        risks.append(float(found.risk(at)))
    assert risks[1] < 0.5 < risks[2] < risks[3]
    beyond = np.array([0.5, 0.0, 2.0, 0.0, -1.0, 0.0])
    shortened = found.shorten(beyond, np.zeros(6), 0.2)
    assert found.risk(shortened) <= 0.2
    assert 0 < shortened[2] < 1.2
    assert shortened[0] == pytest.approx(0.5, abs=0.45)
    none = surrogate.fit_divergence(points, np.zeros(100, bool))
    np.testing.assert_array_equal(none.shorten(beyond, np.zeros(6), 0.2), beyond)


def test_the_incumbent_changes_only_for_more_than_the_noise() -> None:
    points = np.vstack([np.zeros((4, 2)), [[0.1, 0.0]] * 4])
    jitter = np.tile([0.01, -0.01], 4)
    equal = look(points, 2.0 + jitter - np.where(points[:, 0] > 0, 0.003, 0.0))
    np.testing.assert_array_equal(equal.incumbent, [0.0, 0.0])
    better = look(points, 2.0 + jitter - np.where(points[:, 0] > 0, 0.1, 0.0))
    np.testing.assert_array_equal(better.incumbent, [0.1, 0.0])
    assert (equal.since, better.since) == (7, 3)


def test_a_very_high_loss_counts_as_divergence_and_not_in_the_surrogate() -> None:
    points = np.random.default_rng(5).normal(0, 0.5, (60, 4))
    losses = valley(points)
    blown = points[:, 3] > 0.8
    clean, blew = (look(points, np.where(blown, high, losses), 0.01) for high in (np.inf, 90.0))
    assert blown.any()
    np.testing.assert_array_equal(blew.predicted, clean.predicted)
    assert np.argmax(blew.divergence.slopes) == 3


def test_few_values_are_first_moved_one_by_one() -> None:
    points, losses = np.zeros((1, 3)), np.array([3.0])
    axes = Axes({"a": (-3.0, 3.0), "b": (-3.0, 3.0), "c": (-6.0, 6.0)}, {"c": 2.0})
    for k in range(3):
        proposal = region(axes, points, losses, 0.01).proposal(np.random.default_rng(k))
        changes = proposal - points[int(np.argmin(losses))]
        assert np.count_nonzero(changes) == 1
        assert 0.8 <= np.abs(changes / [1, 1, 2]).max() <= 1.2
        points, losses = np.vstack([points, proposal]), np.append(losses, 3.0 + k)
    assert points.any(0).all()
    after = region(axes, points, losses, 0.01).proposal(np.random.default_rng(3))
    assert np.count_nonzero(after - points[0]) == 3


def test_divergence_lowers_the_lr_before_there_is_any_result() -> None:
    points = np.random.default_rng(1).normal(0, 1, (30, 4))

    def steps(now: Region) -> float:
        away = [np.abs(now.proposal(np.random.default_rng(seed)) - now.incumbent).mean() for seed in range(20)]
        return float(np.mean(away))

    free = steps(look(np.zeros((1, 4)), np.zeros(1)))
    lowered = region(axes_of("lr", "b", "c", "d"), points, np.full(30, np.inf))
    np.testing.assert_array_equal(lowered.incumbent, [-3.0, 0.0, 0.0, 0.0])
    assert steps(lowered) < free / 2
    # Without a learning rate to lower, it looks farther away.
    nameless = look(points, np.full(30, np.inf))
    np.testing.assert_array_equal(nameless.incumbent, 0.0)
    assert steps(nameless) > 1.2 * free


def test_a_scale_multiplies_steps_and_changes_nothing_else() -> None:
    points = np.random.default_rng(1).normal(0, 0.5, (40, 4))
    losses = np.where(points[:, 0] > 0.6, np.inf, valley(points))
    scale = np.array([2.0, 0.5, 1.0, 4.0])
    plain = look(points, losses, 0.01)
    axes = Axes({str(i): (-3 * x, 3 * x) for i, x in enumerate(scale)}, {str(i): x for i, x in enumerate(scale)})
    scaled = region(axes, points * scale, losses, 0.01)
    for ours, theirs in ((plain.predicted, scaled.predicted), (plain.incumbent, scaled.incumbent)):
        np.testing.assert_allclose(ours * scale, theirs, rtol=1e-9)
    ours, theirs = plain.proposal(np.random.default_rng(0)), scaled.proposal(np.random.default_rng(0))
    np.testing.assert_allclose(ours * scale, theirs, rtol=1e-9)
    np.testing.assert_allclose(plain.belief(points), scaled.belief(points * scale), rtol=1e-9)
    np.testing.assert_allclose(plain.risk(points), scaled.risk(points * scale), rtol=1e-9)
    there, base = plain.deviation(points[:5], points[7]), scaled.deviation(points[:5] * scale, points[7] * scale)
    np.testing.assert_allclose(there, base, rtol=1e-9)


def test_proposals_stay_in_the_space_and_the_trust_region_and_do_not_diverge() -> None:
    points = np.random.default_rng(1).uniform(-2, 2, (120, 4))
    losses = np.where(points[:, 0] > 0.5, np.inf, valley(points))
    now = look(points, losses, 0.01)
    proposals = np.array([now.proposal(np.random.default_rng(seed)) for seed in range(50)])
    assert np.abs(proposals).max() <= 3
    assert (proposals[:, 0] > 0.5).mean() < 0.1
    assert now.divergence.risk(proposals).max() <= max(RISK, float(now.divergence.risk(now.incumbent))) + 1e-9
    assert np.abs(now.predicted - now.incumbent).max() <= TRUST
    # With many trials, the prediction is the optimum of the values that do not diverge.
    np.testing.assert_allclose(now.predicted[1:], OPTIMUM[1:], atol=0.3)


def test_a_proposal_depends_on_the_seed_and_the_results_in_their_order() -> None:
    points = np.random.default_rng(0).normal(0, 0.5, (8, 2))
    losses = np.where(np.arange(8) == 5, np.inf, (points**2).sum(1))

    def proposed(order: list[int], seed: int = 0) -> list[float]:
        proposal: list[float] = look(points[order], losses[order]).proposal(np.random.default_rng(seed)).tolist()
        return proposal

    order = list(range(8))
    assert proposed(order) == proposed(order)
    assert proposed(order) != proposed(order, seed=1)
    assert proposed(order[::-1]) != proposed(order)


def test_the_interval_is_students() -> None:
    assert pooled([[1.0, 3.0], [5.0], [2.0, 2.0]]) == (1.0, 2)
    assert pooled([[1.0], [2.0]]) == (None, 0)
    assert t95(4) == 2.776
    assert [t95(degrees) for degrees in (9, 20, 1000)] == pytest.approx([2.2622, 2.0860, 1.9623], abs=5e-4)
    assert interval_of_mean([1.0, 3.0], 0.5, 4) == pytest.approx((2 - 2.776 * 0.5 / 2**0.5, 2 + 2.776 * 0.5 / 2**0.5))


def test_one_lucky_trial_does_not_become_the_incumbent() -> None:
    points = np.random.default_rng(5).normal(0, 0.5, (60, 4))
    losses = valley(points) + np.random.default_rng(6).normal(0, 0.02, 60)
    worst = int(np.argmax(losses))
    losses[worst] = losses.min() - 0.05
    assert not np.array_equal(look(points, losses, 0.02).incumbent, points[worst])


def test_fitted_noise_tells_noise_from_a_basin() -> None:
    chance, points = np.random.default_rng(0), np.random.default_rng(1).normal(0, 0.7, (16, 2))
    only_noise = [surrogate.fitted_noise(points, chance.normal(0, 0.1, 16)) for _ in range(20)]
    assert 0.06 < np.median(only_noise) < 0.12
    basin = ((points - 0.5) ** 2).sum(1)
    noisy = [surrogate.fitted_noise(points, basin + chance.normal(0, 0.05, 16)) for _ in range(20)]
    assert 0.02 < np.median(noisy) < 0.1
    assert surrogate.fitted_noise(points, basin) < 0.02
    assert surrogate.fitted_noise(points, np.ones(16)) == 0
