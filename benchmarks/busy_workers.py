"""Measure how busy the workers of a search are: `python benchmarks/busy_workers.py [--trials 1000] [--seconds 0.2]`.

The objective sleeps, so the rest of a worker's time is the cost of the search: proposals, the store and the loop.
Prints, for each tenth of the trials, the share of the workers' time that the objective takes,
and processor milliseconds of the search for each trial. The store is a journal on the disk, as in `leaven tune`.

`--tiny` tests the benchmark in seconds.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from leaven.tuning import search
from leaven.tuning.service.search_loop import Proposal


class Watch:
    """Notes the time, and the processor time of this process, whenever trials have ended."""

    def __init__(self) -> None:
        self.ended_at = [(0, time.perf_counter(), time.process_time())]  # number of trials that have ended, and when

    def started(self, proposal: Proposal) -> None:
        pass

    def ended(self, numbers: Sequence[int]) -> None:
        count = self.ended_at[-1][0] + len(numbers)
        self.ended_at.append((count, time.perf_counter(), time.process_time()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a trial")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--values", type=int, default=8, help="values that are searched")
    parser.add_argument("--method", default="trust-region")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.trials, options.seconds = 20, 0.01
    noise = random.Random(0)

    def objective(proposal: Proposal) -> float:
        time.sleep(options.seconds)
        return sum((x - 1) ** 2 for x in proposal.values()) + noise.gauss(0, 0.01)

    space = {f"value{number}": (-3.0, 3.0) for number in range(options.values)}
    watch = Watch()
    with TemporaryDirectory() as folder:
        search(
            objective,
            space,
            trials=options.trials,
            method=options.method,
            workers=options.workers,
            stop_at_noise=False,
            storage=Path(folder, "journal.log"),
            watch=watch,
        )
    print(
        f"{options.trials:,} trials of {options.seconds:g} s, {options.workers} workers, {options.values} values, "
        f"{options.method}"
    )
    print(f"{'trials':>15} {'busy':>6} {'processor ms a trial':>21}")
    at, size = watch.ended_at, math.ceil(options.trials / 10)
    marks = [min(row for row in at if row[0] >= count) for count in range(0, at[-1][0], size)] + [at[-1]]
    for first, last in [*pairwise(marks), (at[0], at[-1])]:
        count, seconds = last[0] - first[0], last[1] - first[1]
        busy = count * options.seconds / (options.workers * seconds)
        span = f"{first[0] + 1:,} to {last[0]:,}"
        print(f"{span:>15} {busy:6.1%} {(last[2] - first[2]) / count * 1e3:21.1f}")


if __name__ == "__main__":
    main()
