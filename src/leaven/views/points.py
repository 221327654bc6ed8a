"""Describe what a search found and the points (sets of values) that it tried, for the terminal and the page."""

import math
from collections.abc import Mapping, Sequence

from leaven.documents.runs import Outlook
from leaven.recipe.recipe import short_path
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.study_document import PRUNED, UNSURE, Dimension, StudyDocument, StudyTrial, signed
from leaven.views import numbers
from leaven.views.tables import Fact, cut, under

EARLY_ENDS = ("diverged", PRUNED, "failed")  # states of trials that ended without a final loss
NAMES = 6  # largest number of names in a sentence
SURE = 3  # with fewer repeated trials, the texts warn that few trials measured the noise
UNMOVED = 0.005  # octaves (factors of 2); a smaller change would be printed as x1.00


def change(dimension: Dimension, to: float) -> str:
    """Return how a value ``to`` from the start differs from it, as text: ``2×``, ``+0.05``, or the chosen option."""
    return numbers.ratio(2.0**to) if dimension.unit == "octave" else dimension.change(to)


def counts(study: StudyDocument, states: Sequence[str] = EARLY_ENDS) -> dict[str, str]:
    """Return texts by state, such as {"diverged": "2 diverged"}. States without trials are omitted."""
    return {state: f"{n} {state}" for state in states if (n := study.count(state))}


def changes(dimensions: Sequence[Dimension], before: Mapping[str, float], now: Mapping[str, float], room: int) -> str:
    """Return how values change from ``before`` to ``now``, largest changes first, in at most ``room`` characters.

    ``before`` and ``now`` map the path of each value to its distance from the start point of the search.
    """
    moved = [(d, now[d.path], before.get(d.path, 0.0)) for d in dimensions if d.path in now]
    names = [
        f"{short_path(d.path)} {d.change(to, origin)}"
        for d, to, origin in sorted(moved, key=lambda each: -abs(each[1] - each[2]))
        if abs(to - origin) > UNMOVED
    ]
    text = ", ".join(names)
    while len(text) > room and len(names) > 1:
        names.pop()
        text = ", ".join([*names, "…"])
    return cut(text, room)


def summary(trial: StudyTrial, state: StudyDocument, room: int, best: StudyTrial | None = None) -> str:
    """Describe in ``room`` characters how ``trial`` differs from ``best``, or from the start if ``best`` is None."""
    seed = f", seed +{trial.seed}" if trial.seed else ""
    if seed and at_start(trial):
        return cut(f"the start again{seed}", room)
    first = next((other.number for other in state.trials if other.values == trial.values), trial.number)
    if seed and first != trial.number:
        return cut(f"trial {first} again{seed}", room)
    moved = changes(state.dimensions, (best and best.octaves) or {}, trial.octaves or {}, room - len(seed))
    return (moved or f"nothing: {'the best' if best is not None else 'the start'}") + seed


def at_start(trial: StudyTrial) -> bool:
    return trial.octaves is not None and not any(trial.octaves.values())


def share(trial: StudyTrial, state: StudyDocument) -> str:
    """Return how far a trial got, as a share of the tokens of the longest complete trial: ``at 18%``, or ""."""
    whole = max((_reached(other) for other in state.trials if other.state == "complete"), default=0)
    return f"at {min(_reached(trial) / whole, 1.0):.0%}" if whole and _reached(trial) else ""


def _reached(trial: StudyTrial) -> int:
    # A trial of a command may have a loss curve, but no number of tokens.
    return trial.tokens or (trial.curve[-1][0] if trial.curve else 0)


def workers(state: StudyDocument) -> dict[str, str]:
    """Return a short name for each worker. w1 is the worker whose trial ended first."""
    ended = sorted((trial for trial in state.trials if trial.worker), key=lambda trial: trial.ended or math.inf)
    found = dict.fromkeys(trial.worker or "" for trial in ended)
    return {worker: f"w{i}" for i, worker in enumerate(found, 1)}


def result(state: StudyDocument) -> list[str]:
    """Return lines about the loss, certainty and gain of a study's best point, which must exist."""
    best, gain, noise = state.best, state.gain if state.moved else None, state.noise_floor
    assert best is not None
    against = "" if gain is None else f", {signed(-gain)} against the start"
    lines = [f"{best.loss:.4f} nats per token, {best.certainty}{against}"]
    if best.fresh > 1:
        lines.append(f"the mean of {best.fresh} trials with fresh seeds, which were not used to choose these values")
    if state.coordinates and not state.moved:
        tried = any(each.importance for each in state.coordinates)
        reason = "no point is known to be better" if tried else "nothing else was run"
        lines.append(f"the start itself: {reason}")
    if gain is not None and noise:
        few = f" (estimated from only {repeats(state)})" if state.noise_runs < SURE else ""
        above = f"{gain / noise:.1f} times the noise" if gain > noise else "not above the noise"
        doubt = "; it may be luck" if state.in_doubt else ""
        lines.append(f"the gain is {above} between seeds{few}{doubt}")
    elif state.moved and state.in_doubt:
        why = (
            "the noise between seeds is unknown"
            if gain is not None
            else "only trials that chose this point measured it"
        )
        lines.append(f"the gain over the start may be luck: {why}")
    return lines


def repeats(state: StudyDocument) -> str:
    """Return how many repeats measured the noise, such as ``3 repeats``, or ``given`` if the user gave the noise."""
    if state.noise_runs == GIVEN:
        return "given"
    return f"{state.noise_runs} repeat{'' if state.noise_runs == 1 else 's'}"


def findings(state: StudyDocument, budget: int | None = None) -> list[Fact]:
    """Return lines about what a study found besides the best values. ``budget`` is the allowed number of trials."""
    facts = _fewest_changes(state, state.fewest_octaves) if state.moved and state.fewest_octaves is not None else []
    if failed := state.count("failed"):
        facts.append(("failed", f"{failed} of {state.ended} trials: no attempt gave a result"))
    for each in state.coordinates:
        if each.at_end:
            wider = _wider(state.dimension(each.path), each.best)
            beyond = f"the optimum may be outside the search space; to search farther, {wider}"
            facts += under("at a limit", [f"{short_path(each.path)}: {each.end}", beyond])
    if state.idle:
        count = f"{len(state.idle)} of {len(state.coordinates)} values"
        text = f"{count}: resetting all of these to the start costs less than the noise"
        facts += under("not worth", [text, names([short_path(path) for path in state.idle])])
    if unsure := [each.gain for each in state.coordinates if state.effect(each) == UNSURE]:
        gains = f"{round(sum(unsure), 4) + 0.0:.4f} nats{' together' if len(unsure) > 1 else ''}"
        facts.append(("unsure", f"{len(unsure)} with a gain that may be noise: {gains}"))
    if state.informed is not None:
        verdict = "used" if state.informed else "not used, because the trials contradict it"
        facts.append(("prior", f"the prior from laws or an earlier study was {verdict}"))
    if state.outlook is not None:
        facts += outlook_facts(state.outlook, state.noise_floor)
    if state.stalled:
        ended = f"{state.ended} of {budget}" if budget is not None and budget > state.ended else f"{state.ended}"
        facts.append(("stopped", f"after {ended} trials, because the last rounds gained less than the noise"))
    return facts


def _fewest_changes(state: StudyDocument, fewest: Mapping[str, float]) -> list[Fact]:
    """Return lines about ``fewest``, the point with the fewest changes that equals the best within the noise."""
    if fewest == state.octaves:
        return [("fewest", "no trial with fewer changes is as good as the best, within the noise")]
    moved = {path: octaves for path, octaves in fewest.items() if octaves}
    far = sum(abs(x) for path, x in moved.items() if state.dimension(path).unit == "octave")
    changes = (
        f"{len(moved)} of {len(state.octaves)} changed, by {far:.1f} octaves in total"
        if moved
        else "none changed: the start"
    )
    expected = f"expected loss relative to the best: {signed(state.fewest_cost or 0.0)} nats"
    lines = [f"{changes}, equal to the best within the noise; {expected}"]
    if state.fewest is not None:
        lines.append(f"measured {state.fewest.loss:.4f}, {state.fewest.certainty}")
    if moved:
        ordered = sorted(moved.items(), key=lambda item: -abs(item[1]))
        lines.append(names([f"{short_path(path)} {state.dimension(path).change(x)}" for path, x in ordered]))
    return under("fewest", lines)


def outlook_facts(outlook: Outlook, noise: float | None) -> list[Fact]:
    """Return up to two facts: what more trials may gain, and the pair of values with most of the predicted gain."""
    facts: list[Fact] = []
    if outlook.gain is not None:
        against = ", less than the noise" if noise is not None and outlook.gain < noise else ""
        cost = f" ({outlook.flops:.2g} FLOPs)" if outlook.flops else ""
        gain = f"are expected to gain {outlook.gain:.4f} nats{against}"
        facts.append(("outlook", f"{outlook.trials} more trials{cost} {gain}"))
    if outlook.pair is not None:
        pair = " and ".join(map(short_path, outlook.pair))
        facts.append(("two values", f"{pair} alone bring {outlook.pair_share:.0%} of the predicted gain"))
    return facts


def _wider(dimension: Dimension, best: float) -> str:
    """Return a phrase that says how to search beyond ``best``, a value at a limit of the search space."""
    if "." not in dimension.path:  # paths in recipes have a section, names in command files have none
        return f"move this bound of {dimension.path} under [space]"
    low, high, step = dimension.low, dimension.high, 2 * dimension.scale
    low, high = (low, math.ceil(high + step)) if dimension.upper(best) else (math.floor(low - step), high)
    # 0, which stands for the value in the recipe, must be between the two limits.
    limits = f'"{dimension.path}" = [{min(low, -1 / 8):.4g}, {max(high, 1 / 8):.4g}]'
    return f"set {limits} under [tuning.octaves]; to search other values as well, list them as space under [tuning]"


def names(found: Sequence[str]) -> str:
    return ", ".join(found[:NAMES]) + (f" and {len(found) - NAMES} more" if len(found) > NAMES else "")
