"""Measure whether cheap runs inform expensive ones: `python -m benchmarks.fidelity FOLDER [--cases 6] [--trials 24]`.

On real training, four ways to spend the FLOPs of so many full trials on the global values:

- `none`: all of them at full size;
- `unpruned`: likewise, and every trial is trained to its end, also one that can hardly win;
- `shorter`: half of them on runs with a quarter of the tokens, then, from their answer and knowing their trials
  (`leaven transfer`, `leaven tune --from-study`), the other half at full size;
- `narrower`: likewise, with runs of half the width and a quarter of the tokens.

A case is a seed and a start: lr, init std and weight decay are each moved by up to two octaves. What each way answers
is trained with fresh seeds at full size. Differences are paired by case. Every run is kept in FOLDER: run the command
again to resume.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import as_completed
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from benchmarks.tuning.proof import average as mean

from leaven.data.tokens import prepare
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.storage import write_text
from leaven.training.trial import WorkerPool, train_trial
from leaven.tuning.point import BATCH
from leaven.tuning.service.recipe_study import Study
from leaven.tuning.service.search_plan import SearchPlan
from leaven.tuning.space import space

PROXY = Path(__file__).with_name("tuning") / "proxy.toml"
# About 57,000 parameters, 20 tokens for each, 1,120 steps.
SIZE = {
    "model.n_layers": 2,
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.n_kv_heads": 2,
    "model.d_ff": 88,
    "batch.tokens": 1024,
    "data.tokens": 1_146_880,
    "schedule.warmup_tokens": 114_688,
    "precision.compute": "fp32",
}
CHEAP = {"none": None, "unpruned": None, "shorter": (1, 4), "narrower": (2, 4)}  # divisors of width and tokens
SHARE = 0.5  # of the FLOPs, for the cheap runs
MOVED = ("hyperparameters.lr", "hyperparameters.init_std", "hyperparameters.weight_decay")
OCTAVES = 2.0
FRESH = range(1001, 1006)


def start_of(case: int, share: float) -> Recipe:
    """The start of a case, which is its own base. ``share`` of the tokens are trained."""
    counts = ("data.tokens", "schedule.warmup_tokens")
    less = {key: round(share * int(SIZE[key]) / 1024) * 1024 for key in counts}
    recipe = read_recipe(PROXY).replace(SIZE | less | {"data.seed": case})
    draw = random.Random(case)
    octaves = {path: draw.uniform(-OCTAVES, OCTAVES) for path in MOVED}
    values = {path: getattr(recipe.hyperparameters, path.split(".")[1]) * 2**by for path, by in octaves.items()}
    scale = {
        "width": recipe.model.d_model,
        "depth": recipe.model.n_layers,
        "batch_tokens": recipe.batch.tokens,
        "tokens": recipe.data.tokens,
    }
    return recipe.replace(values | {"scaling.base": scale})


def study(folder: Path, recipe: Recipe, flops: float, workers: int, earlier: Path | None = None) -> Recipe:
    """The answer of a study with so many FLOPs; its start if every trial diverged."""
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    values = space(recipe, "global").without(BATCH, "of equal FLOPs the smallest batch makes most")
    with Study(folder, recipe, values, "trust-region", tokens, from_study=earlier) as searcher:
        state = searcher.run(None, workers, flops=flops, stop_at_noise=False)
    spent = sum(trial.flops for trial in state.trials) / flops
    pruned = sum(trial.state == "pruned" for trial in state.trials)
    print(f"  {folder.name}: {len(state.trials)} trials, {pruned} pruned, {spent:.2f} of the FLOPs, answer", end=" ")
    if state.best is None:
        print("none: every trial diverged", flush=True)
        return recipe
    changes = (f"{path.split('.')[-1]} x{2**octaves:.2g}" for path, octaves in state.octaves.items() if octaves)
    print(f"{state.best.loss:.4f}: {', '.join(changes) or 'the start'}", flush=True)
    return read_recipe(folder / "best.toml")


def answer_of(folder: Path, way: str, start: Recipe, trials: int, workers: int) -> Recipe:
    flops = trials * start.data.tokens * flops_per_token(start.model)
    divisors = CHEAP[way]
    if divisors is None:
        unpruned = patch.object(SearchPlan, "baseline", lambda *_: None) if way == "unpruned" else nullcontext()
        with unpruned:
            return study(folder / way, start, flops, workers)
    width, model = start.model.d_model // divisors[0], start.model
    small = transfer(start, width=width, tokens=start.data.tokens // divisors[1])
    found = study(folder / f"{way}-cheap", small, SHARE * flops, workers)
    large = transfer(found, width=model.d_model, tokens=start.data.tokens)
    return study(folder / way, large, (1 - SHARE) * flops, workers, folder / f"{way}-cheap")


def train(folder: Path, answers: dict[str, Recipe], workers: int) -> dict[str, list[float]]:
    """Losses of the answers with the fresh seeds."""
    results = folder / "fresh.jsonl"
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    losses = {(way, seed): loss for way, seed, loss in known}
    missing = [(way, seed) for way in answers for seed in FRESH if (way, seed) not in losses]
    with WorkerPool(workers) as pool:
        futures = {
            pool.submit(train_trial, answers[way].replace({"data.seed": seed})): (way, seed) for way, seed in missing
        }
        for future in as_completed(futures):
            losses[futures[future]] = future.result().loss
            with results.open("a") as file:
                file.write(json.dumps([*futures[future], future.result().loss]) + "\n")
    return {way: [losses[way, seed] for seed in FRESH] for way in answers}


def table(found: Sequence[dict[str, list[float]]]) -> list[str]:
    """The loss of every way in every case, with its difference to `none` and the standard error over fresh seeds."""
    cases = " | ".join(f"case {case}" for case in range(len(found)))
    lines = [f"| way | {cases} | mean | against none |", "|---" * (len(found) + 3) + "|"]
    for way in found[0]:
        cells, against = [], []
        for case in found:
            paired = [loss - other for loss, other in zip(case[way], case["none"], strict=True)]
            against.append(statistics.fmean(paired))
            error = statistics.stdev(paired) / math.sqrt(len(paired))
            difference = "" if way == "none" else f" ({against[-1]:+.3f} ± {error:.3f})"
            cells.append(f"{statistics.fmean(case[way]):.3f}{difference}")
        average = statistics.fmean(loss for case in found for loss in case[way])
        interval = "" if way == "none" else mean(against, "+.4f")
        lines.append(f"| {way} | {' | '.join(cells)} | {average:.3f} | {interval} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--ways", nargs="*", default=list(CHEAP), choices=list(CHEAP), help="`none` is needed")
    parser.add_argument("--share", type=float, default=1.0, help="of the tokens of a trial")
    asked = parser.parse_args()
    found = []
    for case in range(asked.cases):
        folder = asked.folder / f"case-{case}"
        folder.mkdir(parents=True, exist_ok=True)
        start = start_of(case, asked.share)
        answers = {"start": start}
        for way in asked.ways:
            answers[way] = answer_of(folder, way, start, asked.trials, asked.workers)
        found.append(train(folder, answers, asked.workers))
        assert all(math.isfinite(loss) for losses in found[-1].values() for loss in losses)
        lines = table(found)
        write_text(asked.folder / "table.md", "\n".join(lines) + "\n")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
