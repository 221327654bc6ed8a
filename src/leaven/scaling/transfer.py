"""Transfer a recipe to another model size, batch size or number of tokens.

The hyperparameters do not change: they apply to the base. The warm-up, a batch ramp, batch stages and
intervals such as ``evaluation.every_tokens`` keep their share of the run. Each transfer rounds to whole
sequences, so do not transfer a transferred recipe.
"""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leaven.catalogue.messages import sentence, templates
from leaven.catalogue.terms import read
from leaven.errors import InputError
from leaven.recipe.batch import Batch
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_number, format_quantity
from leaven.scaling.table import parameter_table

_MESSAGES = Path(__file__).parent
_WARM_UP = "schedule.warmup_tokens"
_SEARCHED_COUNTS = ("batch.tokens", "data.tokens")  # `transfer_like` multiplies them by (found) / (start)
# Part of the reason that ``leaven tune`` writes for a value. A user may have written a note before it.
_STUDY = re.compile(r"\bstudy [\w.\-]+, trial [0-9]")
# The start of a study, or of an earlier one, in such a reason. The last number is at the size of the recipe.
_START = re.compile(r"\b(?:the start(?:'s| has)|(?P<earlier>an earlier study began with)) (?P<count>[0-9][0-9,]*)")
_COOLDOWN = "schedule.decay_ratio"
_BATCH_SIZES = ("batch.ramp", "batch.stages")  # they change with batch.tokens
# Intervals in tokens that keep their share of the run.
_INTERVALS = (
    "stability.checkpoint_every_tokens",
    "stability.keep_every_tokens",
    "stability.rollback_lr_tokens",
    "evaluation.every_tokens",
    "average.half_life_tokens",
)

# Far beyond published runs; larger numbers are typing errors.
_LARGEST = {
    "width": (200_000, "the widest published model has 20,480 (MT-NLG 530B)"),
    "depth": (2_000, "the deepest published model has 1,000 layers (DeepNet)"),
    "batch-tokens": (1_000_000_000, "the largest published batches have about 100 M tokens"),
    "tokens": (400_000_000_000_000, "the longest published runs have about 40 T tokens"),
}
_LEAST_BETA = 0.01  # with a smaller beta, Adam's moment is just the last gradient

# Fields of the model that have no effect on tuned values.
# `leaven.scaling.tested_ranges.unlike` warns of another vocabulary or sequence length.
MINOR_FIELDS = {"vocab_size", "seq_len", "norm_eps", "rope_theta", "dropout"}
# Fields of the model in which tuned recipe and target may differ, and so may the sizes in the check of transfer.
FREE_FIELDS = MINOR_FIELDS | {"n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_attention", "d_ff"}


def _family(recipe: Recipe) -> dict[str, Any]:
    """Return the values of the model fields that must be equal in a tuned recipe and its target, by field."""
    fields = recipe.model.model_dump()
    experts = fields.pop("experts", None) or {}
    fields |= {f"experts.{key}": value for key, value in experts.items() if key != "d_expert"}
    return {key: value for key, value in fields.items() if key not in FREE_FIELDS}


def transfer(
    recipe: Recipe,
    *,
    width: int | None = None,
    depth: int | None = None,
    batch_tokens: int | None = None,
    tokens: int | None = None,
    d_ff: int | None = None,
    d_head: int | None = None,
    n_kv_heads: int | None = None,
    name: str | None = None,
) -> Recipe:
    """Return the recipe at another scale, with the same base.

    A size that is not given keeps its value, or follows the width: see :meth:`leaven.recipe.shape.ModelShape.scaled`.
    ``start`` (initial weights) is kept only if the model's shape does not change. Raise InputError if a size is
    impossible or does not fit the other sizes, or if the run has too few steps.
    """
    given = {"width": width, "depth": depth, "batch-tokens": batch_tokens, "tokens": tokens}
    for option, (largest, reason) in _LARGEST.items():
        count = given[option]
        if count is not None and count > largest:
            raise InputError(
                f"--{option} {format_quantity(count)}: {reason}; give {format_quantity(largest)} or less"
            )
    target_tokens, target_batch = tokens or recipe.data.tokens, batch_tokens or recipe.batch.tokens
    seq_len = recipe.model.seq_len
    if target_batch % seq_len:
        lower = max(target_batch // seq_len, 1) * seq_len
        raise InputError(
            f"--batch-tokens {target_batch:,} is not a multiple of the sequence length {seq_len:,}; "
            f"give {lower:,} or {lower + seq_len:,}"
        )
    try:
        shape = recipe.model.scaled(
            width or recipe.model.d_model,
            depth or recipe.model.n_layers,
            d_ff=d_ff,
            d_head=d_head,
            n_kv_heads=n_kv_heads,
        )
    except ValueError as error:
        if str(error).startswith("width"):  # checks have --widths or --scales instead of --width
            raise InputError(str(error)) from None
        raise InputError(f"--width, --d-head, --kv-heads: {error}") from None
    if target_tokens < target_batch:
        raise InputError(
            f"--tokens {target_tokens:,} is less than one batch of {target_batch:,}; give at least --tokens "
            f"{target_batch}, or a smaller --batch-tokens"
        )
    longer = target_tokens / recipe.data.tokens
    changes: dict[str, Any] = {
        "name": name or recipe.name,
        "model": shape.model_dump(),
        "start": recipe.start.model_dump() if shape == recipe.model else {},
        "data.tokens": target_tokens,
        "batch": moved_batch(recipe, target_batch, longer),
        # Keep at least one token: an inverse square root schedule counts from the end of the warm-up.
        "schedule.warmup_tokens": max(
            round(recipe.schedule.warmup_tokens * longer), min(recipe.schedule.warmup_tokens, 1)
        ),
        "scaling.base": _pinned(recipe, shape),
    }
    for path in _INTERVALS:
        every = read(recipe, path)
        if every is not None:
            changes[path] = max(round(every * longer), 1)
    moved = _moved(recipe, changes)
    reasons = _reasons(recipe, moved)
    for path in searched_paths(recipe) & {_WARM_UP, *_SEARCHED_COUNTS} & reasons.keys():
        # The reason still says what the study found, because `transfer_like` may read it.
        reasons[path] = _moved_reason(recipe, path, read(moved, path) / read(recipe, path))
    return moved.replace({"why": recipe.of_new_run.why | reasons})


def transfer_like(tuned: Recipe, target: Recipe) -> Recipe:
    """Return ``target`` with the hyperparameters of ``tuned``, a recipe that ``leaven tune`` wrote.

    The tables ``[hyperparameters]`` and ``[scaling]`` are copied. Other values change only if the study searched
    them:

    - The warm-up gets the same share of the run as in ``tuned``.
    - Batch and training tokens are multiplied by (value of ``tuned``) / (value at the start of the study).
    - All other searched values are copied.

    Raise InputError if the models differ in a field outside `FREE_FIELDS`, the run has too few steps, or the result
    is invalid. Also raise it if the study searched batch or training tokens, and the table ``[why]`` of ``tuned``
    does not give their value at the start of the study.
    """
    ours, theirs = _family(tuned), _family(target)
    for field in dict(sorted((ours | theirs).items())):
        one, other = ours.get(field), theirs.get(field)
        if one != other:
            raise InputError(
                f"--like: the models belong to different families: model.{field} is {one} in {tuned.name}, {other} "
                f"in {target.name}; tune a small model with the target's {field}"
            )
    if target.data.tokens < target.batch.tokens:
        raise InputError(
            f"--like: {target.name} has {target.data.tokens:,} tokens, less than one batch of "
            f"{target.batch.tokens:,}; raise data.tokens or lower batch.tokens in that recipe"
        )
    changes: dict[str, Any] = {
        "hyperparameters": tuned.hyperparameters.model_dump(),
        "scaling": tuned.scaling.model_dump() | {"base": _pinned(tuned, target.model)},
    }
    studied = searched_paths(tuned)
    longer = target.data.tokens / study_start(tuned, "data.tokens", target)
    counts = {
        _WARM_UP: longer,
        "data.tokens": longer,
        "batch.tokens": target.batch.tokens / study_start(tuned, "batch.tokens", target),
    }
    # If a count of the target equals the transferred count, the target's reason for it is kept.
    kept_counts = {path for path, factor in counts.items() if round(read(target, path) / factor) == read(tuned, path)}
    searched = {path for path in studied - kept_counts if not path.startswith("hyperparameters.")}
    searched |= {_COOLDOWN} & taken_paths(tuned, target)
    for path in searched:
        changes[path] = max(round(read(tuned, path) * counts[path]), 1) if path in counts else read(tuned, path)
    if "batch.tokens" in searched:
        sequences = changes.pop("batch.tokens") / target.model.seq_len
        changes["batch"] = moved_batch(target, max(round(sequences), 1) * target.model.seq_len)
    moved = _moved(target, changes, "--like: ")
    values = ("hyperparameters", "scaling.")
    kept = {path: why for path, why in target.why.items() if not path.startswith(values) and path not in searched}
    transferred = {path: why for path, why in tuned.why.items() if path.startswith(values) or path in searched}
    for path in searched & counts.keys():
        transferred[path] = _moved_reason(tuned, path, counts[path], target)
    reasons = {path: why for path, why in _reasons(tuned, moved).items() if path.startswith(values)}
    if "batch.tokens" in searched:
        reasons |= {path: why for path, why in _reasons(target, moved).items() if path in _BATCH_SIZES}
    return moved.replace({"why": kept | transferred | reasons}).of_new_run


def taken_paths(tuned: Recipe, target: Recipe) -> set[str]:
    """Return the paths of the values in ``tuned`` that come from a study. :func:`transfer_like` uses them."""
    searched = searched_paths(tuned)
    # If a study has found the decay wsd, its trials had this cooldown, which has no effect in other decays.
    cooldown = "schedule.decay" in searched and tuned.schedule.decay == "wsd" != target.schedule.decay
    return searched | ({_COOLDOWN} if cooldown else set())


def _moved_reason(tuned: Recipe, path: str, factor: float, target: Recipe | None = None) -> str:
    """Return the reason for the value at ``path``, which a study chose and a transfer multiplied by ``factor``."""
    start = None
    with suppress(InputError):  # a reason without the start is refused where the start is used
        start = round(study_start(tuned, path, target) * factor) if path in _SEARCHED_COUNTS else None
    return sentence("transfer like", "moved", {"study": tuned.why[path], "factor": factor, "start": start}, _MESSAGES)


def study_start(tuned: Recipe, path: str, target: Recipe | None = None) -> int:
    """Return batch.tokens or data.tokens (``path``) at the start of the study that chose its value in ``tuned``.

    If no study chose the value, return it. After several studies, return the start of the first study,
    or of the last study if a study also chose the value in ``target``. Raise InputError if the reason in
    ``tuned.why`` does not contain the start.
    """
    why, value = tuned.why.get(path, ""), int(read(tuned, path))
    if path not in searched_paths(tuned):
        return value
    begun = target is not None and path in searched_paths(target)
    found = [match["count"] for match in _START.finditer(why) if not (begun and match["earlier"])]
    if found:
        base = tuned.base.batch_tokens if path == "batch.tokens" else tuned.base.tokens
        if found[-1] == format_number(base):  # older versions wrote three digits
            return base
        return int(found[-1].replace(",", ""))
    if "as at the start" in why:
        return value
    raise InputError(
        f'{tuned.name}: [why] "{path}" does not contain the value at which the study began; copy this line from '
        "best.toml, or remove it to keep the target's value"
    )


def searched_paths(recipe: Recipe) -> set[str]:
    """Return the paths of the values that ``leaven tune`` chose. Their reasons contain "study NAME, trial N"."""
    return {path for path, why in recipe.why.items() if _STUDY.search(why)}


def _moved(recipe: Recipe, changes: dict[str, Any], option: str = "") -> Recipe:
    """Return the changed recipe. Raise InputError if it is invalid, or if a beta of Adam would be near 0."""
    try:
        moved = recipe.replace(changes)
    except ValidationError as error:
        raise InputError(f"{option}{explain(error)}") from None
    base = moved.hyperparameters
    for row in parameter_table(moved).rows:
        for name in () if row.match else ("beta1", "beta2"):  # a scaling rule does not change the momentum of Muon
            if getattr(row, name) < _LEAST_BETA <= getattr(base, name):
                steps = moved.data.tokens / moved.batch.tokens
                base_steps = moved.base.tokens / moved.base.batch_tokens
                raise InputError(
                    f"the run has too few steps for Adam ({steps:,.0f}; the base has {base_steps:,.0f}): "
                    f"the rule lowers {name} from {getattr(base, name):g} to {getattr(row, name):.2g}, too near 0; "
                    "give more --tokens or a smaller --batch-tokens"
                )
    return moved


def _pinned(recipe: Recipe, target: ModelShape) -> dict[str, int]:
    """Return the table ``[scaling.base]`` that gives a recipe of the shape ``target`` the base of ``recipe``.

    The table has no d_ff, d_head and n_kv_heads if scaling ``target`` to the base's width and depth gives them.
    """
    base, shape = recipe.base, recipe.base_shape
    proportions = ("d_ff", "d_head", "n_kv_heads")
    try:
        same = target.scaled(base.width, base.depth)
        implied = all(getattr(same, name) == getattr(shape, name) for name in proportions)
    except ValueError:
        implied = False
    scale = base.model_dump(include={"width", "depth", "batch_tokens", "tokens"})
    return scale if implied else scale | {name: getattr(shape, name) for name in proportions}


def moved_batch(recipe: Recipe, tokens: int, longer: float = 1.0) -> dict[str, Any]:
    """Return the table ``[batch]`` for a batch of ``tokens`` tokens.

    A ramp or stages scale with the batch and with ``longer`` = (new run length) / (old run length). A ramp
    is dropped if its first batch would be a full batch.
    """
    batch, seq_len = recipe.batch, recipe.model.seq_len
    larger = tokens / batch.tokens
    moved: dict[str, Any] = {"tokens": tokens, "micro_batch": batch.micro_batch, "stages_rule": batch.stages_rule}
    if batch.stages:
        moved["stages"] = [
            {
                "from_tokens": round(stage.from_tokens * longer),
                "tokens": max(round(stage.tokens * larger / seq_len), 1) * seq_len,
            }
            for stage in batch.stages
        ]
    if batch.ramp is not None:
        share, increments = _start_and_increments(batch)
        sequences = tokens // seq_len
        if sequences > 1 or not increments:
            increments, increment = _increments(sequences, share, increments)
            moved["ramp"] = {
                "start_tokens": tokens - increments * increment * seq_len,
                "increment_tokens": increment * seq_len,
                "over_tokens": max(round(batch.ramp.over_tokens * longer), 1),
                "rule": batch.ramp.rule,
            }
    return moved


def _start_and_increments(batch: Batch) -> tuple[float, int]:
    """Return the first batch of a ramp as a share of the full batch, and the number of increments."""
    assert batch.ramp is not None
    climb = batch.tokens - batch.ramp.start_tokens
    return batch.ramp.start_tokens / batch.tokens, climb // batch.ramp.increment_tokens


def _increments(sequences: int, share: float, increments: int) -> tuple[int, int]:
    """Return (number of increments, sequences in an increment) of a ramp to a batch of ``sequences``.

    The ramp's first batch, ``sequences`` minus all increments, is as near as possible to ``share`` x ``sequences``.
    """
    if not increments:
        return 0, 1
    climb = sequences * (1 - share)
    sizes = {math.floor(climb / increments), math.ceil(climb / increments)}
    sizes |= {round(climb / count) for count in range(-(-4 * increments // 5), 5 * increments // 4 + 1)}
    found = []
    for size in {min(max(size, 1), sequences - 1) for size in sizes}:
        count = min(max(round(climb / size), 1), (sequences - 1) // size)
        found.append((abs(count * size - climb), abs(count - increments), count, size))
    *_, count, size = min(found)
    return count, size


def _reasons(before: Recipe, after: Recipe) -> dict[str, str]:
    """Return {path: reason} for the changed values of ``after`` that have a template in ``messages.toml``."""
    base, searched = after.base, searched_paths(before)
    facts = {
        "before": before,
        "after": after,
        "where": f"width {base.width}, depth {base.depth}, batch {format_quantity(base.batch_tokens)}, "
        f"{format_quantity(base.tokens)} tokens",
        "warmup": before.schedule.warmup_tokens / before.data.tokens,
        "studied": any(path.startswith("hyperparameters.") for path in searched),
        "clip": re.sub(r"(^|; )no rule scales it:.*", "", before.why.get("hyperparameters.grad_clip", "")) or None,
    }
    if before.batch.ramp and after.batch.ramp:
        for name, batch in (("ramp", after.batch), ("ramp_before", before.batch)):
            share, increments = _start_and_increments(batch)
            facts[name] = {"share": share, "increments": increments}
    for name, part, whole in (("group", "n_heads", "n_kv_heads"), ("ff", "d_ff", "d_model")):
        old, new = (getattr(of.model, part) / getattr(of.model, whole) for of in (before, after))
        facts[name] = {"before": old, "after": new, "kept": old == new}
    always = ("hyperparameters", "hyperparameters.grad_clip", "scaling.base")
    return {
        path: sentence("transfer", path, facts, _MESSAGES)
        for path in templates(_MESSAGES)["transfer"]
        if path in always or read(before, path) != read(after, path)
    }
