"""Read recipe files, apply ``--set`` overrides, and write recipe files with their comments kept."""

import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomlkit
from pydantic import BaseModel, ValidationError

from leaven import storage
from leaven.errors import InputError, suggestion
from leaven.recipe.recipe import Recipe, flatten, set_path, split_path
from leaven.recipe.units import parse_quantity

Kind = TypeVar("Kind", bound=BaseModel)

LONGEST = 10_000_000  # characters of a recipe; real recipes have at most about 10,000
MOST_DOTS = 10_000  # dots in one line
DEEPEST = 20  # levels of nested tables and arrays; recipes have 4
LARGEST_INTEGER = 2**63 - 1  # limit of TOML and torch
SMALLEST_FLOAT, LARGEST_FLOAT = 1.2e-38, 1e19  # in fp32, smaller numbers lose digits; larger ones overflow if squared


def read_recipe(path: Path | str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in a TOML file, with ``a.b=value`` overrides applied, or raise InputError."""
    return parse_recipe(read_text(path), str(path), overrides)


def read_text(path: Path | str) -> str:
    """Return the text of a UTF-8 file, with ``\\n`` as line ends, or raise InputError."""
    try:
        text = storage.read(path).decode("utf-8-sig")  # some editors begin a file with a byte order mark
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: this is a folder, not a recipe file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: this is not a text file in UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def parse_recipe(text: str, origin: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in a TOML text. Error messages name the file ``origin``."""
    document = parse_toml(text, origin, overrides)
    if "command" in document:
        raise InputError(f"{origin}: this is a command file, not a recipe; it is for leaven tune")
    return validated(Recipe, document, origin)


def parse_toml(text: str, origin: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return a TOML text as nested dicts, with ``a.b=value`` overrides applied. ``a.b=`` removes the key."""
    if len(text) > LONGEST:
        raise InputError(f"{origin}: {len(text):,} characters; a recipe has at most {LONGEST:,}; give a recipe file")
    if any(line.count(".") > MOST_DOTS for line in text.split("\n")):  # tomllib takes minutes for such a key
        raise InputError(f"{origin}: a line has more than {MOST_DOTS:,} dots; give a recipe file")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers with too many digits and for deep arrays
        raise InputError(f"{origin}: not TOML: {error}") from None
    given: list[tuple[str, list[str]]] = []
    for override in overrides:
        path, separator, value = override.partition("=")
        if not separator or not path.strip():
            raise InputError(f"--set {override}: not a key and a value; write --set key.subkey=value")
        keys = split_path(path.strip())
        for other, its_keys in given:
            if keys == its_keys:
                raise InputError(f"--set {other} and --set {override} set the same value; leave one out")
            inside = keys[: len(its_keys)] == its_keys and _holds(document, keys)
            if inside or its_keys[: len(keys)] == keys:  # one of them would be lost
                raise InputError(
                    f"--set {other} and --set {override} set a table and a value in it; write both in one"
                )
        given.append((override, keys))
        _override(document, path.strip(), value.strip())
        if isinstance(why := document.get("why"), dict):
            why.pop(".".join(keys), None)  # the reason belongs to the value that was replaced
    _require_plain(document, origin)
    return document


def _holds(document: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(document, dict) or key not in document:
            return False
        document = document[key]
    return True


def _require_plain(document: dict[str, Any], origin: str) -> None:
    """Raise InputError for values that TOML allows but leaven cannot use, such as very large numbers."""
    waiting: list[tuple[str, Any, int]] = [("", document, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        fault = ""
        if depth > DEEPEST:
            raise InputError(f"{origin}: {path}: nested more than {DEEPEST} deep; use fewer levels")
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}".lstrip("."), inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(path, inner, depth + 1) for inner in value]
        elif isinstance(value, str) and "\0" in value:
            fault = "the text contains a NUL; remove it"
        elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            fault = "more than 64 bits; give an integer closer to 0"
        elif isinstance(value, float) and (0 < abs(value) < SMALLEST_FLOAT or LARGEST_FLOAT < abs(value) < math.inf):
            numbers = f"give 0, or a number from {SMALLEST_FLOAT:g} to {LARGEST_FLOAT:g}"
            fault = f"{value:g} is too large or too close to 0; {numbers}"
        if fault:
            raise InputError(f"{origin}: {_place(path.split('.'))}: {fault}")


def _place(keys: list[str]) -> str:
    return f"[{'.'.join(keys[:-1])}] {keys[-1]}" if len(keys) > 1 else keys[0]


def validated(kind: type[Kind], document: dict[str, Any], origin: str) -> Kind:
    """Return a document as an object of class ``kind``, or raise InputError that names the file ``origin``."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{origin}: {explain(error, kind)}") from None


def _override(document: dict[str, Any], path: str, text: str) -> None:
    if not text:
        _remove(document, path)
        return
    found = _toml(path, f"value = {text}")
    # A second assignment or a comment after the value is valid in a document, but not in a list.
    if "\n" in text if found is None else _toml(path, f"value = [{text}]") is None:
        raise InputError(f"--set {path}: more than one value, or a comment, follows the =; give one value")
    if found is not None:
        value: Any = found["value"]
    else:
        try:  # not TOML, so a quantity (7B) or a bare word (cosine)
            value = parse_quantity(text)
        except InputError:
            value = text
    try:
        set_path(document, path, value)
    except (AttributeError, TypeError):
        outer = ".".join(split_path(path)[:-1])
        raise InputError(f"--set {path}: {outer} is a value, not a table; write --set {outer}=VALUE") from None


def _toml(path: str, text: str) -> dict[str, Any] | None:
    """Return the TOML text of ``--set path``, or None if it is not TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"--set {path}: nested more than {DEEPEST} deep; use fewer levels") from None
    except ValueError:
        return None


def _remove(document: dict[str, Any], path: str) -> None:
    *outer, last = split_path(path)
    part: Any = document
    for key in outer:
        part = part.get(key) if isinstance(part, dict) else None
    if not isinstance(part, dict) or last not in part:
        raise InputError(f"--set {path}=: the recipe has no such value to remove; leave out this --set")
    del part[last]


def explain(error: ValidationError, kind: type[BaseModel] = Recipe) -> str:
    """Return a line about a validation error, such as ``[model] d_modle: no such key; did you mean d_model?``"""
    # An unknown key is reported first: if a key is missing as well, the unknown key is usually its misspelling.
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    keys = [str(key) for key in fault["loc"] if not str(key).startswith(("constrained-", "literal[", "int", "tag:"))]
    message = fault["msg"].removeprefix("Value error, ")
    if not keys:
        return message
    where = _place(keys)
    match fault["type"]:
        case "extra_forbidden":
            return f"{where}: no such key; {_suggestion(keys, kind)}"
        case "missing":
            return f"{where}: missing; it has no default, so write it"
        case "value_error":
            return f"[{'.'.join(keys)}] {message}" if len(keys) == 1 else f"{where}: {message}"
        case _:
            return f"{where}: {message[0].lower()}{message[1:]}, not {fault['input']!r}"


def _suggestion(keys: list[str], part: type[BaseModel]) -> str:
    for key in keys[:-1]:
        if field := part.model_fields.get(key):  # other keys are names of modules or numbers in a list
            part = next(_parts(field.annotation), part)
    return suggestion(keys[-1], part.model_fields, f"there are {', '.join(part.model_fields)}")


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def render(recipe: Recipe, template: str = "") -> str:
    """Return the recipe as TOML, with the comments, order and spelling of ``template``, the text of a recipe file.

    With a template, default values are written only if the template states them. Without a template, all values
    are written except None, multipliers of 1 and empty lists in ``[batch]``.
    """
    document = tomlkit.parse(template)
    values = recipe.model_dump(mode="json", exclude_none=True)
    explicit = recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    # Multipliers of 1 are not written. A module whose multipliers are all 1 is written as lr = 1.0.
    if modules := explicit["hyperparameters"].get("modules"):
        explicit["hyperparameters"]["modules"] = {name: stated or {"lr": 1.0} for name, stated in modules.items()}
    for part in ("modules", "depth"):
        values["hyperparameters"][part] = explicit["hyperparameters"].get(part, {})
    if not template:
        values["batch"] = {key: value for key, value in values["batch"].items() if value != []}
        update(document, values, prune=False)
        return tomlkit.dumps(document)
    stated, own = flatten(document.unwrap()), flatten(explicit)
    chosen: dict[str, Any] = {}
    for path, value in flatten(values).items():
        if path in own or path in stated or any(path.startswith(f"{key}.") for key in stated):
            set_path(chosen, path, _trimmed(value, own.get(path), stated.get(path)))
    update(document, chosen, prune=True)
    return tomlkit.dumps(document)


def _trimmed(rows: Any, own: Any, stated: Any) -> Any:
    """Leave out the default values in a list of tables that the template does not state. Keep any other value.

    ``own`` is ``rows`` without default values, and ``stated`` is the template's value.
    """
    if not (isinstance(rows, list) and isinstance(own, list) and all(isinstance(row, dict) for row in rows)):
        return rows
    there = stated if isinstance(stated, list) and len(stated) == len(rows) else [{}] * len(rows)
    return [
        {key: value for key, value in row.items() if key in mine or key in old}
        for row, mine, old in zip(rows, own, there, strict=True)
    ]


def update(target: Any, values: Mapping[str, Any], *, prune: bool) -> None:
    """Write nested values into a TOML container. Do not touch equal values. With ``prune``, remove other keys."""
    before = target.unwrap()
    for key in before:
        if prune and key not in values:
            del target[key]
    for key, value in values.items():
        if isinstance(value, Mapping):
            if not value:
                continue
            if key not in target or not isinstance(target[key], Mapping):
                small = not any(isinstance(inner, Mapping) for inner in value.values())
                inline = small and key not in Recipe.model_fields
                target[key] = tomlkit.inline_table() if inline else tomlkit.table()
            update(target[key], value, prune=prune)
        elif key not in before or before[key] != value:
            grouped = isinstance(value, int) and value >= 10_000
            target[key] = tomlkit.integer(f"{value:_}") if grouped else value


def write_recipe(recipe: Recipe, path: Path | str, template: str = "") -> None:
    """Write the text of :func:`render` to a recipe file, atomically."""
    storage.write_text(path, render(recipe, template))


def cache_folder() -> Path:
    """Return ``$LEAVEN_CACHE``, or the folder ``leaven`` in ``$XDG_CACHE_HOME`` (by default ~/.cache)."""
    if folder := os.environ.get("LEAVEN_CACHE"):
        return storage.expanded(folder)
    return storage.expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "leaven"


def finite(document: Any) -> Any:
    """Return a copy of a document that JSON can represent: infinity and nan become None."""
    if isinstance(document, dict):
        return {key: finite(inner) for key, inner in document.items()}
    if isinstance(document, list | tuple):
        return [finite(inner) for inner in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
