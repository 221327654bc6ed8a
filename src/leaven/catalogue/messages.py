"""Fill in the message templates of ``messages.toml`` and ``checks.toml``.

A template is a text or a list of texts, its parts. Fields are in braces, as in ``str.format``. A part is left
out if a field in it has no value. The formats below are added to those of Python; ``each``, ``range`` and ``count``
are for :class:`leaven.catalogue.neighbours.Votes`.

- ``q``: a quantity, such as ``1.50 B``
- ``n DIGITS``: a number with this many significant digits
- ``params``: the number of parameters of a model, and how many of them a token uses
- ``used``: the words " that a token uses" if the field is true, else nothing
- ``names``: all values, separated by commas
- ``listed``: all values, separated by vertical bars
- ``size``: the number of values
- ``each FORMAT``: the name and value of every vote
- ``range FORMAT``: the chosen value, and the lowest and the highest vote
- ``count FORMAT``: the runs that have the chosen value, and the other votes
- ``if``: inserts nothing; if the field is false, its part is left out
- ``unless``: inserts nothing; if the field is true, its part is left out
"""

import string
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from leaven.recipe.units import format_number, format_parameters, format_quantity


class _LeftOut(Exception):
    """Raised while a part of a message is filled in, to leave out this part."""


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        first, *rest = field_name.split(".")
        value = kwargs.get(first)
        for name in rest:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value, first

    def format_field(self, value: Any, spec: str) -> str:
        kind, _, show = spec.partition(" ")
        if kind in ("if", "unless"):
            if bool(value) is (kind == "unless"):
                raise _LeftOut
            return ""
        if kind == "used":
            return " that a token uses" if value else ""
        if value is None:
            raise _LeftOut
        if isinstance(value, bool):
            return str(value).lower()  # as in a recipe
        return _KINDS[kind](value, show) if kind in _KINDS else format(value, spec)


def _each(votes: Any, show: str) -> str:
    by = getattr(votes, "by", votes)
    return ", ".join(f"{who} {_FORMATTER.format_field(value, show)}" for who, value in by.items())


def _range(votes: Any, show: str) -> str:
    middle, low, high = (_FORMATTER.format_field(one, show) for one in (votes.value, votes.low, votes.high))
    return f"{middle} ({low} .. {high})"


def _count(votes: Any, show: str) -> str:
    agree = [who for who, value in votes.by.items() if value == votes.value]
    others = {who: value for who, value in votes.by.items() if value != votes.value}
    counted = f"{len(agree)} of {len(votes.by)} lineages ({', '.join(agree) or 'none'})"
    return f"{counted}; others: {_each(others, show)}" if others else counted


_KINDS: dict[str, Callable[[Any, str], str]] = {
    "q": lambda value, _: format_quantity(value),
    "n": lambda value, digits: format_number(value, int(digits or 3)),
    "params": lambda model, _: format_parameters(model.params, model.params_active),
    "names": lambda values, _: ", ".join(values),
    "listed": lambda values, _: " | ".join(values),
    "size": lambda values, _: str(len(values)),
    "each": _each,
    "range": _range,
    "count": _count,
}
_FORMATTER = _Formatter()


@cache
def templates(folder: Path = Path(__file__).parent) -> dict[str, dict[str, Any]]:
    """Return the templates in a folder's ``messages.toml``, by section and key."""
    return tomllib.loads((folder / "messages.toml").read_text(encoding="utf-8"))


def filled(message: str | Sequence[str], facts: Mapping[str, Any]) -> list[str]:
    """Return a message's parts, filled with ``facts``. Parts that lack a value are left out.

    >>> filled(["{a} of {b}", "in {c}"], {"a": 1, "b": 2})
    ['1 of 2']
    """
    found = []
    for template in [message] if isinstance(message, str) else message:
        try:
            found.append(_FORMATTER.vformat(template, (), facts))
        except _LeftOut:
            continue
    return found


def parts(section: str, key: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the parts of message ``key`` in ``section`` of ``catalogue/messages.toml``, with ``facts`` filled in."""
    return filled(templates()[section][key], facts)


def sentence(section: str, key: str, facts: Mapping[str, Any], folder: Path = Path(__file__).parent) -> str:
    """Return a filled-in message of a folder's ``messages.toml`` as one line."""
    return "; ".join(filled(templates(folder)[section][key], facts))


def constants(section: str) -> dict[str, str]:
    """Return {key: message} for a section of ``catalogue/messages.toml`` whose messages have no fields."""
    return dict(templates()[section])
