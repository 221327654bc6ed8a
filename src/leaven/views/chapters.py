"""The chapters that pages share: a sheet of sections, and the charts and tables that go on it."""

import shlex
from dataclasses import dataclass, field
from typing import Any

from leaven.recipe.recipe import Recipe, split_path
from leaven.views import figures, numbers, tables
from leaven.views.html import Html, element
from leaven.views.multipliers import acts
from leaven.views.network import picture
from leaven.views.parameters import tables as resolved
from leaven.views.story import Demo, Run, Study


@dataclass
class Sheet:
    """Sections in order, and the figures that their chart boxes name."""

    charts: dict[str, Any] = field(default_factory=dict)
    sections: list[Html] = field(default_factory=list)

    def chart(self, name: str, figure: Any, label: str, size: str = "wide", height: int | None = None) -> Html:
        """The box of a chart; a ``height`` in pixels is for those that have as many rows as there is to show."""
        self.charts[name] = figure.to_plotly_json()
        style = f"height:{height}px" if height else None
        return element("div", id=f"chart-{name}", class_=f"chart {size}", style=style, role="img", aria_label=label)

    def section(self, title: str, told: str | None, *content: Any, class_: str | None = None) -> None:
        lead = element("p", told, class_="told") if told else None
        self.sections.append(element("section", element("h2", title), lead, *content, class_=class_))


def curves(made: Sheet, runs: list[Run]) -> None:
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
        element("p", "The same losses, where the curves have flattened.", class_="told"),
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
    noise(made, runs)


def noise(made: Sheet, runs: list[Run]) -> None:
    """The gradient noise scale against the batch, where a run has measured it."""
    chart = figures.noise_scale(runs)
    if chart is None:
        return
    made.section(
        "Gradient noise scale",
        "The batch at which noise and signal of the gradient are equal (McCandlish et al. 2018), beside the batch, "
        "dotted. Far below it a larger batch saves steps at no cost in tokens; above it, it saves few.",
        made.chart("noise", chart, "gradient noise scale and batch over tokens"),
    )


def returns(made: Sheet, run: Run) -> None:
    """Where the run went back, if it did; the curves show what it came to in the end."""
    if not run.returns:
        return
    pairs = []
    for back in run.returns:
        said = f"{back.why}: rolled" if back.event == "rollback" and back.why else "by hand: taken"
        skipped = numbers.quantity(back.skip_to - back.skip_from)
        said += f" back to {numbers.quantity(back.to_tokens)} tokens, leaving out {skipped} tokens of the data"
        pairs.append((f"{numbers.quantity(back.tokens)} tokens", said))
    count = sum(back.event == "rollback" for back in run.returns)
    told = (
        f"{count} of {len(pairs)} by itself. The curves show what was trained in the end; what was undone is in "
        "events.jsonl, with the numbers."
    )
    made.section("Where the run went back", told, tables.facts(pairs))


def parameters(made: Sheet, recipe: Recipe, beside: Recipe | None, names: tuple[str, str]) -> None:
    table, base = resolved(recipe, beside)
    made.section(
        "The network",
        "Every weight has a learning rate of its own: the base value times the scaling rule, the module's multiplier "
        "and the depth's.",
        picture(recipe, table),
    )
    at = table.ratios
    scale = (
        f"From {names[0]} to {names[1]}: width ×{at.width:g}, depth ×{at.depth:g}, batch ×{at.batch:g}, "
        f"tokens ×{at.tokens:.3g}, moved by {table.rule.name} ({table.rule.source}). "
        if (at.width, at.depth, at.batch, at.tokens) != (1, 1, 1, 1)
        else ""
    )
    made.section(
        "What every parameter gets",
        f"{scale}Point at a value for the reason; a column's head sorts by it.",
        tables.parameter_table(recipe, table, base, names),
        class_="broad",
    )


def tune_command(study: Study, recipe: str, folder: str) -> str:
    """What made a study: with another space, method or more trials it would be another, or go on."""
    counted = str(max(study.ended, 1))
    options = ["--study", folder, "--trials", counted, "--method", study.method, "--space", _space(study)]
    if study.durations:
        options += ["--durations", ",".join(map(str, study.durations))]
    return shlex.join(["leaven", "tune", recipe, *options])


def _space(study: Study) -> str:
    """What was searched as ``--space`` takes it: a quantity of all modules that have it as one pattern."""
    recipe, searched = study.centre, set(study.space)
    names = dict[str, None]()
    for path in study.space:
        *outer, quantity = split_path(path)
        every = {f"hyperparameters.modules.{m}.{quantity}" for m in recipe.model.modules if acts(recipe, m, quantity)}
        whole = len(outer) == 3 and every <= searched
        names[f"hyperparameters.modules.*.{quantity}" if whole else path] = None
    return ",".join(names)


def demo_commands(demo: Demo) -> list[str]:
    """What ``leaven demo`` does, by hand, in the demo's folder."""
    lines = [demo.command, ""]
    study, target = demo.study, demo.target
    if study and target:
        lines += [
            tune_command(study, f"{demo.study_folder}/centre.toml", demo.study_folder),
            shlex.join(["leaven", "transfer", f"{demo.study_folder}/best.toml"])
            + f" --width {target.model.d_model} --depth {target.model.n_layers} --batch-tokens {target.batch.tokens} "
            + f"--tokens {target.data.tokens} -o {shlex.quote(demo.target_path)} --force",
        ]
    for arm in demo.arms:
        recipe = demo.target_path if arm.key == "transferred" and target else f"{arm.folder}/recipe.toml"
        lines.append(shlex.join(["leaven", "train", recipe, "--run", arm.folder]))
    return [*lines, "leaven report . -o report.html"]


def commands(made: Sheet, lines: list[str]) -> None:
    code = element("pre", element("code", "\n".join(lines)), class_="scroll", tabindex="0")
    made.section(
        "The commands that made it", "From inside the folder; below a demo's own line, the same step by step.", code
    )


def provenance(made: Sheet, recipe: Recipe) -> None:
    made.section(
        "Where every value comes from",
        "The reasons written into the recipe by whichever verb chose the value.",
        tables.provenance(recipe),
    )
