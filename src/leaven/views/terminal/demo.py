"""Show ``leaven demo`` in the terminal: what it will train, and the result."""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType

from leaven.documents.runs import DemoDocument
from leaven.recipe.units import format_quantity, format_seconds
from leaven.views.demo import RULES, cost, headline, loss_table, seed_table
from leaven.views.tables import Facts


def demo_plan(
    demo: DemoDocument, runs: int, seconds: Mapping[str, float], most_seconds: float | None
) -> Iterator[str]:
    """Yield lines about what a demo will train, and how long each size of the demo takes on this machine.

    ``most_seconds`` is the time limit by which leaven chose the size, or None if the user chose the size.
    """
    base, *wider = (model.width for model in demo.models)
    copied, moved = RULES
    yield "Is the best learning rate of a small model also the best for a wider model?"
    lrs = f"{len(demo.lrs)} learning rates from {demo.lrs[0]:g} to {demo.lrs[-1]:g}"
    yield (
        f"1  train width {base} with {lrs}, and widths {', '.join(map(str, wider))} twice: with the values of "
        f"width {base} copied (rule {copied}), and moved by the rule {moved}"
    )
    yield (
        f"2  train width {wider[-1]} with the best learning rate of width {base}, copied and moved, with "
        f"{demo.seeds} seeds"
    )
    about = {name: f"about {format_seconds(each)}" for name, each in seconds.items()}
    others = ", ".join(f"--size {name} {text}" for name, text in about.items() if name != demo.size)
    yield (
        f"{runs} runs of {format_quantity(demo.tokens)} tokens of {demo.source}: {about[demo.size]} here with "
        f"{demo.processes} processes (size {demo.size}; {others})"
    )
    if most_seconds is not None and demo.size != next(iter(seconds)):
        yield f"size {demo.size} because the full size takes more than {format_seconds(most_seconds)} here"


def demo_summary(demo: DemoDocument) -> Iterator[RenderableType]:
    """Yield a table of the loss over the lr, a table of the runs with several seeds, the result and the cost."""
    yield "loss, nats per token (*: the lowest loss of a row)"
    yield loss_table(demo)
    yield ""
    yield seed_table(demo)
    yield ""
    yield from headline(demo)
    time = f"{format_seconds(demo.seconds)} with {demo.processes} processes"
    yield Facts([("time", [time, f"training {format_seconds(cost(demo))}"]), ("page", [demo.report or ""])])
