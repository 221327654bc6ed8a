"""Flags of a shell script or of a list of flags, one a line or all in one.

Comments, backslashes, quotes, arrays (``ARGS=( ... )``) and variables that the file itself sets are read. Commands
are not run: their output, and variables that the file does not set, are reported as open.
"""

import re
import shlex
from dataclasses import dataclass, field

from leaven.recipe.errors import InputError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_COMMANDS = re.compile(r"\$\(\(.*?\)\)|\$\(.*?\)|`[^`]*`", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_OPEN = re.compile(r"\$\{?(\w+)")
_COMMAND = "$_COMMAND_"
_ENDS = {"&&", "||", "|", ";", "&", "(", ")"}


@dataclass
class ShellFlags:
    """The flags and variables of a shell script."""

    # the words after each flag, where it occurs last; a word with a $ is open
    values: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def parse(text: str, origin: str) -> ShellFlags:
    """Parse the flags in a shell script.

    Raises:
        InputError: if a quote is not closed, or there is no flag.
    """
    flags = ShellFlags()
    joined = re.sub(r"\\\r?\n", " ", text)
    try:
        words = _words(_COMMANDS.sub(_COMMAND, joined))
    except ValueError as error:
        raise InputError(f"{origin}: cannot be read as a shell's words: {error}") from None
    current: list[str] | None = None
    while words:
        word = words.pop(0)
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned and not word.startswith("-"):
            name, value = assigned.groups()
            current = None
            if value.lstrip("(").lstrip().startswith("--"):
                words[:0] = _words(value.lstrip("("))
            elif value not in {"", "("}:
                flags.variables[name] = _expand(value, flags.variables)
        elif word in _ENDS:
            current = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = flags.values[name.rstrip(")")] = [_expand(value, flags.variables)] if equals else []
        elif current is not None:
            bare = word if "$" in word else word.rstrip(")")
            if bare:
                current.append(_expand(bare, flags.variables))
    if not flags.values:
        raise InputError(f"{origin}: no --flag in it; give a Megatron script or argument list")
    return flags


def _words(text: str) -> list[str]:
    # A comment begins where a word could: shlex would cut a#b too.
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#.*$", r"\1", text), posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    return [word.rstrip(";") or word for word in lexer]


def _expand(word: str, variables: dict[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(8):  # a variable may name another
        expanded = _VARIABLE.sub(one, word)
        if expanded == word:
            break
        word = expanded
    return word


def open_variables(word: str) -> list[str]:
    """Return the unset variables in a word."""
    return ["the output of a command" if name == _COMMAND[1:] else f"${name}" for name in _OPEN.findall(word)]
