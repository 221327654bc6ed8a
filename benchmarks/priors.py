"""Measure what right and wrong prior knowledge is worth to a search: `python -m benchmarks.priors`.

Prints the mean regret (loss above the optimum, in per cent of the start's) on the functions of
`benchmarks.small_budgets` for searches

- without prior knowledge;
- with an expected optimum and a standard deviation of half an octave: near the true optimum ("right"), of another
  function ("another"), and with the opposite signs ("mirrored");
- with 16 trials of an earlier search: on a similar function whose optimum is moved by about 0.3 octaves
  along each value, with the noise of these trials known or unknown; on another function; on the mirrored function.

All searches are given their own noise.
"""

import argparse
from collections.abc import Callable

import numpy as np
from benchmarks.small_budgets import FAMILIES, FIRST, REACH, Array, Function, made_up

from leaven.tuning import search
from leaven.tuning.algorithm.surrogate import EarlierTrials
from leaven.tuning.service.search import SearchResult

CASES = (("bowl", 2), ("valley", 2), ("cliff", 3), ("bowl", 4), ("bowl", 6))
SURE, SHIFT, EARLIER = 0.5, 0.3, 16  # std of knowledge (octaves), shift of optimum (octaves), earlier trials
OTHER = 5000  # added to the seed for "another" function


def run(function: Function, d: int, trials: int, seed: int, noise: float, **knowledge: object) -> SearchResult:
    rng, names = np.random.default_rng([seed, trials]), names_of(d)
    return search(
        lambda x: function(np.array([x[name] for name in names])) + noise * rng.normal(),
        dict.fromkeys(names, (-REACH, REACH)),
        trials=trials,
        seed=seed,
        noise=noise,
        stop_at_noise=False,
        **knowledge,  # type: ignore[arg-type]
    )


def names_of(d: int) -> list[str]:
    return [f"x{i}" for i in range(d)]


def optimum_of(family: str, d: int, seed: int) -> Array:
    """Return the optimum of the function that `made_up` returns."""
    rng = np.random.default_rng([d, seed, sorted(FAMILIES).index(family)])
    return np.clip(rng.normal(0, 1, d), -2, 2)


def told(centre: Array) -> dict[str, object]:
    return {"expected": {name: (float(x), SURE) for name, x in zip(names_of(len(centre)), centre, strict=True)}}


def after(function: Function, d: int, seed: int, noise: float, *, known: bool = True) -> dict[str, object]:
    """Return the arguments that give a search earlier trials; none if the start diverges.

    ``known`` says whether the noise of the earlier search is known.
    """
    if not np.isfinite(function(np.zeros(d))):
        return {}
    trials = [each for each in run(function, d, EARLIER, seed + 1, noise).trials if np.isfinite(each.loss)]
    points = np.array([[trial.params[name] for name in names_of(d)] for trial in trials])
    return {"earlier": EarlierTrials(points, np.array([trial.loss for trial in trials]), noise if known else None)}


def knowledge(family: str, d: int, seed: int, noise: float) -> dict[str, Callable[[], dict[str, object]]]:
    truth, optimum, rng = made_up(family, d, seed), optimum_of(family, d, seed), np.random.default_rng([seed, 7])
    near, shift = optimum + rng.normal(0, SURE, d), rng.normal(0, SHIFT, d)
    return {
        "none": dict,
        "told: right": lambda: told(near),
        "told: another": lambda: told(optimum_of(family, d, seed + OTHER)),
        "told: mirrored": lambda: told(-optimum),
        "earlier: alike": lambda: after(lambda x: 1.5 * truth(x + shift), d, seed, noise),
        "alike, noise unknown": lambda: after(lambda x: 1.5 * truth(x + shift), d, seed, noise, known=False),
        "earlier: another": lambda: after(made_up(family, d, seed + OTHER), d, seed, noise),
        "earlier: mirrored": lambda: after(lambda x: truth(-x), d, seed, noise),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", default="8,16")
    parser.add_argument("--noise", default="0,0.1", help="standard deviations / loss of the start above the optimum")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    titles = list(knowledge("bowl", 2, 0, 0.0))
    print(
        "\n".join([f"| surface | values | noise | trials | {' | '.join(titles)} |", "|---" * (4 + len(titles)) + "|"])
    )
    for noise in map(float, options.noise.split(",")):
        for family, d in CASES:
            for trials in map(int, options.trials.split(",")):
                found: dict[str, list[float]] = {title: [] for title in titles}
                for seed in range(FIRST, FIRST + options.seeds):
                    truth = made_up(family, d, seed)
                    for title, known in knowledge(family, d, seed, noise).items():
                        best = run(truth, d, trials, seed, noise, **known()).params
                        found[title].append(100 * min(truth(np.array([best[name] for name in names_of(d)])), 1.0))
                texts = (f"{np.mean(of):.1f} ± {np.std(of) / len(of) ** 0.5:.1f}" for of in found.values())
                print(f"| {family} | {d} | {noise:.0%} | {trials} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
