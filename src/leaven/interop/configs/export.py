"""Exports recipes as configurations of other trainers (targets). ``targets/NAME.toml`` describes a target.

An export loses the values that the target cannot represent. The target's file lists some of them. To find the
others, the recipe's model shape and parameter settings are compared with those of the target (:mod:`.per_parameter`).
"""

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from leaven.documents.runs import LossRow
from leaven.errors import InputError
from leaven.interop.architectures import changed, nearest, shape_values
from leaven.interop.configs.compare import SAME, SAME_START, ResolvedRecipe, as_written, compare, fitted
from leaven.interop.configs.per_parameter import CANDIDATES, Candidate, identifier
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.storage import make_folder, require_free, write_text, written_folder

HERE = Path(__file__).parent
TARGETS = tuple(CANDIDATES)


@dataclass(frozen=True)
class Target:
    """An export target, read from its table in ``targets/``."""

    title: str  # name of the target in sentences
    sources: str  # where the target's flags, keys, defaults and behaviour are documented
    # default path of the export; {name} is the recipe's name, {identifier} the same name as a Python identifier
    path: str
    files: Mapping[str, str]  # templates by file name; "" is the name if the target has a single file
    decays: Mapping[str, str]  # the target's name of each lr decay; a missing decay is exported as cosine
    # by setting, such as lr: why the target cannot have the recipe's value; "*" stands for all other settings
    reasons: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # supported values by key of [model]
    layout: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # written values by key of [layout]
    # by key of [layout]: why a value is not written; "*" stands for all other keys
    unwritten: Mapping[str, str] = field(default_factory=dict)
    architecture: bool = False  # whether the exported model is a Hugging Face architecture
    plain: bool = False  # whether the exported model has no multipliers, because they are folded into its weights
    ramp: bool = False  # whether the target supports a batch ramp
    samples: bool = False  # whether the target counts samples instead of steps
    token_schedule: bool = False  # whether the target's schedule counts tokens, as leaven's does
    # for templates: the target's word for each value of a key such as ``precision``
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    lost: Sequence[Mapping[str, str]] = ()  # values that are lost, written as in targets/common.toml
    notes: Sequence[Mapping[str, str]] = ()  # notes, written as in targets/common.toml


@dataclass(frozen=True)
class Export:
    files: Mapping[str, str]  # text by file name; "" is the name if the target has a single file
    losses: list[LossRow]  # values of the recipe that the target cannot represent
    notes: list[str]  # other remarks for the user


@cache
def target(name: str) -> Target:
    if name not in TARGETS:
        raise InputError(f"--to {name}: choose from {', '.join(TARGETS)}")
    table = tomllib.loads((HERE / f"targets/{name}.toml").read_text(encoding="utf-8"))
    if "like" in table:  # another target, whose keys apply unless this table has them
        table = vars(target(table.pop("like"))) | table
    return Target(**table)


def default_path(name: str, recipe_name: str) -> str:
    return target(name).path.format(name=recipe_name, identifier=identifier(recipe_name))


def export(name: str, recipe: Recipe) -> Export:
    """Return the export of a recipe. Raise InputError if the target is unknown, or cannot use the recipe's layout,
    batch or model."""
    to, run = target(name), ResolvedRecipe(recipe.without_muon)
    if to.architecture:
        architecture, changes = nearest(recipe.model, trained=True)
        shape, values = changed(recipe.model, changes), shape_values(recipe.model)
        why = f"{architecture.name} supports nothing else"
        losses = [
            LossRow(
                key=f"model.{key}",
                value=as_written(recipe.model.experts) if key == "experts" else values[key],
                why=f"would be {'left out' if value is None else json.dumps(value)}: {why}",
            )
            for key, value in changes.items()
        ]
        if architecture.logits_bias:
            why = f"{architecture.name} also trains a bias on the logits"
            losses.append(LossRow(key="model.bias", value=recipe.model.bias, why=why))
    else:
        architecture, (shape, losses) = None, fitted(recipe.model, to.holds, to.title)
    compared = [
        (compare(run, each.given, each.attention_scale, to.reasons, plain=to.plain), each)
        for each in CANDIDATES[name](run, shape, architecture)
    ]
    (unlike, _), chosen = min(compared, key=lambda each: each[0][1])
    known: dict[str, Any] = _context(to, run, shape, chosen)
    common = tomllib.loads((HERE / "targets/common.toml").read_text(encoding="utf-8"))
    if recipe.hyperparameters.optimizer == "muon":
        why = "would be adamw for all parameters; tune hyperparameters.lr for AdamW before you train"
        losses.append(LossRow(key="hyperparameters.optimizer", value="muon", why=why))
    losses += unlike + [LossRow(**row) for row in _texts((*common["lost"], *to.lost), known)]
    notes = [row["text"] for row in _texts((*common["notes"], *to.notes), known)]
    notes += _unwritten(to, recipe)
    known["lost"], known["notes"] = [loss.text for loss in losses], notes
    comments = [f"# lost: {line}" for line in known["lost"]] + [f"# note: {line}" for line in notes]
    known["comments"] = Verbatim("\n".join(comments))
    files = {}
    for file, template in to.files.items():
        kind = Path(file or to.path).suffix
        text = environment(kind).from_string(template).render(known)
        files[file] = json.dumps(json.loads(text), indent=2) + "\n" if kind == ".json" else text
    return Export(files, losses, notes)


def write(export: Export, path: Path) -> None:
    """Write the exported file or folder: completely, or not at all."""
    if "" in export.files:
        require_free(path, device=True)
        make_folder(path.absolute().parent)
        write_text(path, export.files[""])
        return
    with written_folder(path) as folder:
        for name, text in export.files.items():
            (folder / name).write_text(text, encoding="utf-8")


# Templates --------------------------------------------------------------------------------------------------------


class Verbatim(str):
    """Text that a template prints without quotes."""


def _context(to: Target, run: ResolvedRecipe, shape: ModelShape, chosen: Candidate) -> dict[str, Any]:
    """Return the variables that a target's templates and expressions can use."""
    recipe = run.recipe
    unlike = any(
        abs(row.multiplier / chosen.given[row.name].multiplier - 1) > SAME
        for row in run.table.rows
        if row.name in chosen.given
    )
    # Modules whose initial std in the target is not the recipe's, but counts as equal (`SAME_START`).
    close = {
        row.module
        for row in ([] if to.plain else run.table.rows)
        if row.name in chosen.given
        and SAME < abs(row.init_std / (chosen.given[row.name].init_std or 1) - 1) < SAME_START
    }
    return {
        "target": to,
        "recipe": recipe,
        "run": run,
        "hidden": run.hidden,
        "model": shape,
        "hyper": recipe.hyperparameters,
        "clip": recipe.hyperparameters.grad_clip,
        "schedule": recipe.schedule,
        "batch": recipe.batch,
        "data": recipe.data,
        "layout": recipe.layout,
        "precision": recipe.precision.compute,
        "decay": to.decays.get(recipe.schedule.decay, to.decays["cosine"]),
        "warmup_steps": run.in_steps(recipe.schedule.warmup_tokens),
        "rescaled": bool(run.folding) if to.plain else unlike,
        "close": sorted(close),
        "same_start": SAME_START,
        "max": max,
        "min": min,
        "round": round,
        **chosen.values,
    }


def _unwritten(to: Target, recipe: Recipe) -> Iterator[str]:
    """Yield notes on the values of [layout] that are not exported. Values with the same reason share a note."""
    unknown = f"set this in {to.title} if possible; it changes at most the last bits of the loss"
    found: dict[str, list[str]] = {}
    for key, value in recipe.layout.model_dump(exclude_defaults=True).items():
        if not {"any", value} & set(to.layout.get(key, ())):
            reason = to.unwritten.get(key, to.unwritten.get("*", unknown))
            found.setdefault(reason, []).append(f"layout.{key} = {json.dumps(value)}")
    for reason, values in found.items():
        yield f"{', '.join(values)} {'is' if len(values) == 1 else 'are'} not exported: {reason}"


def _texts(rows: Iterable[Mapping[str, str]], known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the ``[[lost]]`` or ``[[notes]]`` rows of an export target, with templates and expressions evaluated.

    A row is left out if its expression ``when`` is false. ``known`` has the variables.
    """

    def evaluated(expression: str) -> Any:
        return environment("").compile_expression(expression)(**known)

    for row in rows:
        if evaluated(row.get("when", "true")):
            found = {
                key: environment("").from_string(row[key]).render(known)
                for key in ("key", "why", "text")
                if key in row
            }
            if "key" in found:
                found["value"] = evaluated(row.get("value", f"recipe.{found['key']}"))
            yield found


@cache
def environment(kind: str) -> Environment:
    """Return a Jinja environment that prints values as literals of a file type ``kind``, such as ".yaml"."""
    scalars = {".json": _json, ".yaml": _yaml, ".py": _literal(str), ".sh": _literal(shlex.quote)}
    scalar: Callable[[Any], str] = scalars.get(kind, str)
    made = Environment(
        loader=FileSystemLoader([HERE / "targets", HERE, HERE.parent]),
        finalize=lambda value: value if isinstance(value, Verbatim) else scalar(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters |= {"text": Verbatim, "g": "{:g}".format, "commas": "{:,}".format}
    return made


def _digits(value: Any) -> Any:
    """Round floats to twelve digits, at any depth: 2.9999999999999997e-05 becomes 3e-05."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Mapping):
        return {key: _digits(inner) for key, inner in value.items()}
    return [_digits(inner) for inner in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    return json.dumps(_digits(value))


def _yaml(value: Any) -> str:
    """Return a value as JSON, but 1e-08 as 1.0e-08, because YAML 1.1 reads 1e-08 as a string."""
    text = _json(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _literal(quote: Callable[[str], str]) -> Callable[[Any], str]:
    return lambda value: quote(value) if isinstance(value, str) else repr(_digits(value))
