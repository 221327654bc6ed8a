"""Test the runs and the table of benchmarks/tuning/proof.py on known losses."""

import math

import pytest
from benchmarks.tuning.proof import ALONE, CURVE, GROUPS, SEEDS, Run, chosen, runs_of, speed_up, swept, table

SEARCHES = range(3)


def loss(run: Run) -> float:
    better = {"start": -0.05, "global": 0.0, "per-module": 0.1, "per-depth": 0.1}
    off = abs(math.log2(run.times_lr) - 0.5) if run.scale == "target" else 0.0  # half an octave above the rule's lr
    return 3.0 - better.get(run.arm, 0.0) - 0.3 * (run.longer - 1) + 0.1 * off


def trained(*parts: str) -> dict[Run, float]:
    losses: dict[Run, float] = {}
    for part in parts:
        while missing := [run for run in runs_of(part, SEARCHES, losses) if run not in losses]:
            losses |= {run: loss(run) for run in missing}
    return losses


def test_the_table_of_the_proof() -> None:
    losses = trained("proxy", "target", "sweep", "longer", "seeds", "alone")
    assert Run("target", "global", 0, SEEDS[0], 2.0, 2**0.5) in losses
    lines = table(losses, SEARCHES)
    by_module = next(line for line in lines if line.startswith("| target, lr swept | per-module"))
    assert f"| {len(SEEDS)} | 2.9000, 2.9000, 2.9000 | 2.9000 ± 0.0000 | -0.1000 ± 0.0000" in by_module
    # log2 of the speed-up: lower by 0.1 nats, where twice the tokens gain 0.3
    assert "1.26 (1.26 to 1.26) | 1.26, 1.26, 1.26" in by_module
    as_transferred = next(line for line in lines if line.startswith("| target | per-module"))
    assert "2.9500 ± 0.0000 | -0.1000 ± 0.0000 | 1.12 (1.12 to 1.12)" in as_transferred
    group = next(iter(GROUPS))
    assert f"| {group} | +0.1000 ± 0.0000 (+0.100, +0.100, +0.100) | +0.1000" in "\n".join(lines)
    assert len([run for run in losses if run.arm == group]) == 2 * len(SEARCHES) * len(ALONE)


def test_a_sweep_ends_when_both_neighbours_of_the_best_lr_are_worse() -> None:
    losses = trained("target", "sweep")
    assert {run.times_lr for run in losses} == {1.0, 2**0.5, 2.0}
    assert swept(losses, "global", 0) == (2**0.5, True)
    of_seeds = {seed: [run for run in losses if run.seed == seed and run.times_lr == 2] for seed in CURVE}
    assert [len(runs) for runs in of_seeds.values()] == [9, 9, 0]
    del losses[Run("target", "global", 0, SEEDS[0], 1.0, 2.0)]
    assert swept(losses, "global", 0) == (2.0, False)


def test_speed_ups_beyond_the_curve_are_extrapolated() -> None:
    curve = [(1.0, 3.0), (2.0, 2.8)]
    assert speed_up(curve, 2.8) == pytest.approx(2)
    assert speed_up(curve, 2.7) == pytest.approx(2**1.5)
    assert speed_up(curve, 3.1) == pytest.approx(2**-0.5)


def test_the_answer_is_the_finalist_with_the_lowest_sum_of_both_sizes() -> None:
    runs = [run for run in runs_of("finalists", SEARCHES, {}) if (run.arm, run.search) == ("global", 0)]
    at_proxy, at_mid = (3.0, 2.9, 3.1, 3.2), (2.8, 2.95, 2.5, 2.8)
    losses = {run: (at_proxy if run.scale == "proxy" else at_mid)[run.finalist] for run in runs}
    assert chosen(losses, "global", 0, 4) == 2
    losses.pop(runs[-1])
    assert chosen(losses, "global", 0, 4) is None
