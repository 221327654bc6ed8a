"""Derive the recipes of ``leaven new``, and compare them with published runs.

The target is the run that the user wants. The proxy is a smaller run on which hyperparameters are searched.
"""

import math
from dataclasses import replace
from statistics import median

from leaven.catalogue.messages import constants, parts, sentence
from leaven.catalogue.neighbours import Neighbours, neighbours
from leaven.catalogue.starter.draft import StarterRecipes, StarterRequest, derivation_step
from leaven.catalogue.starter.starter import LEAST_HELD_OUT, MOST_EVALUATED, starter
from leaven.documents.planning import ComparedRow
from leaven.errors import InputError
from leaven.planning.accelerators import Accelerator
from leaven.planning.cost import cluster_cost
from leaven.planning.hardware import EXAMPLE_GPU, Cluster, find_accelerator
from leaven.planning.layouts import Job, worth_compiling
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, ACCURACY_OF_EXPERTS, cluster_for, plan, plan_recipe
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.recipe.units import format_seconds
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

# A value is called "outside" if it is beyond the published range by more than a factor: `_ROUNDING` in the text,
# `FAR` in a :class:`ComparedRow`. Published values are rounded, and chosen by hand.
_ROUNDING, FAR = 1.05, 1.25


def start(request: StarterRequest, cluster: Cluster | None = None) -> StarterRecipes:
    """Return the recipes of the target and of its proxy, and the comparison of the target with published runs.

    Raise InputError if :func:`starter` refuses the request, or if the target does not fit the cluster.
    """
    started = starter(request)
    if cluster:
        started = laid_out(started, cluster)
    proxy = _proxy(started)
    if proxy:
        started = _with_gpu_hours(started, proxy, cluster.accelerator if cluster else find_accelerator(EXAMPLE_GPU))
    target = started.target
    near = neighbours(target.model.params_active, target.data.tokens, experts=bool(target.model.experts))
    compared = _compared(target, near)
    if near.close:
        moved = [one.what for one in compared if one.outside and not one.what.startswith("init")]
        lines = []
        for one in compared:
            kind = "beta" if one.what.startswith("beta") else "value"
            lines += parts("target", f"{kind} outside" if one.factor > _ROUNDING else kind, {"one": one})
        if started.tuning.proxy and moved:
            lines += parts("target", "two readings", {"moved": " and ".join(moved)})
    else:
        lines = parts("target", "nothing near", {})
    comparison = derivation_step(len(started.steps) + 1, "at the target", lines)
    return replace(started, steps=(*started.steps, comparison), proxy=proxy, compared=compared)


def laid_out(started: StarterRecipes, cluster: Cluster) -> StarterRecipes:
    """Return the recipes after setting the target's layout and micro-batch to the fastest that fit on the cluster.

    Raise InputError if no layout fits, or no layout splits the batch evenly.
    """
    recipe = started.target
    try:
        job = Job(recipe.model, recipe.batch, cluster, compile=worth_compiling(recipe.model, cluster))
        found = plan(job, recipe.data.tokens)
    except InputError as error:
        raise InputError(f"--gpus {cluster}: {error}") from None
    how = found.chosen.arrangement
    facts = {
        "cluster": str(cluster),
        "arrangement": str(how),
        "gib": found.chosen.memory.total / GIB,
        "capacity": cluster.accelerator.memory_gib,
        "speed": found.speed,
        "time": format_seconds(found.seconds),
    }
    reason = sentence("cluster", "reason", facts)
    always = {"dp", "tp", "pp", "zero", "recompute"}
    chosen = {
        f"layout.{key}": value
        for key, value in how.layout.model_dump().items()
        if key in always or value != Layout.model_fields[key].default
    }
    chosen["batch.micro_batch"] = how.micro_batch
    placed = recipe.replace(chosen)
    why = recipe.why | dict.fromkeys(chosen, reason)
    if placed.layout.compile:
        why["layout.compile"] = sentence("cluster", "compile", facts)
    placed = placed.replace({"why": why})
    lines = parts("cluster", "lines", facts)
    steps = tuple(
        derivation_step(
            step.step,
            step.title,
            (step.lines[0], *lines, *step.lines[2:]),
            {**step.values, **chosen},
            (*step.sources, ACCURACY_OF_EXPERTS if recipe.model.experts else ACCURACY),
        )
        if "precision.compute" in step.values
        else step
        for step in started.steps
    )
    return replace(started, target=placed, steps=steps)


def _proxy(started: StarterRecipes) -> Recipe | None:
    """Return the target recipe scaled down to the size of ``started.tuning.proxy``, laid out for one process."""
    proxy, target = started.tuning.proxy, started.target
    if proxy is None:
        return None
    one = {f"layout.{key}": value for key, value in Layout().model_dump().items()} | {"batch.micro_batch": "auto"}
    small = transfer(
        target.replace(one),
        width=proxy.shape.d_model,
        depth=proxy.shape.n_layers,
        d_ff=proxy.shape.d_ff,
        batch_tokens=proxy.batch_tokens,
        tokens=proxy.tokens,
        name=f"{target.name}-proxy",
    )
    held_out = min(max(proxy.tokens // 100, LEAST_HELD_OUT * proxy.shape.seq_len), target.evaluation.tokens)
    why = small.why | {
        **{
            path: sentence("proxy", path, {"target": target.name, "model": target.model})
            for path in constants("proxy")
            if path != "layout"
        },
        **dict.fromkeys(one, sentence("proxy", "layout", {})),
    }
    often = max(small.evaluation.every_tokens or 0, round(held_out / MOST_EVALUATED))
    return small.replace({"evaluation.tokens": held_out, "evaluation.every_tokens": often, "why": why})


def _with_gpu_hours(started: StarterRecipes, proxy: Recipe, gpu: Accelerator) -> StarterRecipes:
    """Add the GPU-hours of tuning, if known and at least 1, to the reasons for the proxy."""
    tuning = started.tuning
    assert tuning.proxy
    try:
        found = plan_recipe(proxy, cluster_for(proxy, gpu))
    except InputError:  # no layout divides the proxy's batch
        return started
    cluster = found.job.cluster
    hours = tuning.proxy.trials * cluster_cost(cluster, found.seconds).gpu_hours
    if hours < 1:
        return started
    line = sentence("tuning", "planned", {"trials": tuning.proxy.trials, "hours": hours, "cluster": cluster})
    steps = (
        derivation_step(step.step, step.title, [*step.lines, line], step.values, step.sources)
        if step.title == "proxy"
        else step
        for step in started.steps
    )
    return replace(started, steps=tuple(steps), tuning=replace(tuning, reason=f"{tuning.reason}; {line}"))


def _compared(target: Recipe, near: Neighbours) -> tuple[ComparedRow, ...]:
    """Return rows that compare the resolved values of ``target`` with their ranges in the published runs ``near``.

    A value is the median over the hidden matrices; the lr of the embedding is the median over the embeddings. A row's
    ``factor`` is the factor by which the value is outside the range, or 1 if it is inside. For a beta, the factor
    compares 1 / (1 - beta).
    """
    rows = parameter_table(target).rows

    def of(quantity: str, *roles: Role) -> float | None:
        values = [getattr(row, quantity) for row in rows if row.role in roles]
        return median(values) if values else None

    hidden, embedding = (Role.HIDDEN_WEIGHT,), (Role.EMBEDDING, Role.TIED_EMBEDDING)
    lrs = near.values(lambda run: run.peak_lr)
    stds = near.values(lambda run: run.init_scale)
    decays = near.values("hyperparameters.weight_decay")
    shrink = {run: lrs[run] * decays[run] for run in lrs if decays.get(run)}
    lr, decay, std = of("lr", *hidden), of("weight_decay", *hidden), of("init_std", *hidden)
    quantities = [
        ("lr of hidden matrices", "hyperparameters.lr", lr, lrs),
        ("lr of the embedding", "hyperparameters.lr", of("lr", *embedding), lrs),
        ("lr x weight decay", "hyperparameters.weight_decay", lr and decay and lr * decay, shrink),
        ("beta1", "hyperparameters.beta1", of("beta1", *hidden), near.values("hyperparameters.beta1")),
        ("beta2", "hyperparameters.beta2", of("beta2", *hidden), near.values("hyperparameters.beta2")),
        ("init std x sqrt(d)", "hyperparameters.init_std", std and std * math.sqrt(target.model.d_model), stds),
    ]
    compared = []
    for what, path, value, by in quantities:
        if value is None or not by:
            continue
        low, high = float(min(by.values())), float(max(by.values()))
        ends = (value, low, high)
        own, least, most = (1 / (1 - beta) for beta in ends) if what.startswith("beta") else ends  # steps in the mean
        factor = max(least / own, own / most, 1.0)
        outside = factor > FAR
        compared.append(
            ComparedRow(what=what, path=path, value=value, low=low, high=high, factor=factor, outside=outside)
        )
    return tuple(compared)
