"""Render the page of a demo: the loss over the learning rate, the result for each seed, and the next commands."""

from leaven.documents.runs import DemoDocument
from leaven.recipe.errors import InputError
from leaven.views import charts, numbers
from leaven.views.charts import INK, MUTED, Figure
from leaven.views.demo import RULES, best, cost, curves, headline, loss_table, seed_table
from leaven.views.render import render

ABOVE = 0.75  # nats above the lowest loss that the charts show
COMMANDS = (
    "leaven new mine.toml --params 1B --tokens 20B",
    "leaven tune mine-proxy.toml --study studies/mine --trials 32",
    "leaven transfer studies/mine/best.toml --like mine.toml -o mine-tuned.toml",
    "leaven train mine-tuned.toml --run runs/mine",
)


def demo_page(demo: DemoDocument) -> str:
    """Return the page of a finished demo as HTML."""
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
    """Draw the loss over the lr for one rule. Each width has a line, with a diamond at the lowest point of the
    line."""
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
