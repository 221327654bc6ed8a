"""leaven laws: what every empirical law says of a run."""

from dataclasses import asdict
from typing import Annotated

from rich.table import Table

from leaven.catalogue.laws import evaluate
from leaven.cli._common import JsonOption, console, count_option, emit_json
from leaven.recipe.units import format_quantity


def laws(
    params: Annotated[int, count_option("Parameters, e.g. 7B.")],
    tokens: Annotated[int, count_option("Training tokens, e.g. 2T.")],
    json_output: JsonOption = False,
) -> None:
    """Learning rate and batch by every law, with its conditions, and how far it is extrapolated."""
    results = evaluate(params, tokens)
    if json_output:
        emit_json([asdict(result) for result in results])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("law", "peak lr", "batch, tokens", "fitted range", "conditions", "source"):
        table.add_column(name, overflow="fold")
    for result in results:
        batch = "-" if result.batch_tokens is None else f"{format_quantity(result.batch_tokens)} {result.batch_kind}"
        table.add_row(
            result.law,
            "-" if result.lr is None else f"{result.lr:.1e}",
            batch,
            "inside" if result.in_range else f"{result.extrapolation:.1f}x beyond",
            result.conditions,
            result.source,
        )
    console.print(table)
    lrs = [result.lr for result in results if result.lr is not None]
    batches = [result.batch_tokens for result in results if result.batch_tokens and result.batch_kind == "optimal"]
    console.print(
        f"peak lr {min(lrs):.1e} .. {max(lrs):.1e}, a spread of {max(lrs) / min(lrs):.0f}x · optimal batch "
        f"{format_quantity(min(batches))} .. {format_quantity(max(batches))} tokens: tune at small scale"
    )
