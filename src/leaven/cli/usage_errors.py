"""What is wrong with a command line, in one line that says what to type."""

import difflib
import re
from typing import Any


def mended(error: Any) -> str | None:
    """The line for one of typer's usage errors; None for any other error.

    typer brings its own copy of click, in some versions another's: its errors are known by what they carry.
    """
    if not hasattr(error, "format_message"):
        return None
    said = str(error.format_message()).strip()
    context: Any = getattr(error, "ctx", None)
    param: Any = getattr(error, "param", None)
    if unknown := re.match(r"No such command '(.*?)'", said):
        verbs = context.command.list_commands(context)
        return f"no such verb: {context.command_path} {unknown[1]}; {_nearest(unknown[1], verbs)}"
    if said.startswith("No such option"):
        options = [name for each in context.command.get_params(context) for name in each.opts if name[:2] == "--"]
        return f"no such option: {error.option_name}; {_nearest(error.option_name, options)}"
    if said.startswith("Missing") and param is not None:
        return f"{_name(param)} is missing; type: {_usage(context)}"
    if param is not None:
        return f"{_name(param)}: {_lower(error.message.removeprefix('Value error, '))}"
    said = _lower(re.sub("^Option '(.*?)'", r"\1", said).rstrip("."))
    return f"{said}; type: {_usage(context)}" if context is not None else said


def _nearest(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def _name(param: Any) -> str:
    return str(param.opts[0] if param.opts[0].startswith("-") else _metavar(param))


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _usage(context: Any) -> str:
    """``leaven laws --params COUNT --tokens COUNT``: what must be given, and no more."""
    words = [context.command_path]
    for param in context.command.get_params(context):
        if param.required:
            option = param.opts[0].startswith("-")
            words.append(f"{param.opts[0]} {_metavar(param)}" if option else _metavar(param))
    return " ".join(words)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
