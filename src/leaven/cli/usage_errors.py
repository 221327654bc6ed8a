"""Write one-line messages for wrong command lines."""

import difflib
import re
from typing import Any


def usage_message(error: Any) -> str | None:
    """Return a message that says what is wrong with a command line and what to type. Return None if ``error`` is not
    a usage error of typer.

    Some versions of typer contain a copy of click, so errors of click are recognised by their attributes and not by
    their class.
    """
    if not hasattr(error, "format_message"):
        return None
    message = str(error.format_message()).strip()
    context: Any = getattr(error, "ctx", None)
    param: Any = getattr(error, "param", None)
    if unknown := re.match(r"No such command '(.*?)'", message):
        verbs = context.command.list_commands(context)
        return (
            f"the command {context.command_path} {unknown[1]} does not exist; "
            f"{_suggestion(unknown[1], verbs, context)}"
        )
    if message.startswith("No such option"):
        options = [name for each in context.command.get_params(context) for name in each.opts if name[:2] == "--"]
        return f"the option {error.option_name} does not exist; {_suggestion(error.option_name, options, context)}"
    if message.startswith("Missing") and param is not None:
        return f"{_name(param)} is missing; type: {_usage(context)}"
    if param is not None:
        return f"{_name(param)}: {_lower(error.message.removeprefix('Value error, '))}"
    message = _lower(re.sub("^Option '(.*?)'", r"\1", message).rstrip("."))
    return f"{message}; type: {_usage(context)}" if context is not None else message


def _suggestion(typed: str, known: list[str], context: Any) -> str:
    close = difflib.get_close_matches(typed, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"type {context.command_path} --help for the list"


def _name(param: Any) -> str:
    return str(param.opts[0] if param.opts[0].startswith("-") else _metavar(param))


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _usage(context: Any) -> str:
    """Return the command with its required arguments, for example ``leaven export config RECIPE --to TARGET``."""
    words = [context.command_path]
    for param in context.command.get_params(context):
        if param.required:
            option = param.opts[0].startswith("-")
            words.append(f"{param.opts[0]} {_metavar(param)}" if option else _metavar(param))
    return " ".join(words)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
