"""Test the table of benchmarks/tuning/proof.py on known losses."""

from benchmarks.tuning.proof import GROUPS, SEEDS, Run, runs_of, speed_up, table


def test_the_table_of_the_proof() -> None:
    losses = {
        run: 3.0 - 0.1 * (run.arm == "per-module") - 0.3 * (run.longer - 1) + 0.05 * (run.times_lr != 1)
        for part in ("proxy", "target", "alone")
        for run in runs_of(part, range(3))
    }
    lines = table(losses, range(3))
    by_module = next(line for line in lines if line.startswith("| target | per-module"))
    assert "2.9000 ± 0.0000 | -0.1000 ± 0.0000" in by_module
    # log2 of the speed-up: lower by 0.1 nats, where 1.41 times the tokens gain 0.123
    assert "1.32, 1.32, 1.32" in by_module
    group = next(iter(GROUPS))
    assert f"| {group} | +0.1000 ± 0.0000 (+0.100, +0.100, +0.100) | +0.1000" in "\n".join(lines)
    assert Run("target", "global", 0, SEEDS[0], 2.0, 2**0.5) in losses
    assert speed_up([(1.0, 3.0), (2.0, 2.8)], 2.7) == "> 2"
