"""What `leaven new` writes: a target, its proxy, and a comparison of the target with published runs."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from leaven.catalogue.neighbours import Neighbours, neighbours
from leaven.catalogue.starter.decisions import Derivation, derivation_step
from leaven.catalogue.starter.request import StarterRequest
from leaven.catalogue.starter.starter import starter
from leaven.documents.planning import ComparedRow, NewRecipe, ProxyRow
from leaven.planning.hardware import Cluster
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, plan
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.recipe.units import format_seconds
from leaven.scaling.table import resolve
from leaven.scaling.transfer import transfer

_ROUNDING = 1.02  # published values are rounded
# Times the published range; below this there is no disagreement, since published values are rounded and set by hand.
FAR = 1.25


@dataclass(frozen=True)
class StarterRecipes:
    """The recipes that ``leaven new`` writes, and how they came about."""

    derivation: Derivation
    proxy: Recipe | None
    compared: tuple[ComparedRow, ...]  # the target beside published runs

    @property
    def target(self) -> Recipe:
        return self.derivation.recipe

    def document(self, path: Path, proxy_path: Path, next: list[str]) -> NewRecipe:
        """The document of ``leaven new``, which wrote these recipes to ``path`` and ``proxy_path``."""
        tuning, target = self.derivation.tuning, self.target
        proxy = tuning.proxy
        return NewRecipe(
            path=str(path),
            proxy_path=str(proxy_path) if self.proxy else None,
            params=target.model.params,
            tokens=target.data.tokens,
            steps=list(self.derivation.steps),
            proxy=None
            if proxy is None
            else ProxyRow(
                params=proxy.shape.params,
                tokens=proxy.tokens,
                batch_tokens=proxy.batch_tokens,
                trials=proxy.trials,
                cost=proxy.cost,
                evidence=proxy.evidence,
            ),
            tuning=tuning.reason,
            compared=list(self.compared),
            next=next,
        )


def start(request: StarterRequest, cluster: Cluster | None = None) -> StarterRecipes:
    """Derive the target and its proxy, and compare the target with published runs.

    Raises:
        InputError: if the size or the length makes no sense, or the cluster does not hold the target.
    """
    derived = starter(request)
    if cluster:
        derived = laid_out(derived, cluster)
    target = derived.recipe
    near = neighbours(target.model.params, target.data.tokens)
    compared = tuple(_compared(target, near))
    derived = derived.add("at the target", _said(near, compared, tuned=derived.tuning.proxy is not None))
    return StarterRecipes(derived, _proxy(derived), compared)


def laid_out(derivation: Derivation, cluster: Cluster) -> Derivation:
    """Put the starter on a cluster, in the fastest layout that fits.

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
    lines = (str(how), memory, speed, f"{format_seconds(found.seconds)} on {cluster}")
    steps = tuple(
        derivation_step(
            step.step,
            step.title,
            (step.lines[0], *lines, *step.lines[2:]),
            {**step.values, **chosen},
            (*step.sources, ACCURACY),
        )
        if "precision.compute" in step.values
        else step
        for step in derivation.steps
    )
    return replace(derivation, recipe=placed, steps=steps)


def _proxy(derived: Derivation) -> Recipe | None:
    """The recipe of the proxy: the target transferred down to its own base, in one process."""
    proxy, target = derived.tuning.proxy, derived.recipe
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
    held_out = min(max(proxy.tokens // 100, 8 * proxy.shape.seq_len), target.evaluation.tokens)
    why = small.why | {
        "name": f"the proxy of {target.name}",
        "data.tokens": f"as many tokens a parameter as {target.name}",
        "batch.tokens": f"nearly as many steps as {target.name}: its batch shrinks as its tokens do",
        "scaling.base": f"this proxy's own scale, where the values are chosen and tuned; {target.name} has the same",
        "evaluation.tokens": "a hundredth of the run, but 8 sequences at least and no more than the target's",
        **dict.fromkeys(one, "one process; leaven plan lays out a proxy that is too large for one"),
    }
    return small.replace({"evaluation.tokens": held_out, "why": why})


def _compared(target: Recipe, near: Neighbours) -> list[ComparedRow]:
    rows = resolve(target).rows

    def of(quantity: str, *roles: Role) -> float | None:
        values = [getattr(row, quantity) for row in rows if row.role in roles]
        return median(values) if values else None

    hidden, embedding = (Role.HIDDEN_WEIGHT,), (Role.EMBEDDING, Role.TIED_EMBEDDING)
    lrs = near.values(lambda run: run.peak_lr)
    stds = near.values(lambda run: run.init_std and run.arch.d_model and run.init_std * math.sqrt(run.arch.d_model))
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
    return [
        _compared_row(what, path, value, float(min(by.values())), float(max(by.values())))
        for what, path, value, by in quantities
        if value is not None and by
    ]


def _compared_row(what: str, path: str, value: float, low: float, high: float) -> ComparedRow:
    """A value that the rule gives the target beside the published range. Betas are compared by their half-life."""
    ends = (1 / (1 - beta) for beta in (value, low, high)) if what.startswith("beta") else (value, low, high)
    own, least, most = ends
    factor = max(least / own, own / most, 1.0)
    return ComparedRow(what=what, path=path, value=value, low=low, high=high, factor=factor, outside=factor > FAR)


def _said(near: Neighbours, compared: tuple[ComparedRow, ...], *, tuned: bool) -> list[str]:
    """Lines that compare the target with published runs, and both readings where it is outside their range."""
    if not near.close:
        return ["no published run is near this size, so there is nothing to compare with"]
    said = [_line(one) for one in compared]
    moved = [one.what for one in compared if one.outside and not one.what.startswith("init")]
    if tuned and moved:
        said.append(
            f"two readings of {' and '.join(moved)}: the rule moves what is best for a small model, and its powers "
            "of the width are exact in the limit of large widths; published values are set by hand, one for all "
            "modules, and few tried others. Tune the proxy, then check the transfer"
        )
    return said


def _line(one: ComparedRow) -> str:
    digits = ".4g" if one.what.startswith("beta") else ".2g"
    value, low, high = (format(number, digits) for number in (one.value, one.low, one.high))
    outside = f": {one.factor:.2g}x outside" if one.factor > _ROUNDING else ""
    return f"{one.what} {value}, published {low} .. {high}{outside}"
