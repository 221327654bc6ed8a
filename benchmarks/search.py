"""Compare search methods at equal trials: `python -m benchmarks.search [--quick] [--results FILE] [--seeds 20]`.

Minimises synthetic losses of 30 and 90 multipliers with divergence boundaries and noise (benchmarks/_landscapes.py).
Every method gets the same start, bounds and number of trials, including repetitions of the start and of the best
points. Regret is the noise-free loss of the result above the optimum, divided by that of the start: 0 is the optimum,
1 is no better than the start. Results that diverge rank last. Results are saved in a file, one line per search: run
the command again to resume, or run parts separately (`--methods gp --seeds 3`); the table covers the whole file.

`--spread` prints instead how much five trust-region searches of one landscape differ.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
import optuna
from benchmarks._landscapes import EXCESS, FLOOR, REACH, landscape
from benchmarks._turbo import turbo
from optuna.distributions import FloatDistribution

from leaven.tuning import search

NARROW = 0.5  # octaves from the start to either bound, for "narrow" methods: here runs seldom diverge
WIDE = 12.0  # the same for "wide" methods, which begin within REACH, as `leaven tune` does
METHODS = (
    *("trust-region", "trust-region, wide", "random", "random, narrow", "random, wide"),
    *("tpe", "tpe, narrow", "tpe, wide", "cma", "cma, wide", "gp", "gp, narrow", "turbo", "turbo, narrow"),
)
FIRST = 100  # first seed; the constants of the trust region were chosen on smaller seeds


def run(
    method: str, dimensions: int, trials: int, seed: int, *, offset: float = 1.0, far: float = 0.0, again: int = 0
) -> dict[str, Any]:
    """Run one search and return the true quality of its result. ``again`` gives another search of the landscape."""
    truth, rng = (
        landscape(dimensions, seed, offset, far),
        np.random.default_rng([seed, trials, again]),
    )
    seed += 1000 * again
    names = [f"m{i}" for i in range(dimensions)]

    def trial(multipliers: dict[str, float]) -> float:
        return truth.trial(np.array([multipliers[name] for name in names]), rng)

    began = time.perf_counter()
    name, _, which = method.partition(", ")
    reach = {"narrow": NARROW, "wide": WIDE}.get(which, REACH)
    space = dict.fromkeys(names, (-reach, reach))
    near = dict.fromkeys(names, (-REACH, REACH)) if which == "wide" else None
    if name == "turbo":
        best, losses, (low, high) = by_turbo(trial, names, reach, trials, seed)
    else:
        found = search(trial, space, trials=trials, method=name, seed=seed, near=near, stop_at_noise=False)
        best, losses, (low, high) = found.params, [trial.loss for trial in found.trials], found.interval
    loss = truth.loss(np.array([best[name] for name in names]))
    return {
        "method": method,
        "dimensions": dimensions,
        "trials": trials,
        "seed": seed,
        "offset": offset,
        "far": far,
        "regret": (loss - FLOOR) / EXCESS if math.isfinite(loss) else None,
        "diverged": sum(map(math.isinf, losses)) / len(losses),
        "covered": low <= loss <= high,
        "seconds": time.perf_counter() - began,
    }


def by_turbo(
    trial: Callable[[dict[str, float]], float], names: list[str], reach: float, trials: int, seed: int
) -> tuple[dict[str, float], list[float], tuple[float, float]]:
    """Search with TuRBO, which keeps a state between trials. Returns the best point, all losses, and an interval.

    The last 6 trials repeat the start and the best two points twice each, as `leaven.tuning.search` does. For TuRBO,
    a trial that diverges has the worst loss so far. The interval is infinite, because TuRBO reports none.
    """
    study, losses = optuna.create_study(sampler=turbo(len(names), seed)), list[float]()
    study.enqueue_trial(dict.fromkeys(names, 0.0))
    for _ in range(trials - 6):
        asked = study.ask({name: FloatDistribution(-reach, reach) for name in names})
        losses.append(trial(asked.params))
        study.tell(asked, losses[-1] if math.isfinite(losses[-1]) else max(filter(math.isfinite, losses)))
    points = [dict(each.params) for each in study.trials]
    finalists = [points[0], *(points[n] for n in np.argsort(losses, kind="stable")[:2])]
    again = [[trial(point) for _ in range(2)] for point in finalists]
    best = int(np.argmin(np.mean(again, 1)))
    return finalists[best], [*losses, *np.ravel(again).tolist()], (-math.inf, math.inf)


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Return the runs as a Markdown table, one row per method."""
    lines = [
        "| multipliers | trials | method | median regret | quartiles | diverged | covered | seconds | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cells = sorted({(r["dimensions"], r["trials"]) for r in runs})
    for dimensions, trials in cells:
        for method in METHODS:
            of = [r for r in runs if (r["dimensions"], r["trials"], r["method"]) == (dimensions, trials, method)]
            if of:
                regrets = [math.inf if r["regret"] is None else r["regret"] for r in of]
                # "higher" returns one of the regrets: they may be infinite, so they cannot be interpolated.
                low, middle, high = np.quantile(regrets, [0.25, 0.5, 0.75], method="higher")
                diverged, covered, seconds = (
                    np.mean([r[key] for r in of]) for key in ("diverged", "covered", "seconds")
                )
                lines.append(
                    f"| {dimensions} | {trials} | {method} | {middle:.2f} | {low:.2f} to {high:.2f} | {diverged:.0%} "
                    f"| {covered:.0%} | {seconds:.1f} | {len(of)} |"
                )
    return lines


def spread(dimensions: int, trials: int) -> str:
    """Return the mean regret of trust-region searches, and the standard deviation between those of one landscape."""
    regrets = [
        [run("trust-region", dimensions, trials, seed, again=again)["regret"] for again in range(5)]
        for seed in range(FIRST, FIRST + 6)
    ]
    between = math.sqrt(np.mean(np.var(regrets, axis=1, ddof=1)))
    return f"| {dimensions} | {trials} | {np.mean(regrets):.3f} | {between:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--dimensions", default="30,90")
    parser.add_argument("--trials", default="60,200")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--offset", type=float, default=1.0, help="std of the optimum's distance from the start, octaves"
    )
    parser.add_argument(
        "--far", type=float, default=0.0, help="distance of the optimum from the start along one multiplier, octaves"
    )
    parser.add_argument("--results", type=Path, default=Path("runs/search.jsonl"))
    parser.add_argument(
        "--quick", action="store_true", help="6 multipliers, 24 trials, 3 seeds, without CMA-ES and GP"
    )
    parser.add_argument("--spread", action="store_true", help="how much searches of one landscape differ")
    options = parser.parse_args()
    if options.spread:
        print("| multipliers | trials | mean regret | standard deviation between searches |\n|---|---|---|---|")
        for cell in ((9, 48), (25, 48), (25, 96), (25, 200)):
            print(spread(*cell), flush=True)
        return
    if options.quick:
        options.methods = ("trust-region", "random", "random, narrow", "tpe", "tpe, narrow")
        options.dimensions, options.trials, options.seeds = "6", "24", 3
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    runs = [json.loads(line) for line in lines]
    asked = (options.offset, options.far)
    runs = [r for r in runs if (r["offset"], r.get("far", 0.0)) == asked]
    done = {(r["method"], r["dimensions"], r["trials"], r["seed"]) for r in runs}
    for trials in map(int, options.trials.split(",")):
        for dimensions in map(int, options.dimensions.split(",")):
            for method in options.methods:
                for seed in range(FIRST, FIRST + options.seeds):
                    if (method, dimensions, trials, seed) not in done:
                        runs.append(run(method, dimensions, trials, seed, offset=options.offset, far=options.far))
                        with options.results.open("a") as file:
                            file.write(json.dumps(runs[-1]) + "\n")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
