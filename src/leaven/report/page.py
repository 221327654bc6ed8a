"""One self-contained HTML page about a run, a study or a demo. It asks no other host for anything."""

import base64
import gzip
import shlex
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from leaven.recipe.files import write_text
from leaven.recipe.recipe import Recipe
from leaven.report import figures, numbers, searches, tables
from leaven.report.html import Html, element, join, script_json
from leaven.report.network import picture
from leaven.report.parameters import at_base
from leaven.report.parameters import tables as resolved
from leaven.report.story import Demo, Run, Story, Study, read_story

# Scripts and styles stand in the page itself; with this no browser fetches anything, whatever a text in it says.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(folder: Path, out: Path) -> Path:
    """The report on what a folder holds, as one HTML file.

    Raises:
        InputError: if the folder holds nothing to report on, plotly is missing, or the file cannot be written.
    """
    figures.plotly()
    write_text(out, page(read_story(folder)))
    return out


@dataclass
class _Page:
    """Sections in order, and the figures that their chart boxes name."""

    charts: dict[str, Any] = field(default_factory=dict)
    sections: list[Html] = field(default_factory=list)

    def chart(self, name: str, figure: Any, label: str, size: str = "wide") -> Html:
        self.charts[name] = figure.to_plotly_json()
        return element("div", id=f"chart-{name}", class_=f"chart {size}", role="img", aria_label=label)

    def section(self, title: str, told: str | None, *content: Any, class_: str | None = None) -> None:
        lead = element("p", told, class_="told") if told else None
        self.sections.append(element("section", element("h2", title), lead, *content, class_=class_))


def page(story: Story) -> str:
    """The HTML of a story."""
    made = _Page()
    if isinstance(story, Demo):
        kind, head = "demo", _demo(made, story)
    elif isinstance(story, Study):
        kind, head = "study", _study(made, story)
    else:
        kind, head = "run", _run(made, story)
    name = story.title if isinstance(story, Run) else story.name
    header = element("header", element("p", f"leaven · {kind}", class_="kicker"), element("h1", name), head)
    body = element("main", header, *made.sections)
    return _document(f"{name} · leaven {kind}", body, made.charts)


def _document(title: str, body: Html, charts: dict[str, Any]) -> str:
    from plotly.offline import get_plotlyjs

    # Plain, plotly.js alone is nearly 5 MB; no time stamp, so that the same folder makes the same file.
    library = base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
    ours = files("leaven.report")
    css, script = (Html(ours.joinpath(name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    head = element(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        element("title", title),
        element("style", css),
    )
    tail = join(
        element(
            "noscript", element("p", "The charts need JavaScript; texts, tables and numbers do not.", class_="told")
        ),
        element("script", script_json(charts), type="application/json", id="charts"),
        element("script", Html(library), type="text/plain", id="plotly"),
        element("script", script),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body, tail), lang='en')}\n"


def _numbers(*entries: tuple[str, str, str, str]) -> Html:
    """The four numbers: label, value, what it is against, and a class for its colour."""
    return element(
        "div",
        *(
            element("div", element("span", label), element("b", shown, class_=kind), element("small", note))
            for label, shown, note, kind in entries
        ),
        class_="four",
    )


def _demo(made: _Page, demo: Demo) -> Html:
    runs = [arm.run for arm in demo.arms if arm.run]
    mine, rival, gain = demo.transferred, demo.rival, demo.gain
    best = min((arm for arm in demo.arms if arm.loss is not None), key=lambda arm: arm.loss or 0.0, default=None)
    tune = next((part.seconds for part in demo.parts if part.name == "tune"), None)
    noise = demo.study.noise_floor if demo.study else None
    told = f"nats, {_word(gain, noise)}" + (f" (noise of the proxy ±{noise:.4f})" if noise else "")
    head = _numbers(
        ("best loss", numbers.loss(best.loss if best else None), f"nats per token, {best.title}" if best else "", ""),
        ("against", numbers.loss(rival.loss if rival else None), rival.title if rival else "no other run", ""),
        (
            "transfer",
            numbers.delta(-gain) if gain is not None else numbers.NONE,
            told if gain is not None else "a run is missing",
            tables.verdict(gain) if gain is not None and abs(gain) > (noise or 0.0) else "",
        ),
        (
            "cost",
            numbers.seconds(demo.seconds),
            f"in all, {numbers.seconds(tune)} of it tuning" if tune else "in all",
            "",
        ),
    )
    made.section(
        "The runs",
        "One model, one corpus, one number of tokens; only the hyperparameters differ.",
        tables.runs_table(demo),
    )
    if runs:
        _curves(made, runs)
    if demo.study:
        _searched(made, demo.study)
    target = demo.target or (mine.run.recipe if mine and mine.run else None)
    if target:
        proxy = (demo.study.best_recipe if demo.study else None) or at_base(target)
        _parameters(made, target, proxy, ("base", "target"))
        made.section("Where every value comes from", "The reasons written into the recipe by whichever verb chose the value.",
                     tables.provenance(target))  # fmt: skip
    if demo.parts:
        made.section("Time", f"{numbers.seconds(demo.seconds)} in all.", tables.parts_table(demo.parts))
    if demo.corpus or demo.machine:
        columns = [
            element("div", element("h2", title), content)
            for title, content in (
                ("Text", tables.corpus(demo.corpus) if demo.corpus else None),
                ("Machine", tables.machine(demo.machine) if demo.machine else None),
            )
            if content
        ]
        made.sections.append(element("section", *columns, class_="columns"))
    _commands(made, demo_commands(demo))
    return join(element("p", demo.verdict, class_="verdict"), head)


def _word(gain: float | None, noise: float | None) -> str:
    if gain is None or abs(gain) <= (noise or 0.0):
        return "no more than noise"
    return "better" if gain > 0 else "worse"


def _study(made: _Page, study: Study) -> Html:
    best, complete = study.best, study.count("complete")
    first = next((trial.loss for trial in study.trials if trial.loss is not None), None)
    gain = first - best.loss if best and first is not None else None
    searched = f"{len(study.space)} hyperparameters" if len(study.space) != 1 else "one hyperparameter"
    verdict = (
        f"Trial {best.number} is the best of {len(study.trials)}: {numbers.loss(best.loss)} nats per token, "
        f"{searched} searched by {study.method or 'hand'}."
        if best
        else f"None of {len(study.trials)} trials has completed yet; {searched} are searched."
    )
    interval = best.interval if best else None
    lost = [f"{study.count(state)} {state}" for state in ("diverged", "failed", "running") if study.count(state)]
    head = _numbers(
        (
            "best loss",
            numbers.loss(best.loss if best else None),
            f"nats per token, {numbers.loss(interval[0])} to {numbers.loss(interval[1])}"
            if interval
            else "nats per token",
            "",
        ),
        (
            "against the first trial",
            numbers.delta(-gain) if gain is not None else numbers.NONE,
            "nats",
            tables.verdict(gain),
        ),
        ("trials", str(complete), f"complete; {', '.join(lost)}" if lost else "all complete", ""),
        ("cost", numbers.seconds(study.seconds), "added up over workers", ""),
    )
    _searched(made, study)
    chosen = study.best_recipe or study.centre
    _parameters(made, chosen, study.centre if study.best_recipe else None, ("centre", "best"))
    made.section("Where every value comes from", "The reasons written into the recipe by whichever verb chose the value.",
                 tables.provenance(chosen))  # fmt: skip
    tune = f"leaven tune centre.toml --study . --trials {len(study.trials)}"
    _commands(
        made,
        [f"{tune} --method {shlex.quote(study.method)}" if study.method else tune, "leaven report . -o report.html"],
    )
    return join(element("p", verdict, class_="verdict"), head)


def _run(made: _Page, run: Run) -> Html:
    first = next((step.loss for step in run.steps if step.loss is not None), None)
    loss = run.loss if run.loss is not None else run.steps[-1].loss
    kind = "validation" if run.loss is not None else "training"
    verdict = (
        f"{'Finished' if run.finished else 'Not finished'}: after {numbers.quantity(run.tokens)} of "
        f"{numbers.quantity(run.recipe.data.tokens)} tokens the {kind} loss is {numbers.loss(loss)} nats per token."
    )
    head = _numbers(
        (f"{kind} loss", numbers.loss(loss), "nats per token", ""),
        ("against the first step", numbers.loss(first), "nats per token", ""),
        ("speed", numbers.quantity(run.tokens_per_second), "tokens/s, median over steps", ""),
        ("cost", numbers.seconds(run.seconds), f"{numbers.quantity(len(run.steps))} steps", ""),
    )
    _curves(made, [run])
    _parameters(made, run.recipe, at_base(run.recipe), ("base", "target"))
    made.section("Where every value comes from", "The reasons written into the recipe by whichever verb chose the value.",
                 tables.provenance(run.recipe))  # fmt: skip
    _commands(made, ["leaven train recipe.toml --run .", "leaven report . -o report.html"])
    return join(element("p", verdict, class_="verdict"), head)


def _curves(made: _Page, runs: list[Run]) -> None:
    legend = tables.legend(runs) if len(runs) > 1 else None
    made.section(
        "Loss over tokens",
        "Lines are the training loss, smoothed; faint behind them every step; dots are the validation loss.",
        legend,
        made.chart("loss", figures.loss(runs), "loss over tokens of all runs", "tall"),
    )
    gradient = figures.gradient(runs)
    closer = element(
        "div",
        element("h3", "The second half, closer"),
        element("p", "The same losses where they differ by hundredths.", class_="told"),
        made.chart("last", figures.last_stretch(runs), "loss in the second half of the runs"),
    )
    norm = gradient and element(
        "div",
        element("h3", "Gradient norm"),
        element("p", "Smoothed; a rise late in a run is an early sign of divergence.", class_="told"),
        made.chart("gradient", gradient, "gradient norm over tokens"),
    )
    made.sections.append(element("section", closer, norm, class_="pair"))
    made.section(
        "Learning rate and batch over tokens",
        "Both are functions of tokens, not of steps: the schedule does not move when the batch does.",
        made.chart("schedule", figures.schedule(runs), "learning rate and batch over tokens", "tall"),
    )


def _searched(made: _Page, study: Study) -> None:
    noise = (
        f" The band is the noise floor, ±{study.noise_floor:.4f} nats: inside it trials are equal."
        if study.noise_floor
        else ""
    )
    lost = study.count("diverged")
    crosses = f" Crosses at the top edge are the {lost} that diverged." if lost else ""
    made.section(
        "The search",
        f"{len(study.trials)} trials in the order they began; the line is the best so far.{crosses}{noise}",
        made.chart("search", searches.search(study), "loss of every trial"),
    )
    panels = []
    for i, path in enumerate(study.space):
        chart = searches.by_value(study, path)
        if chart is not None:
            short = searches.short(path)
            best = next(
                (
                    trial.values.get(path)
                    for trial in study.trials
                    if study.best and trial.number == study.best.number
                ),
                None,
            )
            panels.append(
                element(
                    "figure",
                    element(
                        "figcaption",
                        element("b", short),
                        element("span", f"best {numbers.value(best)}") if isinstance(best, int | float) else None,
                    ),
                    made.chart(f"value-{i}", chart, f"loss over {short}", "small"),
                )
            )
    if panels:
        made.section(
            "Loss over each hyperparameter",
            "Every trial in each panel: loss in nats per token upwards, the value sideways on a logarithmic axis, "
            "the best one marked. A valley says that the value matters, a cloud that it does not.",
            element("div", *panels, class_="panels"),
        )


def _parameters(made: _Page, recipe: Recipe, beside: Recipe | None, names: tuple[str, str]) -> None:
    table, base = resolved(recipe, beside)
    made.section(
        "The network",
        "Every weight has a learning rate of its own: the base value times the scaling rule, the module's multiplier and "
        "the depth's.",
        picture(recipe, table),
    )
    at = table.ratios
    scale = (
        f"From {names[0]} to {names[1]}: width ×{at.width:g}, depth ×{at.depth:g}, batch ×{at.batch:g}, tokens ×{at.tokens:.3g}, "
        f"moved by {table.rule.name} ({table.rule.source}). "
        if (at.width, at.depth, at.batch, at.tokens) != (1, 1, 1, 1)
        else ""
    )
    made.section(
        "What every parameter gets",
        f"{scale}Point at a value for the reason; a column's head sorts by it.",
        tables.parameter_table(recipe, table, base, names),
        class_="broad",
    )


def demo_commands(demo: Demo) -> list[str]:
    """What ``leaven demo`` does, by hand, in the demo's folder."""
    lines = ["leaven demo", ""]
    study, target = demo.study, demo.target
    if study and target:
        lines += [
            shlex.join(["leaven", "tune", f"{demo.study_folder}/centre.toml", "--study", demo.study_folder])
            + f" --trials {len(study.trials)}"
            + (f" --method {shlex.quote(study.method)}" if study.method else ""),
            shlex.join(["leaven", "transfer", f"{demo.study_folder}/best.toml"])
            + f" --width {target.model.d_model} --depth {target.model.n_layers} --batch-tokens {target.batch.tokens} "
            + f"--tokens {target.data.tokens} -o {shlex.quote(demo.target_path)}",
        ]
    for arm in demo.arms:
        recipe = demo.target_path if arm.key == "transferred" and target else f"{arm.folder}/recipe.toml"
        lines.append(shlex.join(["leaven", "train", recipe, "--run", arm.folder]))
    return [*lines, "leaven report . -o report.html"]


def _commands(made: _Page, lines: list[str]) -> None:
    code = element("pre", element("code", "\n".join(lines)), class_="scroll", tabindex="0")
    made.section(
        "The commands that made it", "From inside the folder; below a demo's own line, the same step by step.", code
    )
