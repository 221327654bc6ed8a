"""Compare a stack of trials with one trial at a time on this device: `python -m benchmarks.stacked [--device cuda]`.

A stack (leaven.training.stack) trains several trials at the same time as one batched model. `one` is leaven's
engine, as `leaven tune` trains a trial; `one, compiled` is the same with compiled blocks. First, the losses of short
runs in a stack are compared with those of the engine in fp32. Then the speed is measured in tokens per second of all
trials together, as the median of the repeats with their range.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from leaven.data.tokens import TokenSet, prepare
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.stack import TrialStack

PROXY = Path(__file__).parent / "tuning" / "proxy.toml"
CHECKED = 20  # steps of the short runs


def recipe_at(width: int, depth: int, sequences: int, steps: int, dtype: str) -> Recipe:
    recipe = read_recipe(PROXY)
    changes = {
        "model": recipe.model.scaled(width=width, depth=depth).model_dump(),
        "batch.tokens": sequences * recipe.model.seq_len,
        "data.tokens": steps * sequences * recipe.model.seq_len,
        "schedule.warmup_tokens": 2 * sequences * recipe.model.seq_len,
        "precision.compute": dtype,
    }
    return recipe.replace(changes)


def difference(recipe: Recipe, tokens: TokenSet, device: str) -> float:
    """Return the largest difference of the final loss between stack and engine, in nats per token."""
    recipes = [recipe.replace({"hyperparameters.lr": lr}) for lr in (0.004, 0.008, 0.016)]
    stacked = TrialStack(recipe, len(recipes), tokens, device).train(recipes)
    alone = []
    for each in recipes:
        training = Training(each, tokens, device)
        while not training.finished:
            training.step()
        alone.append(training.evaluate())
    return max(abs(a - b) for a, b in zip(stacked, alone, strict=True))


def engine_speed(recipe: Recipe, tokens: TokenSet, device: str, compiled: bool) -> Callable[[], float]:
    training = Training(recipe.replace({"layout.compile": compiled}), tokens, device)
    for _ in range(3):
        training.step()

    def measure() -> float:
        began, pending = time.perf_counter(), [training.issue() for _ in range(20)]
        for read in pending:
            read()
        return 20 * recipe.batch.tokens / (time.perf_counter() - began)

    return measure


def stack_speed(recipe: Recipe, size: int, tokens: TokenSet, device: str) -> Callable[[], float]:
    stack = TrialStack(recipe, size, tokens, device)
    stack.train([recipe] * size)

    def measure() -> float:
        stack.begin([recipe] * size)
        stack.advance(recipe.steps)
        return size * recipe.data.tokens / stack.progress.seconds

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="64x2,128x4,256x4", help="WIDTHxDEPTH, comma-separated")
    parser.add_argument("--sizes", default="1,16,64", help="trials per stack, comma-separated")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of 128 tokens in a trial's batch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = []
    for case in asked.cases.split(","):
        width, depth = map(int, case.split("x"))
        recipe = recipe_at(width, depth, asked.sequences, asked.steps, asked.dtype)
        tokens = prepare(recipe.data, recipe.model.vocab_size)
        apart = None
        if not asked.no_check:
            apart = difference(recipe_at(width, depth, asked.sequences, CHECKED, "fp32"), tokens, asked.device)
            print(f"{case}: losses of a stack and of the engine differ by {apart:.1e} nats at most", flush=True)
        arms: dict[str, Callable[[], Callable[[], float]]] = {}
        if not asked.no_engine:
            arms["one"] = lambda r=recipe, t=tokens: engine_speed(r, t, asked.device, False)  # type: ignore[misc]
            arms["one, compiled"] = lambda r=recipe, t=tokens: engine_speed(r, t, asked.device, True)  # type: ignore[misc]
        for size in map(int, filter(None, asked.sizes.split(","))):
            arms[f"a stack of {size}"] = lambda r=recipe, t=tokens, k=size: stack_speed(r, k, t, asked.device)  # type: ignore[misc]
        for name, build in arms.items():
            began = time.perf_counter()
            measure = build()
            start_up = time.perf_counter() - began
            speeds = [measure() for _ in range(asked.repeats)]
            row = {
                "case": case,
                "arm": name,
                "tokens_per_second": statistics.median(speeds),
                "range": [min(speeds), max(speeds)],
                "start_up_seconds": start_up,
                "difference": apart,
            }
            found.append(row)
            print(
                f"{case:8} {name:16} {row['tokens_per_second'] / 1e6:8.3f} M tokens/s ({min(speeds) / 1e6:.3f} to "
                f"{max(speeds) / 1e6:.3f}), ready after {start_up:.0f} s",
                flush=True,
            )
            if asked.out:
                asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
