"""What ``leaven plan`` takes from the machine at hand and from the runs of before."""

from typing import Annotated

import typer

from leaven.cli._common import errors, stopping
from leaven.cli._screens import CountScreen
from leaven.planning.calibration import history as of_before
from leaven.planning.plan import Plan
from leaven.recipe.recipe import Recipe

MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Take three short steps on the machine at hand and calibrate by them.")
]
HistoryOption = Annotated[
    bool, typer.Option("--history/--no-history", help="Calibrate by what runs on this accelerator took.")
]


def by_measurement(plan: Plan, recipe: Recipe, gpus: str, *, measure: bool, history: bool) -> Plan:
    """The plan of a recipe, calibrated by steps that are taken now, or by the history, or as it is.

    Raises:
        InputError: if the machine at hand has none of the planned accelerators.
        typer.Exit: 75, if the measurement was stopped.
    """
    if not measure:
        return plan.calibrated(of_before() if history else [], recipe.precision.compute)

    from leaven.training.measured import measure as take_steps

    with stopping() as stop, CountScreen("measuring") as screen:
        found = take_steps(recipe, gpus, on_step=screen.update, stop=stop)
    if found is None:
        errors.print("stopped before it was measured; nothing is written, the same command begins anew")
        raise typer.Exit(75)
    depth, layers = recipe.model.n_layers, " and ".join(map(str, found.layers))
    of = "" if found.layers == (depth,) else f", of {layers} layers, from which {depth} follow"
    errors.print(f"measured {found.record.device}: best matmul {found.matmul_tflops:.3g} TFLOP/s{of}")
    return plan.calibrated([found.record], recipe.precision.compute)
