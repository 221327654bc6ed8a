"""leaven check memory RECIPE"""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, load
from leaven.cli._screens import CountScreen
from leaven.recipe.units import format_seconds


def memory(
    recipe: RecipeArgument,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="e.g. tp=8,pp=12,dp=4,zero=1,mbs=2,recompute=full (the recipe's own).",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, help="This one, also several times (one of the first, second and last stage)."),
    ] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="One rank of every stage.")] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Is the memory that is planned what a rank takes?

    The model, its layout, the optimiser and two steps are those of a training, of any number of ranks, on one
    processor and without their memory: tensors have shapes and no values. What stays between steps may
    be 2% off, the peak 5%.
    """
    from leaven.verification.memory import check_memory, looked_at, rehearsal, with_layout

    laid_out = load(recipe, overrides)
    if layout is not None:
        laid_out = with_layout(laid_out, layout)
    rehearsed = rehearsal(laid_out)
    wanted = looked_at(rehearsed.how.layout, ranks, all_stages)
    with CountScreen("ranks") as screen:
        screen.row(f"{rehearsed.how} · rank {', '.join(map(str, wanted))} of {rehearsed.how.layout.ranks}")
        check = check_memory(rehearsed, wanted, screen.update)
    if json_output:
        emit_json(check.document())
    else:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for head in ("rank", "stage", "part", "planned", "dry run", "GiB off", "verdict"):
            table.add_column(head, justify="left" if head in {"part", "verdict"} else "right", no_wrap=True)
        for row in check.rows:
            judged = row.passed is not None
            told = Text("")
            if row.passed is not None:
                word, colour = ("within", "green") if row.passed else ("FAILED: over", "red")
                told = Text(f"{word} {row.limit:.0%}", colour)
            off = f"{row.error:+.1%}" if judged and row.error is not None else f"{row.planned_gib - row.dry_gib:+.3f}"
            table.add_row(
                *(str(row.rank), str(row.stage)) if row.part == check.rows[0].part else ("", ""),
                row.part if judged else f"  {row.part}",
                f"{row.planned_gib:.3f}",
                f"{row.dry_gib:.3f}",
                off,
                told,
                style="" if judged else "dim",
            )
        console.print(table)
        judged_rows = [row for row in check.rows if row.passed is not None]
        failed = sum(row.passed is False for row in judged_rows)
        said = f"FAILED: {failed} of" if failed else f"passed: {len(judged_rows)} of"
        console.print(f"{said} {len(judged_rows)} lines, {format_seconds(check.seconds)}")
    if not check.passed:
        raise typer.Exit(1)
