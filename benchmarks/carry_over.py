"""Measure where the gain of a study goes after transfer: `python -m benchmarks.carry_over FOLDER STUDY [--width 2]`.

A study has a start (STUDY/centre.toml) and an answer (STUDY/best.toml). At the size of the study and at a larger one
(`leaven transfer`), train with the same seeds:

- the start and the answer: how much of the gain is left;
- the answer with one value at the start, for each value: how much of the gain is due to this value;
- the answer with one value half and twice as large: a parabola through the three losses has its minimum at the best
  value. If it moves between the two sizes, the exponent of the scaling rule is off by the move divided by the octaves
  of the size.

Differences are paired by seed. Every run is kept in FOLDER/runs.jsonl: run the command again to resume.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path

from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe, differences, short_path
from leaven.scaling.transfer import transfer
from leaven.storage import make_folder
from leaven.training.trial import WorkerPool, train_trial
from leaven.tuning.point import distance, recipe_at, value_at

Variant = tuple[str, str]  # (path of a value, what it is changed to: start | lower | higher), or ("", start | answer)


def variants(start: Recipe, answer: Recipe) -> dict[Variant, Recipe]:
    """Return the recipes to train at one size."""
    found = {("", "start"): start, ("", "answer"): answer}
    for path in (each[0] for each in differences(start, answer)):
        old, new = value_at(start, path), value_at(answer, path)
        if not (isinstance(old, float) and isinstance(new, float)):
            continue
        for what, by in {"start": distance(path, new, old), "lower": -1.0, "higher": 1.0}.items():
            found[path, what] = recipe_at(answer, {path: by})
    return found


def train(folder: Path, sizes: dict[str, dict[Variant, Recipe]], seeds: Sequence[int], workers: int) -> dict:
    """Return the losses by (size, path, what) and seed; train those that are missing."""
    results = folder / "runs.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    losses = {tuple(key): math.inf if loss is None else loss for *key, loss in map(json.loads, lines)}
    with WorkerPool(workers) as pool:
        futures = {}
        for size, recipes in sizes.items():
            for seed in seeds:
                for (path, what), recipe in recipes.items():
                    key = (size, path, what, seed)
                    if key not in losses:
                        futures[pool.submit(train_trial, recipe.replace({"data.seed": seed}))] = key
        for done, future in enumerate(as_completed(futures), 1):
            key, loss = futures[future], future.result().loss
            losses[key] = loss
            with results.open("a") as file:
                file.write(json.dumps([*key, loss if math.isfinite(loss) else None]) + "\n")
            print(f"{done} of {len(futures)}: {' '.join(map(str, key))}: {loss:.4f}", flush=True)
    return losses


def mean(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):+.3f} ± {error:.3f}"


def minimum(low: float, middle: float, high: float) -> float:
    """Return the minimum of the parabola through losses at -1, 0 and 1 octaves, within +-2; nan without a minimum."""
    curvature = low - 2 * middle + high
    return min(max((low - high) / (2 * curvature), -2.0), 2.0) if curvature > 0 else math.nan


def report(losses: dict, sizes: dict[str, dict[Variant, Recipe]], seeds: Sequence[int]) -> None:
    def of(size: str, path: str, what: str) -> list[float]:
        return [losses[size, path, what, seed] for seed in seeds]

    print("| value | " + " | ".join(f"{size}: gain, nats | best, octaves" for size in sizes) + " |")
    print("|---" * (2 * len(sizes) + 1) + "|")
    paths = dict.fromkeys(path for recipes in sizes.values() for path, _ in recipes)
    for path in paths:
        cells = []
        for size in sizes:
            gains = [a - b for a, b in zip(of(size, path, "start"), of(size, "", "answer"), strict=True)]
            cells.append(mean(gains))
            if not path:
                cells.append("")
                continue
            along = of(size, path, "lower"), of(size, "", "answer"), of(size, path, "higher")
            cells.append(f"{minimum(*map(statistics.fmean, along)):+.2f}")
        print(f"| {short_path(path) if path else 'all'} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("study", type=Path)
    parser.add_argument("--width", type=int, default=2, help="times the width")
    parser.add_argument("--depth", type=int, default=1, help="times the depth")
    parser.add_argument("--tokens", type=int, default=2, help="times the tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    make_folder(asked.folder)
    start, answer = read_recipe(asked.study / "centre.toml"), read_recipe(asked.study / "best.toml")
    small = variants(start, answer)
    larger = {
        key: transfer(
            recipe,
            width=asked.width * recipe.model.d_model,
            depth=asked.depth * recipe.model.n_layers,
            tokens=asked.tokens * recipe.data.tokens,
        )
        for key, recipe in small.items()
    }
    sizes, seeds = {"study": small, "larger": larger}, range(2001, 2001 + asked.seeds)
    report(train(asked.folder, sizes, seeds, asked.workers), sizes, seeds)


if __name__ == "__main__":
    main()
