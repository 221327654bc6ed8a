"""Test the benchmarks of search methods: the properties of their test functions, and a small comparison."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks._landscapes import EXCESS, FLOOR, JITTER, NOISE, landscape

from benchmarks import small_budgets


@pytest.mark.parametrize("dimensions", [6, 30, 90])
def test_the_optimum_is_known(dimensions: int) -> None:
    made, rng = landscape(dimensions, 1), np.random.default_rng(0)
    assert made.loss(made.optimum) == pytest.approx(FLOOR)
    assert made.loss(np.zeros(dimensions)) == pytest.approx(FLOOR + EXCESS)
    assert max(made.strain(np.zeros(dimensions)), made.strain(made.optimum)) <= -3 * JITTER + 1e-9
    for _ in range(100):
        assert made.loss(made.optimum + rng.normal(0, 0.3, dimensions)) > FLOOR
    runs = [made.trial(np.zeros(dimensions), rng) for _ in range(400)]
    assert np.std(np.array(runs)[np.isfinite(runs)]) == pytest.approx(NOISE, rel=0.15)
    over = np.zeros(dimensions)
    over[0] = made.cliffs[0] + 1
    assert made.loss(over) == np.inf


def test_the_trust_region_is_the_best_of_few_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two surfaces and two seeds, only the difference to random search is clear."""
    monkeypatch.setattr("sys.argv", ["small_budgets", "--quick", "--results", str(tmp_path / "runs.jsonl")])
    small_budgets.main()
    rows = [line.replace("*", "").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0].strip("| "), row[2]) for row in rows] == [
        (surface, noise) for noise in ("0%", "10%") for surface in ("bowl", "valley")
    ]
    ours, random = (sum(float(row[column].split()[0]) for row in rows) for column in (5, 7))
    assert ours < random


def test_surfaces_of_a_sweep_have_their_start_at_1_and_their_minimum_at_0(tmp_path: Path) -> None:
    lines = ["N,D,lr,bs,smooth loss"]
    for i in range(-4, 5):
        for j in range(-4, 5):
            lines.append(f"1000,20000,{0.001 * 2.0**i},{64 * 2.0**j},{2 + 0.01 * (i - 1) ** 2 + 0.01 * (i + j) ** 2}")
    (tmp_path / "sweep.csv").write_text("\n".join(lines))
    surfaces = small_budgets.published(tmp_path / "sweep.csv")
    assert len(surfaces) == 1
    truth = small_budgets.of_a_sweep(surfaces, 3)
    assert truth(np.zeros(2)) == pytest.approx(1)
    grid = np.linspace(-5, 5, 41)
    assert min(truth(np.array([x, y])) for x in grid for y in grid) == pytest.approx(0, abs=0.02)
