"""One self-contained HTML page about a run, a study, a check or a demo."""

from pathlib import Path

from leaven.recipe.files import write_text
from leaven.views import chapters, checks, figures, numbers, study, tables
from leaven.views.folders import CheckFile, read_story
from leaven.views.html import Html, element, join
from leaven.views.parameters import at_base
from leaven.views.shell import document
from leaven.views.story import Demo, Run, Story, Study


def write_page(folder: Path, out: Path) -> Path:
    """The report on what a folder holds, as one HTML file.

    Raises:
        InputError: if the folder holds nothing to report on, plotly is missing, or the file cannot be written.
    """
    figures.plotly()
    write_text(out, page(read_story(folder)))
    return out


def page(story: Story | CheckFile) -> str:
    """The HTML of a story."""
    if isinstance(story, CheckFile):
        return checks.page(story.model_dump())
    made = chapters.Sheet()
    if isinstance(story, Demo):
        kind, head = "demo", _demo(made, story)
    elif isinstance(story, Study):
        kind, head = "study", study.head(made, story)
    else:
        kind, head = "run", _run(made, story)
    name = story.title if isinstance(story, Run) else story.name
    header = element("header", element("p", f"leaven · {kind}", class_="kicker"), element("h1", name), head)
    body = element("main", header, *made.sections)
    return document(f"{name} · leaven {kind}", body, made.charts)


def _demo(made: chapters.Sheet, demo: Demo) -> Html:
    runs = [arm.run for arm in demo.arms if arm.run]
    mine, rival, gain = demo.transferred, demo.rival, demo.gain
    shown = mine if mine and mine.loss is not None else rival
    tune = next((part.seconds for part in demo.parts if part.name == "tune"), None)
    noise = demo.study.noise_floor if demo.study else None
    told = f"nats, {_word(gain, noise)}" + (f" (noise of the proxy ±{noise:.4f})" if noise else "")
    head = tables.four(
        ("loss", numbers.loss(shown.loss if shown else None), f"nats per token, {shown.title}" if shown else "", ""),
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
        "One model, one corpus, one number of tokens; only the hyperparameters and how they move with scale differ.",
        tables.runs_table(demo),
    )
    if runs:
        chapters.curves(made, runs)
    if demo.study:
        study.searched(made, demo.study)
    target = demo.target or (mine.run.recipe if mine and mine.run else None)
    if target:
        proxy = (demo.study.best_recipe if demo.study else None) or at_base(target)
        chapters.parameters(made, target, proxy, ("base", "target"))
        chapters.provenance(made, target)
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
    chapters.commands(made, chapters.demo_commands(demo))
    return join(element("p", demo.verdict, class_="verdict"), head)


def _word(gain: float | None, noise: float | None) -> str:
    if gain is None or abs(gain) <= (noise or 0.0):
        return "no more than noise"
    return "better" if gain > 0 else "worse"


def _run(made: chapters.Sheet, run: Run) -> Html:
    first = next((step.loss for step in run.steps if step.loss is not None), None)
    loss = run.loss if run.loss is not None else run.steps[-1].loss
    kind = "validation" if run.loss is not None else "training"
    of = "" if run.finished else f" of {numbers.quantity(run.recipe.data.tokens)}"
    state = "Finished" if run.finished else f"Stopped ({run.stopped})" if run.stopped else "Not finished"
    where = f"after {numbers.quantity(run.tokens)}{of} tokens"
    verdict = f"{state}: {where} the {kind} loss is {numbers.loss(loss)} nats per token."
    head = tables.four(
        (f"{kind} loss", numbers.loss(loss), "nats per token", ""),
        ("against the first step", numbers.loss(first), "nats per token", ""),
        ("speed", numbers.quantity(run.tokens_per_second), "tokens/s, median over steps", ""),
        ("cost", numbers.seconds(run.seconds), f"{numbers.quantity(len(run.steps))} steps", ""),
    )
    chapters.curves(made, [run])
    chapters.returns(made, run)
    chapters.parameters(made, run.recipe, at_base(run.recipe), ("base", "target"))
    chapters.provenance(made, run.recipe)
    chapters.commands(made, ["leaven train recipe.toml --run .", "leaven report . -o report.html"])
    return join(element("p", verdict, class_="verdict"), head)
