"""Measure how busy the workers of a search are: `python benchmarks/busy_workers.py --trials 1000 --seconds 0.2`.

`--filled 9500 --trials 10000` writes 9,500 finished trials into the store first, and measures the other 500.
`--where` prints where the processor time of the search goes, measured by cProfile (which makes it longer).

The objective sleeps, so the rest of a worker's time is the cost of the search: proposals, the store and the loop.
Prints, for each tenth of the trials, the share of the workers' time that the objective takes,
and processor milliseconds of the search for each trial. The store is a journal on the disk, as in `leaven tune`.

`--tiny` tests the benchmark in seconds.
"""

import argparse
import cProfile
import math
import os
import pstats
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from optuna.trial import TrialState, create_trial

from leaven.tuning import search
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service import stored_study, study_settings
from leaven.tuning.service.search_loop import Proposal
from leaven.tuning.service.stores import open_store

MOST_ROWS = 60  # functions that --where prints


class Watch:
    """Notes the time, and the processor time of this process, whenever trials have ended."""

    def __init__(self) -> None:
        self.ended_at = [(0, time.perf_counter(), time.process_time())]  # number of trials that have ended, and when

    def started(self, proposal: Proposal) -> None:
        pass

    def ended(self, numbers: Sequence[int]) -> None:
        count = self.ended_at[-1][0] + len(numbers)
        self.ended_at.append((count, time.perf_counter(), time.process_time()))


def loss_at(point: Mapping[str, float], noise: random.Random) -> float:
    return sum((x - 1) ** 2 for x in point.values()) + noise.gauss(0, 0.01)


def fill(path: Path, space: Mapping[str, tuple[float, float]], count: int, noise: random.Random, method: str) -> None:
    """Write a study with ``count`` finished trials, which come closer to the optimum, through its store."""
    axes, begin = Axes(space), time.time() - count
    with mock.patch("os.fsync"):
        store = open_store(path)
        known = {"method": method, "axes": axes, "seed": 0, "noise": None}
        study = study_settings.join_study(store, "leaven", "the study", "", **known)
        for number in range(count):
            radius = 2 / (1 + number / 20) + 0.1
            point = {name: min(max(noise.gauss(1, radius), -3.0), 3.0) for name in space}
            start = number < 3
            attributes = {
                stored_study.OWNER: "filled",
                stored_study.PURPOSE: "noise" if start and number else "search",
                stored_study.SEED: number if start else 0,
                stored_study.JOB: f"start:{number}" if start else f"search:{number}",
                stored_study.BEGAN: begin + number,
                stored_study.ENDED: begin + number + 0.5,
            }
            point = dict(axes.start) if start else point
            trial = create_trial(
                state=TrialState.COMPLETE,
                value=loss_at(point, noise),
                params=point,
                distributions=stored_study.distributions(axes),
                user_attrs=attributes,
            )
            trial.number = number
            digest = stored_study._digest_of(trial, trial.state, trial.values)
            trial.user_attrs = attributes | {stored_study.DIGEST: digest}
            store.create_new_trial(study.id, trial)
    os.sync()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a trial")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--values", type=int, default=8, help="values that are searched")
    parser.add_argument("--method", default="trust-region")
    parser.add_argument("--filled", type=int, default=0, help="trials that are in the store at the beginning")
    parser.add_argument("--where", action="store_true", help="print where the search's processor time goes")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.trials, options.seconds, options.filled = 30, 0.01, 10
    noise = random.Random(0)

    def objective(proposal: Proposal) -> float:
        time.sleep(options.seconds)
        return loss_at(proposal, noise)

    space = {f"value{number}": (-3.0, 3.0) for number in range(options.values)}
    profile = cProfile.Profile(time.thread_time) if options.where else None
    with TemporaryDirectory() as folder:
        path = Path(folder, "journal.log")
        if options.filled:
            fill(path, space, options.filled, noise, options.method)
        watch = Watch()
        with profile or nullcontext():
            search(
                objective,
                space,
                trials=options.trials,
                method=options.method,
                workers=options.workers,
                stop_at_noise=False,
                storage=path,
                watch=watch,
            )
    ran = watch.ended_at[-1][0]
    print(
        f"{ran:,} trials of {options.seconds:g} s after {options.filled:,} others, {options.workers} workers, "
        f"{options.values} values, {options.method}"
    )
    print(f"{'trials':>15} {'busy':>6} {'processor ms a trial':>21}")
    at, size, more = watch.ended_at, math.ceil(ran / 10), options.filled
    marks = [min(row for row in at if row[0] >= count) for count in range(0, ran, size)] + [at[-1]]
    for first, last in [*pairwise(marks), (at[0], at[-1])]:
        count, seconds = last[0] - first[0], last[1] - first[1]
        busy = count * options.seconds / (options.workers * seconds)
        span = f"{more + first[0] + 1:,} to {more + last[0]:,}"
        print(f"{span:>15} {busy:6.1%} {(last[2] - first[2]) / count * 1e3:21.1f}")
    if profile is not None:
        print(f"{'processor ms a trial':>21}  function, with what it calls")
        stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        rows = sorted(((row[3], where) for where, row in stats.items()), reverse=True)
        for seconds, (file, _, name) in rows[:MOST_ROWS]:
            print(f"{seconds / ran * 1e3:21.2f}  {Path(file).name} {name}")


if __name__ == "__main__":
    main()
