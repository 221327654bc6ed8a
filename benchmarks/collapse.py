"""Measure whether the loss curves of a family of small models collapse: `python -m benchmarks.collapse FOLDER`.

The text is a random chain of characters: each is drawn like a character of Shakespeare's plays that follows the same
four characters. So there is as much text as needed, no part of it is harder than another, and its entropy is known.
A small model is compared with one of twice the width, once without a fault, and with a fault planted into one of them
(docs/log.md). Runs are saved as they end: run the command again to resume. The recipe is written to
FOLDER/collapse.toml, for `leaven check collapse FOLDER/collapse.toml --run FOLDER --scales 32x2,64x2`.
"""

import argparse
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

# One thread per process: more threads than cores are up to ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from leaven.data.sources import SHAKESPEARE
from leaven.recipe.files import parse_recipe, write_recipe
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
SMALL, WIDE = 32, 64  # widths
# The width that has a fault, the fault, and what it changes in the recipe of this width.
FAULTS: Sequence[tuple[int, str, Mapping[str, object]]] = (
    (WIDE, "none", {}),
    (WIDE, "rule standard", {"scaling.rule": "standard"}),
    (SMALL, "constant lr", {"schedule.decay": "constant"}),
    (SMALL, "4 times the lr", {"hyperparameters.lr": 0.04}),
    (SMALL, "10 times the weight decay", {"hyperparameters.weight_decay": 1.0}),
    (WIDE, "4 times the lr", {"hyperparameters.lr": 0.04}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the text and the runs are saved")
    parser.add_argument("--seeds", type=int, default=10, help="of the small model without a fault")
    parser.add_argument("--wide-seeds", type=int, default=5, help="of the wide model without a fault")
    parser.add_argument("--fault-seeds", type=int, default=2, help="of each model with a fault")
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe, KEY=VALUE")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    text, made, irreducible = options.folder / "chain.bin", *chain(TOKENS)
    if not text.exists():
        made.tofile(text)
    recipe = parse_recipe(RECIPE, "collapse.py", [f"data.source={text}", *options.set])
    write_recipe(recipe, options.folder / "collapse.toml")
    small, wide = grown(RecipeFamily(recipe), [RunScale(SMALL, 2), RunScale(WIDE, 2)])

    def trials(size: RunScale, changes: Mapping[str, object]) -> list[RecipeTrial]:
        family = RecipeFamily(recipe.replace(changes))
        seeds = options.fault_seeds if changes else options.seeds if size == small else options.wide_seeds
        return [family.trial(RunSetting(size, family.value("lr"), seed=seed)) for seed in range(seeds)]

    table = Table("fault", "of width", "final loss", "L0", "deviation", "95% interval", "verdict")
    with RunStore(options.folder, 1, lambda done, total: print(f"{done} of {total} runs", flush=True)) as store:
        for width, fault, changes in FAULTS:
            models = {size.width: trials(size, changes if size.width == width else {}) for size in (small, wide)}
            outcome = store.run([trial for several in models.values() for trial in several])
            runs = {f"width {each}": [outcome(trial).curve for trial in models[each]] for each in models}
            final = np.mean([outcome(trial).loss for trial in models[width]])
            for given in (None, irreducible):
                document = collapse("chain", runs, given, {"rule": None})
                (row,) = document.rows
                (level,) = document.measured
                parts = (row.parts[key] or 0 for key in ("deviation", "deviation, low", "deviation, high"))
                deviation, low, high = (f"{100 * part:.1f}" for part in parts)
                verdict = "passed" if row.passed else "undecided" if row.undecided else "failed"
                measured = f"{final:.3f}", f"{level.value:.3f}", f"{deviation}%", f"{low} to {high}"
                table.add_row(fault, str(width), *measured, verdict)
    Console(width=120).print(table)


def chain(tokens: int) -> tuple[NDArray[np.uint16], float]:
    """Return random characters, and the lowest mean loss that is possible in sequences of ``SEQ_LEN``, in nats.

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
