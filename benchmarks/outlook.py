"""Compare what a study expects of more trials with the truth: `python -m benchmarks.outlook [--seeds 12]`.

Minimises synthetic losses with a known optimum. Prints for each number of values and trials, as means over seeds:

- the gain that the study expects of as many trials again, and the gain of a search with twice the trials, in nats;
- the share of the gain that two values bring alone: as the study says, in truth for the pair that it names, and in
  truth for the best pair.
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
from benchmarks._landscapes import EXCESS, landscape
from benchmarks.small_budgets import Array, made_up

from leaven.tuning import search
from leaven.tuning.algorithm.sensitivity import best_pair, further_gain
from leaven.tuning.algorithm.trust_region import Axes, region
from leaven.tuning.service.search import SearchResult
from leaven.tuning.service.search_loop import Proposal

CASES = {2: (8, 16, 32), 4: (12, 24, 48), 9: (16, 32, 64), 25: (48, 96)}  # numbers of trials by number of values
NOISE = 0.01  # std in nats, with fewer than 6 values
PAIRS = 9  # the best pair is found by trying all pairs only up to this number of values


def truth(d: int, seed: int) -> Callable[[Array], float]:
    """Return the loss above the optimum in nats; with fewer than 6 values, another kind of function."""
    if d < 6:
        function = made_up("bowl", d, seed)
        return lambda x: EXCESS * function(x)
    land = landscape(d, seed)
    return lambda x: land.loss(x) - land.loss(land.optimum)


def searched(axes: Axes, d: int, seed: int, trials: int) -> SearchResult:
    function, land = truth(d, seed), landscape(d, seed) if d >= 6 else None

    def objective(x: Proposal) -> float:
        octaves = np.array(list(x.values()))
        rng = np.random.default_rng([seed, x.seed, *np.abs(octaves * 1e6).astype(int)])
        return land.trial(octaves, rng) if land else function(octaves) + NOISE * rng.normal()

    return search(objective, axes.limits, trials=trials, seed=seed, stop_at_noise=False)


def share_of(function: Callable[[Array], float], d: int, pair: tuple[int, int]) -> float:
    """Return the share of the start's excess loss that can be removed by changing two values, found on a grid."""
    grid = np.linspace(-3, 3, 49)
    points = np.zeros((len(grid) ** 2, d))
    points[:, pair] = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
    start = function(np.zeros(d))
    return (start - min(map(function, points))) / start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    options = parser.parse_args()
    print("| values | trials | expected gain | gain | pair: said | pair: true | best pair |")
    print("|---" * 7 + "|")
    for d, counts in CASES.items():
        axes = Axes({f"{'lr' if i % 3 == 0 else 'v'}.{i}": (-3.0, 3.0) for i in range(d)})
        for trials in counts:
            rows = []
            for seed in range(options.seeds):
                function, found, twice = (
                    truth(d, seed),
                    searched(axes, d, seed, trials),
                    searched(axes, d, seed, 2 * trials),
                )
                points = np.array([axes.octaves(trial.params) for trial in found.trials])
                losses = np.array([trial.loss for trial in found.trials])
                of_search = np.array([trial.purpose == "search" for trial in found.trials])
                now, best = region(axes, points, losses, found.noise), axes.octaves(found.params)
                expected = further_gain(now, axes, points, losses, searched=of_search, best=best)
                gain = function(best) - function(axes.octaves(twice.params))
                pair, shares = best_pair(now, points, best, found.noise or 0.0), (np.nan,) * 3
                if pair and d <= PAIRS:
                    every = {two: share_of(function, d, two) for two in itertools.combinations(range(d), 2)}
                    shares = pair[2], every[min(pair[:2]), max(pair[:2])], max(every.values())
                rows.append((expected, gain, *shares))
            columns = [column[np.isfinite(column)] for column in np.array(rows, float).T]
            mean = [float(column.mean()) if len(column) else np.nan for column in columns]
            texts = (f"{share:.0%}" if np.isfinite(share) else "" for share in mean[2:])
            print(f"| {d} | {trials} | {mean[0]:.4f} | {mean[1]:.4f} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
