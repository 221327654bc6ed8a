"""Measure what pruning trials saves and costs: `PYTHONPATH=src python -m benchmarks.early_stopping`.

Trains trials at random points around a recipe to their end and records their loss curves; run the command again to
resume. Then replays the trials in many random orders. As in a search, each trial is compared with the best trial
before it. Prints how much training pruning saves, how many of the best trials are pruned, and the error of the losses
predicted for pruned trials. The constants of leaven.training.early_stopping were chosen on the set ``choose`` (`--set
choose --scan`); the table in docs/log.md is for ``report``, which has other points and other seeds.
"""

import argparse
import json
import math
import os
import statistics
from dataclasses import asdict
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe
from leaven.training import early_stopping as rule
from leaven.training.outcome import Baseline, Outcome
from leaven.training.trial import train_trial

RECIPE = """
name = "early-stopping"
[model]
n_layers = 2
d_model = 32
n_heads = 2
n_kv_heads = 2
d_head = 16
d_ff = 96
vocab_size = 512
seq_len = 64
qk_norm = true
[data]
source = "python-stdlib"
tokens = 262_144
[batch]
tokens = 512
[schedule]
warmup_tokens = 8_192
[hyperparameters]
lr = 0.008
init_std = 0.1
[evaluation]
tokens = 32_768
"""
MODULES = (
    "embedding",
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.out",
    "mlp.out",
    "unembedding",
)
# Octaves from the recipe to either end of the search space.
REACH = {
    "hyperparameters.lr": 3.0,
    "hyperparameters.init_std": 2.0,
    "hyperparameters.weight_decay": 3.0,
    "hyperparameters.residual": 1.5,
    **{f"hyperparameters.modules.{module}.lr": 3.0 for module in MODULES},
}
SETS = {"choose": 0, "report": 1000}  # seed of each set
DECAYS = ("cosine", "wsd")
SEEDS = 4  # runs of the recipe itself, which measure the noise
BEST = (3, 5)  # pruned trials are counted among the best 3 and the best 5
ORDERS = 200


def point(recipe: Recipe, seed: int, number: int) -> Recipe:
    """Return trial ``number``: 0 is the recipe; others differ in every value, with a std of 0.5, 1 or 2 octaves."""
    draw = np.random.default_rng([seed, number])
    radius = (0.5, 1.0, 2.0)[number % 3] if number else 0.0
    octaves = {path: float(np.clip(draw.normal() * radius, -reach, reach)) for path, reach in REACH.items()}
    hyperparameters = recipe.hyperparameters
    centre = {path: getattr(hyperparameters, path.split(".")[-1]) if path.count(".") == 1 else 1.0 for path in REACH}
    return recipe.replace({path: centre[path] * 2.0**octave for path, octave in octaves.items()})


def record(folder: Path, name: str, decay: str, trials: int) -> tuple[list[Outcome], float]:
    """Train the trials of a set; return their outcomes, and the std of the recipe's loss between seeds."""
    seed = SETS[name]
    recipe = parse_recipe(RECIPE, "early-stopping").replace({"data.seed": seed, "schedule.decay": decay})
    runs = {f"{number}": point(recipe, seed, number) for number in range(trials)}
    runs |= {f"noise {number}": recipe.replace({"data.seed": seed + number}) for number in range(1, SEEDS)}
    file = folder / f"{name}-{decay}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    ended = {line["key"]: line for line in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    for key, run in runs.items():
        if key in ended:
            continue
        ended[key] = {"key": key} | asdict(train_trial(run))
        print(f"{name} {decay} {key}: loss {ended[key]['loss']:.4f} in {ended[key]['seconds']:.1f} s", flush=True)
        with file.open("a") as lines:
            lines.write(json.dumps(ended[key]) + "\n")
    found = {key: Outcome.of({name: value for name, value in ended[key].items() if name != "key"}) for key in runs}
    centre = [found["0"].loss] + [found[f"noise {number}"].loss for number in range(1, SEEDS)]
    return [found[f"{number}"] for number in range(trials)], statistics.stdev(centre)


def replayed(trials: list[Outcome], noise: float, order: list[int]) -> dict[int, tuple[float, float, float]]:
    """Return the pruned trials, by number, of a search that runs the trials in this order.

    The values are: share of the trial that was trained, error of the predicted loss, and loss above the best so far
    (both in nats).
    """
    best, stopped = trials[order[0]], {}
    for number in order[1:]:
        trial, against = trials[number], Baseline(best.curve, best.loss, noise)
        for points in range(1, len(trial.curve)):
            curve = trial.curve[:points]
            if rule.should_prune(curve, against):
                share, off = curve[-1][0] / best.curve[-1][0], rule.expected(curve, against) - trial.loss
                stopped[number] = (share, off, trial.loss - best.loss)
                break
        else:
            if trial.loss < best.loss:
                best = trial
    return stopped


def replay(trials: list[Outcome], noise: float) -> dict[str, float]:
    """Return statistics over many orders, in which the recipe itself always comes first."""
    ranked = sorted(range(len(trials)), key=lambda number: trials[number].loss)
    draw, full = np.random.default_rng(0), max(trial.tokens for trial in trials)
    spent, killed, near, given_up, errors = [], [], [], [], []
    for _ in range(ORDERS):
        stopped = replayed(trials, noise, [0, *(1 + draw.permutation(len(trials) - 1)).tolist()])
        tokens = [stopped[n][0] * full if n in stopped else trials[n].tokens for n in range(len(trials))]
        spent.append(sum(tokens) / sum(trial.tokens for trial in trials))
        killed.append([sum(n in stopped for n in ranked[:best]) for best in BEST])
        near.append(sum(behind < 2 * noise for _, _, behind in stopped.values()))
        given_up.append(len(stopped))
        # A pruned trial that would have diverged later has no final loss to compare with.
        errors += [error for n, (_, error, _) in stopped.items() if math.isfinite(trials[n].loss)]
    return {
        "saved": 1 - statistics.fmean(spent),
        "given up": statistics.fmean(given_up),
        **{f"of the best {best}": float(np.mean(killed, axis=0)[i]) for i, best in enumerate(BEST)},
        "within twice the noise": statistics.fmean(near),
        "off, median": float(np.median(errors)) if errors else 0.0,
        "off, 90%": float(np.quantile(np.abs(errors), 0.9)) if errors else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/early-stopping"))
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--set", choices=SETS, action="append")
    parser.add_argument("--scan", action="store_true", help="also try other constants")
    options = parser.parse_args()
    scanned = (
        {"FIRST": (0.25, 0.375, 0.5), "MARGIN": (0.25, 0.5, 1.0, 1.5), "LEAST": (4.0, 6.0, 8.0)}
        if options.scan
        else {}
    )
    for name, decay in product(options.set or SETS, DECAYS):
        trials, noise = record(options.run, name, decay, options.trials)
        losses = sorted(trial.loss for trial in trials)
        diverged = sum(trial.diverged for trial in trials)
        print(
            f"{name}, {decay}: {len(trials)} trials, {diverged} diverged; noise {noise:.4f}; "
            f"loss {losses[0]:.3f}, median {losses[len(losses) // 2]:.3f}"
        )
        for values in product(*scanned.values()):
            for constant, value in zip(scanned, values, strict=True):
                setattr(rule, constant, value)
            results = "  ".join(f"{key} {value:.3f}" for key, value in replay(trials, noise).items())
            print("  ", dict(zip(scanned, values, strict=True)) or "", results)


if __name__ == "__main__":
    main()
