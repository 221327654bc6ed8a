"""Compare runs without batch ramp, with a ramp and fixed hyperparameters, and with a ramp that scales them.

    python benchmarks/ramp.py --out ramp.jsonl

Writes one line of JSON per run. Runs with the same seed have the same initial values and the same order of samples.
"""

import argparse
import json
from pathlib import Path

from leaven.recipe.files import parse_recipe
from leaven.training.trial import train_trial

RECIPE = """\
name = "ramp"
[model]
n_layers = 2
d_model = 48
n_heads = 3
n_kv_heads = 3
d_head = 16
d_ff = 128
vocab_size = 512
seq_len = 64
qk_norm = true
[data]
source = "python-stdlib"
tokens = 1_048_576
[batch]
tokens = 8_192
micro_batch = 32
[schedule]
warmup_tokens = 52_224
[hyperparameters]
lr = 0.016
init_std = 0.08
[evaluation]
tokens = 65_536
"""
START = 1_024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.016])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument(
        "--over", type=float, nargs="+", default=[0.0, 0.15, 0.5], help="ramp lengths / length of the run; 0: no ramp"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    base = parse_recipe(RECIPE, "ramp")
    arms = [(over, rule) for over in options.over for rule in (["fixed", "scaled"] if over else ["none"])]
    for seed in options.seeds:
        for lr in options.lr:
            for over, rule in arms:
                ramp = {
                    "start_tokens": START,
                    "increment_tokens": START,
                    "over_tokens": int(over * base.data.tokens),
                    "rule": rule,
                }
                recipe = base.replace(
                    {"data.seed": seed, "hyperparameters.lr": lr, "batch.ramp": ramp if over else None}
                )
                found = train_trial(recipe)
                line = {"seed": seed, "lr": lr, "over": over, "rule": rule, "loss": found.loss}
                with options.out.open("a") as file:
                    file.write(json.dumps(line | {"steps": recipe.steps, "seconds": found.seconds}) + "\n")


if __name__ == "__main__":
    main()
