"""Compute the settings that each parameter would have in each export target, such as Megatron or torchtitan.

A target is a trainer for which leaven writes a configuration. ``targets/NAME.toml`` has the sources.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leaven.errors import InputError
from leaven.interop.architectures import MEGATRON, TORCHTITAN, Architecture, Stored
from leaven.interop.configs.compare import ParameterSettings, ResolvedRecipe
from leaven.recipe.shape import BRANCH_ENDS, ModelShape, Role
from leaven.scaling.table import ParameterRow, optimizer_groups


@dataclass(frozen=True)
class Candidate:
    """A configuration that an export may write for another trainer, the target.

    A target may have several candidates. The candidate that differs least from the recipe is exported.
    """

    given: Mapping[str, ParameterSettings]  # the target's settings, by leaven's name of the parameter
    attention_scale: float | None = None  # the factor on query . key; None if it is folded into the weights
    values: Mapping[str, Any] = field(default_factory=dict)  # more variables for the templates


Candidates = Callable[[ResolvedRecipe, ModelShape, Architecture | None], Iterator[Candidate]]


def megatron(run: ResolvedRecipe, shape: ModelShape, _: Architecture | None) -> Iterator[Candidate]:
    """Yield the candidates for Megatron: one that sets --lr and --decoupled-lr, and then one with --use-mup.

    The second follows Table 8 of Yang et al. 2022. It is left out if the model has experts or is not wider than its
    base.
    """
    recipe, hidden, rows = run.recipe, run.hidden, run.rows
    d_head = recipe.model.d_head
    ends = {row.name: rows[row.name] for row in run.table.rows if row.module in {"embedding", "unembedding"}}
    lrs = {settings.lr for settings in ends.values()}
    end_lr = lrs.pop() if len(lrs) == 1 else hidden.lr
    embedding_std = next(iter(ends.values())).init_std

    def start(row: ParameterRow, settings: ParameterSettings) -> ParameterSettings:
        if not row.role.is_matrix:
            gain = row.module.startswith("norm.") and not row.role.endswith("bias")
            return replace(settings, init_mean=float(gain), init_std=0.0, weight_decay=0.0)
        if row.role in {Role.EMBEDDING, Role.TIED_EMBEDDING}:
            return replace(settings, init_std=embedding_std)
        if row.module in BRANCH_ENDS:
            return replace(settings, init_std=settings.init_std / math.sqrt(2 * recipe.model.n_layers))
        return settings

    base = replace(hidden, init_mean=0.0, multiplier=1.0)
    counts = _megatron_counts(run, shape)
    yield Candidate(
        {row.name: start(row, replace(base, lr=end_lr) if row.name in ends else base) for row in run.table.rows},
        1 / math.sqrt(d_head),
        {
            **counts,
            "mup_base": None,
            "lr": hidden.lr,
            "decoupled_lr": end_lr if end_lr != hidden.lr else None,
            "init_std": hidden.init_std,
            "embedding_std": embedding_std if embedding_std != hidden.init_std else None,
            "eps": hidden.eps,
        },
    )
    if recipe.base.width >= shape.d_model or shape.experts:  # it was not checked which values --use-mup gives experts
        return
    # For matrices inside the blocks, Megatron divides lr and eps by the width ratio m, and the std by sqrt(m). Flags
    # have the values before this division.
    m = recipe.model.d_model / recipe.base_shape.d_model
    vector = replace(base, lr=rows["embedding.weight"].lr, eps=hidden.eps * m)
    matrix = replace(vector, lr=vector.lr / m, eps=hidden.eps)
    readout = replace(vector, multiplier=1 / m, init_std=embedding_std)
    yield Candidate(
        {
            row.name: readout
            if row.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING}
            else start(row, matrix if row.role is Role.HIDDEN_WEIGHT else vector)
            for row in run.table.rows
        },
        math.sqrt(recipe.base_shape.d_head) / d_head,
        {
            **counts,
            "mup_base": recipe.base_shape,
            "lr": vector.lr,
            "decoupled_lr": None,
            "init_std": hidden.init_std * math.sqrt(m),
            "embedding_std": embedding_std,
            "eps": vector.eps,
        },
    )


def _megatron_counts(run: ResolvedRecipe, shape: ModelShape) -> dict[str, Any]:
    """Return the variables of Megatron's template that are the same in every :class:`Candidate`."""
    recipe = run.recipe
    stages = [f"{each.first_token}:{each.batch_tokens // shape.seq_len}" for each in recipe.batches.segments]
    return {
        "batch_stages": " ".join(stages),  # for each batch size: first token and sequences
        # Megatron pads the vocabulary to a multiple of this number x tp. With this number, padding changes nothing if
        # tp divides the vocabulary.
        "vocabulary_multiple": math.gcd(shape.vocab_size, 128 * recipe.layout.tp) // recipe.layout.tp or 1,
        "samples": -(-recipe.data.tokens // shape.seq_len),
        "router_losses": run.table.router_losses,
    }


def megatron_module(run: ResolvedRecipe, shape: ModelShape, _: Architecture | None) -> Iterator[Candidate]:
    """Yield the only candidate: Megatron with leaven_table.py, which sets values per parameter: lr, betas, eps,
    weight decay and init.

    Megatron stores some matrices as one, such as query, key and value. Each part of such a matrix has its own init
    std. The whole matrix has the lr, betas, eps and decay of its first part.
    """
    if run.recipe.layout.zero > 1:
        raise InputError(
            f"layout.zero = {run.recipe.layout.zero} selects Megatron-FSDP, which shards parameters, but "
            "megatron-module needs whole parameters; use --set layout.zero=1"
        )
    _require_dense(shape, "megatron-module")
    # Megatron's layer norms have biases even if its matrices have none.
    whole = shape.model_copy(update={"bias": True}) if shape.norm == "layernorm" else shape
    biases = ["layernorm.bias", *(["linear_qkv.bias"] if shape.has_bias("attention.query") else [])]
    tensors = [
        stored
        for stored in MEGATRON.tensors(whole)
        if shape.bias or stored.name.endswith(tuple(biases)) or not stored.name.endswith(".bias")
    ]
    given, parameters = _by_tensor(run, tensors, shape, MEGATRON)
    hidden = next(run.plain[row.name] for row in run.table.rows if run.rows[row.name] == run.hidden)
    flags: dict[str, Any] = {"mup_base": None, "decoupled_lr": None, "embedding_std": None}
    flags |= {"lr": hidden.lr, "init_std": hidden.init_std, "eps": hidden.eps}
    yield Candidate(given, None, {**_megatron_counts(run, shape), **flags, "parameters": parameters})


def nanotron(run: ResolvedRecipe, shape: ModelShape, _: Architecture | None) -> Iterator[Candidate]:
    """Yield two candidates for nanotron, which has one lr, one pair of betas and one eps for all parameters.

    The scaling method ``NUM_LAYERS`` divides the init std of the last matrix of each branch by sqrt(2 n_layers).
    """
    recipe, base = run.recipe, replace(run.hidden, multiplier=1.0)
    vector = base if recipe.hyperparameters.decay_norm_and_bias else replace(base, weight_decay=0.0)
    for method, ratio in (("NUM_LAYERS", 1 / math.sqrt(2 * recipe.model.n_layers)), ("NONE", 1.0)):
        given = _alike(run, base, replace(base, init_std=base.init_std * ratio), vector)
        yield Candidate(given, 1 / math.sqrt(recipe.model.d_head), {"scaling_method": method})


def litgpt(run: ResolvedRecipe, shape: ModelShape, _: Architecture | None) -> Iterator[Candidate]:
    """Yield litgpt's only candidate. litgpt has one lr, one weight decay, and fixed formulas for initial stds."""
    base, width = replace(run.hidden, multiplier=1.0), run.recipe.model.d_model
    matrix = replace(base, init_std=math.sqrt(2 / 5 / width))
    end = replace(base, init_std=1 / math.sqrt(width) / run.recipe.model.n_layers)
    scalar = round(1 / run.table.attention_scale**2)  # a whole number in litgpt
    yield Candidate(_alike(run, matrix, end, base), 1 / math.sqrt(scalar), {"attention_scores_scalar": scalar})


def _alike(
    run: ResolvedRecipe, matrix: ParameterSettings, end: ParameterSettings, vector: ParameterSettings
) -> dict[str, ParameterSettings]:
    """Return the settings of each parameter, by name: ``vector`` if it is a gain or bias, ``end`` if it is the last
    matrix of a branch, else ``matrix``."""
    return {
        row.name: replace(vector, init_mean=row.init_mean, init_std=0.0)
        if not row.role.is_matrix
        else (end if row.module in BRANCH_ENDS else matrix)
        for row in run.table.rows
    }


def deepspeed(run: ResolvedRecipe, shape: ModelShape, _: Architecture | None) -> Iterator[Candidate]:
    """Yield the only candidate for DeepSpeed. It has no settings per parameter, because DeepSpeed supports none."""
    yield Candidate({}, None, {"client_groups": len(optimizer_groups(run.table.rows))})


# torchtitan: initial values for each module, and parameter groups by regular expressions ----------------------------

TORCHTITAN_NAMES = {**TORCHTITAN.ends, **TORCHTITAN.block}
TORCHTITAN_SHARED_START = {"attention.key": "attention.value", "norm.key": "norm.query"}


def torchtitan(run: ResolvedRecipe, shape: ModelShape, _: Architecture | None) -> Iterator[Candidate]:
    """Yield the only candidate for torchtitan: the settings of an equivalent model without multipliers.

    torchtitan gives key matrices the init of value matrices, and key norms the init of query norms. The candidate
    does the same, even if the recipe differs.
    """
    given: dict[str, ParameterSettings] = {}
    starts: dict[str, list[float]] = {}
    groups: dict[tuple[float, ...], list[str]] = {}
    for row in run.table.rows:
        if row.module not in TORCHTITAN_NAMES:
            continue
        settings = run.plain[row.name]
        if row.module in TORCHTITAN_SHARED_START:
            other = run.plain[row.name.replace(row.module, TORCHTITAN_SHARED_START[row.module])]
            settings = replace(settings, init_mean=other.init_mean, init_std=other.init_std)
        given[row.name] = settings
        place = TORCHTITAN_NAMES[row.module]
        start = settings.init_std if settings.init_std or "norm" not in row.module else settings.init_mean
        starts.setdefault(place, []).append(float(f"{start:.12g}"))
        values = (settings.lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay)
        group = groups.setdefault(tuple(float(f"{value:.12g}") for value in values), [])
        group.append(place if row.layer is None else f"layers.{row.layer}.{place}")
    yield Candidate(
        given,
        None,
        {
            "starts": {place: stds[0] if len(set(stds)) == 1 else stds for place, stds in starts.items()},
            "groups": _by_pattern(groups, shape.n_layers, "layers", r"\.weight"),
            "identifier": identifier(run.recipe.name),
        },
    )


def _by_pattern(
    groups: Mapping[tuple[float, ...], Sequence[str]], n_layers: int, blocks: str, end: str = ""
) -> list[tuple[str, tuple[float, ...]]]:
    """Return a pair (regular expression, values) for each group. The first expression that matches a name decides.

    ``groups`` has parameter names by the values that they share. ``blocks`` is the path of the list of blocks, and
    ``end`` a regular expression for the end of the names.
    """
    most = max(groups, key=lambda values: len(groups[values]))
    patterns = [
        (_pattern(names, n_layers, blocks) + end + "$", values) for values, names in groups.items() if values != most
    ]
    return [*patterns, (".*", most)]


def _pattern(places: Iterable[str], n_layers: int, blocks: str) -> str:
    """Return a regex for parameter names that begin with one of ``places``, such as ``model.layers.0.mlp``.

    ``blocks`` is the path of the list of blocks, such as ``model.layers``. If ``places`` contains the same module of
    all ``n_layers`` blocks, the regex accepts any block number for this module.
    """
    layers: dict[str, list[str]] = {}
    alternatives = []
    for place in places:
        if place.startswith(f"{blocks}."):
            layer, inner = place.removeprefix(f"{blocks}.").split(".", 1)
            layers.setdefault(inner, []).append(layer)
        else:
            alternatives.append(place.replace(".", r"\."))
    within: dict[str, list[str]] = {}
    for inner, numbers in layers.items():
        which = r"\d+" if len(numbers) == n_layers else "|".join(numbers)
        within.setdefault(which, []).append(inner.replace(".", r"\."))
    path = blocks.replace(".", r"\.")
    alternatives += [rf"{path}\.({which})\.({'|'.join(inner)})" for which, inner in within.items()]
    return rf"^({'|'.join(alternatives)})"


def identifier(name: str) -> str:
    word = "".join(each if each.isalnum() and each.isascii() else "_" for each in name)
    return word if word[0].isalpha() else f"recipe_{word}"


# transformers: values for each tensor of an architecture ---------------------------------------------------------


def transformers(run: ResolvedRecipe, shape: ModelShape, architecture: Architecture | None) -> Iterator[Candidate]:
    """Yield the only candidate. A fused matrix gets the lr, eps and weight decay of its first part."""
    assert architecture is not None
    given, parameters = _by_tensor(run, architecture.parameters(shape), shape, architecture)
    config = architecture.config(shape)
    if shape.experts and run.table.router_losses[0] and not architecture.router_bias:
        # transformers adds its balance loss only if the model returns the logits of the router. The loss is the mean
        # over layers (in leaven the sum), and at an even load the number of active experts (in leaven 1).
        layers = shape.n_layers - shape.experts.dense_layers
        coefficient = run.table.router_losses[0] * layers / shape.experts.active
        config |= {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    yield Candidate(given, None, {"architecture": architecture, "config": config, "parameters": parameters})


def automodel(run: ResolvedRecipe, shape: ModelShape, architecture: Architecture | None) -> Iterator[Candidate]:
    """Yield the only candidate: factors on lr and weight decay for groups of parameters, by patterns of names.

    All parameters get the same betas and eps: those of the most frequent settings of hidden weights.
    """
    assert architecture is not None
    _require_dense(shape, "automodel")
    settings, parameters = _by_tensor(run, architecture.tensors(shape), shape, architecture)
    hidden = next(run.plain[row.name] for row in run.table.rows if run.rows[row.name] == run.hidden)
    decay = hidden.weight_decay or max(each["weight_decay"] for each in parameters.values())
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, each in parameters.items():
        shares = (each["lr"] / hidden.lr, each["weight_decay"] / decay if decay else 1.0)
        groups.setdefault(tuple(float(f"{share:.12g}") for share in shares), []).append(name)
    values = {
        "architecture": architecture,
        "config": architecture.config(shape),
        "parameters": parameters,
        "groups": _by_pattern(groups, shape.n_layers, architecture.blocks),
        "base": replace(hidden, weight_decay=decay),
    }
    alike = {"beta1": hidden.beta1, "beta2": hidden.beta2, "eps": hidden.eps}
    yield Candidate({name: replace(each, **alike) for name, each in settings.items()}, None, values)


def _require_dense(shape: ModelShape, target: str) -> None:
    if shape.experts:
        raise InputError(f"--to {target} writes no mixtures of experts; use --to megatron or --to transformers")


def _by_tensor(
    run: ResolvedRecipe, tensors: Iterable[Stored], shape: ModelShape, architecture: Architecture
) -> tuple[dict[str, ParameterSettings], dict[str, dict[str, Any]]]:
    """Return settings by leaven's parameter name, and entries of parameters.json by tensor name."""
    factors, offsets = architecture.factors(shape, architecture.config(shape)), architecture.offsets(shape)
    # Biases that the recipe does not have start at 0.
    fallback = replace(run.hidden, init_mean=0.0, init_std=0.0, weight_decay=0.0, multiplier=1.0)
    parameters: dict[str, dict[str, Any]] = {}
    given = {}
    for stored in tensors:
        parts = [run.plain.get(name, fallback) for name in stored.parts]
        first, name = parts[0], next(iter(stored.parts))
        written = first.folded(1 / factors.get(name, 1.0), run.decoupled)
        parameters[stored.name] = {
            "init_mean": written.init_mean - offsets.get(name, 0.0),
            "init_std": [part.init_std for part in parts] if len(parts) > 1 else written.init_std,
            "lr": written.lr,
            "betas": [first.beta1, first.beta2],
            "eps": written.eps,
            "weight_decay": written.weight_decay,
        }
        if len(parts) > 1:
            rows = [math.prod(each[:-1]) if len(each) > 1 else each[0] for each in stored.parts.values()]
            parameters[stored.name] |= {"rows": rows, "heads": stored.heads, "transposed": stored.transposed}
        for name, part in zip(stored.parts, parts, strict=True):
            if name in run.plain:
                given[name] = replace(first, init_std=part.init_std)
    return given, parameters


CANDIDATES: Mapping[str, Candidates] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "nanotron": nanotron,
    "transformers": transformers,
    "litgpt": litgpt,
    "megatron-module": megatron_module,
    "automodel": automodel,
}
