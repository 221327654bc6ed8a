"""Folders as the verbs write them: a study at a small scale, three runs at a larger one, and the demo of both."""

import json
import math
import random
from pathlib import Path
from typing import Any

from leaven.documents.checks import CheckDocument, MeasuredRow, VerdictCurve, VerdictRow
from leaven.recipe.files import parse_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.verification.runs import RunStore
from leaven.verification.verdict import curve, verdict

HOSTILE = "</script><script>window.owned=1</script><img src=http://evil.example/x onerror=window.owned=1>%{x}"
PROXY = """
name = "wheat-proxy"
[model]
n_layers = 4
d_model = 64
n_heads = 4
n_kv_heads = 4
d_head = 16
d_ff = 192
vocab_size = 4096
seq_len = 128
qk_norm = true
[data]
tokens = 1_000_000
[batch]
tokens = 4_096
[schedule]
warmup_tokens = 50_000
[hyperparameters]
lr = 0.004
init_std = 0.05
depth.lr = [1.0, 1.2, 0.8]
[hyperparameters.modules]
embedding = { lr = 4.0 }
"attention.query" = { lr = 0.5, init_std = 1.4 }
"norm.final" = { lr = 1.6 }
[why]
"hyperparameters.lr" = "study wheat-proxy, trial 17 of 20, 95% interval 0.0031 to 0.0052"
schedule = "warm-up 5%, cosine to 10%: the commonest of the catalogue"
"""


def proxy(**changes: Any) -> Recipe:
    return parse_recipe(PROXY, "wheat-proxy.toml").replace(changes)


def target(recipe: Recipe) -> Recipe:
    moved = transfer(recipe, width=192, depth=8, batch_tokens=16_384, tokens=4_915_200, name="wheat-target")
    ramp = {"start_tokens": 4_096, "increment_tokens": 4_096, "over_tokens": 1_200_000}
    return moved.replace({"batch.ramp": ramp})


def write_run(folder: Path, recipe: Recipe, floor: float, *, seed: int = 0, torn: bool = False) -> float:
    """Write a finished run, and return its loss."""
    folder.mkdir(parents=True)
    write_recipe(recipe, folder / "recipe.toml")
    noise = random.Random(seed)
    tokens, batch = 0, 0
    events: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []

    def event(name: str, **values: Any) -> None:
        events.append({"event": name, "step": len(lines), "tokens": tokens, "time": 1.76e9 + len(lines), **values})

    def loss_at(consumed: int) -> float:
        return floor + 6.2 * (1 + consumed / 60_000) ** -0.62

    event("start")
    for step in range(recipe.steps):
        size = recipe.batches.batch_at(tokens)
        if size != batch:
            batch = size
            event("ramp", batch_tokens=batch)
        tokens += batch
        line = {"step": step, "tokens": tokens, "batch_tokens": batch, "update_norm": 0.003, "mfu": None}
        line["loss"] = loss_at(tokens) + noise.gauss(0, 0.05)
        line["lr"] = 1.1e-3 * recipe.schedule.multiplier(tokens, recipe.data.tokens)
        line["grad_norm"] = 0.4 + 2.5 * math.exp(-tokens / 150_000)
        line["tokens_per_second"] = 42_000 * noise.uniform(0.95, 1.05)
        lines.append(line)
        if (step + 1) % 40 == 0:
            event("validation", loss=loss_at(tokens))
    event("validation", loss=loss_at(tokens))
    event("finish", loss=loss_at(tokens), seconds=131.0)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"step": 99, "tok' if torn else ""))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return loss_at(tokens)


def write_study(folder: Path, recipe: Recipe, name: str = "wheat-proxy") -> None:
    """Write a study of twenty trials, two of which diverged, without curves or a model of the loss."""
    folder.mkdir(parents=True)
    noise = random.Random(3)
    values = recipe.hyperparameters.model_dump()
    centre = {f"hyperparameters.{key}": values[key] for key in ("lr", "init_std", "weight_decay", "residual")}
    trials: list[dict[str, Any]] = []
    for number in range(20):
        octaves = {path: noise.gauss(0, 1 - number / 30) for path in centre}
        trial = {"number": number, "octaves": octaves, "seconds": 12.0, "tokens_per_second": 85_000.0}
        trial["values"] = {path: value * 2 ** octaves[path] for path, value in centre.items()}
        lost = number in {4, 9}
        trial["state"] = "diverged" if lost else "complete"
        trial["loss"] = None if lost else 3.41 + 0.03 * sum(octave**2 for octave in octaves.values())
        trials.append(trial)
    best = min((trial for trial in trials if trial["loss"]), key=lambda trial: trial["loss"])
    interval = [best["loss"] - 0.008, best["loss"] + 0.008]
    study = {
        "name": name,
        "method": "trust-region",
        "space": list(centre),
        "noise_floor": 0.0062,
        "best": {"number": best["number"], "loss": best["loss"], "interval": interval},
        "trials": trials,
        "dimensions": [{"path": path, "centre": value, "low": -6.0, "high": 6.0} for path, value in centre.items()],
    }
    (folder / "study.json").write_text(json.dumps(study))
    write_recipe(recipe.replace({"hyperparameters.lr": 0.002, "hyperparameters.modules": {}}), folder / "centre.toml")
    write_recipe(recipe, folder / "best.toml")


def write_demo(folder: Path, hostile: str = "") -> Path:
    """Write a whole demo; ``hostile`` is part of every text that a person may write."""
    small = proxy()
    large = target(small)
    copied = large.replace({"scaling.base": None, "name": "wheat-copied", "hyperparameters.depth": {}})
    untuned = copied.replace({"name": "wheat-untuned", "hyperparameters": {"lr": 6e-4, "init_std": 0.02}})
    folder.mkdir(parents=True, exist_ok=True)
    write_study(folder / "proxy", small, name=f"wheat-proxy{hostile}")
    write_recipe(large, folder / "target.toml")
    arms = []
    for seed, (key, recipe, floor) in enumerate(
        (("transferred", large, 2.41), ("copied", copied, 2.55), ("untuned", untuned, 2.63))
    ):
        loss = write_run(folder / "runs" / key, recipe, floor, seed=seed, torn=key == "copied")
        texts = {"title": key + hostile, "why": f"{key}{hostile}"}
        arms.append({"key": key, "run": f"runs/{key}", "loss": loss, **texts})
    gain = arms[1]["loss"] - arms[0]["loss"]
    corpus = {"bytes": 16_512_333, "documents": 1_204, "train_tokens": 5_410_223, "validation_tokens": 113_020}
    machine = {"cores": 2, "memory_gib": 15.6, "python": "3.12.4", "torch": "2.13.0+cpu", "leaven": "0.1.0"}
    seconds = {"text": 1.4, "tokens": 22.8, "tune": 224.0, "transfer": 0.1, "train": 318.0, "report": 2.2}
    document = {
        "name": f"wheat{hostile}",
        "verdict": f"The recipe is {gain:.3f} nats better than the same values copied.{hostile}",
        "arms": arms,
        "proxy": {"study": "proxy"},
        "target": "target.toml",
        "parts": [{"name": name, "seconds": value} for name, value in seconds.items()],
        "corpus": {"source": f"python-stdlib{hostile}", "vocab_size": 4096, **corpus},
        "machine": {"processor": f"AMD EPYC 7B13{hostile}", "platform": "Linux 6.1 x86_64", **machine},
    }
    (folder / "demo.json").write_text(json.dumps(document))
    return folder


def row(module: str, axis: str, slope: float | None, limit: float, **more: Any) -> VerdictRow:
    passed = None if slope is None else abs(slope) < limit
    return VerdictRow(module=module, axis=axis, slope=slope, limit=limit, **{"passed": passed} | more)


def slopes_check() -> CheckDocument:
    """Return a coordinate check with a fault, one line that is always 0, and a hostile name."""
    sizes = {"width": (64, 128, 256, 512), "depth": (2, 4, 8)}
    rows, curves = [], []
    for axis, x in sizes.items():
        for module, power in (("embedding", 0.0), ("unembedding", 0.9), (HOSTILE, -0.02)):
            parts = dict.fromkeys(("start", "end", "change"), power)
            rows.append(row(module, axis, power, 0.1, parts=parts, note=f"GROWS with {axis}" if power > 0.1 else ""))
            curves += [curve(module, axis, part, x, [[n**power * 0.9, n**power] for n in x]) for part in parts]
        rows.append(row("rotary", axis, None, 0.1, parts={"start": 0.0, "end": 0.0, "change": None}, note="always 0"))
        curves.append(curve("rotary", axis, "change", x, [[0.0, 0.0] for _ in x]))
    settings = {"rule": None, "widths": sizes["width"], "depths": sizes["depth"], "steps": 3, "seeds": 2}
    return verdict("coordinates", f"mine:{HOSTILE}", "slope", rows, curves=curves, settings=settings)


def write_losses_check(folder: Path) -> Path:
    """Write the folder of a transfer check, as :func:`leaven.verification.runs.keep` leaves it."""
    lrs = (0.25, 0.5, 1.0, 2.0, 4.0)
    parts = {"best lr, base": 1.0, "best lr, target": 0.5, "shift": -1.0, "regret": 0.03, "noise": None}
    scales = "64x2 -> 256x2"
    rows = (
        row("best lr, octaves", scales, -1.0, 0.5, parts=parts, note="moves by a factor of 0.5", beyond=0.5),
        row("regret, nats", scales, 0.03, 0.05, parts=parts),
    )
    curves = [
        curve(
            scale,
            "lr",
            "loss",
            lrs,
            [[4 + 0.1 * math.log2(lr / best) ** 2 + seed / 50 for seed in (0, 1)] for lr in lrs],
        )
        for scale, best in (("64x2", 1.0), ("256x2", 0.5))
    ]
    of_width = {"x": [64, 256], "y": [1.0, 0.5], "low": [0.9, 0.4], "high": [1.1, 0.6]}
    curves.append(VerdictCurve(module="best lr", axis="width", quantity="best", **of_width))
    at = {"x": [1.0], "y": [4.0], "low": [4.0], "high": [4.0]}
    curves.append(VerdictCurve(module="64x2", axis="lr", quantity="optimum", **at))
    name = "exponent of the best lr over width"
    exponent = MeasuredRow(name=name, value=-0.5, low=-0.7, high=-0.3, expected=0.0, note="OUTSIDE")
    settings = {
        "rule": None,
        "scales": ["64x2", "256x2"],
        "lrs": lrs,
        "unit": "multiple of the factory's",
        "seeds": 2,
    }
    folder.mkdir(parents=True)
    document = verdict(
        "transfer", "mine:model", "shift", rows, curves=curves, settings=settings, measured=(exponent,)
    )
    RunStore(folder).keep(document)
    return folder
