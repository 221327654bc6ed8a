"""Check before a run whether leaven can train a recipe on a number of processes."""

from importlib.metadata import version
from math import gcd

from leaven.errors import InputError
from leaven.planning.arrangement import pipeline_refusal, shape_refusal
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe


def require_trainable(recipe: Recipe, processes: int) -> None:
    """Raise InputError if leaven cannot train a recipe on ``processes`` processes, or cannot measure the gradient
    noise scale that the recipe asks for."""
    if recipe.layout.cp > 1:
        raise InputError(
            "[layout] cp above 1: leaven can plan and export this layout but not train with it; use --set layout.cp=1"
        )
    _require_ranks(recipe, processes)
    micro_batch = 1 if recipe.batch.micro_batch == "auto" else recipe.batch.micro_batch
    if refusal := (
        shape_refusal(recipe.model, recipe.layout)
        or pipeline_refusal(recipe.layout, recipe.model.seq_len, recipe.batch.smallest_tokens, micro_batch)
        or _zero_bubble_refusal(recipe)
    ):
        raise InputError(f"[layout] {refusal}")
    if refusal := _noise_refusal(recipe):
        raise InputError(f"[stability] noise_scale_every_tokens {refusal}")


def resized(recipe: Recipe, processes: int) -> Recipe:
    """Fit dp, dp_replicate and ep of a recipe to ``processes``. If no dp fits, return the recipe unchanged."""
    layout = recipe.layout
    dp, rest = divmod(processes, layout.tp * layout.pp)
    if rest or not dp or dp == layout.dp:
        return recipe
    replicate = layout.dp_replicate if dp % layout.dp_replicate == 0 else 1
    return recipe.replace({"layout.dp": dp, "layout.dp_replicate": replicate, "layout.ep": gcd(layout.ep, dp)})


def _require_ranks(recipe: Recipe, processes: int) -> None:
    layout = recipe.layout
    if layout.ranks == processes:
        return
    there = "there is one process" if processes == 1 else f"there are {processes} processes"
    message = f"[layout] dp {layout.dp} x tp {layout.tp} x pp {layout.pp} is {layout.ranks} ranks, and {there}"
    if processes == 1:
        parts = ("dp", "tp", "pp", "cp", "ep", "zero", "dp_replicate", "schedule", "stages_per_rank")
        single = [(key, value) for key, value in Layout() if key in parts and value != getattr(layout, key)]
        raise InputError(
            f"{message}; start the run with torchrun --nproc-per-node {layout.ranks} -m leaven train ..., or on one "
            f"device with {' '.join(f'--set layout.{key}={value}' for key, value in single)}"
        )
    dp, rest = divmod(processes, layout.tp * layout.pp)
    would = (
        "change dp, tp or pp so that their product is the number of processes"
        if rest or not dp
        else f"dp={dp} would work"
    )
    raise InputError(f"{message}; {would}")


def _noise_refusal(recipe: Recipe) -> str | None:
    if recipe.stability.noise_scale_every_tokens is None:
        return None
    layout = recipe.layout
    off = "remove this setting to train without the measurement"
    if layout.pp > 1:
        return (
            "needs the gradients of the first micro-batch alone, which a pipeline "
            f"(pp = {layout.pp}) does not keep; {off}"
        )
    if layout.ranks > 1 and (layout.zero < 2 or layout.dp_replicate > 1):
        return (
            "needs gradients that are exchanged after every micro-batch, and this layout exchanges them once a step; "
            f"use --set layout.zero=2 --set layout.dp_replicate=1, or {off}"
        )
    each = -(-recipe.batch.tokens // recipe.model.seq_len // layout.dp)
    size = recipe.batch.micro_batch
    if each == 1:
        return f"needs at least two micro-batches per step, and a rank has one sequence; use a larger batch, or {off}"
    if size != "auto" and size >= each:
        return (
            f"needs at least two micro-batches per step, and a rank's {each} sequences fit into one micro-batch of "
            f"{size}; use --set batch.micro_batch={each // 2}, or {off}"
        )
    return None


def _zero_bubble_refusal(recipe: Recipe) -> str | None:
    if recipe.layout.schedule != "zero-bubble":
        return None
    torch = version("torch")
    if tuple(map(int, torch.split(".")[:2])) < (2, 13):  # wrong for operations with several outputs, without an error
        return (
            f'schedule = "zero-bubble" computes wrong gradients in torch {torch}; install torch 2.13, or use "1f1b"'
        )
    if recipe.model.experts:
        return (
            'schedule = "zero-bubble" computes the gradients of weights in a second backward pass, which would count '
            'the loads of the experts twice; use "1f1b" or "interleaved"'
        )
    return None


def layout_cautions(recipe: Recipe) -> list[str]:
    """Return warnings about a layout that can be trained but is probably a mistake."""
    layout, found = recipe.layout, []
    if layout.zero and layout.dp == 1:
        found.append(
            f"[layout] zero = {layout.zero} saves nothing: it shards over dp ranks, and dp = 1; use zero = 0"
        )
    smallest = recipe.batch.smallest_tokens // recipe.model.seq_len
    if smallest < layout.dp:
        found.append(
            f"[layout] dp = {layout.dp}: the smallest batch has {smallest} sequences, so some ranks have none; use a "
            "smaller dp or larger batches"
        )
    return found
