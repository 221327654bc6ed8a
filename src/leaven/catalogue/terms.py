"""A published run and a recipe in the same words, so that one can be held against the other.

The words are the paths of a recipe. What only one of the two knows has no counterpart, and is told apart.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from leaven.catalogue.counting import d_head
from leaven.catalogue.runs import Run
from leaven.recipe.recipe import Recipe


class Difference(NamedTuple):
    path: str
    a: Any
    b: Any
    counterpart: bool  # False where one side has no word for it


class _Term(NamedTuple):
    of_run: Callable[[Run], Any]
    of_recipe: Callable[[Recipe], Any]
    published: tuple[str, ...]  # the paths of a run's file that say this


def _read(source: Any, path: str) -> Any:
    for name in path.split("."):
        source = getattr(source, name, None)
    return source


def _term(path: str, *published: str, of_run: Callable[[Run], Any] | None = None) -> _Term:
    """A value of a recipe, and where a run has it; ``of_run`` where it is not simply there."""
    return _Term(of_run or (lambda run: _read(run, published[0])), lambda recipe: _read(recipe, path), published)


def _warmup_tokens(run: Run) -> int | None:
    return round(run.warmup_fraction * run.tokens) if run.warmup_fraction is not None and run.tokens else None


def _positions(run: Run) -> str | None:
    return "rope" if run.arch.positional == "rotary" else run.arch.positional


def _start_tokens(run: Run) -> int | None:
    """The first batch of a ramp."""
    ramp = run.batch.rampup if run.batch else None
    if ramp is None or ramp.kind == "none":
        return None
    if ramp.stages:
        return ramp.stages[0].get("tokens")
    seq_len = run.data.seq_len if run.data else None
    return ramp.start_tokens or (ramp.start_samples * seq_len if ramp.start_samples and seq_len else None)


def _ramp_tokens(run: Run) -> int | None:
    """From how many tokens on the batch has its size."""
    ramp = run.batch.rampup if run.batch else None
    if ramp is None or ramp.kind == "none":
        return None
    return ramp.stages[-1].get("from_tokens") if ramp.stages else ramp.over_tokens


def _sizes(recipe: Recipe) -> tuple[int, int] | tuple[None, None]:
    """First batch of the ramp, and from how many tokens on the batch has its size."""
    if recipe.batch.ramp is not None:
        return recipe.batch.ramp.start_tokens, recipe.batch.ramp.over_tokens
    sizes = recipe.batch.sizes
    return (sizes[0][1], sizes[-1][0]) if len(sizes) > 1 else (None, None)


def _clip(recipe: Recipe) -> float | None:
    clip = recipe.hyperparameters.grad_clip
    return clip.limit if clip.mode == "global" else None


def _optimizer(recipe: Recipe) -> str:
    """Papers call AdamW Adam too; the adam of a recipe adds its decay to the gradient, as no run here says it did."""
    tuned = recipe.hyperparameters
    return L2_DECAY if tuned.optimizer == "adam" and tuned.weight_decay else tuned.optimizer


L2_DECAY = "adam, L2 decay"
_SHAPE = "n_layers d_model n_heads n_kv_heads d_ff"
_CHOICES = "norm activation qk_norm tied_embeddings embedding_norm bias"
_OPTIM = "weight_decay beta1 beta2 eps decay_norm_and_bias"
TERMS: dict[str, _Term] = {
    "params": _Term(
        lambda run: run.params_total, lambda recipe: recipe.model.params, ("params_total", "params_active")
    ),
    **{f"model.{name}": _term(f"model.{name}", f"arch.{name}") for name in f"{_SHAPE} {_CHOICES}".split()},
    "model.d_head": _term("model.d_head", "arch.d_head", of_run=lambda run: d_head(run.arch)),
    "model.vocab_size": _term(
        "model.vocab_size",
        "arch.vocab_size",
        "arch.vocab_padded",
        of_run=lambda run: run.arch.vocab_padded or run.arch.vocab_size,
    ),
    "model.positions": _term("model.positions", "arch.positional", of_run=_positions),
    "model.rope_theta": _Term(
        lambda run: run.arch.rope_theta,
        lambda recipe: recipe.model.rope_theta if recipe.model.positions == "rope" else None,
        ("arch.rope_theta",),
    ),
    "model.seq_len": _term("model.seq_len", "data.seq_len"),
    "model.dropout": _term("model.dropout", "optim.dropout"),
    "data.tokens": _term("data.tokens", "data.tokens_total"),
    "batch.tokens": _term("batch.tokens", "batch.global_batch_tokens", "batch.global_batch_samples"),
    "batch.ramp.start_tokens": _Term(_start_tokens, lambda recipe: _sizes(recipe)[0], ()),
    "batch.ramp.over_tokens": _Term(_ramp_tokens, lambda recipe: _sizes(recipe)[1], ()),
    "batch.micro_batch": _Term(
        lambda run: _read(run, "parallel.micro_batch"),
        lambda recipe: None if recipe.batch.micro_batch == "auto" else recipe.batch.micro_batch,
        ("parallel.micro_batch", "parallel.grad_accum"),
    ),
    "schedule.warmup_tokens": _term(
        "schedule.warmup_tokens",
        *(f"schedule.{length}" for length in ("warmup_tokens", "warmup_steps", "warmup_samples", "warmup_fraction")),
        of_run=_warmup_tokens,
    ),
    "schedule.decay": _term("schedule.decay", "schedule.shape", of_run=lambda run: run.decay),
    "schedule.min_lr_ratio": _term(
        "schedule.min_lr_ratio", "schedule.min_lr_ratio", "schedule.min_lr", of_run=lambda run: run.min_lr_ratio
    ),
    "hyperparameters.lr": _term("hyperparameters.lr", "schedule.peak_lr"),
    "hyperparameters.init_std": _term("hyperparameters.init_std", "init.std"),
    "hyperparameters.grad_clip": _Term(lambda run: _read(run, "optim.grad_clip"), _clip, ("optim.grad_clip",)),
    "hyperparameters.optimizer": _Term(lambda run: _read(run, "optim.optimizer"), _optimizer, ("optim.optimizer",)),
    **{f"hyperparameters.{name}": _term(f"hyperparameters.{name}", f"optim.{name}") for name in _OPTIM.split()},
    "precision.compute": _term("precision.compute", "precision.dtype"),
    **{f"layout.{name}": _term(f"layout.{name}", f"parallel.{name}") for name in ("dp", "tp", "pp")},
    "layout.zero": _term("layout.zero", "parallel.zero_stage"),
}
# What tells who, when and how fast, not how the model was trained; lengths that follow from others; free text.
_ABOUT = {"family", "organisation", "date", "kind", "status", "id", "lineage", "params", "hardware", "throughput"}
_FOLLOWS = {"arch.gated", "schedule.total_steps", "schedule.total_samples", "parallel.framework", "data.dataset"}
_TEXT = ("note", "scheme", "formula")
# What every model of leaven's has, so that a recipe need not say it.
_GIVEN = {
    "arch.norm_placement": "pre",
    "arch.norm_affine": True,
    "arch.rotary_pct": 1.0,
    "arch.qk_norm_width": "head",
}
# Parts of a recipe that tell how to go about a training, not what is trained.
_LEAVENS_OWN = {"name", "why", "tuning", "evaluation", "stability", "data", "layout", "precision"}


def diff_in_terms(
    a: Run | Recipe, b: Run | Recipe, resolved: Callable[[Recipe], dict[str, Any]] = lambda recipe: {}
) -> list[Difference]:
    """The values in which a run or recipe differs from another; None where one is silent.

    ``resolved`` tells, by path, what a recipe's values come to: they are written in base coordinates, those of a
    published run are what its parameters got. A value without a counterpart on the other side comes last, under the
    path that it has on its own.
    """
    told_a, told_b = (terms(one) | (resolved(one) if isinstance(one, Recipe) else {}) for one in (a, b))
    found = [
        Difference(path, told_a.get(path), told_b.get(path), True)
        for path in TERMS
        if told_a.get(path) != told_b.get(path)
    ]
    alone_a, alone_b = dict(without_counterpart(a)), dict(without_counterpart(b))
    return found + [
        Difference(path, alone_a.get(path), alone_b.get(path), type(a) is type(b))
        for path in {**alone_a, **alone_b}
        if alone_a.get(path) != alone_b.get(path)
    ]


def terms(of: Run | Recipe) -> dict[str, Any]:
    """What is known, by the paths of a recipe."""
    values = {path: term.of_run(of) if isinstance(of, Run) else term.of_recipe(of) for path, term in TERMS.items()}
    return {path: value for path, value in values.items() if value is not None}


def without_counterpart(of: Run | Recipe) -> Iterator[tuple[str, Any]]:
    """The values that only one of the two kinds has a word for, where they are not those of an ordinary run."""
    if isinstance(of, Recipe):
        for path, value in _leaves(of.model_dump(mode="json", exclude_defaults=True), ""):
            counted = path in TERMS or path.startswith(("batch.ramp.", "batch.stages"))
            if not counted and path.partition(".")[0] not in _LEAVENS_OWN:
                yield path, value
        return
    taken = {path for term in TERMS.values() for path in term.published} | _FOLLOWS
    for path, value in of.flat().items():
        passed = path in taken or path.partition(".")[0] in _ABOUT or path.endswith(_TEXT)
        ramp = path.startswith("batch.rampup.")  # its start and its length have words
        if not passed and not ramp and value is not False and _GIVEN.get(path) != value:
            yield path, value


def _leaves(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
