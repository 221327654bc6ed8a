"""leaven plan: memory, speed and time of a recipe on a cluster."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, load
from leaven.planning.layouts import Candidate
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, Plan, plan_recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.report.numbers import value
from leaven.report.terminal import Facts


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
    console.print(Facts(_facts(found)))


def _facts(found: Plan) -> list[tuple[str, Sequence[str | Text]]]:
    memory, speed, time = found.memory, found.speed, found.time
    parts = " · ".join(f"{name} {gib:.1f}" for name, gib in memory.parts_gib.items() if gib >= 0.05)
    total = f"{memory.total / GIB:.1f} GiB of {found.cluster.accelerator.memory_gib:g}: {parts}"
    waits = {
        "tensor-parallel": time.tensor_parallel,
        "pipeline bubble": time.bubble,
        "pipeline transfers": time.pipeline,
        "data-parallel": time.data_parallel,
        "optimizer": time.optimizer,
    }
    shares = [f"{name} {wait / time.step:.0%}" for name, wait in waits.items() if wait > 0.01 * time.step]
    rate = format_quantity(speed.tokens_per_second / found.cluster.gpus)
    return [
        ("layout", str(found.arrangement).split(" · ")),
        ("memory / GPU", [*total.split(" · "), *([] if found.fits else [Text("DOES NOT FIT", style="red")])]),
        (
            "speed",
            (
                f"{speed.tflops_per_gpu:.0f} TFLOP/s",
                f"MFU {speed.mfu:.1%} (full attention; causal {speed.mfu_causal:.1%}; HFU {speed.hfu:.1%})",
                f"{value(speed.step_seconds)} s a step",
                f"{rate} tokens/s/GPU",
            ),
        ),
        ("not compute", [*shares[:-1], f"{shares[-1] if shares else 'under 1%'} of the step"]),
        ("budget", (format_seconds(found.seconds), f"{found.gpu_hours:,.0f} GPU-h on {found.cluster}")),
        *(("" if n else "next best", [_alternative(other, found)]) for n, other in enumerate(found.alternatives[:3])),
        ("accuracy", [ACCURACY]),
    ]


def _alternative(other: Candidate, found: Plan) -> Text:
    chosen = found.arrangement.to_json()
    differs = ", ".join(
        f"{key.replace('_', ' ')} {choice}"
        for key, choice in other.arrangement.to_json().items()
        if choice != chosen[key]
    )
    slower = other.time.step / found.time.step - 1
    return Text.assemble(
        f"{other.memory.total / GIB:5.1f} GiB  ",
        (f"{slower:+7.1%} time", "red" if slower > 0 else "green"),
        f"  {differs}",
    )
