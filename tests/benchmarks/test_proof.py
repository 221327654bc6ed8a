"""Test the runs and the table of benchmarks/tuning/proof.py on known losses."""

import pytest
from benchmarks.tuning.proof import ALONE, GROUPS, SEEDS, SWEPT, Run, best_lr, chosen, runs_of, speed_up, table

SEARCHES = range(3)


def loss(run: Run) -> float:
    better = {"start": -0.05, "global": 0.0, "per-module": 0.1, "per-depth": 0.1}
    return 3.0 - better.get(run.arm, 0.0) - 0.3 * (run.longer - 1) + 0.05 * (run.times_lr != 2**0.5)


def test_the_table_of_the_proof() -> None:
    losses: dict[Run, float] = {}
    for part in ("proxy", "target", "longer", "alone"):
        losses |= {run: loss(run) for run in runs_of(part, SEARCHES, losses) if run not in losses}
    assert best_lr(losses, 0) == 2**0.5
    assert Run("target", "global", 0, SEEDS[0], 2.0, 2**0.5) in losses
    lines = table(losses, SEARCHES)
    by_module = next(line for line in lines if line.startswith("| target | per-module"))
    # 2.95 at the rule's lr, and the global answer's is 3.05
    assert "2.9500 ± 0.0000 | -0.1000 ± 0.0000" in by_module
    # log2 of the speed-up: lower than the swept global answer by 0.05 nats, where 1.41 times the tokens gain 0.123
    assert "1.15 (1.15 to 1.15) | 1.15, 1.15, 1.15" in by_module
    group = next(iter(GROUPS))
    assert f"| {group} | +0.1000 ± 0.0000 (+0.100, +0.100, +0.100) | +0.1000" in "\n".join(lines)
    assert len([run for run in losses if run.arm == group]) == 2 * len(SEARCHES) * len(ALONE)


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


def test_the_sweep_is_unknown_until_all_its_runs_have_ended() -> None:
    runs = [Run("target", "global", 0, seed, 1.0, factor) for seed in SEEDS[:2] for factor in SWEPT]
    assert best_lr({run: loss(run) for run in runs[:-1]}, 0) is None
