"""Tune a small model on a CPU at 20 tokens per parameter, for the catalogue, in two commands.

    leaven tune benchmarks/tuned_base/recipe.toml --study STUDY --workers 2 --trials 26
    python -m benchmarks.tuned_base STUDY

The second writes ``benchmarks/tuned_base/log.jsonl``, one line per trial, and from that log alone two files in
``src/leaven/catalogue``: ``bases/NAME.toml``, the recipe that ``leaven new`` starts from, and ``runs/NAME.toml``, its
entry in ``leaven recipes``. ``--log`` writes both again from the existing log.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import tomlkit

from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.device import machine
from leaven.tuning.algorithm.answer import answer
from leaven.tuning.space import space
from leaven.tuning.study_document import PRUNED, UNDER_WAY, Answer, StudyTrial

HERE = Path(__file__).parent
RECIPE, LOG = HERE / "recipe.toml", HERE / "log.jsonl"
CATALOGUE = HERE.parents[1] / "src" / "leaven" / "catalogue"
LOGGED = ("number", "purpose", "confirms", "seed", "state", "loss", "seconds", "octaves")
BETAS = ("hyperparameters.beta1", "hyperparameters.beta2")


def write_log(study: Path) -> None:
    """Write a line about the study, then its finished trials."""
    trials = json.loads((study / "study.json").read_text(encoding="utf-8"))["trials"]
    ended = [trial for trial in trials if trial["state"] not in UNDER_WAY]
    header = {
        "command": f"leaven tune benchmarks/tuned_base/recipe.toml --study STUDY --workers 2 --trials {len(ended)}",
        "machine": machine(),
        "octaves": "from the recipe's values; of 1 - beta for the betas",
    }
    lines = [header, *({key: trial[key] for key in LOGGED} for trial in ended)]
    LOG.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_log() -> list[StudyTrial]:
    lines = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()[1:]]
    recipe = read_recipe(RECIPE)
    points = space(recipe)
    return [
        StudyTrial(
            values=points.values(line["octaves"]),
            tokens_per_second=None,
            tokens=recipe.data.tokens,
            **line | {"state": PRUNED if line["state"] == "stopped" else line["state"]},
        )
        for line in lines
    ]


def answered(trials: list[StudyTrial]) -> Answer:
    return answer(trials, space(read_recipe(RECIPE)).dimensions, over=True)


def chosen(found: Answer) -> dict[str, float]:
    """The values of the result, rounded to two significant digits."""
    return {path: rounded(path, value) for path, value in space(read_recipe(RECIPE)).values(found.octaves).items()}


def as_good(found: Answer) -> dict[str, list[float]]:
    """For each value the range in which the loss stays within the noise of the best, all others at their best."""
    points = space(read_recipe(RECIPE))
    flat = {one.path: one.flat for one in found.coordinates}

    def at(path: str, octaves: float) -> float:
        return rounded(path, points.values(found.octaves | {path: octaves})[path])

    return {path: sorted(at(path, end) for end in flat[path]) for path in points.paths}


def base(trials: list[StudyTrial]) -> Recipe:
    """The recipe that ``leaven new`` starts from, with what the log says of each searched value."""
    recipe, found = read_recipe(RECIPE), answered(trials)
    why = {
        path: f"tuned by leaven in {len(trials)} runs; as good within the noise of {found.noise_floor:.2g} nats: "
        f"{low:g} to {high:g}"
        for path, (low, high) in as_good(found).items()
    }
    return recipe.replace(chosen(found) | {"scaling.base": recipe.base.model_dump(), "tuning": None, "why": why})


def entry(trials: list[StudyTrial]) -> dict[str, Any]:
    """The catalogue entry of the base."""
    recipe, found = read_recipe(RECIPE), answered(trials)
    model, best, values = recipe.model, found.best, chosen(found)
    assert best is not None
    assert found.noise_floor is not None
    hyperparameters = recipe.hyperparameters.model_dump() | {
        path.removeprefix("hyperparameters."): value for path, value in values.items()
    }
    starts = [trial.loss for trial in trials if trial.loss is not None and not any((trial.octaves or {}).values())]
    source = {"source": "benchmarks/tuned_base/log.jsonl", "confidence": "file", "evidence": "logbook"}
    recipe_file = source | {"source": "benchmarks/tuned_base/recipe.toml", "evidence": "config"}
    batch = recipe.batch.tokens
    return {
        "family": "leaven proxies",
        "organisation": "leaven",
        "date": "2026-11",
        "kind": "dense",
        "status": "succeeded",
        "params_total": model.params,
        "params_active": model.params,
        "notes": [
            "not a published run: leaven's own, measured on a processor; it has no vote among the published",
            "a base to transfer from: the scaling rule gives its values for larger models",
        ],
        "lineage": {"name": "leaven"} | source,
        "params": {"precision": "exact"} | recipe_file,
        "arch": {
            **{key: getattr(model, key) for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff")},
            "vocab_size": model.vocab_size,
            "activation": model.activation,
            "gated": True,
            "norm": model.norm,
            "norm_placement": "pre",
            "positional": "rotary",
            **{key: getattr(model, key) for key in ("rope_theta", "tied_embeddings", "qk_norm", "bias")},
        }
        | recipe_file,
        "data": {
            "tokens_total": recipe.data.tokens,
            "seq_len": model.seq_len,
            "dataset": "the Python standard library's source",
        }
        | recipe_file,
        "batch": {
            "global_batch_samples": batch // model.seq_len,
            "global_batch_tokens": batch,
            "rampup": {"kind": "none"},
        }
        | recipe_file,
        "optim": {
            "optimizer": "adamw",
            **{key: hyperparameters[key] for key in ("beta1", "beta2", "eps", "weight_decay", "grad_clip")},
            "dropout": model.dropout,
            "decay_norm_and_bias": recipe.hyperparameters.decay_norm_and_bias,
        }
        | source,
        "schedule": {
            "peak_lr": hyperparameters["lr"],
            "min_lr_ratio": recipe.schedule.min_lr_ratio,
            "warmup_tokens": values.get("schedule.warmup_tokens", recipe.schedule.warmup_tokens),
            "shape": recipe.schedule.decay,
            "total_steps": recipe.data.tokens // batch,
        }
        | source,
        "init": {
            "kind": "scaled_normal",
            "std": hyperparameters["init_std"],
            "residual_scaling": "1/sqrt(2L)",
        }
        | source,
        "precision": {"dtype": recipe.precision.compute} | recipe_file,
        "tuning": {
            "rule": recipe.scaling.rule,
            "trials": len(trials),
            "noise_nats": rounded("", found.noise_floor),
            "loss": round(best.loss, 4),
            "loss_interval": [round(end, 4) for end in best.interval],
            "loss_runs": best.runs,
            "start_loss": round(mean(starts), 4),
            "start_runs": len(starts),
            "at_end": [one.path for one in found.coordinates if one.at_end],
            **source,
            "values": values,
            "intervals": as_good(found),
        },
    }


def rounded(path: str, value: float) -> float | int:
    """A value rounded to two significant digits; for a beta, those of 1 - beta."""
    if path in BETAS:
        return round(1 - float(f"{1 - value:.1e}"), 9)
    short = float(f"{value:.1e}")
    return round(short) if path == "schedule.warmup_tokens" else short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("study", nargs="?", type=Path, help="the folder of the study")
    given.add_argument("--log", action="store_true", help="from the log that is there")
    arguments = parser.parse_args()
    if arguments.study is not None:
        write_log(arguments.study)
    trials, file = read_log(), f"{read_recipe(RECIPE).name}.toml"
    (CATALOGUE / "bases").mkdir(exist_ok=True)
    write_recipe(base(trials), CATALOGUE / "bases" / file)
    written = re.sub(
        r"(?<![\d.])\d{5,}(?![\d.e])", lambda digits: f"{int(digits[0]):_}", tomlkit.dumps(entry(trials))
    )
    (CATALOGUE / "runs" / file).write_text(written, encoding="utf-8")
    print(f"wrote {LOG}, {CATALOGUE / 'bases' / file} and {CATALOGUE / 'runs' / file}")


if __name__ == "__main__":
    main()
