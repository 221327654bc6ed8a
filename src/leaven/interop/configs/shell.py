"""Parses the flags in a shell script or in a list of flags.

The parser supports comments, backslashes, quotes, arrays (``ARGS=( ... )``) and variables that the file itself sets.
It does not run commands. The output of commands and variables that the file does not set are unknown values.
"""

import re
import shlex

from leaven.recipe.errors import InputError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_COMMANDS = re.compile(r"\$\(\(.*?\)\)|\$\(.*?\)|`[^`]*`", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_OPEN = re.compile(r"\$\{?(\w+)")
_COMMAND = "$_COMMAND_"
_ENDS = {"&&", "||", "|", ";", "&", "(", ")"}


def parse(text: str, origin: str) -> dict[str, list[str]]:
    """Return the flags in a shell script, each with the words that follow its last occurrence. A word whose value is
    unknown contains a $.

    Raises:
        InputError: if a quote is not closed, or there is no flag.
    """
    flags: dict[str, list[str]] = {}
    variables: dict[str, str] = {}
    joined = re.sub(r"\\\r?\n", " ", text)
    try:
        words = _words(_COMMANDS.sub(_COMMAND, joined))
    except ValueError as error:
        raise InputError(f"{origin}: cannot be split into words as a shell does: {error}") from None
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
                variables[name] = _expand(value, variables)
        elif word in _ENDS:
            current = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = flags[name.rstrip(")")] = [_expand(value, variables)] if equals else []
        elif current is not None:
            bare = word if "$" in word else word.rstrip(")")
            if bare:
                current.append(_expand(bare, variables))
    if not flags:
        raise InputError(f"{origin}: contains no --flag; give a Megatron script or argument list")
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
