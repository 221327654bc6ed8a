"""Reads Megatron-LM's arguments from a list of arguments or a shell script.

A text that begins with a flag is read as a list. Any other text is read as a script. A script of one line may be a
printed command whose values have lost their quotes. So it is read in both ways, and the one with more flags counts.
"""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from leaven.errors import InputError
from leaven.interop.configs.megatron_script import ONLY_UNKNOWN, Lexer, Script, unknown_in

TABLE = tomllib.loads((Path(__file__).parent / "targets/megatron_flags.toml").read_text(encoding="utf-8"))

LONGEST = 2**17  # most characters of a script; Linux takes no longer argument

_DASHES = re.compile("-?[\u2010-\u2015\u2212]")  # the last one is the minus sign
# A line of YAML or of a log of Megatron-LM, such as "--num-layers: 24" and "num_layers ............ 24"
_OTHER_FILES = re.compile(r"^[^\w\n]*num[-_]layers(?::\s| ?\.{3})", re.MULTILINE)


@dataclass
class Arguments:
    flags: dict[str, list[str]] = field(default_factory=dict)  # the words after each flag
    unknown: dict[str, str] = field(default_factory=dict)  # by flag: what is unknown of its value, such as $LR
    open: list[str] = field(default_factory=list)  # what may have more flags, such as $@
    defaults: list[str] = field(default_factory=list)  # variables whose default is used


def parse_arguments(text: str, origin: str) -> Arguments:
    """Return the arguments in a script or list.

    If a flag is repeated, its last value counts. Raise InputError if a word is neither a flag nor the value of one.
    """
    if len(text) > LONGEST:
        raise InputError(
            f"{origin}: has {len(text):,} characters, and leaven reads at most {LONGEST:,}; give a file with only "
            "the arguments"
        )
    text = re.sub("[\0\1]", "", text).replace("\u00a0", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    is_list = bool(lines) and lines[0].lstrip().startswith("-")
    is_line = len(lines) == 1 and not re.search(r"(?:^|\s)(?:&&|\|\|?|&)(?:\s|$)|;(?:\s|$)|=\(", lines[0])
    found, errors = list[Arguments](), list[InputError]()
    for as_list in [False] * (not is_list) + [True] * (is_list or is_line):
        try:
            found.append(_read("\n".join(lines) if as_list else text, origin, as_list))
        except InputError as error:
            errors.append(error)
    if _OTHER_FILES.search(text) and (is_list or not found):
        raise InputError(
            f"{origin}: looks like YAML or the log of a run; give the script that trains, or only its flags"
        )
    if found:
        return max(found, key=lambda each: len(each.flags))
    raise errors[0]


def _read(text: str, origin: str, as_list: bool, use_defaults: bool = True) -> Arguments:
    """Return the arguments in a script or list. The result's ``defaults`` are the variables such as ${LR:-1e-4} whose
    default is used in a flag that leaven reads."""
    script = Script(origin, use_defaults)
    if as_list:
        words = script.fields(Lexer(text, origin).words(""))
    else:
        script.run(text)
        words = script.trained_with()
    found = _sorted(_after_program(words), origin, script.may_be_flags)
    if script.defaults and use_defaults:
        try:
            without = _read(text, origin, as_list, use_defaults=False)
            reached = set(", ".join([*without.unknown.values(), *without.open]).split(", "))
        except InputError:
            reached = set(script.defaults)
        found.defaults = [name for name in script.defaults if name in reached]
    return found


def kind_of(flag: str) -> str | None:
    """Return the kind of a flag's value, as in megatron_flags.toml, or None if leaven does not read the flag."""
    kind: str | None = TABLE["flags"].get(flag, {}).get("kind")
    return kind


def _name(flag: str) -> str:
    """Return the current spelling of a flag if leaven reads it, otherwise the flag as it is written."""
    name = flag.replace("_", "-")
    name = TABLE["aliases"].get(name, name)
    return name if name in TABLE["flags"] else flag


def _is_known(flag: str) -> bool:
    return flag in TABLE["flags"] or any(fnmatchcase(flag.replace("_", "-"), each) for each in TABLE["unsupported"])


def _after_program(words: list[str]) -> list[str]:
    """Return the words after the Python file of the training program. Without one, return the first flag and all
    words after it.

    A launcher may come first, with flags and a .py file of its own. So the program is the last .py file before the
    first known Megatron flag.
    """
    flags = [place for place, word in enumerate(words) if word.startswith("--")]
    known = (place for place in flags if _is_known(_name(words[place][2:].partition("=")[0])))
    names = [place for place, word in enumerate(words[: next(known, None)]) if word.endswith(".py")]
    return words[names[-1] + 1 if names else min(flags, default=0) :]


def _sorted(words: list[str], origin: str, may_be_flags: Callable[[str], bool]) -> Arguments:
    """Sort the words of a command into flags, their values, and what is unknown.

    After a flag that leaven does not know, a word such as ``$ARGS`` may be its value or more flags. Such a word
    counts as flags if ``may_be_flags`` returns True for it.
    """
    found, flag, places = Arguments(), "", dict[str, None]()
    for word in words:
        kind, given = kind_of(flag), found.flags.get(flag, [])
        name, equals, value = word[2:].partition("=")
        is_flag, unknown = word.startswith("--") and name, unknown_in(word)
        needs_no_value = not flag or given or kind == "switch" or (not kind and any(map(may_be_flags, unknown)))
        if (is_flag and "\0" in name) or (ONLY_UNKNOWN.fullmatch(word) and needs_no_value):
            places |= dict.fromkeys(unknown)
        elif is_flag:
            flag = _name(name)
            given = found.flags[flag] = [value] if equals else []
        elif _DASHES.match(word):
            raise InputError(f"{origin}: {word} has a dash instead of hyphens; write -- before the name of a flag")
        elif not flag or kind == "switch" or (kind in {"count", "number"} and given):
            shown = word.replace("\0", "").replace("\1", " ")
            shown = (f"{shown[:60]}..." if len(shown) > 60 else shown) + (f" after --{flag}" if flag else "")
            raise InputError(f"{origin}: {shown} is not the value of any flag; correct or remove it")
        else:
            given.append(word)
    found.open = list(places)
    for flag, given in found.flags.items():
        if kind_of(flag) and "\0" in (text := " ".join(given)):
            found.unknown[flag] = ", ".join(unknown_in(text))
    return found
