"""Count false alarms of the spike guard: `python benchmarks/false_alarms.py [--runs 20] [--first 0] [--lr 0.016]`.

Trains healthy runs, each with its own seed: 300 to 913 steps on python-stdlib, 2 to 4 layers of width 64, batches of
512 to 2,048 tokens, with warm-up, all decay schedules, and a batch ramp in half of the runs. The guard only observes.
Prints one line per run: its alarms, and the maximum of each of the guard's cumulative sums (24 raises an alarm).
"""

import argparse
import math

import torch

from leaven.data.tokens import prepare
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.spikes import FLOORS, LEVEL, LIMIT, SpikeDetector

RECIPE = """
name = "quiet"
[model]
n_layers = {layers}
d_model = 64
n_heads = 4
n_kv_heads = 4
d_head = 16
d_ff = 192
vocab_size = 2048
seq_len = 64
[data]
tokens = {tokens}
seed = {seed}
[batch]
tokens = {batch}
{ramp}
[schedule]
warmup_tokens = {warmup}
decay = "{decay}"
[hyperparameters]
lr = {lr}
init_std = 0.05
[evaluation]
tokens = 4096
"""


def quiet(seed: int, lr: float | None = None, batch: int | None = None) -> Recipe:
    batch = batch or (1024, 2048, 512)[seed % 3]
    tokens = (300, 500, 800)[seed % 3] * batch
    ramp = f"start_tokens = {batch // 4}, increment_tokens = {batch // 8}, over_tokens = {tokens // 8}"
    text = RECIPE.format(
        layers=2 + seed % 3,
        tokens=tokens,
        seed=seed,
        batch=batch,
        ramp=f"ramp = {{ {ramp} }}" if seed % 2 else "",
        warmup=tokens // (10, 20, 50)[seed % 3],
        decay=("cosine", "linear", "wsd", "constant", "inverse_sqrt")[seed % 5],
        lr=lr or (0.002, 0.004, 0.008, 0.016)[seed % 4],
    )
    return parse_recipe(text, "quiet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    verdicts = steps = 0
    for seed in range(options.first, options.first + options.runs):
        recipe = quiet(seed, options.lr, options.batch)
        training = Training(recipe, prepare(recipe.data, recipe.model.vocab_size))
        guard, furthest, found, loss = SpikeDetector(), dict.fromkeys(FLOORS, 0.0), 0, math.nan
        while not training.finished:
            step = training.issue()()
            if guard.observe(step) is not None:
                found, guard = found + 1, SpikeDetector()
            furthest = {name: max(furthest[name], watch.total) for name, watch in guard.watches.items()}
            loss = step.loss
        verdicts, steps = verdicts + found, steps + recipe.steps
        sums = "  ".join(f"{name} {total:4.1f}" for name, total in furthest.items())
        print(
            f"seed {seed:3d}  lr {recipe.hyperparameters.lr:<6g} {recipe.schedule.decay:<12} "
            f"{recipe.steps:4d} steps  loss {loss:.3f}  verdicts {found}  {sums}",
            flush=True,
        )
    judged = steps - options.runs * 2 * LEVEL
    print(f"{verdicts} verdicts in {options.runs} runs, {judged:,} judged steps; the limit is {LIMIT:g}")


if __name__ == "__main__":
    main()
