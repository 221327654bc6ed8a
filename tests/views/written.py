"""Write folders as the commands write them: runs, demos and checks."""

import json
import math
import random
from itertools import product
from pathlib import Path
from typing import Any

from leaven.demo import result_of
from leaven.documents import sealed
from leaven.documents.checks import CheckDocument, MeasuredRow, VerdictCurve, VerdictRow
from leaven.documents.runs import DemoCorpus, DemoDocument, DemoModel, DemoRun
from leaven.recipe.files import parse_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.verification.collapse import collapse
from leaven.verification.runs import RunStore
from leaven.verification.verdict import curve, verdict

HOSTILE = (
    "</script><script>window.owned=1</script><img src=http://evil.example/x onerror=window.owned=1>"
    "<a href=http://evil.example>%{x}"
)
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


def write_run(folder: Path, recipe: Recipe, floor: float, *, seed: int = 0, torn: bool = False) -> None:
    """Write a finished run. ``torn`` leaves an incomplete last line."""
    folder.mkdir(parents=True)
    write_recipe(recipe, folder / "recipe.toml")
    noise, tokens = random.Random(seed), 0
    events: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []

    def loss_at(consumed: int) -> float:
        return floor + 6.2 * (1 + consumed / 60_000) ** -0.62

    for step in range(recipe.steps):
        batch = recipe.batches.batch_at(tokens)
        tokens += batch
        line = {"step": step + 1, "tokens": tokens, "batch_tokens": batch, "update_norm": 0.003, "mfu": None}
        line["loss"] = loss_at(tokens) + noise.gauss(0, 0.05)
        line["lr"] = 1.1e-3 * recipe.schedule.multiplier(tokens, recipe.data.tokens)
        line["grad_norm"] = 0.4 + 2.5 * math.exp(-tokens / 150_000)
        line["tokens_per_second"] = 42_000 * noise.uniform(0.95, 1.05)
        lines.append(line)
        if (step + 1) % 40 == 0 or step + 1 == recipe.steps:
            events.append({"event": "validation", "tokens": tokens, "time": 1.76e9 + step, "loss": loss_at(tokens)})
    events.append(
        {"event": "finish", "step": recipe.steps, "tokens": tokens, "loss": loss_at(tokens), "seconds": 131.0}
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"step": 99, "tok' if torn else ""))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def demo(hostile: str = "", *, gain: float = 0.5, noise: float = 0.01) -> DemoDocument:
    """Return a finished demo; ``hostile`` is part of every text that a person may write."""
    lrs, widths, seeds = [0.004, 0.008, 0.016], (32, 64), 3

    def loss(rule: str, width: int, lr: float, seed: int) -> float:
        wide = width > 32
        lower = wide and rule == "standard"
        octaves = math.log2(lr / (0.004 if lower else 0.008))
        return 3.9 + 0.1 * octaves**2 + (gain - 0.1 if lower else -0.1 * wide) + noise * seed * (1 + lower)

    runs = [
        DemoRun(rule=rule, width=width, lr=lr, seed=seed, loss=loss(rule, width, lr, seed), seconds=2.0)
        for rule, width, lr, seed in product(("standard", "complete-d-p"), widths, lrs, range(seeds))
        if (rule != "standard" if width == 32 else not seed or lr == 0.008)
    ]
    machine = {"cores": 2, "memory_gib": 15.6, "python": "3.12.4", "torch": "2.13.0+cpu", "leaven": "0.1.0"}
    document = DemoDocument(
        name=f"leaven demo{hostile}",
        size="full",
        source=f"texts/*.txt{hostile}",
        tokens=32_768,
        models=[DemoModel(width=32, params=41_000), DemoModel(width=64, params=130_000)],
        lrs=lrs,
        seeds=seeds,
        machine={"processor": f"AMD EPYC 7B13{hostile}", "platform": "Linux 6.1 x86_64", **machine},
        corpus=DemoCorpus(
            source=f"texts/*.txt{hostile}",
            bytes=1_115_262,
            train_tokens=520_000,
            validation_tokens=25_000,
            vocab_size=512,
        ),
        runs=runs,
        processes=2,
        seconds=181.0,
    )
    return document.model_copy(update={"result": result_of(document)})


def write_demo(folder: Path, document: DemoDocument) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(sealed(document.dump())))
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


def collapse_check() -> CheckDocument:
    """Return a collapse check of three sizes, of which one has a hostile name and another shape."""

    def curve_of(end: float, power: float) -> list[tuple[float, float]]:
        return [(step, 1.5 + end * (step / 64) ** -power) for step in range(1, 65)]

    sizes = {"20m": (1.0, 0.4), "50m": (0.8, 0.4), HOSTILE: (0.7, 1.0)}
    runs = {name: [curve_of(*shape), curve_of(shape[0] * 1.001, shape[1])] for name, shape in sizes.items()}
    return collapse(f"logs/{HOSTILE}", runs, 1.5, {"rule": None})


def write_losses_check(folder: Path) -> Path:
    """Write the folder of a transfer check, as :meth:`leaven.verification.runs.RunStore.keep` leaves it."""
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
