"""The page of a study: what came out, the search, what mattered, the network it found, every trial, the cost."""

from leaven.recipe.recipe import short_path
from leaven.tuning.document import UNDER_WAY
from leaven.views import chapters, multipliers, numbers, points, searches, slices, study_tables, tables, trial_marks
from leaven.views.html import Html, element, join
from leaven.views.story import Study


def head(made: chapters.Sheet, study: Study) -> Html:
    """The verdict and the four numbers; the chapters go on the sheet."""
    searched(made, study)
    _network(made, study)
    _changes(made, study)
    _trained(made, study)
    chosen = study.best_recipe or study.centre
    beside = study.centre if study.best_recipe else None
    chapters.parameters(made, chosen, beside, ("centre", "best" if beside else "start"))
    chapters.provenance(made, chosen)
    chapters.commands(made, [chapters.tune_command(study, "centre.toml", "."), "leaven report . -o report.html"])
    return join(element("p", verdict(study), class_="verdict"), _four(study))


def verdict(study: Study) -> str:
    """What came out, in a sentence or two."""
    best, gain, count = study.best, study.gain, len(study.trials)
    one = len(study.space) == 1
    searched, are, were = ("one value", "is", "was") if one else (f"{len(study.space)} values", "are", "were")
    if best is None:
        complete, diverged = study.count("complete"), study.count("diverged")
        if complete:
            return f"{complete} of {count} trials reached their end; the best few are not judged yet."
        if study.advice and not study.under_way:
            return f"{study.advice[0].upper()}{study.advice[1:]}."
        if diverged == count:
            return f"All {count} trials diverged." if count > 1 else "The only trial diverged."
        none = f"None of {count} trials has" if count > 1 else "The first trial has not"
        return f"{none} completed yet; {searched} {are} searched by {study.method}."
    against = ""
    if gain is not None and study.noise_floor:
        times = (
            f" and {gain / study.noise_floor:.0f} times the noise between seeds"
            if gain > 2 * study.noise_floor
            else ""
        )
        against = f", {gain:.3f} below the start{times}"
        if gain <= study.noise_floor:
            against = ", no better than the start by more than the noise between seeds"
            if study.coordinates and not study.moved:
                against = ", the start itself: nothing was found that is known to be better"
    worth = sum(coordinate.worth for coordinate in study.coordinates)
    alone = f"; {worth} gained more than the noise by {'itself' if worth == 1 else 'themselves'}"
    alone = alone if worth else "; none is known to have gained more than the noise by itself"
    alone = alone if study.coordinates and study.moved and not one else ""
    stalled = " The search stopped of itself: its last rounds gained less than the noise." if study.stalled else ""
    return (
        f"Trial {best.number} {'has the lowest loss' if study.unjudged else 'is the best'} of {count}: "
        f"{numbers.loss(best.loss)} nats per token{against}.{_doubt(study)} "
        f"{searched.capitalize()} {were} searched by {study.method}{alone}.{stalled}"
    )


def _four(study: Study) -> Html:
    best, gain, interval = study.best, study.gain, study.interval
    told = f"; 95%: {interval[0]:.4f} to {interval[1]:.4f}" if interval else ""
    if best and not best.fresh:
        told = (
            "; the lowest of the search, expect worse" if study.unjudged else "; of runs that chose it, expect worse"
        )
    lost = [f"{study.count(state)} {state}" for state in ("diverged", "stopped", "failed", *UNDER_WAY)]
    lost = [each for each in lost if not each.startswith("0 ")]
    noise = f"nats; noise between seeds {study.noise_floor:.4f}" if study.noise_floor else "nats"
    flops = sum(trial.flops for trial in study.trials)
    workers = len({trial.worker for trial in study.trials if trial.worker})
    cost = f"added up over {workers} workers" if workers > 1 else "added up over workers"
    return tables.four(
        (
            "best loss",
            numbers.loss(best.loss if best else None),
            f"nats per token{told}",
            "",
        ),
        (
            "against the start",
            numbers.delta(-gain) if gain is not None else numbers.NONE,
            noise,
            tables.verdict(gain) if best and best.fresh and abs(gain or 0.0) > (study.noise_floor or 0.0) else "",
        ),
        (
            "trials",
            str(len(study.trials)),
            f"{study.count('complete') or 'none'} to the end, {', '.join(lost)}" if lost else "all to the end",
            "",
        ),
        (
            "cost",
            numbers.seconds(study.seconds),
            cost + (f"; {flops:.2g} FLOPs".replace("e+", "e") if flops else ""),
            "",
        ),
    )


def _doubt(study: Study) -> str:
    if study.best is None or study.best.fresh:
        return ""
    if study.unjudged:
        return (
            " That is the run that chose it, the lowest of the search, and not judged by fresh seeds: expect worse."
        )
    return f" That is the mean of {study.best.runs} runs that chose it among several: expect a little worse."


def searched(made: chapters.Sheet, study: Study) -> None:
    """The trials in order, and what each value did to the loss."""
    kinds = trial_marks.by_kind(study)
    if study.start_loss is None:
        return  # no trial has ended with a loss; how those went that diverged is told by their curves
    told = "The trials in the order they began."
    beyond = kinds.get("beyond", ())
    if study.count("diverged") + study.count("failed"):
        told += " Crosses at the top edge have no loss."
    if beyond:
        told += f" Triangles at the top edge: {len(beyond)} with a higher loss."
    if study.noise_floor:
        many = "repeats" if study.noise_runs != 1 else "repeat"
        runs = f", from {study.noise_runs} {many}" if study.noise_runs else ""
        told += (
            f" The band is the noise floor, ±{study.noise_floor:.4f} nats between seeds{runs}; the trials of the "
            "search share one seed, so the lowest of them may be lucky."
        )
    if study.best and study.best.fresh:
        runs = "a run with a fresh seed" if study.best.fresh == 1 else f"the mean of {study.best.fresh} fresh seeds"
        told += f" The answer stands at the right{' with its interval' if study.interval else ''}: {runs}."
    elif study.unjudged:
        told += " The answer, at the right, is the lowest of the search and not judged by fresh seeds: expect worse."
    elif study.best:
        told += f" The answer stands at the right: the mean of {study.best.runs} runs that chose it among several."
    chart = made.chart("search", searches.search(study), "loss of every trial")
    made.section("The search", told, trial_marks.key(study), chart)
    if study.coordinates:
        _slices(made, study)
        _mattered(made, study)


def _slices(made: chapters.Sheet, study: Study) -> None:
    """The landscape along the most important values, a panel each."""
    searched = {dimension.path: dimension for dimension in study.dimensions}
    shown = [coordinate for coordinate in study.coordinates if coordinate.slice][: slices.MOST]
    frame = slices.scale(study)
    panels = [
        element(
            "figure",
            element(
                "figcaption",
                element("b", short_path(coordinate.path)),
                element("span", f"best {points.change(searched[coordinate.path], coordinate.best)}"),
            ),
            made.chart(
                f"slice-{i}",
                slices.panel(study, coordinate, frame),
                f"loss over {short_path(coordinate.path)} through the best point",
                "small",
            ),
        )
        for i, coordinate in enumerate(shown)
    ]
    if panels:
        many = (
            f"The {len(panels)} most important of {len(study.coordinates)} values"
            if len(panels) < len(study.coordinates)
            else "Each value"
        )
        made.section(
            "Slices through the best point",
            f"{many}, all others at the best: nats above the best upwards, the same scale in all; factors of the "
            "start sideways, or what is added to it, or the choices. The band is one standard deviation of what the "
            "trials know. Grey is flat within the noise, the dotted line is the start. The red hill is the chance of "
            "divergence, certain at the top; crosses are trials that diverged, faint where this value is hardly the "
            "reason; ticks are the others.",
            element("div", *panels, class_="panels"),
        )


def _mattered(made: chapters.Sheet, study: Study) -> None:
    """What each value came to."""
    told = (
        "Each value by itself, all others at the best. Importance is its share of how much the loss varies over what "
        "was tried; what moving it from the start brought has its standard deviation beside it."
    )
    if at_end := [f"{short_path(each.path)} ({each.end})" for each in study.coordinates if each.at_end]:
        told += (
            f" At the end of its range: {', '.join(at_end)}. The optimum may lie beyond; [tuning.octaves] in the "
            "recipe takes the search farther."
        )
    if study.idle:
        were, they = ("was", "it costs") if len(study.idle) == 1 else ("were", "all of them together cost")
        told += (
            f" {len(study.idle)} of {len(study.coordinates)} {were} not worth tuning: back at the start {they} less "
            "than the noise."
        )
    unsure = [each.gain for each in study.coordinates if study_tables.word(each, study) == study_tables.UNSURE]
    if unsure:
        are, together = ("are", " together") if len(unsure) > 1 else ("is", "")
        told += (
            f" {len(unsure)} {are} not known to have gained more than the noise: "
            f"{numbers.delta(-sum(unsure))} nats{together}."
        )
    made.section("What mattered", told, study_tables.values(study))


def _network(made: chapters.Sheet, study: Study) -> None:
    """What the best recipe multiplies for each module and depth."""
    if study.best_recipe is None or (picture := multipliers.picture(study.best_recipe, study.space)) is None:
        return
    made.section(
        "What each module got",
        "The best recipe's multipliers of its global values: a row a module in the order of the forward pass, a "
        "column a kind, a band from the first layer to the last; pale where it was not searched. "
        f"{multipliers.summary(study.best_recipe, study.space)}",
        picture,
    )
    profile = multipliers.depth(study.best_recipe, study.space)
    if profile is not None:
        made.section(
            "Over depth",
            "The same for every module of a block; dots are the points of the profile, lines what lies between.",
            made.chart("depth", profile, "multipliers over depth"),
        )


def _changes(made: chapters.Sheet, study: Study) -> None:
    table = study_tables.changes(study)
    if table is None or study.best_trial is None or study.best_trial.octaves is None:
        return
    moved = study.best_trial.octaves
    count = sum(abs(octaves) > points.UNMOVED for octaves in moved.values())
    told = f"The best recipe moves {count} of {len(moved)} values."
    if study.fewest_octaves is not None and study.fewer is None:
        told += " No point with fewer changes was found that is equal to it within the noise."
    elif study.fewest is not None and study.fewer is not None and study.best is not None:
        few = sum(abs(octaves) > points.UNMOVED for octaves in study.fewer.values())
        behind = study.fewest.loss - study.best.loss
        told += (
            f" {few} changes do as well within the noise ({numbers.delta(behind)} nats): of all points that are "
            "equal, as far as one can tell, that is the one nearest the start."
        )
    if any(path in study.space for path in points.BETAS):
        told += " The factor of a beta is its exponent: 2× forgets twice as fast."
    made.section("What the best recipe changes", told, table)


def _trained(made: chapters.Sheet, study: Study) -> None:
    """The trials as runs: curves, cost, and each in a row."""
    front, ends, timeline = searches.front(study), study_tables.durations(study), searches.timeline(study)
    if known := searches.known_curves(study):
        told = "Training loss of every trial" + (", faint; the best one strong." if study.best else ".")
        if study.count("stopped"):
            told += " Triangles: given up where the curve of the best trial left no hope."
        if study.count("diverged"):
            told += " Crosses: where it diverged."
        whole = searches.curves(study, known, "training loss, nats per token")
        charts = [made.chart("curves", whole, "training loss of all trials", "tall")]
        if ahead := searches.against_best(study):
            told += " The second chart: the same less the loss of the best trial at the same tokens."
            chart = searches.curves(study, ahead, "above the best trial, nats per token")
            charts.append(made.chart("ahead", chart, "loss of all trials above the best at the same tokens", "tall"))
        both = element("div", *charts, class_="pair") if len(charts) > 1 else charts[0]
        made.section("The trials as they trained", told, both)
    if front is not None or ends is not None:
        told = "Every dot is a trial at the end of a duration; the steps join those that no cheaper trial beats."
        if study.best and study.best.fresh:
            told += " The diamond is the answer, judged by fresh seeds at the longest duration; the others are not."
        chart = front and made.chart("front", front, "loss against cost")
        made.section("Loss against cost", told if front else None, chart, ends)
    made.section(
        "Every trial",
        ("Lowest loss first; a" if study.count("complete") else "A")
        + " column's head sorts by it."
        + (" The loss of a stopped trial is what was expected of it." if study.count("stopped") else ""),
        study_tables.trials(study),
        class_="broad",
    )
    workers = len(points.workers(study))
    made.section(
        "What it took",
        "Each bar is a trial, in the colours of the search." if timeline else None,
        study_tables.cost(study),
        timeline and made.chart("timeline", timeline, "which worker ran which trial when", height=80 + 24 * workers),
    )
