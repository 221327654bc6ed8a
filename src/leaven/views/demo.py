"""Show ``leaven demo`` in the terminal, as sentences and tables, and as an HTML page."""

import statistics
from collections.abc import Iterator
from itertools import product

from rich.console import RenderableType

from leaven.documents.runs import DemoDocument
from leaven.errors import InputError
from leaven.recipe.units import format_quantity, format_seconds
from leaven.views import charts, numbers
from leaven.views.charts import INK, MUTED, Figure
from leaven.views.render import render
from leaven.views.tables import Column, Facts, Table

# The scaling rules of the demo, and what each does with the hyperparameters of the base (the smallest width).
RULES = {"standard": "copied unchanged", "complete-d-p": "moved by the rule"}
ABOVE = 0.75  # nats; the charts show losses up to this much above the lowest loss
COMMANDS = (  # for a model of the user's own, after the demo
    "leaven new mine.toml --params 1B --tokens 20B",
    "leaven tune mine-proxy.toml --study studies/mine --trials 32",
    "leaven transfer studies/mine/best.toml --like mine.toml -o mine-tuned.toml",
    "leaven train mine-tuned.toml --run runs/mine-tuned",
)


def curves(demo: DemoDocument) -> dict[tuple[str, int], dict[float, float]]:
    """Return {lr: loss} by (rule, width): at the base, the mean over seeds, and else the loss of the first seed."""
    base = demo.models[0].width
    return {
        (rule, width): {
            lr: statistics.fmean(losses if width == base else losses[:1])
            for lr, losses in demo.losses(rule, width).items()
        }
        for rule, width in product(RULES, (model.width for model in demo.models))
    }


def best(curve: dict[float, float]) -> float:
    return min(curve, key=lambda lr: curve[lr])


def headline(demo: DemoDocument) -> Iterator[str]:
    result, base = demo.result, demo.models[0].width
    if result is None:
        yield "The demo has not finished; run the same command again to resume."
        return
    where = f"At {result.width / base:g} times the width, the loss with the small model's values moved by the rule is"
    ends = f"(95% interval {result.low:.3f} to {result.high:.3f}, {len(result.moved)} seeds)"
    if result.low > 0:
        yield f"{where} {result.difference:.3f} nats lower than with these values copied {ends}."
    elif result.high < 0:
        yield f"{where} {-result.difference:.3f} nats HIGHER than with these values copied {ends}."
    else:
        same = "within noise, the same as with these values copied"
        yield f"{where}, {same}: {result.difference:.3f} nats lower {ends}."
    drawn = curves(demo)
    first = best(drawn["standard", base])
    copied, moved = (_change(first, best(drawn[rule, result.width]), demo.lrs) for rule in RULES)
    yield f"The best learning rate {copied} with copied values, and {moved} with moved values."


def _change(first: float, last: float, lrs: list[float]) -> str:
    """Return the change of the best lr, such as ``goes from 0.016 to 0.002 or less`` if 0.002 is the lowest tried."""
    beyond = " or less" if last == lrs[0] else " or more" if last == lrs[-1] else ""
    return f"stays at {first:g}" if first == last else f"goes from {first:g} to {last:g}{beyond}"


def loss_table(demo: DemoDocument) -> Table:
    """Return a table of the losses at each lr, with a row for each width and rule. A star marks the lowest."""
    base, drawn = demo.models[0].width, curves(demo)
    rows = []
    for (rule, width), curve in drawn.items():
        if width == base and rule != "standard":
            continue
        lowest = best(curve)
        name = f"the base, {demo.seeds} seeds" if width == base else RULES[rule]
        cells = [f"{curve[lr]:.3f}{'*' if lr == lowest else ' '}" for lr in demo.lrs]
        rows.append([str(width), name, *cells])
    heads = [Column("width"), Column("values", align="left"), *(Column(f"lr {lr:g} ") for lr in demo.lrs)]
    return Table(heads, rows)


def seed_table(demo: DemoDocument) -> Table:
    """Return a table of a finished demo: losses of its smallest and largest model, with a column for each seed."""
    result, base = demo.result, demo.models[0].width
    assert result is not None, "the demo has ended"
    lines = [
        (base, "the base", result.base),
        (result.width, RULES["standard"], result.copied),
        (result.width, RULES["complete-d-p"], result.moved),
    ]
    params = {model.width: model.params for model in demo.models}
    columns = [
        Column("width"),
        Column("parameters"),
        Column(f"values at lr {result.lr:g}", align="left"),
        *(Column(f"seed {seed}") for seed in range(len(result.moved))),
        Column("mean"),
        Column("against the base"),
    ]
    mean = statistics.fmean(result.base)
    rows = [
        [
            str(width),
            f"{params[width]:,}",
            name,
            *(f"{loss:.3f}" for loss in losses),
            f"{statistics.fmean(losses):.3f}",
            "" if name == "the base" else numbers.fixed(statistics.fmean(losses) - mean, 3, "+"),
        ]
        for width, name, losses in lines
    ]
    return Table(columns, rows)


def cost(demo: DemoDocument) -> float:
    return sum(run.seconds for run in demo.runs)


def demo_plan(demo: DemoDocument, runs: int) -> Iterator[str]:
    """Yield lines that describe the training runs of a demo. ``runs`` is their number."""
    base, *wider = (model.width for model in demo.models)
    copied, moved = RULES
    yield "Is the best learning rate of a small model also the best for a wider model?"
    lrs = f"{len(demo.lrs)} learning rates from {demo.lrs[0]:g} to {demo.lrs[-1]:g}"
    yield (
        f"1  train width {base} with {lrs}; then train widths {', '.join(map(str, wider))} twice: with the "
        f"hyperparameters of width {base} copied (rule {copied}), and with these moved by the rule {moved}"
    )
    yield (
        f"2  train width {wider[-1]} with the best learning rate of width {base}, once copied and once moved, with "
        f"{demo.seeds} seeds each"
    )
    shorter = "; leaven demo --quick --run runs/quick takes about a third of the time" if demo.size == "full" else ""
    yield (
        f"{runs} runs of {format_quantity(demo.tokens)} tokens of {demo.source} with {demo.processes} processes "
        f"(size {demo.size}{shorter})"
    )


def demo_summary(demo: DemoDocument) -> Iterator[RenderableType]:
    """Yield the loss tables, the result and the time of a finished demo, and the path of the HTML page."""
    yield "loss, nats per token (*: the lowest loss of a row)"
    yield loss_table(demo)
    yield ""
    yield seed_table(demo)
    yield ""
    yield from headline(demo)
    time = f"{format_seconds(demo.seconds)} with {demo.processes} processes"
    yield Facts(("time", [time, f"training {format_seconds(cost(demo))}"]), ("page", demo.report or ""))


def demo_page(demo: DemoDocument) -> str:
    """Return the page of a demo as HTML. Raise InputError if the demo has not finished."""
    if demo.result is None:
        raise InputError("the demo has not finished; run the same leaven demo again to resume it")
    return render(
        "demo.html.j2",
        {rule: _losses(demo, rule) for rule in RULES},
        kind="demo",
        title="Does the learning rate transfer?",
        demo=demo,
        result=demo.result,
        headline=list(headline(demo)),
        legend=[(f"width {model.width}", _colour(n), f"{model.width}", "") for n, model in enumerate(demo.models)],
        rules=RULES,
        losses=loss_table(demo),
        seeds=seed_table(demo),
        training=cost(demo),
        above=ABOVE,
        commands=COMMANDS,
    )


def _losses(demo: DemoDocument, rule: str) -> Figure:
    drawn = curves(demo)
    lowest = min(min(curve.values()) for curve in drawn.values())
    start = best(drawn[rule, demo.models[0].width])
    traces = []
    for n, model in enumerate(demo.models):
        curve, colour, group = drawn[rule, model.width], _colour(n), str(model.width)
        texts = [f"<b>width {model.width}</b><br>{loss:.3f} at lr {lr:g}" for lr, loss in curve.items()]
        at, diamond = best(curve), {"symbol": "diamond"}
        traces += [
            charts.line(curve.items(), colour, size=6, hovertext=texts, legendgroup=group),
            charts.dots([(at, curve[at])], colour, 13, marker=diamond, legendgroup=group),
        ]
    x = charts.log_axis(demo.lrs[0], demo.lrs[-1], numbers.value, pad=0.06)
    x |= {"tickvals": demo.lrs, "ticktext": [f"{lr:g}" for lr in demo.lrs]}
    y = charts.linear_axis(lowest, lowest + ABOVE, "{:.1f}".format, pad=0.08)
    line_at = charts.mark_line("x", start, MUTED)
    return charts.figure("learning rate of the recipe", "loss, nats per token", traces, x=x, y=y, shapes=[line_at])


def _colour(number: int) -> str:
    return charts.hue(number - 1) if number else INK
