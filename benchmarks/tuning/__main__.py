"""Measure whether tuning by module pays and transfers: `python -m benchmarks.tuning FOLDER [--trials 90] [--seed 0]`.

On real training (text of the standard library, 0.2 M parameters), two methods with the FLOPs of so many full trials:

- `global`: all of them over the global values;
- `per-module`: the first third over the global values, then from their best the rest over about 25 values.

Both start from one recipe. Their results are trained again with fresh seeds at the tuning scale and, after `leaven
transfer`, at 4 times the width, twice the depth and 4 times the tokens. The equal-loss speed-up is how many times the
tokens the global result needs to reach the loss of the per-module result: it is trained for several durations with
the same seeds, and the crossing is interpolated in log2 of the tokens. Differences are paired by seed.

Everything is kept in FOLDER, one line per run: run the command again to resume. `--until searches|proxy|target` stops
early.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leaven.data.tokens import prepare
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.storage import write_text
from leaven.training.trial import WorkerPool, train_trial
from leaven.tuning.algorithm.noise import t95
from leaven.tuning.point import BATCH
from leaven.tuning.service.recipe_study import Study
from leaven.tuning.space import space

PROXY = Path(__file__).with_name("proxy.toml")
SEEDS = range(1001, 1006)  # the searches' own are the first few
FIRST = 1 / 3  # of the trials of `per-module` are over the global values
LONGER = {"proxy": (1.19, 1.41, 1.68, 2.0), "target": (1.41,)}  # times the tokens, for the speed-up
WIDER, DEEPER, MORE_TOKENS = 4, 2, 4
PARTS = ("searches", "proxy", "target")


@dataclass(frozen=True)
class StudyJob:
    arm: str
    scale: str  # proxy | target
    longer: float
    recipe: Recipe  # with its seed

    @property
    def key(self) -> str:
        """A key of everything that determines the result."""
        text = self.recipe.model_dump_json(exclude={"why", "name"})
        return blake2b(text.encode(), digest_size=8).hexdigest()


def searched(folder: Path, seed: int, trials: int, workers: int) -> dict[str, Recipe]:
    """The results of the searches by arm; `start` is their common start."""
    start = read_recipe(PROXY).replace({"data.seed": seed})
    some = study(folder / "global-first", start, "global", trials * FIRST, workers)
    return {
        "start": start,
        "global": study(folder / "global", start, "global", trials, workers),
        "per-module": study(folder / "per-module", unpinned(some), "per-module", trials * (1 - FIRST), workers),
    }


def study(folder: Path, recipe: Recipe, which: str, trials: float, workers: int) -> Recipe:
    """The result of a study with the FLOPs of so many full trials."""
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    flops = trials * recipe.data.tokens * flops_per_token(recipe.model)
    values = space(recipe, which).without(
        BATCH, "of equal FLOPs the smallest batch makes most, whatever it takes in hours"
    )
    with Study(folder, recipe, values, "trust-region", tokens) as searcher:
        print(f"{folder.name}: {len(searcher.space.dimensions)} values", flush=True)
        state = searcher.run(None, workers, flops=flops, stop_at_noise=False)
    assert state.best is not None, f"every trial of {folder.name} diverged"
    low, high = state.best.interval
    count = Counter(trial.state for trial in state.trials)
    print(
        f"  best {state.best.loss:.4f} ({low:.4f} to {high:.4f}), noise {state.noise_floor:.4f}; {len(state.trials)} "
        f"trials, {count['stopped']} stopped, {count['diverged']} diverged",
        flush=True,
    )
    return read_recipe(folder / "best.toml")


def unpinned(recipe: Recipe) -> Recipe:
    """The result of a study as the start of another one, at the same scale."""
    return recipe.replace({"scaling.base": None, "why": {}})


def jobs(answers: dict[str, Recipe], scale: str) -> list[StudyJob]:
    found = []
    for arm, answer in answers.items():
        recipe = answer
        if scale == "target" and arm == "start":
            continue  # hours, to say what the search was worth there too
        if scale == "target":
            model = answer.model
            recipe = transfer(
                answer,
                width=WIDER * model.d_model,
                depth=DEEPER * model.n_layers,
                tokens=MORE_TOKENS * answer.data.tokens,
            )
        for longer in (1.0, *(LONGER[scale] if arm == "global" else ())):
            at = recipe if longer == 1 else transfer(recipe, tokens=whole(recipe, longer))
            found += [StudyJob(arm, scale, longer, at.replace({"data.seed": seed})) for seed in SEEDS]
    # The runs that decide the difference first.
    return sorted(found, key=lambda job: (job.longer, job.recipe.data.seed, job.arm == "start"))


def whole(recipe: Recipe, longer: float) -> int:
    return round(longer * recipe.data.tokens / recipe.batch.tokens) * recipe.batch.tokens


def train(folder: Path, asked: Sequence[StudyJob], workers: int) -> None:
    """Train the runs that are missing; one line per run."""
    results = folder / "runs.jsonl"
    done = {row["key"] for row in rows(folder)}
    missing = [job for job in asked if job.key not in done]
    print(f"{asked[0].scale}: {len(asked) - len(missing)} of {len(asked)} runs are there", flush=True)
    with WorkerPool(workers) as pool:
        futures = {
            pool.submit(train_trial, job.recipe, checkpoint=folder / "checkpoints" / job.key): job for job in missing
        }
        for future in as_completed(futures):
            job, outcome = futures[future], future.result()
            row = {
                "key": job.key,
                "arm": job.arm,
                "scale": job.scale,
                "longer": job.longer,
                "seed": job.recipe.data.seed,
                "loss": outcome.loss if math.isfinite(outcome.loss) else None,
                "seconds": round(outcome.seconds, 1),
            }
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shutil.rmtree(folder / "checkpoints" / job.key, ignore_errors=True)
            print(f"  {job.arm:10} x{job.longer:<5g} seed {row['seed']}  {outcome.loss:.4f}", flush=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    results = folder / "runs.jsonl"
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Losses by scale and arm, differences paired by seed, and the speed-up."""
    lines = ["| scale | arm | loss | against global | equal-loss speed-up | seeds |", "|---|---|---|---|---|---|"]
    for scale in PARTS[1:]:
        losses = {
            (row["arm"], row["longer"], row["seed"]): row["loss"]
            for row in found
            if row["scale"] == scale and row["loss"] is not None
        }
        for arm in ("start", "global", "per-module"):
            mine = {seed: loss for (of, longer, seed), loss in losses.items() if of == arm and longer == 1}
            if not mine:
                continue
            base = {seed: losses.get(("global", 1.0, seed)) for seed in mine}
            paired = [mine[seed] - other for seed, other in base.items() if other is not None]
            ratios = [] if arm != "per-module" else speed_ups(losses, mine)
            against = "" if arm == "global" else mean(paired, "+.4f")
            speed = times(ratios, LONGER[scale][-1])
            loss = mean(list(mine.values()), ".4f")
            lines.append(f"| {scale} | {arm} | {loss} | {against} | {speed} | {len(mine)} |")
    return lines


def speed_ups(losses: dict[tuple[str, float, int], float], mine: dict[int, float]) -> list[float | None]:
    """For each seed, how many times the tokens the global result needs for this loss; None beyond the longest run."""
    found: list[float | None] = []
    for seed, loss in mine.items():
        same = {longer: value for (arm, longer, of), value in losses.items() if arm == "global" and of == seed}
        curve = sorted(same.items())
        if len(curve) < 2:
            continue
        if loss >= curve[0][1]:  # not better at all: as if the line to the next went on backwards
            (a, at_a), (b, at_b) = curve[:2]
        else:
            crossing = [pair for pair in itertools.pairwise(curve) if pair[1][1] <= loss]
            if not crossing:
                found.append(None)
                continue
            (a, at_a), (b, at_b) = crossing[0]
        share = (at_a - loss) / (at_a - at_b) if at_a > at_b else 0.0
        found.append(2 ** (math.log2(a) + share * (math.log2(b) - math.log2(a))))
    return found


def times(ratios: Sequence[float | None], longest: float) -> str:
    """The geometric mean of the speed-ups with its 95% interval, or a list if some are beyond the longest run."""
    known = [math.log2(ratio) for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or len(known) < 2:
        return ", ".join(f"> {longest:g}" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    middle = statistics.fmean(known)
    margin = t95(len(known) - 1) * statistics.stdev(known) / math.sqrt(len(known))
    return f"{2**middle:.2f} ({2 ** (middle - margin):.2f} to {2 ** (middle + margin):.2f})"


def mean(values: Sequence[float], form: str) -> str:
    """The mean with its 95% interval by Student's t."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values)
    margin = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{form}} ± {margin:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0, help="of the searches: their proposals, and what they train")
    parser.add_argument("--until", choices=PARTS, default="target")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    answers = searched(asked.folder, asked.seed, asked.trials, asked.workers)
    for arm, recipe in answers.items():
        write_recipe(recipe, asked.folder / f"{arm}.toml")
    for scale in PARTS[1 : PARTS.index(asked.until) + 1]:
        train(asked.folder, jobs(answers, scale), asked.workers)
    lines = table(rows(asked.folder))
    write_text(asked.folder / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
