"""Where a starter runs: the planner's layout and micro-batch in its recipe and in its derivation."""

from dataclasses import replace

from leaven.catalogue.starter.decisions import Derivation
from leaven.planning.hardware import Cluster
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, plan
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout
from leaven.recipe.units import format_seconds


def laid_out(derivation: Derivation, cluster: Cluster) -> Derivation:
    """The same starter on a cluster, in the fastest layout that fits.

    Raises:
        InputError: if nothing fits or the batch divides over no layout; says what would.
    """
    recipe = derivation.recipe
    smallest = min(tokens for _, tokens in recipe.batch.sizes)
    try:
        found = plan(recipe.model, recipe.data.tokens, recipe.batch.tokens, cluster, smallest_tokens=smallest)
    except InputError as error:
        raise InputError(f"--gpus {cluster}: {error}; or take fewer GPUs") from None
    how = found.arrangement
    memory = f"{found.memory.total / GIB:.1f} GiB of {cluster.accelerator.memory_gib:g}"
    speed = f"{found.speed.tflops_per_gpu:.0f} TFLOP/s a GPU, MFU {found.speed.mfu:.0%}"
    reason = f"the fastest that fits {cluster} by the planner: {how}; {memory}, {speed}"
    always = {"dp", "tp", "pp", "zero", "recompute"}
    chosen = {
        f"layout.{key}": value
        for key, value in how.layout.model_dump().items()
        if key in always or value != Layout.model_fields[key].default
    }
    chosen["batch.micro_batch"] = how.micro_batch
    placed = recipe.replace(chosen)
    placed = placed.replace({"why": recipe.why | dict.fromkeys(chosen, reason)})
    said = (str(how), memory, speed, f"{format_seconds(found.seconds)} on {cluster}")
    steps = tuple(
        replace(
            step,
            lines=(step.lines[0], *said, *step.lines[2:]),
            values={**step.values, **chosen},
            sources=(*step.sources, ACCURACY),
        )
        if "precision.compute" in step.values
        else step
        for step in derivation.steps
    )
    return replace(derivation, recipe=placed, steps=steps)
