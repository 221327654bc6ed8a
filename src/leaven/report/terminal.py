"""Tables and summaries for the terminal; the verbs print what these return."""

from pathlib import Path

from rich.table import Table

from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.report import numbers
from leaven.report.folders import read_demo
from leaven.report.parameters import groups
from leaven.report.story import Demo
from leaven.scaling.table import ParameterTable


def parameter_table(table: ParameterTable, recipe: Recipe) -> Table:
    """The resolved parameter table, neighbouring layers with equal values as one line.

    ``lr`` is a parameter's own peak, ``decay`` is per step and lr, both as the optimiser gets them.
    """
    at, model = table.ratios, recipe.model
    made = Table(
        title=f"{recipe.name}: {format_quantity(model.params)} parameters, {table.rule.name}, "
        f"width x{at.width:g} depth x{at.depth:g} batch x{at.batch:g} tokens x{at.tokens:.3g} of the base",
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    made.add_column("module", no_wrap=True)
    made.add_column("layers", no_wrap=True)
    made.add_column("shape\n(out, in)", no_wrap=True)
    made.add_column("role", no_wrap=True)
    for name in (
        "init std",
        "peak lr\n(a step)",
        "weight decay\n(x lr)",
        "beta1",
        "beta2",
        "eps",
        "multiplier\n(forward)",
    ):
        made.add_column(name, justify="right", no_wrap=True)
    for group in groups(table):
        row = group.row
        made.add_row(
            group.label,
            group.layers,
            " x ".join(map(str, row.shape)),
            str(row.role).replace("_", " "),
            *(
                numbers.value(quantity)
                for quantity in (
                    row.init_std,
                    row.lr,
                    row.weight_decay,
                    row.beta1,
                    row.beta2,
                    row.eps,
                    row.multiplier,
                )
            ),
        )
    return made


def demo_summary(folder: Path, report: Path | None = None) -> list[str]:
    """At most ten lines on a demo: what came out, what it cost, where to read on.

    ``report`` is the page's path, report.html in the folder if none is given and it is there.

    Raises:
        InputError: if the folder holds no demo.
    """
    demo = read_demo(folder)
    lines = [demo.verdict, *_losses(demo)]
    if demo.parts:
        parts = " · ".join(f"{part.name} {format_seconds(part.seconds)}" for part in demo.parts)
        lines.append(f"time         {format_seconds(demo.seconds)}: {parts}")
    if demo.corpus:
        text = demo.corpus
        lines.append(
            f"text         {text.source}: {numbers.text_size(text.bytes, text.documents)}, "
            f"{format_quantity(text.train_tokens)} tokens to train on, vocabulary {text.vocab_size:,}"
        )
    lines += _scales(demo)
    report = report or next(iter(folder.glob("report.html")), None)
    if report:
        lines.append(f"report       {report}")
    return lines[:10]


def _losses(demo: Demo) -> list[str]:
    mine = demo.transferred.loss if demo.transferred else None
    lines: list[str] = []
    width = max([12, *(len(arm.title) for arm in demo.arms)])
    for arm in demo.arms:
        loss = "no run     " if arm.loss is None else f"{arm.loss:.4f}"
        behind = ""
        if arm.key != "transferred" and arm.loss is not None and mine is not None:
            behind = f"{arm.loss - mine:+.4f}"
        unit = "nats per token" if not lines else ""
        lines.append(f"{arm.title:<{width}} {loss}  {behind:<8}{unit}".rstrip())
    return lines


def _scales(demo: Demo) -> list[str]:
    if demo.target is None:
        return []
    proxy = demo.study.centre if demo.study else None
    large = demo.target
    small = proxy or large
    moved = (
        f"{format_quantity(small.model.params)} -> {format_quantity(large.model.params)} parameters",
        f"width {small.model.d_model} -> {large.model.d_model}",
        f"depth {small.model.n_layers} -> {large.model.n_layers}",
        f"batch {format_quantity(small.batch.tokens)} -> {format_quantity(large.batch.tokens)}",
        f"tokens {format_quantity(small.data.tokens)} -> {format_quantity(large.data.tokens)}",
    )
    return [f"scale        {' · '.join(moved)}"]
