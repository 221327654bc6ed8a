"""leaven plan: memory, speed and time of a recipe on a cluster."""

from typing import Annotated

import typer

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, load
from leaven.planning.layouts import Candidate
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, Plan, plan_recipe
from leaven.recipe.units import format_quantity, format_seconds


def plan(
    recipe: RecipeArgument,
    gpus: Annotated[str, typer.Option(metavar="COUNTxNAME", help="The cluster, e.g. 64xH100-80GB.")],
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...", help="e.g. tp=8,pp=12,dp=4,zero=1,mbs=2,recompute=full; else the best."
        ),
    ] = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Will it fit, how fast, how long; the best layout if none is given."""
    found = plan_recipe(load(recipe, overrides), gpus, layout)
    if json_output:
        emit_json(found.to_json())
        return
    for label, text in _lines(found):
        console.print(f"{label:<13} {text}", soft_wrap=True)


def _lines(found: Plan) -> list[tuple[str, str]]:
    memory, speed, time = found.memory, found.speed, found.time
    parts = " · ".join(f"{name} {value:.1f}" for name, value in memory.parts_gib.items())
    verdict = "" if found.fits else "  [red]DOES NOT FIT[/red]"
    waits = {
        "tensor-parallel": time.tensor_parallel,
        "pipeline bubble": time.bubble,
        "pipeline transfers": time.pipeline,
        "data-parallel": time.data_parallel,
        "optimizer": time.optimizer,
    }
    shares = " · ".join(
        f"{name} {value / time.step:.0%}" for name, value in waits.items() if value > 0.01 * time.step
    )
    lines = [
        ("layout", str(found.arrangement)),
        (
            "memory / GPU",
            f"{memory.total / GIB:.1f} GiB of {found.cluster.accelerator.memory_gib:g}     {parts}{verdict}",
        ),
        (
            "speed",
            f"{speed.tflops_per_gpu:.0f} TFLOP/s · MFU {speed.mfu:.1%} "
            f"(full attention; causal {speed.mfu_causal:.1%}; HFU {speed.hfu:.1%}) · "
            f"{speed.step_seconds:.3g} s a step · "
            f"{format_quantity(speed.tokens_per_second / found.cluster.gpus)} tokens/s/GPU",
        ),
        ("not compute", f"{shares or 'under 1%'} of the step"),
        ("budget", f"{format_seconds(found.seconds)} · {found.gpu_hours:,.0f} GPU-h on {found.cluster}"),
    ]
    if found.alternatives:
        lines.append(("next best", " · ".join(_alternative(other, found) for other in found.alternatives[:3])))
    return [*lines, ("accuracy", ACCURACY)]


def _alternative(other: Candidate, found: Plan) -> str:
    chosen = found.arrangement.to_json()
    differs = ", ".join(
        f"{key.replace('_', ' ')} {value}"
        for key, value in other.arrangement.to_json().items()
        if value != chosen[key]
    )
    return f"{differs}: {other.memory.total / GIB:.1f} GiB, {other.time.step / found.time.step - 1:+.1%} time"
