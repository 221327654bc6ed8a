"""The page of the published runs: lr, batch, tokens and init std against size, each point with its source."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leaven.catalogue.run import PublishedRun
from leaven.catalogue.runs import load_runs
from leaven.recipe.files import write_text
from leaven.views import chapters, figures, numbers
from leaven.views.catalogue_chart import BAND_FACTOR, OTHERS, group_of, hues_of, scatter
from leaven.views.catalogue_quantities import QUANTITIES, Quantity
from leaven.views.figures import MUTED
from leaven.views.html import Html, element, join
from leaven.views.shell import document
from leaven.views.tables import scroll


def write_catalogue(out: Path) -> Path:
    """The page, as one HTML file.

    Raises:
        InputError: if plotly is missing, or the file cannot be written.
    """
    figures.plotly()
    write_text(out, page(load_runs()))
    return out


def page(runs: Sequence[PublishedRun]) -> str:
    hues, made = hues_of(runs), chapters.Sheet()
    lineages = Counter(run.lineage.name for run in runs)
    (most, copies), *_ = lineages.most_common(1)
    smallest, largest = (numbers.quantity(end(run.params_total for run in runs)) for end in (min, max))
    verdict = (
        f"{len(runs)} published runs of {smallest} to {largest} parameters, in {len(lineages)} lineages: {copies} of "
        f"them took their learning rate over from {most}, and are one opinion."
    )
    kicker = element("p", "leaven · catalogue", class_="kicker")
    head = element("header", kicker, element("h1", "Published runs"), element("p", verdict, class_="verdict"))
    key = (
        "A colour is a lineage: whose learning rate a run took over; press one to hide it. A circle is a run with "
        "Adam(W), a diamond one under muP, a square one with another optimizer: their learning rates mean something "
        "else. Hollow: experts, at their total size. The band holds the middle half of the lineages, each with one "
        f"vote, at sizes within a factor of {BAND_FACTOR:g}, among the circles. Hover or tap a point for its source."
    )
    made.sections.append(element("section", element("p", key, class_="told"), _legend(runs, hues)))
    charts = [_chart(made, quantity, runs, hues) for quantity in QUANTITIES]
    for pair in (charts[:2], charts[2:]):
        made.sections.append(element("section", *pair, class_="pair even"))
    told = (
        "Every value is in leaven recipes show ID with its own source; here is that of the learning rate. How it is "
        "known: file (read there), secondary (in notes on it), paper-memory (from memory)."
    )
    made.section("All runs", told, _table(runs), class_="broad")
    return document("Published runs · leaven", element("main", head, *made.sections), made.charts)


def _legend(runs: Sequence[PublishedRun], hues: dict[str, str]) -> Html:
    count = Counter(group_of(run, hues) for run in runs)
    rest = len({run.lineage.name for run in runs} - set(hues))
    return element(
        "div",
        *(
            element(
                "button",
                element("i", class_="swatch", style=f"background:{hues.get(name, MUTED)}"),
                f"{rest} more lineages" if name == OTHERS else name,
                element("b", str(count[name])),
                type="button",
                data_group=name,
                aria_pressed="true",
            )
            for name in (*hues, OTHERS)
            if count[name]
        ),
        class_="legend",
    )


def _chart(made: chapters.Sheet, quantity: Quantity, runs: Sequence[PublishedRun], hues: dict[str, str]) -> Html:
    figure, drawn = scatter(quantity, runs, hues)
    names = [
        element("span", element("b", n), f" {line.name}{',' if n < len(drawn) else ''}")
        for n, line in enumerate(drawn, start=1)
    ]
    return element(
        "div",
        element("h3", quantity.title),
        element("p", quantity.told, class_="told"),
        made.chart(quantity.key, figure, f"{quantity.title} against size", "tall"),
        element("p", [(name, " ") for name in names], class_="told lines") if names else None,
    )


_COLUMNS = ("run", "parameters", "tokens", "peak lr", "batch", "init std", "optimizer", "lineage", "source of the lr")
_NUMBERS = range(1, 6)


def _table(runs: Sequence[PublishedRun]) -> Html:
    heads = [
        element("th", element("button", name, type="button"), scope="col", class_="number" if n in _NUMBERS else None)
        for n, name in enumerate(_COLUMNS)
    ]
    rows = [element("tr", element("th", run.id, scope="row"), *_cells(run)) for run in runs]
    return scroll(
        element(
            "table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="catalogue sortable"
        ),
        "all published runs",
    )


def _cells(run: PublishedRun) -> list[Html]:
    counts = ((run.params_total, numbers.quantity), (run.tokens, numbers.quantity), (run.peak_lr, numbers.value))
    shown = (*counts, (run.batch_tokens, numbers.quantity), (run.init_std, numbers.value))
    marked = "" if run.lr_comparable or run.peak_lr is None else "*"
    known = run.schedule.provenance("peak_lr") if run.schedule and run.peak_lr else None
    return [
        *(
            element("td", spell(value), marked if n == 2 else None, class_="number", data_v=f"{value or 0:g}")
            for n, (value, spell) in enumerate(shown)
        ),
        element("td", run.optimizer or numbers.NONE),
        element("td", run.lineage.name),
        element("td", [(linked(source), Html("<br>")) for source in known.sources], f"known from: {known.confidence}")
        if known
        else element("td", numbers.NONE),
    ]


_LINKED = re.compile(r"arXiv (\d{4}\.\d{4,5})|^([\w.-]+/[\w.-]+): ")


def linked(source: str) -> Html:
    """A source whose arXiv number or repository is a link; the page itself asks no other host for anything."""

    def anchor(found: re.Match[str]) -> Html:
        paper, repository = found.groups()
        to = f"https://arxiv.org/abs/{paper}" if paper else f"https://github.com/{repository}"
        return element("a", found.group().removesuffix(": "), href=to, rel="noreferrer")

    made: list[Any] = []
    at = 0
    for found in _LINKED.finditer(source):
        made += [source[at : found.start()], anchor(found), ": " if found.group(2) else ""]
        at = found.end()
    return join(*made, source[at:])
