"""Run the commands that leaven prints, from `leaven new` to a trained model, and compare the final loss.

    python -m benchmarks.road FOLDER [--params 220k --tokens 4.4M --seeds 3]

`leaven new` writes two recipes in FOLDER: the target, and a smaller proxy on which hyperparameters are searched. Then
every command that leaven prints is run unchanged. The benchmark stops at a command that fails or prints a warning.
Then it trains the target in several ways with the same seeds (equal initial values and order of data):

- `tuned`: the recipe that the last printed command writes;
- `new`: the target as `leaven new` wrote it, untuned;
- `laws`: the target with values from scaling laws and published runs of similar size, not from leaven's own runs;
- `published`: the target with lr, betas, weight decay and init of the nearest published run, the same for every
  parameter (with `--candidates N`, the best of N runs on one seed);
- `published, moved`: the same, with the lr adapted to the target's size and batch as `leaven new` does;
- `direct`, with `--direct`: `new` with the best of three lrs (half, equal, double) on the first seed. These runs cost
  several times as much as the search on the proxy.

All results are saved in FOLDER; run the command again to resume. The last lines are the table of
docs/evidence/road.md.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from leaven.catalogue.neighbours import neighbours
from leaven.catalogue.runs import PublishedRun
from leaven.catalogue.starter.draft import RunSize, StarterDraft
from leaven.catalogue.starter.optimizer import (
    LR_SIZE_EXPONENT,
    batch_factor,
    choose_adam,
    choose_lr,
    choose_schedule,
)
from leaven.catalogue.terms import terms
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity
from leaven.training.outcome import Outcome
from leaven.tuning.algorithm.noise import t95
from leaven.verification.recipe_family import RecipeTrial
from leaven.verification.runs import RunStore

COPIED = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip")
DIRECT_FACTORS = (0.5, 2.0)
FIRST_SEED = 1_000  # different from the seeds of the search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--params", default="220k")
    parser.add_argument("--tokens", default="4.4M")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--candidates", type=int, default=1, help="copy the best of this many published runs")
    parser.add_argument("--new", default="", help="further options of leaven new")
    parser.add_argument("--direct", action="store_true", help="also tune the lr on the target")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not (asked.folder / "road.toml").exists():
        words = ["new", "road.toml", "--params", asked.params, "--tokens", asked.tokens, *shlex.split(asked.new)]
        run(words, asked.folder)
    follow(asked.folder)
    compare(asked.folder, asked.seeds, asked.workers, asked.candidates, asked.direct)


def follow(folder: Path) -> None:
    """Run in order the commands that `leaven new` printed; finished commands are skipped."""
    log = folder / "commands.txt"
    done = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    printed = (folder / "new.txt").read_text(encoding="utf-8")
    for command in commands(printed):
        if command not in done:
            run(shlex.split(command)[1:], folder)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{command}\n")


def commands(printed: str) -> list[str]:
    """Return the commands under the label "next" of an output."""
    after = printed[re.search(r"^next +", printed, re.MULTILINE).end() :]  # type: ignore[union-attr]
    return [line.strip() for line in after.splitlines() if line.strip().startswith("leaven ")]


def run(words: list[str], folder: Path) -> None:
    """Run one command in the folder and keep its output as VERB.txt."""
    print("$ leaven", shlex.join(words), flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "leaven", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    (folder / f"{words[0]}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    if done.returncode or warned:
        sys.exit("\n".join([f"exit code {done.returncode}", *warned, done.stdout[-2000:], done.stderr[-2000:]]))


def untuned(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with the schedule and hyperparameters that `leaven new` would choose without tuning."""
    model, tokens = recipe.model, recipe.data.tokens
    at = RunSize(neighbours(model.params_active, tokens, experts=bool(model.experts)), model, tokens)
    draft, batch = StarterDraft(), recipe.batch.tokens
    draft.decide("batch", recipe.batch.model_dump(mode="json", exclude_none=True))
    choose_schedule(draft, at, batch)
    choose_adam(draft, at, batch, choose_lr(draft, at, batch, f"at {format_quantity(recipe.model.params)}"))
    chosen = {name: draft.document[name] for name in ("schedule", "hyperparameters")}
    return recipe.replace(chosen | {"scaling": {"rule": "complete-d-p"}, "why": draft.why})


def compare(folder: Path, seeds: int, workers: int, candidates: int, direct: bool) -> None:
    """Train the recipes to compare (arms) with the same seeds, and print the table."""
    target = read_recipe(folder / "road.toml")
    tuned = read_recipe(folder / "road-tuned.toml") if (folder / "road-tuned.toml").exists() else target
    same = tuned.hyperparameters == target.hyperparameters
    arms = (
        {"tuned, which is new: the search found nothing better": target} if same else {"tuned": tuned, "new": target}
    )
    arms["laws"] = untuned(target)
    near = neighbours(target.model.params, target.data.tokens).runs[:candidates]
    copies = {run.id: copied(run, target, moved=False) for run in near}

    def train(recipes: list[Recipe]) -> dict[str, Outcome]:
        trials = [RecipeTrial(recipe) for recipe in recipes]
        with RunStore(folder / "arms", workers, lambda n, of: print(f"{n} of {of} runs")) as store:
            outcome = store.run(trials)
        return {trial.key: outcome(trial) for trial in trials}

    def loss(recipe: Recipe, seed: int) -> float:
        return ended[RecipeTrial(seeded(recipe, FIRST_SEED + seed)).key].loss

    ended = train([seeded(recipe, FIRST_SEED) for recipe in copies.values()])
    for id, recipe in copies.items():
        print(f"published, one seed of {id}: {loss(recipe, 0):.4f}")
    best = min(near, key=lambda run: loss(copies[run.id], 0))
    arms[f"published: {best.id}"] = copies[best.id]
    arms[f"published, moved: {best.id}"] = copied(best, target, moved=True)
    ended |= train([seeded(recipe, FIRST_SEED + seed) for recipe in arms.values() for seed in range(seeds)])
    if direct:
        own = target.hyperparameters.lr
        lrs = [target.replace({"hyperparameters.lr": own * factor}) for factor in DIRECT_FACTORS]
        ended |= train([seeded(recipe, FIRST_SEED) for recipe in lrs])
        for recipe in lrs:
            print(f"direct, one seed of lr {recipe.hyperparameters.lr:.3g}: {loss(recipe, 0):.4f}")
        arms["direct"] = min([target, *lrs], key=lambda recipe: loss(recipe, 0))
        ended |= train([seeded(arms["direct"], FIRST_SEED + seed) for seed in range(seeds)])
    losses = {arm: [loss(recipe, seed) for seed in range(seeds)] for arm, recipe in arms.items()}
    (folder / "losses.json").write_text(json.dumps(losses, indent=2), encoding="utf-8")
    print(f"\n{format_quantity(target.model.params)} parameters, {format_quantity(target.data.tokens)} tokens")
    print("| arm | loss, nats per token | against the first | seeds |\n|---|---|---|---|")
    base = next(iter(losses.values()))
    for arm, values in losses.items():
        apart = [value - other for value, other in zip(values, base, strict=True)]
        against = "" if values is base else f"{statistics.mean(apart):+.4f} ± {interval(apart):.4f}"
        print(f"| {arm} | {statistics.mean(values):.4f} ± {interval(values):.4f} | {against} | {seeds} |")


def copied(run: PublishedRun, target: Recipe, *, moved: bool) -> Recipe:
    """Return the target with a published run's values; if ``moved``, the lr is adapted to the target."""
    known = terms(run)
    changes: dict[str, object] = {
        f"hyperparameters.{name}": known[f"hyperparameters.{name}"]
        for name in COPIED
        if f"hyperparameters.{name}" in known
    }
    if moved and run.peak_lr:
        size = (target.model.params / run.params_total) ** LR_SIZE_EXPONENT
        changes["hyperparameters.lr"] = run.peak_lr * size * batch_factor(target.batch.tokens, run.batch_tokens)
    std = run.init_std or 0.02
    ends = (run.residual_init_std or std) / std
    modules = {} if ends == 1 else {name: {"init_std": ends} for name in ("attention.out", "mlp.out")}
    changes |= {"hyperparameters.init_std": std, "hyperparameters.modules": modules, "scaling": {"rule": "standard"}}
    return target.replace(changes)


def seeded(recipe: Recipe, seed: int) -> Recipe:
    return recipe.replace({"data.seed": seed, "start": {}})


def interval(values: list[float]) -> float:
    """Return half the width of the 95% confidence interval of a mean."""
    count = len(values)
    return math.inf if count < 2 else t95(count - 1) * statistics.stdev(values) / math.sqrt(count)


if __name__ == "__main__":
    main()
