"""Measure what a search loses if K trials are proposed at once: `python -m benchmarks.parallel_trials [--seeds 20]`.

A stack of trials (leaven.training.stack) gets K proposals before any of their losses are known. The functions are
those of benchmarks/small_budgets.py: 4 values of a bowl, and 8 or 30 multipliers of a landscape with divergences. The
noise between seeds is a thirtieth of the start's distance from the minimum. Regret is the noise-free loss of the
answer above the minimum, in per cent of the start's: mean and standard error over seeds. Seeds are from 100 on, as
there.

With `--at-once 2,3` it compares these counts to one trial at a time instead, on functions of few values: the mean of
one at a time, then the difference from it, seed by seed.
"""

import argparse
import math
import os
import statistics
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from benchmarks.small_budgets import FIRST, Problem, trust_region

from leaven.tuning.service import search
from leaven.tuning.service.search_loop import SearchLoop

NOISE = 1 / 30
CASES = (("bowl", 4), ("modules", 8), ("modules", 30))
FEW_VALUES = (("bowl", 2), ("bowl", 4), ("modules", 8))
SHARES = {"one": 0, "1/12": 12, "1/6": 6, "1/3": 3, "all": 1}  # trials at once, as shares of all trials


def regret(family: str, dimensions: int, trials: int, at_once: int, seed: int) -> float:
    class InRounds(SearchLoop):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, stack=at_once)

    problem, rng = Problem.of(family, dimensions, seed, []), np.random.default_rng([seed, trials])
    plain, search.SearchLoop = search.SearchLoop, InRounds  # type: ignore[misc]
    try:
        answer = trust_region(lambda x: problem.loss(x) + NOISE * float(rng.normal()), problem, trials, seed)
    finally:
        search.SearchLoop = plain  # type: ignore[misc]
    return min(100 * problem.loss(answer), 100.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", default="24,48,96", help="numbers of trials, comma-separated")
    parser.add_argument("--at-once", help="counts to compare to one trial at a time, comma-separated")
    asked = parser.parse_args()
    columns = asked.at_once.split(",") if asked.at_once else list(SHARES)[1:]
    print(f"{'function':>12} {'trials':>6} " + "".join(f"{column:>14}" for column in ["one", *columns]))
    seeds = range(FIRST, FIRST + asked.seeds)
    for family, dimensions in FEW_VALUES if asked.at_once else CASES:
        for trials in map(int, asked.trials.split(",")):
            print(f"{family + ' ' + str(dimensions):>12} {trials:6} ", end="", flush=True)
            one = [regret(family, dimensions, trials, 1, seed) for seed in seeds]
            print(mean_and_error(one), end="", flush=True)
            for column in columns:
                at_once = int(column) if asked.at_once else trials // SHARES[column]
                found = [regret(family, dimensions, trials, at_once, seed) for seed in seeds]
                if asked.at_once:
                    found = [more - alone for more, alone in zip(found, one, strict=True)]
                print(mean_and_error(found), end="", flush=True)
            print()


def mean_and_error(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):7.1f} ± {error:4.1f}"


if __name__ == "__main__":
    main()
