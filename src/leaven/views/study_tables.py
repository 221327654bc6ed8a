"""The tables of a search: what each value came to, the changes, every trial, and what it all took."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from leaven.recipe.recipe import short_path
from leaven.tuning.document import Coordinate, Dimension, StudyTrial
from leaven.views import numbers, points
from leaven.views.html import Html, element, join
from leaven.views.slices import strip
from leaven.views.story import Study
from leaven.views.tables import facts, scroll

FIRST = 14  # values that are told before the others are folded away


def values(study: Study) -> Html:
    """Every value, the most important first: what it moved to, how far that is flat, what it brought."""
    ranges = {dimension.path: dimension for dimension in study.dimensions}
    highest = max((abs(coordinate.importance) for coordinate in study.coordinates), default=0.0) or 1.0

    def line(coordinate: Coordinate) -> Html:
        dimension = ranges[coordinate.path]
        flat = () if dimension.levels else coordinate.flat
        bar = element("i", style=f"width:{100 * max(coordinate.importance, 0.0) / highest:.3g}%")
        return element(
            "tr",
            element("th", short_path(coordinate.path), scope="row"),
            element("td", strip(coordinate, dimension), class_="strips"),
            element("td", points.change(dimension, coordinate.best), class_="number"),
            element("td", " to ".join(points.change(dimension, to) for to in flat), class_="number quiet"),
            element("td", _gain(coordinate), class_="number"),
            element("td", element("div", bar, class_="bar"), class_="share"),
            element("td", f"{coordinate.importance:.0%}", class_="number", title=_optuna(coordinate)),
            element("td", word(coordinate, study), class_="quiet"),
            class_="idle" if word(coordinate, study) == IDLE else None,
        )

    heads = [
        _head("value"),
        _head("searched, flat, best", "start: tick; red: diverges"),
        _head("best", "of the start", "number"),
        _head("flat", "within the noise", "number"),
        _head("moving it brought", "nats", "number"),
        element("th", "importance", scope="col", colspan=2),
        _head("tuning it"),
    ]

    def table(rows: list[Coordinate]) -> Html:
        body = element("tbody", *map(line, rows))
        return scroll(
            element("table", element("thead", element("tr", *heads)), body, class_="values"),
            "what each value came to",
        )

    return _folding(table, study.coordinates, "more values")


MATTERED, IDLE, UNSURE = "mattered", "not worth tuning", "unsure"


def word(coordinate: Coordinate, study: Study) -> str:
    """In the words of the terminal: what mattered by itself, what may go back to the start together, and the rest,
    which may have gained much or nothing; of what stayed at the start nothing is known."""
    if coordinate.worth or coordinate.path in study.idle:
        return MATTERED if coordinate.worth else IDLE
    return UNSURE if coordinate.best else ""


def _optuna(coordinate: Coordinate) -> str | None:
    shared = coordinate.optuna_importance
    return f"Optuna's PED-ANOVA: {shared:.0%}" if shared else None


def _gain(coordinate: Coordinate) -> Html:
    deviation = f" ±{coordinate.gain_deviation:.4f}" if coordinate.gain_deviation else ""
    return join(numbers.delta(-coordinate.gain), element("span", deviation, class_="quiet"))


def _head(name: str, unit: str = "", kind: str | None = None) -> Html:
    return element("th", name, element("small", unit) if unit else None, scope="col", class_=kind)


def changes(study: Study) -> Html | None:
    """The best point beside the one with the fewest changes; None where there is no best or it changes nothing."""
    best = study.best_trial
    if best is None or best.octaves is None:
        return None
    ranges, fewest = {dimension.path: dimension for dimension in study.dimensions}, study.fewer
    moved = best.octaves
    order = sorted(
        (path for path, octaves in moved.items() if abs(octaves) > points.UNMOVED),
        key=lambda path: (-abs((fewest or moved).get(path, 0.0)), -abs(moved[path])),
    )
    if not order:
        return None
    groups = [element("th", "", colspan=2), element("th", "best", colspan=3, scope="colgroup", class_="first")]
    triple = [_head("value", kind="number first"), _head("change", kind="number"), _head("octaves", kind="number")]
    heads = [_head("value"), _head("start", kind="number"), *triple]
    if fewest is not None:
        groups.append(element("th", "fewest changes", colspan=3, scope="colgroup", class_="first"))
        heads += triple

    def line(path: str) -> Html:
        cells = [
            element("th", short_path(path), scope="row"),
            element("td", _shown(ranges[path].centre), class_="number quiet"),
            *_moved(ranges[path], best.values.get(path), moved[path]),
        ]
        octaves = fewest.get(path, 0.0) if fewest is not None else None
        if octaves is not None and abs(octaves) > points.UNMOVED:
            value = points.value(ranges[path], octaves, study.centre.model.seq_len)
            cells += _moved(ranges[path], value, octaves)
        elif octaves is not None:
            cells.append(element("td", "as at the start", colspan=3, class_="first quiet"))
        return element("tr", *cells)

    def table(paths: list[str]) -> Html:
        head = element("thead", element("tr", *groups), element("tr", *heads))
        return scroll(
            element("table", head, element("tbody", *map(line, paths)), class_="changes"),
            "what the best recipe changes",
        )

    return _folding(table, order, "more values that the best recipe moves")


def durations(study: Study) -> Html | None:
    """The lowest loss at the end of each duration; None where there is but one."""
    ends = [
        (tokens, loss, trial)
        for trial in study.trials
        if trial.state == "complete" and trial.purpose == "search"
        for tokens, loss in trial.branches
    ]
    lengths = sorted({tokens for tokens, _, _ in ends})
    if len(lengths) < 2:
        return None

    def line(tokens: int, number: int, loss: float, judged: str) -> Html:
        return element(
            "tr",
            element("th", numbers.quantity(tokens), scope="row", class_="number"),
            element("td", number, class_="number"),
            element("td", numbers.loss(loss), class_="number strong"),
            element("td", judged, class_="quiet"),
        )

    rows = []
    for length in lengths:
        _, loss, trial = min((end for end in ends if end[0] == length), key=lambda end: end[1])
        rows.append(line(length, trial.number, loss, "one run, of the seed that chose it: expect worse"))
    if study.best and study.best.fresh:
        runs = "1 run with a fresh seed" if study.best.fresh == 1 else f"mean of {study.best.fresh} fresh seeds"
        rows.append(line(lengths[-1], study.best.number, study.best.loss, f"the answer: {runs}"))
    heads = (_head("tokens", kind="number"), _head("lowest", "trial", "number"), _head("loss", kind="number"))
    head = element("thead", element("tr", *heads, _head("judged by")))
    return scroll(element("table", head, element("tbody", *rows), class_="durations"), "the lowest of each duration")


def _folding(table: Callable[[list[Any]], Html], rows: Sequence[Any], more: str) -> Html:
    """A table of the first rows, and one of the others to be unfolded."""
    first, rest = list(rows[:FIRST]), list(rows[FIRST:])
    folded = element("details", element("summary", f"{len(rest)} {more}"), table(rest)) if rest else None
    return join(table(first), folded)


def _shown(value: float | str | None) -> str:
    return value if isinstance(value, str) else numbers.value(value)


def _moved(dimension: Dimension, value: float | str | None, to: float) -> list[Html]:
    octaves = f"{to:+.2f}".replace("-", numbers.MINUS) if dimension.unit == "octave" else numbers.NONE
    return [
        element("td", _shown(value), class_="number first strong"),
        element("td", points.change(dimension, to), class_="number"),
        element("td", octaves, class_="number quiet"),
    ]


SHOWN = 30  # rows of the table of trials, in whatever order it is in, before the others are asked for


def trials(study: Study) -> Html:
    """Every trial; those of the lowest loss at first."""
    names, best = points.workers(study), study.best_trial
    told = "change against the best" if best else "change against the start"
    lowest = min((t.loss for t in study.trials if t.state == "complete" and t.loss is not None), default=None)
    lowest = best.loss if best else lowest
    ranked = sorted(
        study.trials, key=lambda t: (t.state != "complete", math.inf if t.loss is None else t.loss, t.number)
    )

    def line(trial: StudyTrial) -> Html:
        behind = trial.loss - lowest if trial.loss is not None and lowest is not None else None
        state = "ended" if trial.state == "complete" else f"{trial.state} {points.share(trial, study)}".strip()
        return element(
            "tr",
            element("th", trial.number, scope="row", class_="number"),
            element("td", state, class_="bad" if trial.state in {"diverged", "failed"} else "quiet"),
            element("td", trial.purpose, class_="quiet"),
            _number(trial.loss, numbers.loss(trial.loss), "strong" if trial is best else ""),
            _number(behind, numbers.delta(behind)),
            _number(trial.tokens, numbers.quantity(trial.tokens or None)),
            _number(trial.seconds, numbers.seconds(trial.seconds)),
            _number(trial.tokens_per_second, numbers.quantity(trial.tokens_per_second)),
            element("td", names.get(trial.worker or "", numbers.NONE), title=trial.worker, class_="quiet"),
            element("td", points.told(trial, study, 72, best), class_="quiet"),
        )

    heads = ("trial", "state", "purpose", "loss", "against best", "tokens", "time", "tokens/s", "worker", told)
    right = {"trial", "loss", "against best", "tokens", "time", "tokens/s"}
    cells = [
        element("th", element("button", name, type="button"), scope="col", class_="number" if name in right else None)
        for name in heads
    ]
    many = len(ranked) > SHOWN
    table = element(
        "table",
        element("thead", element("tr", *cells)),
        element("tbody", *map(line, ranked)),
        class_="trials sortable" + (" first-rows" if many else ""),
    )
    switch = element(
        "label", element("input", type="checkbox", class_="all-rows"), f" all {len(ranked)} trials", class_="switch"
    )
    return join(switch if many else None, scroll(table, "every trial"))


def _number(value: float | None, shown: str, kind: str = "") -> Html:
    ranked = math.inf if value is None else value
    return element("td", shown, data_v=f"{ranked:.9g}".replace("inf", "1e99"), class_=f"number {kind}".strip())


def cost(study: Study) -> Html:
    """What the search took: time, tokens, FLOPs, machines."""
    ran = [trial for trial in study.trials if trial.seconds]
    workers = {trial.worker for trial in ran if trial.worker}
    hosts = {worker.rpartition(":")[0] for worker in workers}
    speeds = [trial.tokens_per_second for trial in ran if trial.tokens_per_second and trial.state == "complete"]
    begun = [trial.ended - (trial.seconds or 0.0) for trial in ran if trial.ended]
    span = max(trial.ended for trial in ran if trial.ended) - min(begun) if begun else None
    tokens, flops = sum(trial.tokens for trial in study.trials), sum(trial.flops for trial in study.trials)
    reached = [
        f"{numbers.seconds(sum(t.seconds or 0.0 for t in ran if t.state == state))} in {count} {state}"
        for state in ("stopped", "diverged", "failed")
        if (count := study.count(state))
    ]
    return facts(
        (
            ("time", f"{numbers.seconds(study.seconds)} added up over workers" if ran else None),
            ("elapsed", numbers.seconds(span) if span is not None else None),
            ("ended early", ", ".join(reached) or None),
            ("tokens", f"{numbers.quantity(tokens)} trained on" if tokens else None),
            ("compute", f"{flops:.3g} FLOPs".replace("e+", "e") if flops else None),
            (
                "speed",
                f"{numbers.quantity(statistics.median(speeds))} tokens/s a trial, the median" if speeds else None,
            ),
            ("workers", f"{len(workers)} on {', '.join(sorted(hosts))}" if workers else None),
        )
    )
