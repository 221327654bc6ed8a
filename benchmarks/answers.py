"""Check what a search reports about its result: `python -m benchmarks.answers [--quick] [--seeds 20] [--share 0.5]`.

Minimises losses with a known optimum (benchmarks/_landscapes.py) as `leaven tune` does, and compares the report of
`leaven.tuning.algorithm.answer` with the truth. Shares in the table are of all searches, or of all multipliers of all
searches. ``--share`` is the share of the noise's variance that all runs with the same seed have in common. Landscapes
are numbered from 1000; smaller numbers were used to choose constants.
"""

import argparse
import itertools
import math
import os
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
from benchmarks._landscapes import EXCESS, FLOOR, NOISE, REACH, Landscape, landscape
from optuna.storages import InMemoryStorage

from benchmarks import _landscapes
from leaven.tuning import search
from leaven.tuning.algorithm.answer import answer
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service.samplers import ped_anova
from leaven.tuning.service.search_loop import Proposal
from leaven.tuning.service.stored_study import trials_of
from leaven.tuning.study_document import Dimension, StudyTrial

SEEDS = 16  # more seeds than a search uses for one point
IDLE = 6  # number of values in the study whose values have no effect
FIRST = 1000  # first seed
ROWS = {
    "regret": "regret of the best, median",
    "noise": "measured noise floor over the true, median",
    "beyond": "best beyond a cliff (left out below)",
    "interval": "95% interval of the best holds its true loss",
    "flat optimum": "flat region holds the optimum of its multiplier",
    "flat best": "likewise, of those said to have gained more than the noise",
    "flat one": "ends of flat regions truly within the noise of the best",
    "flat two": "within twice the noise",
    "flat width": "width of flat regions, octaves, median",
    "worth": "said to have gained more than the noise, all else at the best",
    "worth true": "and did",
    "small true": "not known to have gained more, and had not",
    "idle": "together not worth tuning, of all",
    "idle one": "together truly within the noise",
    "fewest": "fewest changes: multipliers changed, of all",
    "fewest less": "fewer than the best's",
    "fewest one": "fewest changes truly within the noise of the best",
    "fewest two": "within twice the noise",
    "fewest interval": "its 95% interval holds its true loss",
    "ours": "importance: rank correlation with the truth",
    "optuna": "PED-ANOVA: rank correlation with the truth",
}
MEDIANS = {"regret", "noise", "flat width"}


def searched(
    truth: Landscape | None, trials: int, seed: int, share: float, idle: int = IDLE
) -> tuple[list[StudyTrial], tuple[Dimension, ...]]:
    """Return the trials of a finished study and its dimensions; without a landscape, it has ``idle`` values
    without effect."""
    limits = {f"m{i}": (-REACH, REACH) for i in range(len(truth.optimum) if truth else idle)}
    dimensions = tuple(Dimension(name, 1.0, *both) for name, both in limits.items())
    rng, common = np.random.default_rng([seed, trials]), np.random.default_rng([seed, 0]).normal(size=SEEDS)
    store = InMemoryStorage()

    def run(point: Proposal) -> float:
        if truth is None:
            return FLOOR + _landscapes.NOISE * (
                share**0.5 * float(common[point.seed]) + (1 - share) ** 0.5 * rng.normal()
            )
        return truth.trial(np.array(list(point.values())), rng, float(common[point.seed]), share)

    search(run, limits, None, trials, seed=seed, stop_at_noise=False, storage=store)
    kept = store.get_all_trials(store.get_study_id_from_name("leaven"), deepcopy=False)
    return trials_of(kept, Axes(limits)), dimensions


def judged(d: int, trials: int, seed: int, share: float) -> dict[str, list[float]]:
    """Run one search and return its measures by key of ``ROWS``."""
    truth = landscape(d, seed)
    study, dimensions = searched(truth, trials, seed, share)
    found = answer(study, dimensions, over=True, optunas=ped_anova)
    assert found.best is not None
    assert found.fewest is not None
    assert found.fewest_octaves is not None
    best, fewest = np.array(list(found.octaves.values())), np.array(list(found.fewest_octaves.values()))
    loss, other = truth.loss(best), truth.loss(fewest)
    tried = np.array([list((trial.octaves or {}).values()) for trial in study if trial.state == "complete"])
    out: dict[str, list[float]] = {key: [] for key in ROWS}
    out["regret"] = [(loss - FLOOR) / EXCESS]
    out["noise"] = [(found.noise_floor or 0.0) / NOISE]
    out["beyond"] = [math.isinf(loss)]
    if math.isinf(loss):
        return out

    def at(i: int, x: float) -> float:
        return truth.loss(np.where(np.arange(d) == i, x, best)) - loss

    ours, optuna, true = [], [], []
    for each in found.coordinates:
        i = int(each.path.removeprefix("m"))
        low, high = each.flat
        gain = at(i, 0.0)
        out["flat optimum"].append(low <= truth.optimum[i] <= high)
        out["flat width"].append(high - low)
        out["worth"].append(each.worth)
        out["worth true" if each.worth else "small true"].append(bool(gain > NOISE) == each.worth)
        if each.worth:
            out["flat best"].append(low <= truth.optimum[i] <= high)
        for end in each.flat:
            out["flat one"].append(at(i, end) <= NOISE)
            out["flat two"].append(at(i, end) <= 2 * NOISE)
        along = np.array([at(i, x) for x in tried[:, i]])
        true.append(float(np.std(along[np.isfinite(along)])))
        ours.append(each.importance)
        optuna.append(each.optuna_importance)
    out["interval"] = [found.best.interval[0] <= loss <= found.best.interval[1]]
    idle = np.array([dimension.path in found.idle for dimension in dimensions])
    out["idle"] = idle.tolist()
    out["idle one"] = [truth.loss(np.where(idle, 0.0, best)) - loss <= NOISE]
    out["fewest less"] = [np.count_nonzero(fewest) < np.count_nonzero(best)]
    out["fewest"] = [np.count_nonzero(fewest) / d]
    out["fewest one"] = [other - loss <= NOISE]
    out["fewest two"] = [other - loss <= 2 * NOISE]
    out["fewest interval"] = [found.fewest.interval[0] <= other <= found.fewest.interval[1]]
    out["ours"], out["optuna"] = [_ranked(ours, true)], [_ranked(optuna, true)]
    return out


def _ranked(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def found_in_nothing(seeds: Sequence[int]) -> None:
    """Print how often the answer of a search of values without effect is not the start, and how often it has a gain
    that is not in doubt."""
    print("| trials | common to a seed | not the start | with a gain that is not in doubt |\n|---|---|---|---|")
    for trials, share in itertools.product((8, 16, 32, 60), (0.0, 0.5, 0.9)):
        answers = [answer(*searched(None, trials, seed, share), over=True) for seed in seeds]
        moved = [any(found.octaves.values()) for found in answers]
        claimed = [away and not found.in_doubt for away, found in zip(moved, answers, strict=True)]
        print(f"| {trials} | {share:.0%} | {np.mean(moved):.0%} | {np.mean(claimed):.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cells", nargs="*", default=["30x60", "30x200", "90x60", "90x200"], metavar="MULTIPLIERSxTRIALS"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=FIRST)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument(
        "--nothing", action="store_true", help="count the gains that are reported for values without effect"
    )
    parser.add_argument("--quick", action="store_true", help="6 multipliers, 24 trials, 3 seeds")
    options = parser.parse_args()
    if options.nothing:
        found_in_nothing(range(options.first, options.first + options.seeds))
        return
    cells, seeds = (["6x24"], 3) if options.quick else (options.cells, options.seeds)
    columns = []
    for cell in cells:
        d, trials = map(int, cell.split("x"))
        each = [judged(d, trials, seed, options.share) for seed in range(options.first, options.first + seeds)]
        pooled = {key: [value for run in each for value in run[key]] for key in ROWS}
        columns.append(
            {
                key: f"{np.median(values):.2f}"
                if key in MEDIANS
                else f"{np.mean(values):.2f}"
                if key in {"ours", "optuna"}
                else f"{np.mean(values):.0%}"
                if values
                else ""
                for key, values in pooled.items()
            }
        )
    print("| multipliers x trials | " + " | ".join(cells) + " |")
    print("|---" * (len(cells) + 1) + "|")
    for key, row in ROWS.items():
        print(f"| {row} | " + " | ".join(column[key] for column in columns) + " |")


if __name__ == "__main__":
    main()
