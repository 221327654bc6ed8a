"""leaven plan: memory, speed, time, cost and ramp of a recipe on a cluster; or what a cluster has room for."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import _next
from leaven.cli._budget import show_budget
from leaven.cli._common import JsonOption, SetOption, console, emit_json, load
from leaven.cli._measure import HistoryOption, MeasureOption, by_measurement
from leaven.cli._plan import plan_screen
from leaven.planning.cost import parse_price
from leaven.planning.plan import plan_recipe, plan_run
from leaven.planning.ramp import SHARE
from leaven.planning.training_codes import Moments
from leaven.recipe.errors import InputError
from leaven.views.plan_page import write_plan


def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A recipe file (TOML).", show_default=False)
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="COUNTxNAME", help="The cluster, e.g. 64xH100-80GB or 8x8xA100; or cpu.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Plan this layout, e.g. tp=2,pp=4,mbs=2, not the best. "
            "Keys: dp tp pp cp ep zero mbs dp_replicate stages_per_rank schedule recompute compile. Left out, dp is "
            "what the others leave, mbs and compile are the recipe's, the rest 1, 0 or none; --explain has it at its "
            "best.",
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUE,...", help="Why not so, the rest at its best? e.g. tp=4 or pp=8,zero=1."),
    ] = None,
    share: Annotated[
        float, typer.Option(metavar="SHARE", help="Of full speed, that a batch ramp is to keep from its start.")
    ] = SHARE,
    price: Annotated[
        str | None, typer.Option(metavar="PRICE", help="Of a GPU for an hour, e.g. $2.50, for the cost in money.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", "-o", metavar="HTML", help="Write a page with pictures, too.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="CLUSTERxTIME", help="Without a RECIPE: which sizes fit, e.g. '64xH100 x 14d'."),
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(metavar="SHARE", help="With --budget: of the peak, in place of planned layouts.")
    ] = None,
    moments: Annotated[Moments, typer.Option(help="Of the optimiser to plan for; leaven trains with adam.")] = "adam",
    measure: MeasureOption = False,
    history: HistoryOption = True,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Will it fit, how fast, how long, for how much; the best layout if none is given. With --budget: what would."""
    if budget is not None:
        _alone(
            "a --budget",
            {
                "RECIPE": recipe,
                "--gpus": gpus,
                "--layout": layout,
                "--explain": explain,
                "-o": report,
                "--share": None if share == SHARE else share,
                "--moments": None if moments == "adam" else moments,
                "--measure": measure or None,
                "--no-history": None if history else True,
                "--set": overrides or None,
            },
        )
        show_budget(budget, mfu, price, json_output)
        return
    if recipe is None or gpus is None:
        missing = "RECIPE" if recipe is None else "--gpus"
        raise InputError(
            f"{missing} is missing; type: leaven plan RECIPE --gpus COUNTxNAME, "
            "or without a recipe: leaven plan --budget '64xH100-80GB x 14d'"
        )
    if mfu is not None:
        raise InputError("--mfu goes with --budget; of a recipe the speed is planned, so leave --mfu out")
    if not 0 < share <= 1:
        raise InputError(f"--share {share:g}: a share of full speed; give one above 0 and up to 1, for example 0.7")
    each = None if price is None else parse_price(price)
    if not recipe.exists() and recipe.suffix != ".toml" and len(recipe.parts) == 1:
        _alone(f"{recipe}, a published run,", {"--set": overrides or None, "--measure": measure or None})
        name, found = str(recipe), plan_run(str(recipe), gpus, layout, moments)
        following = _next.after_plan_of_run(name, found.cluster)
    else:
        read = load(recipe, overrides)
        name, found = read.name, plan_recipe(read, gpus, layout, moments)
        found = by_measurement(found, read, gpus, measure=measure, history=history)
        following = _next.after_plan(recipe, read, found, overrides or ())
    found = found.changed(share=share)
    screen, document = (
        (None, found.to_json(explain, each)) if json_output else (plan_screen(found, each, explain), None)
    )
    if report is not None:
        options = {"--gpus": gpus, "--layout": layout, "--price": price, "--share": f"{share:g}"}
        options |= {} if moments == "adam" else {"--moments": moments}
        words = [word for option, given in options.items() if given is not None for word in (option, given)]
        switches = ["--measure"] * measure + ["--no-history"] * (not history)
        sets = [word for override in overrides or () for word in ("--set", override)]
        write_plan(report, found, name, shlex.join(["leaven", "plan", str(recipe), *words, *switches, *sets]), each)
    if document is not None:
        emit_json(document | {"next": following})
        return
    console.print(screen)
    if report is not None:
        console.print(f"wrote {report}", markup=False, soft_wrap=True)
    _next.say(following)


def _alone(what: str, others: Mapping[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(f"{what} is planned without {given[0]}; leave it out")
