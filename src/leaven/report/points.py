"""Points of a search as a person reads them: octaves from the start, what changed most."""

import math
from collections.abc import Mapping

from leaven.recipe.recipe import short_path
from leaven.report.terminal import cut
from leaven.training.study_file import StudyState, Trial

BETAS = ("hyperparameters.beta1", "hyperparameters.beta2")
UNMOVED = 0.005  # octaves: what is read as x1.00


def value(path: str, centre: float, octaves: float, seq_len: int) -> float:
    """What a recipe has so many octaves from ``centre``: of a beta, whose exponent they double, 1 - beta doubles; a
    batch is of whole sequences, and a warm-up of whole tokens."""
    factor = math.exp2(octaves)
    if path in BETAS:
        return math.pow(centre, factor)
    whole = {"batch.tokens": seq_len, "schedule.warmup_tokens": 1}.get(path)
    return centre * factor if whole is None else max(round(centre * factor / whole), 1) * whole


def changes(moved: Mapping[str, float], room: int) -> str:
    """What a point changes, in octaves, largest first, as many as there is room for: ``embedding.lr x1.41, …``."""
    names = [
        f"{short_path(path)} x{2**distance:.2f}"
        for path, distance in sorted(moved.items(), key=lambda item: -abs(item[1]))
        if abs(distance) > UNMOVED
    ]
    said = ", ".join(names)
    while len(said) > room and len(names) > 1:
        names.pop()
        said = ", ".join([*names, "…"])
    return cut(said, room)


def told(trial: Trial, state: StudyState, room: int, best: Trial | None = None) -> str:
    """What a trial is, in one line: what it changes against ``best`` or the start, or which point it runs again."""
    seed = f", seed +{trial.seed}" if trial.seed else ""
    if seed and at_start(trial):
        return cut(f"the start again{seed}", room)
    first = next((other.number for other in state.trials if other.values == trial.values), trial.number)
    if seed and first != trial.number:
        return cut(f"trial {first} again{seed}", room)
    before = (best and best.octaves) or {}
    moved = {path: now - before.get(path, 0.0) for path, now in (trial.octaves or {}).items()}
    return (changes(moved, room - len(seed)) or f"nothing: {'the best' if best is not None else 'the start'}") + seed


def at_start(trial: Trial) -> bool:
    return trial.octaves is not None and not any(trial.octaves.values())


def share(trial: Trial, state: StudyState) -> str:
    """Where a trial broke off: ``at 18%`` of a whole run, or nothing while no run has been whole."""
    whole = max((other.tokens for other in state.trials if other.state == "complete"), default=0)
    return f"at {min(trial.tokens / whole, 1.0):.0%}" if whole and trial.tokens else ""


def workers(state: StudyState) -> dict[str, str]:
    """w1, w2 and so on, by host:pid, in the order in which they first ended a trial."""
    ended = sorted((trial for trial in state.trials if trial.worker), key=lambda trial: trial.ended or math.inf)
    found = dict.fromkeys(trial.worker or "" for trial in ended)
    return {worker: f"w{i}" for i, worker in enumerate(found, 1)}
