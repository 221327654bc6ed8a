"""Build studies as a search writes them. The loss is a quadratic function of the values, plus noise."""

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from written import proxy

from leaven.documents import sealed
from leaven.recipe.files import write_recipe
from leaven.recipe.recipe import Recipe
from leaven.tuning.algorithm.answer import answer
from leaven.tuning.space import space
from leaven.tuning.study_document import Best, StudyDocument, StudyTrial, front

NOISE = 0.0031
TOKENS = 1_000_000
FLOOR = 2.405
SEARCHED = (
    "hyperparameters.lr,hyperparameters.init_std,hyperparameters.weight_decay,hyperparameters.residual,"
    "hyperparameters.depth.lr*,hyperparameters.modules.*.residual,per-module-full"
)
DEPTH_POINTS = 4


def replace(value: Any, **changes: object) -> Any:
    """Return a copy of a dataclass or a document with other values."""
    copied = dataclasses.replace if dataclasses.is_dataclass(value) else lambda old, **new: old.model_copy(update=new)
    return copied(value, **changes)


def recipe() -> Recipe:
    depth = {"lr": [1.0] * DEPTH_POINTS}
    return proxy(**{"hyperparameters.modules": {}, "hyperparameters.depth": depth, "model.n_layers": 6, "why": {}})


def study(count: int = 31, trials: int = 64, seed: int = 0) -> StudyDocument:
    """Return a study with runs of the start as noise, early stops, divergences, reruns and confirmation runs."""
    searched, draw = space(recipe(), SEARCHED).dimensions[:count], random.Random(seed)
    curvature = {each.path: max(20 / count, 1) * 10 ** draw.uniform(-3.5, -1.8) for each in searched}
    optimum = {each.path: draw.uniform(-1.2, 1.2) for each in searched}
    made: list[StudyTrial] = []

    def run(octaves: Mapping[str, float], purpose: str = "search", repeat: int = 0, confirms: bool = False) -> None:
        number, state, share = len(made), "complete", 1.0
        if purpose == "search" and number % 7 == 6:
            state, share = "diverged", 0.3
        elif purpose == "search" and number % 5 == 4:
            state, share = "pruned", 0.4
        excess = sum(curvature[path] * (octaves[path] - optimum[path]) ** 2 for path in octaves)
        loss = FLOOR + excess + draw.gauss(0, NOISE)
        shares = [(i + 1) / 80 for i in range(80) if (i + 1) / 80 <= share]
        trial = StudyTrial(
            number=number,
            state=state,
            loss=None if state == "diverged" else loss,
            values={each.path: each.centre * 2 ** octaves[each.path] for each in searched},
            seconds=200 * share,
            tokens_per_second=TOKENS / 200,
            octaves=dict(octaves),
            purpose=purpose,
            confirms=confirms,
            seed=repeat,
            tokens=int(TOKENS * share),
            flops=6 * 850_000 * TOKENS * share,
            curve=tuple((int(s * TOKENS), loss + 0.55 * (s**-0.42 - 1)) for s in shares),
            worker=f"node-{number % 2}:{4100 + number % 2}",
            ended=1_760_000_000.0 + 201 * (number // 2 + 1),
        )
        made.append(trial)

    start = dict.fromkeys(optimum, 0.0)
    run(start)
    for repeat in range(1, 5):
        run(start, "noise", repeat)
    for number in range(trials - 13):
        progress = number / (trials - 13)
        run({path: round(progress * at + draw.gauss(0, 0.3), 4) for path, at in optimum.items()})
    leaders = sorted((trial for trial in made if trial.state == "complete"), key=lambda trial: trial.loss or 0.0)[:2]
    for leader in leaders:
        for repeat in range(1, 3):
            run(leader.octaves or {}, "rerun", repeat)
    chosen = answer(made, searched, over=True).octaves
    for repeat in range(5, 7):
        for point in (chosen, start):
            run(point, "rerun", repeat, confirms=True)
    return StudyDocument(
        **vars(answer(made, searched, over=True)),
        name="wheat-proxy",
        method="trust-region",
        space=tuple(each.path for each in searched),
        trials=tuple(made),
        radius=0.3,
        stalled=True,
    )


def durations(state: StudyDocument) -> StudyDocument:
    """Return the study with trials of three durations each, and the front of loss against cost."""
    lengths = tuple(TOKENS // k for k in (4, 2, 1))
    trials = [
        replace(trial, branches=tuple((n, trial.loss + 0.12 * math.log2(TOKENS / n)) for n in lengths))
        if trial.state == "complete"
        else trial
        for trial in state.trials
    ]
    return replace(state, trials=tuple(trials), front=front(trials), durations=lengths)


def all_diverged(state: StudyDocument) -> StudyDocument:
    lost = tuple(replace(t, state="diverged", loss=None, tokens=t.tokens // 3) for t in state.trials[:9])
    none = dict.fromkeys(("best", "noise_floor", "fewest", "fewest_octaves", "gain"))
    advice = "all 9 trials diverged, including the start: start from lr at 0.001 or lower, 1/4 of its old value"
    return replace(state, trials=lost, coordinates=(), idle=(), noise_runs=0, advice=advice, **none)


def unjudged(state: StudyDocument) -> StudyDocument:
    """Return the study before any trial was run again with a fresh seed."""
    trials = tuple(t for t in state.trials if t.purpose == "search")
    lowest = min((t for t in trials if t.state == "complete"), key=lambda t: t.loss or math.inf)
    best = Best(lowest.number, lowest.loss or math.inf, (-math.inf, math.inf))
    return replace(state, trials=trials, best=best, noise_floor=None, noise_runs=0, fewest=None, fewest_octaves=None)


def bare(state: StudyDocument) -> StudyDocument:
    """Return the study without noise, curves, workers and costs."""
    trials = tuple(replace(trial, curve=(), worker=None, ended=None, flops=0.0) for trial in state.trials)
    return replace(state, trials=trials, noise_floor=None, fewest=None, fewest_octaves=None)


def at_first(state: StudyDocument) -> StudyDocument:
    """Return the study while its first trial runs."""
    unfinished = dict.fromkeys(("loss", "seconds", "tokens_per_second", "ended"))
    one = replace(state.trials[0], state="running", tokens=0, curve=(), **unfinished)
    return replace(all_diverged(state), trials=(one,))


def write(folder: Path, state: StudyDocument) -> Path:
    folder.mkdir(parents=True)
    start = recipe()
    write_recipe(start, folder / "centre.toml")
    if state.best is not None:
        best = next(trial for trial in state.trials if trial.number == state.best.number)
        profile = [best.values.get(f"hyperparameters.depth.lr[{i}]", 1.0) for i in range(DEPTH_POINTS)]
        plain = {path: value for path, value in best.values.items() if "[" not in path}
        write_recipe(start.replace(plain | {"hyperparameters.depth": {"lr": profile}}), folder / "best.toml")
    (folder / "study.json").write_text(json.dumps(sealed(json.loads(state.model_dump_json()))))
    return folder
