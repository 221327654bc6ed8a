"""Folders as the verbs write them: a study at a small scale, three runs at a larger one, and the demo round them."""

import json
import math
import random
from pathlib import Path
from typing import Any

from leaven.documents.checks import CheckDocument, MeasuredRow, VerdictCurve, VerdictRow
from leaven.recipe.files import write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.verification.runs import RunStore
from leaven.verification.verdict import curve, verdict

HOSTILE = "</script><script>window.owned=1</script><img src=http://evil.example/x onerror=window.owned=1>%{x}"
SPACE = ("hyperparameters.lr", "hyperparameters.init_std", "hyperparameters.weight_decay", "hyperparameters.residual")


def proxy(**changes: Any) -> Recipe:
    recipe = Recipe.model_validate(
        {
            "name": "wheat-proxy",
            "model": {
                "n_layers": 4,
                "d_model": 64,
                "n_heads": 4,
                "n_kv_heads": 4,
                "d_head": 16,
                "d_ff": 192,
                "vocab_size": 4096,
                "seq_len": 128,
                "qk_norm": True,
            },
            "data": {"tokens": 1_000_000},
            "batch": {"tokens": 4_096},
            "schedule": {"warmup_tokens": 50_000},
            "hyperparameters": {
                "lr": 0.004,
                "init_std": 0.05,
                "modules": {
                    "embedding": {"lr": 4.0},
                    "attention.query": {"lr": 0.5, "init_std": 1.4},
                    "norm.final": {"lr": 1.6},
                },
                "depth": {"lr": [1.0, 1.2, 0.8]},
            },
            "why": {
                "hyperparameters.lr": "study wheat-proxy, trial 17 of 20, 95% interval 0.0031 to 0.0052",
                "hyperparameters.beta2": "0.95 in 41 of 47 published runs",
                "data.tokens": "what this machine does in ten minutes",
                "schedule": "warm-up 5%, cosine to 10%: the commonest of the catalogue",
            },
        }
    )
    return recipe.replace(changes)


def target(recipe: Recipe) -> Recipe:
    moved = transfer(recipe, width=192, depth=8, batch_tokens=16_384, tokens=4_915_200, name="wheat-target")
    ramp = {"start_tokens": 4_096, "increment_tokens": 4_096, "over_tokens": 1_200_000}
    return moved.replace({"batch.ramp": ramp})


def write_run(
    folder: Path, recipe: Recipe, floor: float, lr_scale: float = 1.0, *, seed: int = 0, torn: bool = False
) -> None:
    folder.mkdir(parents=True)
    write_recipe(recipe, folder / "recipe.toml")
    noise = random.Random(seed)
    began, tokens, batch = 1_760_000_000.0, 0, 0
    horizon = recipe.data.tokens
    events = [{"event": "start", "step": 0, "tokens": 0, "time": began}]
    lines = []

    def loss_at(consumed: int) -> float:
        return floor + 6.2 * (1 + consumed / 60_000) ** -0.62

    for step in range(recipe.steps):
        size = recipe.batches.batch_at(tokens)
        if size != batch:
            batch = size
            events.append(
                {"event": "ramp", "step": step, "tokens": tokens, "time": began + step, "batch_tokens": batch}
            )
        tokens += batch
        lines.append(
            {
                "step": step,
                "tokens": tokens,
                "loss": loss_at(tokens) + noise.gauss(0, 0.05),
                "lr": 1.1e-3 * lr_scale * recipe.schedule.multiplier(tokens, horizon),
                "grad_norm": 0.4 + 2.5 * math.exp(-tokens / 150_000) + abs(noise.gauss(0, 0.06)),
                "update_norm": 0.003,
                "batch_tokens": batch,
                "tokens_per_second": 42_000 * (1 - math.exp(-batch / 6_000)) * noise.uniform(0.95, 1.05),
                "mfu": None,
            }
        )
        if (step + 1) % 40 == 0:
            events.append(
                {
                    "event": "validation",
                    "step": step,
                    "tokens": tokens,
                    "time": began + step / 2,
                    "loss": loss_at(tokens) + noise.gauss(0, 0.004),
                }
            )
    final = loss_at(tokens)
    events.append(
        {"event": "validation", "step": len(lines) - 1, "tokens": tokens, "time": began + 130, "loss": final}
    )
    events.append(
        {
            "event": "finish",
            "step": len(lines) - 1,
            "tokens": tokens,
            "time": began + 131,
            "loss": final,
            "seconds": 131.0,
        }
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"step": 99, "tok' if torn else ""))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def write_study(folder: Path, recipe: Recipe, name: str = "wheat-proxy") -> None:
    folder.mkdir(parents=True)
    noise = random.Random(3)
    centre = dict(zip(SPACE, (0.004, 0.05, 0.1, 1.0), strict=True))
    trials: list[dict[str, Any]] = []
    for number in range(20):
        shrink = max(0.25, 1 - number / 16)
        values = {
            "hyperparameters.lr": 0.004 * 2 ** noise.gauss(0, 1.6 * shrink),
            "hyperparameters.init_std": 0.05 * 2 ** noise.gauss(0, 1.0 * shrink),
            "hyperparameters.weight_decay": 0.1 * 2 ** noise.gauss(0, 1.5 * shrink),
            "hyperparameters.residual": 1.0 * 2 ** noise.gauss(0, 0.7 * shrink),
        }
        diverged = number in {4, 9}
        if diverged:
            values["hyperparameters.lr"] = 0.03 + number / 500
        octaves = {path: math.log2(value / centre[path]) for path, value in values.items()}
        far = sum(w * x**2 for x, w in zip(octaves.values(), (1, 0.4, 0.15, 0.3), strict=True))
        trials.append(
            {
                "number": number,
                "state": "diverged" if diverged else "complete",
                "loss": None if diverged else 3.41 + 0.035 * far + noise.gauss(0, 0.003),
                "values": values,
                "octaves": octaves,
                "seconds": noise.uniform(9, 14) * (0.4 if diverged else 1),
                "tokens_per_second": None if diverged else noise.uniform(80_000, 95_000),
            }
        )
    best = min((trial for trial in trials if trial["loss"]), key=lambda trial: trial["loss"])
    study = {
        "name": name,
        "method": "trust-region",
        "space": list(SPACE),
        "noise_floor": 0.0062,
        "best": {
            "number": best["number"],
            "loss": best["loss"],
            "interval": [best["loss"] - 0.008, best["loss"] + 0.008],
        },
        "trials": trials,
        "dimensions": [{"path": path, "centre": value, "low": -6.0, "high": 6.0} for path, value in centre.items()],
    }
    (folder / "study.json").write_text(json.dumps(study))
    write_recipe(recipe.replace({"hyperparameters.lr": 0.002, "hyperparameters.modules": {}}), folder / "centre.toml")
    write_recipe(recipe, folder / "best.toml")


def write_demo(folder: Path, hostile: str = "") -> Path:
    """A whole demo; ``hostile`` goes into every text that a person may write."""
    small = proxy()
    large = target(small)
    copied = large.replace({"scaling.base": None, "name": "wheat-copied", "hyperparameters.depth": {}})
    untuned = copied.replace({"name": "wheat-untuned", "hyperparameters": {"lr": 6e-4, "init_std": 0.02}})
    folder.mkdir(parents=True, exist_ok=True)
    write_study(folder / "proxy", small, name=f"wheat-proxy{hostile}")
    write_recipe(large, folder / "target.toml")
    for seed, (key, recipe, floor, scale) in enumerate(
        (("transferred", large, 2.41, 1.0), ("copied", copied, 2.55, 3.6), ("untuned", untuned, 2.63, 0.55))
    ):
        write_run(folder / "runs" / key, recipe, floor, scale, seed=seed, torn=key == "copied")
    losses = {
        key: [json.loads(line) for line in (folder / "runs" / key / "events.jsonl").read_text().splitlines()][-1][
            "loss"
        ]
        for key in ("transferred", "copied", "untuned")
    }
    gain = losses["copied"] - losses["transferred"]
    titles = {
        "transferred": ("transferred", "the values found on the small model, moved by Complete(d)P"),
        "copied": ("copied", "the same values without the rule: what one gets by copying a config"),
        "untuned": ("untuned", "what leaven new has for this size, untuned"),
    }
    document = {
        "name": f"wheat{hostile}",
        "verdict": f"Tuned on 0.8 M parameters and moved to 5.1 M, the recipe is {gain:.3f} nats better than the "
        f"same values copied, and better than an untuned recipe.{hostile}",
        "arms": [
            {"key": key, "title": title + hostile, "run": f"runs/{key}", "loss": losses[key], "why": why + hostile}
            for key, (title, why) in titles.items()
        ],
        "proxy": {"study": "proxy"},
        "target": "target.toml",
        "parts": [
            {"name": name, "seconds": seconds}
            for name, seconds in (
                ("text", 1.4),
                ("tokens", 22.8),
                ("tune", 224.0),
                ("transfer", 0.1),
                ("train", 318.0),
                ("report", 2.2),
            )
        ],
        "corpus": {
            "source": "python-stdlib" + hostile,
            "bytes": 16_512_333,
            "documents": 1_204,
            "train_tokens": 5_410_223,
            "validation_tokens": 113_020,
            "vocab_size": 4096,
        },
        "machine": {
            "processor": "AMD EPYC 7B13" + hostile,
            "cores": 2,
            "memory_gib": 15.6,
            "python": "3.12.4",
            "torch": "2.13.0+cpu",
            "platform": "Linux 6.1 x86_64",
            "leaven": "0.1.0",
        },
    }
    (folder / "demo.json").write_text(json.dumps(document))
    return folder


def slopes_check() -> CheckDocument:
    """A coordinate check with a fault, one line that is always 0, and a hostile name."""
    sizes = {"width": (64, 128, 256, 512), "depth": (2, 4, 8)}
    rows, curves = [], []
    for axis, x in sizes.items():
        for module, power in (("embedding", 0.0), ("unembedding", 0.9), (HOSTILE, -0.02)):
            passed, note = abs(power) < 0.1, "" if abs(power) < 0.1 else f"GROWS with {axis}"
            rows.append(
                VerdictRow(
                    module=module,
                    axis=axis,
                    slope=power,
                    limit=0.1,
                    passed=passed,
                    parts={"start": power, "end": power, "change": power},
                    note=note,
                )
            )
            curves += [
                curve(module, axis, quantity, x, [[n**power * 0.9, n**power] for n in x])
                for quantity in ("start", "end", "change")
            ]
        zero = {"start": 0.0, "end": 0.0, "change": None}
        rows.append(
            VerdictRow(module="rotary", axis=axis, slope=None, limit=0.1, passed=None, parts=zero, note="always 0")
        )
        curves.append(curve("rotary", axis, "change", x, [[0.0, 0.0] for _ in x]))
    settings = {"rule": None, "widths": sizes["width"], "depths": sizes["depth"], "steps": 3, "seeds": 2}
    return verdict("coordinates", f"mine:{HOSTILE}", "slope", rows, curves=curves, settings=settings)


def write_losses_check(folder: Path) -> Path:
    """The folder of a transfer check, as :func:`leaven.verification.runs.keep` leaves it."""
    lrs = (0.25, 0.5, 1.0, 2.0, 4.0)
    parts = {"best lr, base": 1.0, "best lr, target": 0.5, "shift": -1.0, "regret": 0.03, "noise": None}
    rows = (
        VerdictRow(
            module="best lr, octaves",
            axis="64x2 -> 256x2",
            slope=-1.0,
            limit=0.5,
            passed=False,
            parts=parts,
            note="the best lr moves by a factor of 0.5",
            beyond=0.5,
        ),
        VerdictRow(module="regret, nats", axis="64x2 -> 256x2", slope=0.03, limit=0.05, passed=True, parts=parts),
    )
    losses = {scale: [[4 + 0.1 * math.log2(lr / best) ** 2 + seed / 50 for seed in (0, 1)] for lr in lrs]
              for scale, best in (("64x2", 1.0), ("256x2", 0.5))}  # fmt: skip
    curves = tuple(curve(scale, "lr", "loss", lrs, by_seed) for scale, by_seed in losses.items())
    best = VerdictCurve(
        module="best lr", axis="width", quantity="best", x=[64, 256], y=[1.0, 0.5], low=[0.9, 0.4], high=[1.1, 0.6]
    )
    star = VerdictCurve(module="64x2", axis="lr", quantity="optimum", x=[1.0], y=[4.0], low=[4.0], high=[4.0])
    exponent = MeasuredRow(
        name="exponent of the best lr over width", value=-0.5, low=-0.7, high=-0.3, expected=0.0, note="OUTSIDE"
    )
    settings = {"rule": None, "scales": list(losses), "lrs": lrs, "unit": "multiple of the factory's", "seeds": 2}
    folder.mkdir(parents=True)
    document = verdict(
        "transfer",
        "mine:model",
        "shift",
        rows,
        curves=(*curves, star, best),
        settings=settings,
        measured=(exponent,),
    )
    RunStore(folder).keep(document)
    return folder
