"""Where the best lr goes with width and depth, complete-d-p against standard: `python benchmarks/lr_transfer.py`.

The result is for docs/log.md: the shift of the optimum in octaves with its interval, and the regret in nats, for both
rules. Every run is kept as it ends; the same command goes on, and prints the tables once all have ended. About a
quarter of an hour on two cores. `--tiny` proves in seconds that it works.
"""

import argparse
import json
import os
from pathlib import Path

# One thread a process: more than the cores lose a factor of ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from leaven.data.tokens import prepare
from leaven.recipe.files import parse_recipe
from leaven.report.checks import conclusion, terminal, write_check
from leaven.verification.transfer import transfer

RECIPE = """\
name = "lr-transfer"

[model]
n_layers = 2
d_model = 64
n_heads = 2
n_kv_heads = 2
d_head = 32
d_ff = 128
vocab_size = 512
seq_len = 64
activation = "gelu"
qk_norm = true

[data]
source = "python-stdlib"
tokens = 65_536

[batch]
tokens = 512

[schedule]
warmup_tokens = 8_192

[hyperparameters]
lr = 0.008
init_std = 0.1

[evaluation]
tokens = 16_384
"""

AXES = {"width": [(64, 2), (128, 2), (256, 2), (512, 2)], "depth": [(64, 2), (64, 4), (64, 8), (64, 16)]}
TINY = {"width": [(32, 1), (64, 1)], "depth": [(32, 1), (32, 2)]}
# Grids of a factor 2, wide enough for both rules: under standard the optimum falls to a sixteenth and below.
GRIDS = {
    "complete-d-p": [0.008 * 2.0**octave for octave in (-2, -1, 0, 1, 2)],
    "standard": [0.008 * 2.0**octave for octave in (-5, -4, -3, -2, -1, 0)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/lr-transfer"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    console = Console(width=140, highlight=False, markup=False)
    overrides = ["data.tokens=4096", "schedule.warmup_tokens=1024"] if options.tiny else []
    for rule, grid in GRIDS.items():
        recipe = parse_recipe(RECIPE, "lr_transfer.py", [*overrides, f"scaling.rule={rule}"])
        prepare(recipe.data.source, recipe.data.tokenizer, recipe.model.vocab_size)
        for axis, scales in (TINY if options.tiny else AXES).items():
            lrs = grid[:3] if options.tiny else grid

            def told(done: int, total: int, what: str = f"{rule}, {axis}") -> None:
                console.print(f"{what}: {done} of {total} runs", end="\r")

            verdict = transfer(
                recipe, scales, lrs, options.run, seeds=options.seeds, workers=options.workers, on_run=told
            )
            document = verdict.document()
            (options.run / f"{rule}-{axis}.json").write_text(json.dumps(document, indent=2) + "\n")
            write_check(document, options.run / f"{rule}-{axis}.html")
            console.print(f"\n{rule}, {axis}: {conclusion(document)}")
            for table in terminal(document):
                console.print(table)


if __name__ == "__main__":
    main()
