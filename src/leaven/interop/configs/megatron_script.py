"""Reads the flags of Megatron-LM in a shell script, without running the script."""

import re
import shlex
import tomllib
from collections import deque
from itertools import islice, takewhile
from pathlib import Path

from leaven.errors import InputError

TABLE = tomllib.loads((Path(__file__).parent / "targets/megatron_flags.toml").read_text(encoding="utf-8"))

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
# Arguments of the script or of a function, such as $1, $@ and ${@:2}.
_POSITIONAL = re.compile(r"\$(?:[@*1-9]|\{(?:[@*]|\d+)(?:[:=+?-][^{}]*)?\})")
_OPEN = re.compile(r"\$\{?(\w+|[@*])")
_FLAG = re.compile(r"(?:^|\s)--\w")
_COMMAND = "$_COMMAND_"
# What a shell reads at once. A comment begins where a word can begin.
_PIECE = re.compile(
    r"(?P<comment>(?<![^\s;&|(])#)|(?P<single>'[^']*')|(?P<continued>\\\r?\n)|(?P<command>`[^`]*`|\$\()"
    r"|\\.|[^\\$`\"'#()]+|.",
    re.DOTALL,
)
_TRAINING = re.compile(r"pretrain\w*\.(?:py|sh)\b")
_LINE_OF_COMMENT = re.compile(r"(?<=\n)[ \t]*#.*")
_DASHES = "\u2010-\u2015\u2212"  # the last one is the minus sign
# A flag with a dash, perhaps as the first one of an assignment, before which variables may stand.
_DASH = re.compile(rf"(?:\w+\+?=\(?\s*(?:\$\S+\s+)*)?((?=[\w-]*[{_DASHES}])[{_DASHES}-]+([A-Za-z][\w{_DASHES}-]*))")
_NAME = re.compile(r"[A-Za-z_]\w*")
# A change of a variable in arithmetic, such as N=2, N*=2, N++ and --N, but no comparison.
_CHANGE = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_BEFORE_COMMAND = {"", "if", "elif", "then", "else", "while", "until", "do", "!", "{", "("}
_SETTING = {"for", "select", "let", "read", "readarray", "mapfile"}
_END = re.compile(r"[\n;]+|&&|\|[|&]|[|&()]|\]\]?|(?:\d?[<>]|&>).*", re.DOTALL)  # of a command or of its arguments
LONGEST = 2**17  # most characters of a script; Linux takes no longer argument
MOST_EXPANDED = 2**20  # most characters that all variables of a script insert together
MOST_VALUES = 50  # most words of a loop that are read; two are enough to find that there are several values
DEEPEST = 20  # most variables in each other's values, such as A=$B, B=$C


def parse_flags(text: str, origin: str) -> dict[str, list[str]]:
    """Return the flags in a shell script or a list of flags: the name of each flag -> the words after it.

    All lines count, even in branches and in unused variables. If a command repeats a flag, its last value
    counts. Raise InputError if commands have different values of a flag that leaven reads.

    A variable that the script sets is replaced by its value, and the variable of a loop by the words of the loop. An
    unset variable stays as $NAME, as does a variable that the script changes by ``read`` or by arithmetic. The
    output of a command becomes ``_COMMAND``. An unset variable in a place where a flag may be, such as $ARGS or $@,
    is also a key of the result, because it may contain flags.
    """
    if len(text) > LONGEST:
        raise InputError(
            f"{origin}: has {len(text):,} characters, and leaven reads at most {LONGEST:,}; give a file with only "
            "the flags"
        )
    try:
        script = _Script(_plain(text), origin)
    except InputError:  # of a flag with a dash
        raise
    except ValueError as error:
        raise InputError(f"{origin}: cannot be split into words as a shell does: {error}") from None
    if not script.flags:
        raise InputError(f"{origin}: contains no --flag; give a Megatron script or argument list")
    script.require_one_precision()
    flags: dict[str, list[str]] = {}
    several = []
    for flag, given in script.flags.items():
        flags[flag] = list(given.values())[-1]
        kind = kind_of(flag)
        if kind is None:
            continue
        for words in given.values():
            spare = {"switch": words, "word": []}.get(kind, words[1:])
            if not spare or "$" in spare[0]:  # an unset variable may be a flag that takes the words after it
                continue
            if kind != "switch" and re.match(r"[+-]?\.?\d", spare[0]):
                raise InputError(f"{origin}: --{flag} {' '.join(words)}: leaven reads one value of --{flag}")
            raise InputError(
                f"{origin}: {spare[0]} after --{flag} is not the value of any flag; correct or remove it, or, if "
                "another command such as echo uses it, give a file with only the flags"
            )
        if kind == "switch":
            continue
        texts = [" ".join(words if kind == "word" else words[:1]) for words in given.values() if words]
        values = [re.sub(r"\s\S*\$\S*", "", value) for text in texts for value in script.expand(text)]
        flags[flag] = list(dict.fromkeys(values))  # without unset variables after the first word: they may be flags
        if len(flags[flag]) > 1:
            several.append(f"--{flag} ({' or '.join(flags[flag][:5]).replace(_COMMAND, '$(...)')})")
    if several:
        raise InputError(
            f"{origin}: {', '.join(several)} {'have' if len(several) > 1 else 'has'} several values; write echo "
            "before the training command, run the script, and import the printed line, with one value for each flag"
        )
    return flags | {word: [] for word in script.open_arguments()}


def _name(flag: str) -> str:
    """Return the current spelling of a flag if leaven reads it, otherwise the flag as it is written."""
    name = flag.replace("_", "-")
    name = TABLE["aliases"].get(name, name)
    return name if name in TABLE["flags"] else flag


def kind_of(flag: str) -> str | None:
    """Return the kind of a flag's value, as in megatron_flags.toml, or None if leaven does not read the flag."""
    kind: str | None = TABLE["flags"].get(flag, {}).get("kind")
    return kind


def _is_argument(word: str) -> bool:
    """Whether a word is a variable or an argument of the script, and nothing else."""
    return bool(_VARIABLE.fullmatch(word) or _POSITIONAL.fullmatch(word))


def _words(text: str) -> deque[str]:
    """Split a script without comments into words. Each semicolon or line end is a word, too."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return deque(lexer)


def _plain(text: str, *, comments: bool = True) -> str:
    """Return a script without comments, with continued lines joined, and with ``_COMMAND`` in place of ``$(...)``.

    If ``comments`` is false, # is a character like any other. Raise ValueError if a ``$(`` has no closing
    parenthesis.
    """
    kept: list[str] = []
    ends: list[str] = []  # what closes each open double quote and $(, and each open ( within $(
    at = opened = 0
    while piece := _PIECE.match(text, at):
        token, kind, at = piece[0], piece.lastgroup, piece.end()
        quoted, dropped = ends[-1:] == ['"'], ")" in ends
        if kind == "single" and quoted:
            token, at = "'", piece.start() + 1
        elif kind == "comment" and comments and not quoted:
            end = text.find("\n", at)
            token, at = " ", end if end >= 0 else len(text)
        elif kind == "continued":
            token = " "
        elif [token] == ends[-1:]:
            ends.pop()
        elif token in {'"', "$("} or (token == "(" and dropped and not quoted):
            ends.append('"' if token == '"' else ")")
        if not dropped:
            opened = piece.start()
            kept.append(_COMMAND if kind == "command" else token)
    if ")" in ends:
        line = text.count("\n", 0, opened) + 1
        raise ValueError(f"line {line}: No closing parenthesis for {text[opened:].splitlines()[0][:40]}")
    return "".join(kept)


def _words_in_quotes(text: str, before: str) -> list[str]:
    """Return the words of ``text``, a text in quotes that contains flags. ``before`` is the word before the quotes.

    ``text`` is read as a shell script if ``before`` is an option such as ``-c``, or if ``text`` has several lines and
    names a script such as ``pretrain_gpt.py``. Raise ValueError if it cannot be parsed.
    """
    try:
        if re.fullmatch(r"-\w*c", before) or ("\n" in text and _TRAINING.search(text)):
            plain = _plain(text).replace("\n", ";")
        else:
            plain = _plain(_LINE_OF_COMMENT.sub("", text), comments=False)
    except ValueError as error:
        raise ValueError(f"in a text in quotes, {error}") from None
    # \$LR in double quotes is $LR for the inner shell.
    return [part.strip("'\"").replace("\\$", "$") for part in plain.replace(";", " ; ").split()]


class _Script:
    """The flags and variables of a shell script without comments.

    ``flags[flag][n]``: the words after ``flag`` in the n-th command. ``values[name]``: the values that the
    script gives to the variable ``name``, except flags. ``loose``: variables and arguments of the script, such as
    ``$ARGS`` and ``$@``, in places where a flag is possible.
    """

    def __init__(self, text: str, origin: str) -> None:
        self.flags: dict[str, dict[int, list[str]]] = {}
        self.loose: list[str] = []
        self.values: dict[str, list[str]] = {}
        self._origin = origin
        self._expanded = 0  # characters that variables have inserted so far
        self._changed: set[str] = set()  # variables that `read` or arithmetic changes, so their values are unknown
        for piece in text.split("((")[1:]:
            arithmetic, closed, _ = piece.partition("))")
            self._change(arithmetic if closed else "")
        self._read(_words(text))
        for name in self._changed:
            self.values.pop(name, None)

    def _read(self, words: deque[str]) -> None:
        current: list[str] | None = None
        command, takes_flags, flag, word = 0, True, "", ""
        while words:
            before, word = word, words.popleft()
            self._require_hyphens(word)
            self._set_by_command(before, word, words)
            closes = word.count(")") - word.count("(") if word.endswith(")") else 0
            if word.split() != [word] and _FLAG.search(word):
                words.extendleft(reversed(_words_in_quotes(word, before)))
                word = ""  # a command can begin here
            elif 0 < closes < len(word) and word.endswith(")" * closes):
                words.extendleft([")", word[:-closes]])
            elif assigned := _ASSIGNMENT.fullmatch(word):
                name, value = assigned.groups()
                values = self.values.setdefault(name, [])
                if _FLAG.match(value) or (value.startswith("(") and (")" not in value or value[1] in "-$)")):
                    first = value.removeprefix("(")
                    words.appendleft(first if first[:1] in "-$" else "")
                elif value and value not in values:
                    values.append(value)
                words.appendleft(";")
            elif _END.fullmatch(word):
                alone = word.isspace() and (len(words) < 2 or words[1].isspace())
                value_may_follow = alone and not current and kind_of(_name(flag)) != "switch"
                current = current if value_may_follow else None  # a word alone in its line may be a value
                command, takes_flags = command + 1, True
            elif word.startswith("--") and len(word) > 2:
                flag, equals, value = word[2:].partition("=")
                current = self.flags.setdefault(_name(flag), {})[command] = [value] if equals else []
                takes_flags = True
            else:
                if takes_flags and current != [] and _is_argument(word):
                    self.loose.append(word)
                if current is not None:
                    current += [word] if word.strip() else []
                else:
                    takes_flags = re.search(r"^\$|pretrain\w*\.py$", word) is not None

    def _set_by_command(self, before: str, command: str, words: deque[str]) -> None:
        """Record the variables that ``command`` sets, if it is a loop, ``read`` or ``let``.

        ``before`` is the word before ``command``, and ``words`` are the words after it.
        """
        if command not in _SETTING:
            return
        if before not in _BEFORE_COMMAND and not _END.fullmatch(before):
            return  # a word in the middle of a command
        first = islice(words, MOST_VALUES)
        arguments = list(takewhile(lambda word: not _END.fullmatch(word), first))
        if command == "let":
            for word in arguments:
                if not re.fullmatch(r"[A-Za-z_]\w*=\d+", word):
                    self._change(word)
        elif command not in {"for", "select"}:
            self._changed.update(word for word in arguments if _NAME.fullmatch(word))
        elif arguments and _NAME.fullmatch(arguments[0]):
            self._loop(*arguments)

    def _loop(self, name: str, *words: str) -> None:
        """Record the values of the variable ``name`` of a loop. ``words`` are the words after it: ``in 1 2 3``."""
        values = self.values.setdefault(name, [])
        for word in words[1:]:
            variable = _VARIABLE.fullmatch(word)
            if word.startswith("--") or (not variable and re.search(r"[{}*?\[]", word)):  # such as {1..4}
                self._changed.add(name)
            each = [text for value in self._values_of(word) for text in value.split(maxsplit=MOST_VALUES)]
            values += [value for value in dict.fromkeys(each or [word]) if value not in values]
        if words[:1] != ("in",):  # a loop over the arguments of the script
            self._changed.add(name)

    def _values_of(self, variable: str) -> list[str]:
        """Return the values that the lines read so far give to a variable such as ``${LR:-1}``, without the 1."""
        found = _VARIABLE.fullmatch(variable)
        return self.values.get(found[1] or found[3], []) if found else []

    def _change(self, arithmetic: str) -> None:
        self._changed.update(first or second for first, second in _CHANGE.findall(arithmetic))

    def require_one_precision(self) -> None:
        """Raise InputError if one command has both --bf16 and --fp16. A script may have them in two branches."""
        if self.flags.get("bf16", {}).keys() & self.flags.get("fp16", {}).keys():
            raise InputError(f"{self._origin}: --bf16 and --fp16: these are two precisions; remove one")

    def open_arguments(self) -> list[str]:
        """Return the unset variables in places where a flag is possible.

        A set variable in such a place is replaced by the variables in its value: after ``ARGS=$@``, ``$ARGS`` becomes
        ``$@``.
        """
        found: dict[str, None] = {}
        words, followed = deque(self.loose), set()
        while words:
            word = words.popleft()
            names = _OPEN.findall(word)
            if self.values.keys().isdisjoint(names):
                found[word] = None
            elif names[0] not in followed:
                followed.add(names[0])
                words.extend(part for value in self._values_of(word) for part in value.split() if _is_argument(part))
        return list(found)

    def _require_hyphens(self, word: str) -> None:
        if dashed := _DASH.match(word):
            flag = re.sub(f"[{_DASHES}]", "-", dashed[2])
            raise InputError(
                f"{self._origin}: {dashed[1]} has a dash instead of hyphens; write --{flag}, or put text in quotes"
            )

    def expand(self, word: str, inside: tuple[str, ...] = ()) -> list[str]:
        """Return all texts that a word can become: one for each combination of the values of its variables.

        An unset variable stays as it is. ``inside`` has the values from which the word came. They are not inserted
        again, so that a variable that contains itself does not expand without end. Raise InputError if the texts
        become too long.
        """
        found, end = [""], 0
        for match in _VARIABLE.finditer(word) if len(inside) < DEEPEST else ():
            name, default = match[1] or match[3], match[2]
            values = [value for value in self.values.get(name, []) if value not in inside]
            values += [] if default is None else [default]
            each = [text for value in values for text in self.expand(value, (*inside, value))] or [match[0]]
            self._expanded += sum(len(text) + 1 for text in each) * len(found)
            if self._expanded > MOST_EXPANDED:
                raise InputError(
                    f"{self._origin}: its variables expand to more than {MOST_EXPANDED:,} characters, the last "
                    f"variable {name}; write the values into the flags"
                )
            found = [before + word[end : match.start()] + text for before in found for text in each]
            end = match.end()
        return list(dict.fromkeys(before + word[end:] for before in found))


def open_variables(word: str) -> list[str]:
    """Return the unset variables in a word, such as ``$LR``. Each ``$(...)`` gives "the output of a command"."""
    return ["the output of a command" if name == _COMMAND[1:] else f"${name}" for name in _OPEN.findall(word)]
