"""Studies as a search leaves them: a trust region over a landscape that is known, so that its slices are."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

from written import proxy

from leaven.recipe.files import write_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS
from leaven.tuning.document import (
    Best,
    Coordinate,
    Dimension,
    Front,
    SlicePoint,
    StudyDocument,
    StudyTrial,
)

NOISE = 0.0031
TOKENS = 1_000_000
FLOOR = 2.405
GLOBAL = {"lr": 3.0, "init_std": 2.0, "weight_decay": 3.0, "residual": 1.5}
DEPTH_POINTS = 4


def replace(value: Any, **changes: object) -> Any:
    """A copy of a dataclass or a document with other values."""
    copied = dataclasses.replace if dataclasses.is_dataclass(value) else lambda old, **new: old.model_copy(update=new)
    return copied(value, **changes)


def recipe() -> Recipe:
    return proxy(**{"hyperparameters.modules": {}, "hyperparameters.depth": {}, "model.n_layers": 6}).replace(
        {"hyperparameters.depth": {"lr": [1.0] * DEPTH_POINTS}, "why": {}}
    )


def dimensions(start: Recipe, count: int) -> tuple[Dimension, ...]:
    values = start.hyperparameters
    found = [
        Dimension(f"hyperparameters.{name}", float(getattr(values, name)), -reach, reach)
        for name, reach in GLOBAL.items()
    ]
    found += [Dimension(f"hyperparameters.depth.lr[{i}]", 1.0, -2.0, 2.0) for i in range(DEPTH_POINTS)]
    for kind, reach in (
        ("lr", 3.0),
        ("init_std", 2.0),
        ("weight_decay", 3.0),
        ("beta2", 2.0),
        ("eps", 6.0),
        ("beta1", 2.0),
    ):
        found += [
            Dimension(f"hyperparameters.modules.{module}.{kind}", 1.0, -reach, reach)
            for module, role in start.model.roles.items()
            if role.is_matrix or kind not in {"init_std", "weight_decay"}
        ]
    ends = [Dimension(f"hyperparameters.modules.{end}.residual", 1.0, -1.5, 1.5) for end in BRANCH_ENDS]
    return tuple((found[: len(GLOBAL) + DEPTH_POINTS] + ends + found[len(GLOBAL) + DEPTH_POINTS :])[:count])


class Landscape:
    def __init__(self, searched: tuple[Dimension, ...], seed: int) -> None:
        draw = random.Random(seed)
        self.curvature = {d.path: 10 ** draw.uniform(-2.2, 0.0) for d in searched}
        self.optimum = {d.path: max(-1.8, min(1.8, draw.gauss(0, 1.0))) for d in searched}
        scale = 0.12 / sum(self.curvature[p] * self.optimum[p] ** 2 for p in self.curvature)
        self.curvature = {path: scale * curvature for path, curvature in self.curvature.items()}
        self.cliff = {
            d.path: max(self.optimum[d.path], 0) + draw.uniform(0.5, 1.6) for d in searched if d.path.endswith("lr")
        }

    def excess(self, octaves: dict[str, float]) -> float:
        return sum(self.curvature[p] * (octaves.get(p, 0) - self.optimum[p]) ** 2 for p in self.curvature)

    def strain(self, octaves: dict[str, float]) -> float:
        return max((octaves.get(p, 0.0) - cliff for p, cliff in self.cliff.items()), default=-9.0)


def _curve(loss: float, draw: random.Random, upto: float = 1.0, points: int = 80) -> tuple[tuple[int, float], ...]:
    shares = [(i + 1) / points for i in range(points) if (i + 1) / points <= upto]
    return tuple((int(s * TOKENS), loss + 0.55 * (s**-0.42 - 1) + draw.gauss(0, 0.004)) for s in shares)


def study(count: int = 31, trials: int = 64, seed: int = 0, workers: int = 2) -> StudyDocument:
    """A per-module study with noise runs, early stops, divergences and reruns."""
    start = recipe()
    searched = dimensions(start, count)
    land, draw = Landscape(searched, seed), random.Random(seed)
    made: list[StudyTrial] = []
    clock = [1_760_000_000.0 + 3 * i for i in range(workers)]

    def run(octaves: dict[str, float], purpose: str = "search", seed_: int = 0) -> StudyTrial:
        number = len(made)
        octaves = {path: round(o, 4) for path, o in octaves.items()}
        loss = FLOOR + land.excess(octaves) + draw.gauss(0, NOISE)
        state, share = "complete", 1.0
        best = min((t.loss for t in made if t.state == "complete" and t.loss), default=math.inf)
        if land.strain(octaves) > draw.gauss(0, 0.1):
            state, share = "diverged", draw.uniform(0.05, 0.6)
        elif purpose == "search" and loss > best + 0.04:
            state, share = "stopped", 0.4
        worker = number % workers
        seconds = draw.uniform(195, 225) * share
        clock[worker] += seconds + 0.4
        trial = StudyTrial(
            number=number,
            state=state,
            loss=None if state == "diverged" else loss,
            values={d.path: d.centre * 2 ** octaves[d.path] for d in searched},
            seconds=seconds,
            tokens_per_second=TOKENS * share / seconds,
            octaves=octaves,
            purpose=purpose,
            seed=seed_,
            tokens=int(TOKENS * share),
            flops=6 * 850_000 * TOKENS * share,
            curve=_curve(loss, draw, share),
            worker=f"node-{worker % 2}:{4100 + worker}",
            ended=clock[worker],
        )
        made.append(trial)
        return trial

    centre = {d.path: 0.0 for d in searched}
    run(centre)
    for extra in range(1, 5):
        run(centre, "noise", extra)
    incumbent, lowest, radius = dict(centre), made[0].loss or math.inf, 0.7
    while len(made) < trials - 6:
        moved = {p for p in centre if draw.random() < min(1.0, 8 / count)}
        limits = {d.path: d for d in searched}
        point = {
            p: max(limits[p].low, min(limits[p].high, o + (draw.gauss(0, radius) if p in moved else 0.0)))
            for p, o in incumbent.items()
        }
        trial = run(point)
        if trial.state == "complete" and (trial.loss or math.inf) < lowest - NOISE:
            incumbent, lowest, radius = point, trial.loss or math.inf, min(1.0, radius * 1.25)
        else:
            radius = max(0.2, radius * 0.96)
    leaders = sorted((t for t in made if t.state == "complete"), key=lambda t: t.loss or 0.0)[:2]
    for leader in leaders:
        for extra in range(1, 4):
            run(leader.octaves or {}, "rerun", extra)
    best = leaders[0]
    mean = FLOOR + land.excess(best.octaves or {}) + draw.gauss(0, NOISE / 2)
    coordinates = _coordinates(searched, land, best.octaves or {})
    worth = {c.path for c in coordinates if c.worth}
    fewest = {p: o if p in worth else 0.0 for p, o in (best.octaves or {}).items()}
    # From the least important on, as many as cost less than the noise together.
    left, idle = NOISE, list[str]()
    for coordinate in sorted(coordinates, key=lambda c: abs(c.gain)):
        left -= abs(coordinate.gain)
        if left > 0:
            idle.append(coordinate.path)
    return StudyDocument(
        name="wheat-proxy",
        method="trust-region",
        space=tuple(d.path for d in searched),
        noise_floor=NOISE,
        best=Best(best.number, mean, (mean - 0.0042, mean + 0.0042), fresh=3),
        trials=tuple(made),
        dimensions=searched,
        noise_runs=4,
        radius=radius,
        stalled=True,
        fewest=Best(best.number, mean + 0.0012, (mean - 0.005, mean + 0.0074), fresh=3),
        fewest_octaves=fewest,
        gain=(made[0].loss or math.inf) - mean,
        idle=tuple(idle),
        coordinates=coordinates,
    )


def _coordinates(searched: tuple[Dimension, ...], land: Landscape, best: dict[str, float]) -> tuple[Coordinate, ...]:
    found = []
    total = sum(land.curvature[p] * best[p] ** 2 + 1e-9 for p in best)
    for d in searched:
        curvature, optimum, at = land.curvature[d.path], land.optimum[d.path], best[d.path]

        def over(octaves: float, curvature: float = curvature, optimum: float = optimum, at: float = at) -> float:
            return curvature * ((octaves - optimum) ** 2 - (at - optimum) ** 2)

        width = math.sqrt(NOISE / curvature)
        gain = over(0.0)
        steps = [d.low + (d.high - d.low) * i / 40 for i in range(41)]
        cliff = land.cliff.get(d.path)
        risk = [1 / (1 + math.exp(-(o - cliff) / 0.12)) if cliff is not None else 0.0 for o in steps]
        slices = tuple(
            SlicePoint(o, over(o), 0.002 + 0.006 * abs(o - at), r) for o, r in zip(steps, risk, strict=True)
        )
        width = math.hypot(at - optimum, width)
        flat = (max(d.low, optimum - width), min(d.high, optimum + width))
        share = curvature * at**2 / total
        found.append(Coordinate(d.path, at, flat, gain, share, gain > NOISE, slices))
    return tuple(sorted(found, key=lambda c: -c.importance))


def durations(state: StudyDocument) -> StudyDocument:
    """The same with trials of three durations each, and the front of loss against cost."""
    trials = []
    for t in state.trials:
        loss, late = t.loss or 0.0, 0.002 * (t.number % 5)
        ends = tuple((TOKENS // k, loss + 0.12 * math.log2(k) + late * k) for k in (4, 2, 1))
        trials.append(replace(t, branches=ends) if t.state == "complete" else t)
    front = []
    for i in range(3):
        least = min((t for t in trials if t.branches), key=lambda t: t.branches[i][1])
        tokens, loss = least.branches[i]
        front.append(Front(least.number, tokens, 6 * 850_000 * tokens, loss))
    lengths = tuple(TOKENS // k for k in (4, 2, 1))
    return replace(state, trials=tuple(trials), front=tuple(front), durations=lengths)


def all_diverged(state: StudyDocument) -> StudyDocument:
    lost = tuple(replace(t, state="diverged", loss=None, tokens=t.tokens // 3) for t in state.trials[:9])
    none = dict.fromkeys(("best", "noise_floor", "fewest", "fewest_octaves", "gain"))
    advice = "all 9 trials diverged, the start's too: start from lr at 1/4 of what it was, 0.001 or lower"
    return replace(state, trials=lost, coordinates=(), idle=(), noise_runs=0, advice=advice, **none)


def unjudged(state: StudyDocument) -> StudyDocument:
    """The lowest of the search is the answer: no run was left for fresh seeds."""
    trials = tuple(t for t in state.trials if t.purpose == "search")
    lowest = min((t for t in trials if t.state == "complete"), key=lambda t: t.loss or math.inf)
    best = Best(lowest.number, lowest.loss or math.inf, (-math.inf, math.inf))
    return replace(state, trials=trials, best=best, noise_floor=None, noise_runs=0, fewest=None, fewest_octaves=None)


def at_first(state: StudyDocument) -> StudyDocument:
    """One trial at work, none ended."""
    one = replace(
        state.trials[0],
        state="running",
        loss=None,
        seconds=None,
        tokens_per_second=None,
        tokens=0,
        curve=(),
        ended=None,
    )
    return replace(all_diverged(state), trials=(one,))


def write(folder: Path, state: StudyDocument) -> Path:
    folder.mkdir(parents=True)
    start = recipe()
    write_recipe(start, folder / "centre.toml")
    if state.best is not None:
        write_recipe(moved(start, state), folder / "best.toml")
    (folder / "study.json").write_text(state.model_dump_json())
    return folder


def moved(start: Recipe, state: StudyDocument) -> Recipe:
    assert state.best is not None
    best = next(t for t in state.trials if t.number == state.best.number)
    low, high = state.best.interval
    reason = f"study {state.name}, trial {best.number} of {len(state.trials)}, 95% interval {low:.4f} to {high:.4f}"
    profile = [best.values.get(f"hyperparameters.depth.lr[{i}]", 1.0) for i in range(DEPTH_POINTS)]
    plain = {path: value for path, value in best.values.items() if "[" not in path}
    return start.replace(plain | {"hyperparameters.depth": {"lr": profile}, "why": dict.fromkeys(plain, reason)})
