"""Measure whether the loss curves of a family of small models collapse: `python -m benchmarks.collapse FOLDER`.

The text is a random chain of characters: each is drawn like a character of Shakespeare's plays that follows the same
four characters. So there is as much text as is needed, no part of it is harder than another, and its entropy is known.
A model of width 32 is trained, and models of twice the width: one as the rule says, the others with a fault each. Every
wide model is compared with the small one (docs/log.md). Runs are saved as they end: run the command again to resume.
"""

import argparse
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path

# One thread per process: more threads than cores are up to ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from leaven.data.sources import SHAKESPEARE
from leaven.recipe.files import parse_recipe
from leaven.verification.collapse import collapse, grown
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.recipe_family import RecipeFamily, RecipeTrial
from leaven.verification.runs import RunStore

RECIPE = """\
name = "collapse"

[model]
n_layers = 2
d_model = 32
n_heads = 2
n_kv_heads = 2
d_head = 16
d_ff = 96
vocab_size = 65
seq_len = 64
qk_norm = true

[data]
source = "chain.bin"    # written by chain()
tokens = 819_200

[batch]
tokens = 256

[schedule]
warmup_tokens = 40_960
decay = "linear"
min_lr_ratio = 0.0

[hyperparameters]
lr = 0.01
init_std = 0.1
weight_decay = 0.1
beta2 = 0.98

[precision]
compute = "fp32"

[evaluation]
tokens = 32_768
"""
ORDER = 4  # the number of characters on which the next one depends
TOKENS = 12_000_000
SEQ_LEN = 64
CHAINS = 2_000  # that are drawn at once, each with the same number of tokens
SMALL, WIDE = RunScale(32, 2), RunScale(64, 2)
FAULTS: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "rule: the lr does not change with the width": {"scaling.rule": "standard"},
    "4 times the lr": {"hyperparameters.lr": 0.04},
    "the lr does not decay": {"schedule.decay": "constant"},
    "10 times the weight decay": {"hyperparameters.weight_decay": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the text and the runs are saved")
    parser.add_argument("--seeds", type=int, default=3, help="of the small model, and of the wide one without fault")
    parser.add_argument("--fault-seeds", type=int, default=2, help="of each wide model with a fault")
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="how many of the wide models are trained")
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe, KEY=VALUE")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    text = args.folder / "chain.bin"
    tokens, irreducible = chain(TOKENS if not text.exists() else CHAINS)
    if not text.exists():
        tokens.tofile(text)
    recipe = parse_recipe(RECIPE, "collapse.py", [f"data.source={text}", *args.set])
    small, wide = grown(RecipeFamily(recipe), [SMALL, WIDE])

    def trials(scale: RunScale, changes: Mapping[str, object], seeds: int) -> list[RecipeTrial]:
        family = RecipeFamily(recipe.replace(changes))
        return [family.trial(RunSetting(scale, family.value("lr"), seed=seed)) for seed in range(seeds)]

    table = Table("the wide model's fault", "L0", "deviation, %", "95% interval", "verdict", "final loss")
    with RunStore(args.folder, workers=1, on_run=lambda done, total: print(f"{done} of {total} runs", flush=True)) as store:
        base = trials(small, {}, args.seeds)
        for fault, changes in list(FAULTS.items())[: args.faults]:
            faulty = trials(wide, changes, args.fault_seeds if changes else args.seeds)
            outcome = store.run([*base, *faulty])
            runs = {name: [outcome(each).curve for each in several] for name, several in (("32x2", base), ("64x2", faulty))}
            for given in (None, irreducible):
                document = collapse("chain", runs, given, {"rule": None})
                (row,) = document.rows
                (level,) = document.measured
                verdict = "passed" if row.passed else "undecided" if row.undecided else "failed"
                deviation, low, high = (row.parts[key] for key in ("deviation", "deviation, low", "deviation, high"))
                between = "" if low is None or high is None else f"{low:.1%} to {high:.1%}"
                final = np.mean([outcome(each).loss for each in faulty])
                table.add_row(fault, f"{level.value:.3f}", f"{deviation:.1%}", between, verdict, f"{final:.4f}")
    Console(width=160).print(table)


def chain(tokens: int) -> tuple[NDArray[np.uint16], float]:
    """Return random characters, and the lowest mean loss that a model with 64 characters of context can have, in nats.

    A chain is a walk over the positions of the plays: from a position to a random one with the same ``ORDER``
    characters before it. The first characters of a sequence have fewer characters before them, and so more entropy.
    """
    with gzip.open(SHAKESPEARE, "rt") as lines:
        plays = "".join(json.loads(line)["text"] for line in lines)
    letters, text = np.unique(np.frombuffer(plays.encode(), np.uint8), return_inverse=True)
    context, entropies = np.zeros(len(text), np.int64), []
    for order in range(1, ORDER + 1):
        context = context * len(letters) + np.roll(text, order)
        _, number, counts = np.unique(context, return_inverse=True, return_counts=True)
        pairs, occurrences = np.unique(number * len(letters) + text, return_counts=True)
        entropies.append(float(occurrences @ np.log(counts[pairs // len(letters)] / occurrences) / len(text)))
    places, starts = np.argsort(number, kind="stable"), np.cumsum(counts) - counts
    random = np.random.default_rng(0)
    at, drawn = random.integers(len(text), size=CHAINS), np.empty((CHAINS, tokens // CHAINS), np.uint16)
    for step in range(drawn.shape[1]):
        here = number[at]
        at = places[starts[here] + (random.random(CHAINS) * counts[here]).astype(int)]
        drawn[:, step] = text[at]
        at = (at + 1) % len(text)
    return drawn.ravel(), float(np.mean(entropies + [entropies[-1]] * (SEQ_LEN - ORDER)))


if __name__ == "__main__":
    main()
