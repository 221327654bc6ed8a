"""Measure how the best lr changes with width and depth: `python benchmarks/lr_transfer.py`.

Compares the scaling rules complete-d-p and standard. Prints the shift of the best lr in octaves (factors of two) with
its interval, and the regret: how many nats the best lr of one size costs at another size (docs/log.md).
Runs are saved as they end: run the command again to resume. Takes half an hour on two cores, a few minutes on
sixteen. `--large` trains wider models for longer, for several processes on one accelerator; `--tiny` tests the
benchmark in seconds.
"""

import argparse
import json
import os
from pathlib import Path

# One thread per process: more threads than cores are up to ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from leaven.data.tokens import prepare
from leaven.recipe.files import parse_recipe
from leaven.verification.model_instance import RunScale
from leaven.verification.recipe_family import recipe_models
from leaven.verification.runs import RunStore
from leaven.verification.sweep import sweep
from leaven.views.check_page import check_page
from leaven.views.terminal.checks import check_screen

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
# Wider and longer: 1,000 steps instead of 128.
LARGE = {"width": [(128, 4), (256, 4), (512, 4), (1024, 4)]}
LARGE_OVERRIDES = [
    *("model.n_layers=4", "model.d_model=128", "model.n_heads=2", "model.n_kv_heads=2", "model.d_head=64"),
    *("model.d_ff=256", "model.vocab_size=4096", "model.seq_len=256", "batch.tokens=8192", "batch.micro_batch=32"),
    *("data.tokens=8_192_000", "schedule.warmup_tokens=819_200"),
    *("evaluation.tokens=131_072", "precision.compute=bf16"),
]
TINY = {"width": [(32, 1), (64, 1)], "depth": [(32, 1), (32, 2)]}
# Learning rates in factors of 2. With the rule standard, the best lr falls with width and depth, so its grid begins
# lower.
GRIDS = {
    "complete-d-p": [0.008 * 2.0**octave for octave in range(-3, 4)],
    "standard": [0.008 * 2.0**octave for octave in range(-4, 4)],
}
# With Muon the best lr of the smallest size is four times as high or higher, and the grids are narrower.
MUON_GRIDS = {
    "complete-d-p": [0.032 * 2.0**octave for octave in range(-1, 3)],
    "standard": [0.032 * 2.0**octave for octave in range(-3, 3)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/lr-transfer"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="tokens per run")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--rules", nargs="+", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--sizes", type=int, help="only so many of the smallest sizes on each axis")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true")
    size.add_argument("--large", action="store_true")
    options = parser.parse_args()
    console = Console(width=140, highlight=False, markup=False)
    axes, overrides = AXES, list[str]()
    if options.tiny:
        axes, overrides = TINY, ["data.tokens=4096", "schedule.warmup_tokens=1024"]
    elif options.large:
        axes, overrides = LARGE, LARGE_OVERRIDES
    if options.tokens:
        overrides = [*overrides, f"data.tokens={options.tokens}", f"schedule.warmup_tokens={options.tokens // 8}"]
    overrides = [*overrides, f"hyperparameters.optimizer={options.optimizer}"]
    for rule in options.rules:
        grid = (MUON_GRIDS if options.optimizer == "muon" else GRIDS)[rule]
        recipe = parse_recipe(RECIPE, "lr_transfer.py", [*overrides, f"scaling.rule={rule}"])
        family = recipe_models(recipe, prepare)
        for axis, scales in axes.items():
            if axis not in options.axes:
                continue
            lrs = grid[:3] if options.tiny else grid

            def progress(done: int, total: int, what: str = f"{rule}, {axis}") -> None:
                if done == total or done % 10 == 0:
                    console.print(f"{what}: {done} of {total} runs")

            sizes = [RunScale(*scale) for scale in scales[: options.sizes]]
            with RunStore(options.run, options.workers, progress) as store:
                check, _ = sweep("transfer", family, "lr", sizes, lrs, store=store, seeds=options.seeds)
                document = store.keep(check)
            (options.run / f"{rule}-{axis}.json").write_text(json.dumps(document.dump(), indent=2) + "\n")
            (options.run / f"{rule}-{axis}.html").write_text(check_page(document))
            console.print(f"{rule}, {axis}")
            for part in check_screen(document):
                console.print(part)


if __name__ == "__main__":
    main()
