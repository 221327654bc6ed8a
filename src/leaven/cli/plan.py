"""Defines the command ``leaven plan``."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    JsonOption,
    SetOption,
    ShareOption,
    argument,
    exit_interrupted,
    load_recipe,
    option,
    print_document,
    require_alone,
    stop_on_signal,
)
from leaven.errors import InputError
from leaven.planning.calibration import history as past_runs
from leaven.planning.cost import parse_price
from leaven.planning.plan import ClusterPlan, plan_recipe
from leaven.planning.published import plan_run
from leaven.planning.ramp import SHARE
from leaven.planning.training_codes import Moments
from leaven.recipe.recipe import Recipe
from leaven.storage import write_page
from leaven.views.terminal.console import errors, warn
from leaven.views.terminal.live import LiveScreen
from leaven.views.terminal.plan import budget_screen, plan_screen


def plan(
    context: typer.Context,
    recipe: Annotated[Path | None, argument("RECIPE", "A recipe file (TOML), or the id of a published run.")] = None,
    gpus: Annotated[
        str | None, option("The cluster, e.g. 64xH100-80GB, 8x8xA100 (8 nodes of 8) or cpu.", metavar="COUNTxNAME")
    ] = None,
    layout: Annotated[
        str | None,
        option(
            "Plan this layout instead of the best layout, e.g. tp=2,pp=4,mbs=2. Keys: dp tp pp cp ep zero mbs "
            "(micro-batch) dp_replicate stages_per_rank schedule recompute compile. Defaults: dp fills the cluster, "
            "mbs and compile come from the recipe, and the others are off.",
            metavar="KEY=VALUE,...",
        ),
    ] = None,
    explain: Annotated[
        str | None,
        option(
            "Explain why this layout was not chosen, e.g. tp=4 or pp=8,zero=1. Other keys take their best values.",
            metavar="KEY=VALUE,...",
        ),
    ] = None,
    share: ShareOption = SHARE,
    price: Annotated[
        str | None,
        option(
            "Price of one GPU for one hour, e.g. $2.50. The plan then includes the cost in money.", metavar="PRICE"
        ),
    ] = None,
    report: Annotated[
        Path | None, option("Also write the plan as an HTML page with charts.", metavar="HTML", names="--report -o")
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "Without RECIPE: list the model sizes that can be trained in this time on this cluster, e.g. '64xH100 x "
            "14d'.",
            metavar="CLUSTERxTIME",
        ),
    ] = None,
    mfu: Annotated[
        float | None, option("With --budget: assume this MFU (0 to 1) instead of planning layouts.", metavar="SHARE")
    ] = None,
    moments: Annotated[
        Moments | None,
        option(
            "Count memory for the states of this optimizer, by default the recipe's optimizer. leaven itself does "
            "not train with adam-8bit."
        ),
    ] = None,
    code: Annotated[
        str | None,
        option(
            "Plan for Megatron-LM instead of leaven's own trainer, e.g. megatron-2026, or megatron-deepep for "
            "mixtures of experts; a wrong name prints all names. Published runs are planned for megatron-flash.",
            metavar="NAME",
        ),
    ] = None,
    measure: Annotated[
        bool,
        option(
            "Run three short steps on this machine and calibrate the predicted times with them.", names="--measure"
        ),
    ] = False,
    history: Annotated[bool, option("Calibrate the predicted times with earlier runs on this accelerator.")] = True,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    hourly = None if price is None else parse_price(price)
    if budget is not None:
        others = "recipe gpus layout explain share report moments code measure history overrides"
        require_alone(context, "--budget", others)
        from leaven.planning.budget import budget as sizes_that_fit

        sizes = sizes_that_fit(budget, mfu=mfu, price=hourly)
        print_document(sizes, budget_screen(sizes), json_output, next_commands.after_budget(sizes))
        return
    if recipe is None or gpus is None:
        missing = "RECIPE" if recipe is None else "--gpus"
        raise InputError(
            f"{missing} is missing; type: leaven plan RECIPE --gpus COUNTxNAME, "
            "or without a recipe: leaven plan --budget '64xH100-80GB x 14d'"
        )
    if mfu is not None:
        raise InputError("--mfu is only for --budget; for a recipe, leaven predicts the speed, so leave --mfu out")
    if not recipe.exists() and recipe.suffix != ".toml" and len(recipe.parts) == 1:
        require_alone(context, f"the published run {recipe}", "overrides measure history")
        name, found = str(recipe), plan_run(str(recipe), gpus, layout, moments or "adam", code=code)
        document = found.document(explain, hourly, share)
        following = next_commands.after_plan_of_run(name, document.cluster)
    else:
        read = load_recipe(recipe, overrides)
        if code is not None:
            require_alone(context, "--code", "measure history")
        name, found = read.name, plan_recipe(read, gpus, layout, moments, code)
        if code is None:
            found = by_measurement(found, read, gpus, measure=measure, history=history)
        document = found.document(explain, hourly, share)
        following = [] if code is not None else next_commands.after_plan(recipe, read, document, overrides or ())
    screen = plan_screen(document)
    if report is not None:
        from leaven.views.plan_page import plan_page

        write_page(report, plan_page(found, document, name, next_commands.again()))
        screen = chain(screen, [f"wrote {report}"])
    print_document(document, screen, json_output, following)


def by_measurement(plan: ClusterPlan, recipe: Recipe, gpus: str, *, measure: bool, history: bool) -> ClusterPlan:
    """Correct the plan's times by a measurement on this machine (``measure``) or else by past runs (``history``)."""
    if not measure:
        records = past_runs(lambda fault: warn([fault])) if history else []
        return plan.calibrated(records, recipe.precision.compute)

    from leaven.training.profiling import measure as take_steps

    with stop_on_signal() as stop, LiveScreen() as screen:
        found = take_steps(recipe, gpus, on_step=screen.counts("measuring"), stop=stop)
    if found is None:
        exit_interrupted(
            "stopped before the measurement was complete; nothing is saved, so the same command starts from the "
            "beginning"
        )
    depth, layers = recipe.model.n_layers, " and ".join(map(str, found.layers))
    short = "" if found.layers == (depth,) else f"; the time of {depth} layers is extrapolated from {layers}"
    errors.print(
        f"measured {found.record.device}: the fastest matrix product reached {found.matmul_tflops:.3g} TFLOP/s{short}"
    )
    if found.unsaved is not None:
        warn([f"later plans do not use this measurement, because it cannot be saved: {found.unsaved}"])
    return plan.calibrated([found.record], recipe.precision.compute)
