"""Reads the flags of Megatron-LM in a shell script, without running the script."""

import re
import shlex
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from textwrap import shorten

from leaven.errors import InputError

TABLE = tomllib.loads((Path(__file__).parent / "targets/megatron_flags.toml").read_text(encoding="utf-8"))

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
# Arguments of the script or of a function, such as $1, $@ and ${@:2}.
_POSITIONAL = re.compile(r"\$(?:[@*1-9]|\{(?:[@*]|\d+)(?:[:=+?-][^{}]*)?\})")
# The begin of a value such as ${ARGS:---bf16}, in which the default is empty or may have flags.
_DEFAULT = re.compile(r"\(?\$\{(\w+)(?:\[[@*]\])?:?[-=][-$}]")
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
_SCRIPT = re.compile(r"\w\.(?:py|sh)$")
_NAME = re.compile(r"[A-Za-z_]\w*")
# A change of a variable in arithmetic, such as N=2, N*=2, N++ and --N, but no comparison.
_CHANGE = re.compile(r"(?<!\w)([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_BEFORE_COMMAND = {"", "if", "elif", "then", "else", "while", "until", "do", "!", "{", "("}
_BEFORE_ASSIGNMENT = {"", "then", "else", "do", "export", "declare", "local", "readonly", "typeset"}
_OPTIONS_WITH_VALUE = {"read": "dinNptu", "readarray": "dnOsuCc", "mapfile": "dnOsuCc"}
_BLOCKS = dict.fromkeys(("for", "select", "while", "until"), "done") | {"if": "fi", "case": "esac", "{": "}"}
_NO_PROGRAM = {"echo", "printf", "[", "[[", "test"}  # flags after these are text
_NO_TRAINING = {"[", "[[", "test", "cp", "ln", "ls", "mv"}  # names after these are only files
_END = re.compile(r"[\n;]+|&&|\|[|&]|[|&()]|\]\]?|(?:\d?[<>]|&>).*", re.DOTALL)  # of a command or of its arguments
LONGEST = 2**17  # most characters of a script; Linux takes no longer argument
MOST_EXPANDED = 2**20  # most characters that all variables of a script insert together
MOST_WORDS = 50  # most words of a loop or of arithmetic that are read
MOST_NAMED = 4  # most words of a loop that a message names
DEEPEST = 20  # most variables in each other's values, such as A=$B, B=$C


class Flags(dict[str, list[str]]):
    """The name of each flag -> the words after it. ``loops``: the variable of a loop -> its words, for a message."""

    loops: dict[str, str]


def parse_flags(text: str, origin: str) -> Flags:
    """Return the flags in a shell script or a list of flags.

    All lines count, even in branches and in unused variables. If a command repeats a flag, its last value
    counts. Raise InputError if commands have different values of a flag that leaven reads.

    A variable that the script sets is replaced by its value. A variable that is not set, or whose value is unknown
    because of a loop, ``read`` or arithmetic, stays as $NAME. The output of a command becomes ``_COMMAND``. An
    unset variable in a place where a flag may be, such as $ARGS or $@, is also a key of the result, because it may
    contain flags.
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
    flags = Flags()
    flags.loops = script.loops
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
    flags.update((word, []) for word in script.open_arguments())
    return flags


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


def _variables_of_read(command: str, arguments: list[str]) -> list[str]:
    """Return the variables that ``read`` or ``mapfile`` sets. ``arguments`` are the words after it."""
    found, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word.startswith("-"):
            with_value = re.search(f"[{_OPTIONS_WITH_VALUE[command]}]", word)
            skip = with_value is not None and with_value.end() == len(word)
        elif _NAME.fullmatch(word):
            found.append(word)
    return found


class _Blocks:
    """The blocks of a shell script, such as branches and loops, that are open where it is read."""

    def __init__(self) -> None:
        self.opened = 0  # blocks opened so far
        self._open: list[tuple[int, str]] = []  # number and last word of each open block

    def read(self, word: str) -> None:
        """Open or close a block if ``word``, with which a command begins, does so."""
        if word in _BLOCKS:
            self._begin(_BLOCKS[word])
        elif self._open and word == self._open[-1][1]:
            self._open.pop()
        elif self._open and word in {"else", "elif"}:
            self.next_branch()

    def next_branch(self) -> None:
        """Close the last block, and open one like it."""
        if self._open:
            self._begin(self._open.pop()[1])

    def _begin(self, last: str) -> None:
        self.opened += 1
        self._open.append((self.opened, last))

    def still_in(self, opened: int) -> bool:
        """Whether this place can be reached only from the block that was open when ``opened`` blocks were opened."""
        return not self._open or self._open[-1][0] <= opened


@dataclass
class _Command:
    """What is known of a command while its words are read. An array is one command, too."""

    number: int
    variable: str = ""  # the variable of the assignment before, in which the command's words may be
    array: bool = False
    after_word: bool = False  # in an array: whether a word such as -o is in the line, and no flag
    is_text: bool = False  # part of a text after echo
    program: str = ""  # the first word, without keywords of the shell and variables
    script: str = ""  # the last word that names a script
    has_flag: bool = False
    trains: bool = False
    names_training: bool = False  # whether a word or a variable in it names a script that trains
    has_training_flag: bool = False
    arguments: list[str] = field(default_factory=list)  # variables before the first flag
    before_script: int = 0  # how many of these are before the program or script, such as a launcher

    @property
    def is_aside(self) -> bool:
        """Whether the command is only a text or a test."""
        return self.is_text or (self.program in _NO_PROGRAM and not self.trains)


class _Script:
    """The flags and variables of a shell script without comments.

    ``flags[flag][n]``: the words after ``flag`` in the n-th command. ``values[name]``: the values that the
    script gives to the variable ``name``, except flags. ``loops[name]``: the words of a loop over ``name``, for a
    message, if its value is unknown. ``loose``: variables and arguments of the script, such as ``$ARGS`` and
    ``$@``, in places where a flag is possible.
    """

    def __init__(self, text: str, origin: str) -> None:
        self.flags: dict[str, dict[int, list[str]]] = {}
        self.loose: list[str] = []
        self.values: dict[str, dict[str, None]] = {}
        self.loops: dict[str, str] = {}
        self._origin = origin
        self._expanded = 0  # characters that variables have inserted so far
        # Variables of unknown value, and the number of blocks opened before the last change of each
        self._changed: dict[str, int] = {}
        self._used: set[str] = set()  # those of them that a flag or another variable has used
        self._blocks = _Blocks()
        self._inside: dict[str, list[str]] = {}  # variables in an array or text without flags: its variable -> names
        self._with_flags: set[str] = set()  # variables that contain flags
        self._given: set[str] = set()  # variables that may have flags before the script: ARGS=${ARGS:-}
        self._waiting: list[list[str]] = []  # the variables of each command without a flag
        self._asides: set[int] = set()  # numbers of commands that are only texts
        self._lists: set[int] = set()  # numbers of commands that are the words of a loop
        self._others: set[int] = set()  # numbers of commands that run a script that does not train
        self._naming: set[str] = set()  # variables that name a script that trains
        self._after_name: set[str] = set()  # variables after the name of one
        self._trains = False  # whether a command has such a name and training flags
        self._flag = ""
        self._current: list[str] | None = None  # the words after the last flag of the command, if it has one
        self._command = _Command(0)
        self._variable, self._array = "", False  # of the next command
        self._joined = False  # whether && or || is before the command
        self._read(_words(text))
        for name in self._changed:
            self.values.pop(name, None)
        self._find_loose()

    def _read(self, words: deque[str]) -> None:
        word, text_ends = "", -1
        while words:
            if len(words) <= text_ends:  # the text after echo has ended
                text_ends = -1
            before, word = word, words.popleft()
            self._command.is_text = text_ends >= 0
            self._require_hyphens(word)
            if before in _BEFORE_COMMAND or before.endswith("()") or _END.fullmatch(before):
                self._set_by_command(word, words)
            self._joined = before in {"&&", "||"} if before.strip() else self._joined
            closes = word.count(")") - word.count("(") if word.endswith(")") else 0
            if word.split() != [word] and _FLAG.search(word):
                if self._command.program in {"echo", "printf"} and not _TRAINING.search(word):
                    text_ends = max(text_ends, len(words))
                words.extendleft(reversed(_words_in_quotes(word, before)))
                word = ""  # a command can begin here
            elif 0 < closes < len(word) and word.endswith(")" * closes):
                words.extendleft([")", word[:-closes]])
            elif assigned := _ASSIGNMENT.fullmatch(word):
                self._assign(assigned[1], assigned[2], before, words)
            elif _END.fullmatch(word):
                self._end(word, words)
            elif word.startswith("--") and len(word) > 2:
                self._add_flag(*word[2:].partition("="))
            else:
                self._add_word(word)
        self._close()

    def _assign(self, name: str, value: str, before: str, words: deque[str]) -> None:
        """Record a value of a variable. ``before`` and ``words`` are the words around the assignment."""
        self._use(value)
        if self._names_training(value):
            self._naming.add(name)
        if (default := _DEFAULT.match(value)) and default[1] == name:
            self._given.add(name)
        alone = not words or _END.fullmatch(words[0]) or _ASSIGNMENT.match(words[0])
        begins = before in _BEFORE_ASSIGNMENT or (_END.fullmatch(before) and not self._joined)
        if alone and begins and name not in self._used and self._blocks.still_in(self._changed.get(name, 0)):
            self._changed.pop(name, None)
            self.loops.pop(name, None)
        values = self.values.setdefault(name, {})
        in_array = self._command.array
        if not in_array:
            self._variable, self._array = name, False
        if _FLAG.match(value) or (value.startswith("(") and (")" not in value or value[1] in "-$)")):
            self._array = not in_array and value.startswith("(") and value != "()"
            first = value.removeprefix("(")
            words.appendleft(first if first[:1] in "-$" else "")
        elif value:
            values.setdefault(value)
        words.appendleft(";")

    def _end(self, word: str, words: deque[str]) -> None:
        """Record that ``word`` ends a command or a part of it. ``words`` are the words after it."""
        alone = word.isspace() and (len(words) < 2 or words[1].isspace())
        value_may_follow = alone and not self._current and kind_of(_name(self._flag)) != "switch"
        self._current = self._current if value_may_follow else None  # a word alone in its line may be a value
        if ";;" in word:
            self._blocks.next_branch()
        if self._command.array and word != ")":
            self._command.number += 1
            self._command.after_word = False
            return
        self._close()
        self._command = _Command(self._command.number + 1, self._variable, self._array)
        self._variable, self._array = "", False

    def _add_flag(self, flag: str, equals: str, value: str) -> None:
        command, self._flag = self._command, flag
        self._use(value)
        self._current = [value] if equals else []
        self.flags.setdefault(_name(flag), {})[command.number] = self._current
        if not command.has_flag and not command.is_aside and (command.array or command.script or not command.program):
            self.loose += command.arguments[command.before_script :]
        command.has_flag, command.after_word = True, False
        command.has_training_flag |= kind_of(_name(flag)) is not None
        if command.is_aside:
            self._asides.add(command.number)

    def _add_word(self, word: str) -> None:
        """Record a word of a command that is no flag."""
        command, argument = self._command, _is_argument(word)
        is_value = self._current == [] and kind_of(_name(self._flag)) != "switch"
        if argument and command.names_training and command.program not in _NO_TRAINING:
            self._after_name.update(_OPEN.findall(word))
        command.names_training |= self._names_training(word)
        if argument and not is_value and not command.after_word:
            after_flag = self._current is not None or command.has_flag
            may_be_flag = (after_flag or command.trains) and not command.is_aside
            (self.loose if may_be_flag else command.arguments).append(word)
        if self._current is not None:
            self._use(word)
            self._current += [word] if word.strip() else []
        elif not argument and word not in _BEFORE_COMMAND and not word.endswith("()"):
            command.program = command.program or word
            command.after_word = command.array
            command.before_script = len(command.arguments)
            if _TRAINING.search(word):
                command.trains = True
            command.script = word if _SCRIPT.search(word) else command.script

    def _close(self) -> None:
        """Record what the command was, after its last word."""
        command = self._command
        named = command.names_training or command.variable in self._naming
        if named and command.variable:
            self._naming.add(command.variable)
        if command.program not in _NO_TRAINING:
            self._trains |= named and command.has_training_flag
        if command.script and not command.trains:
            self._others.add(command.number)
        if command.variable and (command.has_flag or command.trains):
            self._with_flags.add(command.variable)
        elif command.variable:
            self._inside.setdefault(command.variable, []).extend(command.arguments)
        if len(command.arguments) > 1 and not command.is_aside:
            self._waiting.append(command.arguments)

    def _names_training(self, text: str) -> bool:
        return _TRAINING.search(text) is not None or not self._naming.isdisjoint(_OPEN.findall(text))

    def _use(self, text: str) -> None:
        """Record that a flag or a variable has ``text`` as its value."""
        self._used.update(name for name in _OPEN.findall(text) if name in self._changed)

    def _set_by_command(self, command: str, words: deque[str]) -> None:
        """Record the blocks and variables that ``command`` begins or sets, such as those of a loop or ``read``.

        ``words`` are the words after it.
        """
        self._blocks.read(command)
        loop = command in {"for", "select"}
        if not loop and command not in {"let", *_OPTIONS_WITH_VALUE} and not command.startswith("(("):
            return
        first = list(islice(words, MOST_WORDS))
        arguments = list(takewhile(lambda word: not _END.fullmatch(word), first))
        if command.startswith("((") or (loop and first[:1] and first[0].startswith("((")):
            self._change(" ".join([command, *first]).partition("))")[0])
        elif command == "let":
            for word in arguments:
                if not re.fullmatch(r"[A-Za-z_]\w*=\d+", word):
                    self._change(word)
        elif not loop:
            self._set(*_variables_of_read(command, arguments))
        elif arguments and _NAME.fullmatch(arguments[0]):
            rest = arguments[1:2] + first[len(arguments) : len(arguments) + 3]
            if "do" in rest or len(arguments) == MOST_WORDS:  # otherwise no loop of a shell
                self._lists.add(self._command.number)
                self._loop(*arguments)

    def _loop(self, name: str, *words: str) -> None:
        """Record the values of the variable ``name`` of a loop. ``words`` are the words after it: ``in 1 2 3``."""
        if words[:1] != ("in",):  # a loop over the arguments of the script
            self._set(name)
            return
        found: list[str] = []
        for word in words[1:]:
            values = [] if self._changed.keys() & _OPEN.findall(word) else list(self._values_of(word))
            found += values[0].split(maxsplit=MOST_WORDS) if len(values) == 1 else [word]
        found = list(dict.fromkeys(found))
        if len(found) == 1 and not re.search(r"[${}*?\[()\s]|^--", found[0]):
            self.values.setdefault(name, {})[found[0]] = None
            return
        self._set(name)
        named = [shorten(word.replace(_COMMAND, "$(...)"), 30, placeholder="...") for word in found[:MOST_NAMED]]
        self.loops[name] = ", ".join(named if len(found) <= MOST_NAMED else [*named, "..."])

    def _values_of(self, variable: str) -> Iterable[str]:
        """Return the values that the lines read so far give to a variable such as ``${LR:-1}``, without the 1."""
        found = _VARIABLE.fullmatch(variable)
        return self.values.get(found[1] or found[3], ()) if found else ()

    def _change(self, arithmetic: str) -> None:
        self._set(*(first or second for first, second in _CHANGE.findall(arithmetic)))

    def _set(self, *names: str) -> None:
        """Record that the script gives unknown values to variables."""
        for name in names:
            self._changed[name] = self._blocks.opened
            self.loops.pop(name, None)

    def _find_loose(self) -> None:
        """Add the variables after one that contains flags, such as those after ``$CMD``, to ``loose``."""
        users: dict[str, list[str]] = {}
        for name, values in self.values.items():
            for value in [*values, *self._inside.get(name, ())]:
                for used in _OPEN.findall(value):
                    users.setdefault(used, []).append(name)
                if _TRAINING.search(value):
                    self._with_flags.add(name)
        names = list(self._with_flags)
        while names:
            more = [name for name in users.pop(names.pop(), ()) if name not in self._with_flags]
            self._with_flags.update(more)
            names += more
        self._trains |= not self._with_flags.isdisjoint(self._after_name)
        for arguments in self._waiting:
            after = dropwhile(lambda word: self._with_flags.isdisjoint(_OPEN.findall(word)), arguments)
            self.loose += list(after)[1:]

    def require_one_precision(self) -> None:
        """Raise InputError if one command has both --bf16 and --fp16.

        A script may have them in two branches, or as the words of a loop.

        A precision that only a text or another program has, such as a converter, is removed beside the other.
        """
        given = {flag: self.flags[flag] for flag in ("bf16", "fp16") if flag in self.flags}
        if len(given) < 2:
            return
        aside = self._asides | (self._others if self._trains else set())
        possible: dict[str, set[int]] = {flag: commands.keys() - aside for flag, commands in given.items()}
        if possible["bf16"] & possible["fp16"] - self._lists:
            raise InputError(f"{self._origin}: --bf16 and --fp16: these are two precisions; remove one")
        if any(possible.values()):
            self.flags = {flag: words for flag, words in self.flags.items() if possible.get(flag, {0})}

    def open_arguments(self) -> list[str]:
        """Return the unset variables in places where a flag is possible.

        A set variable in such a place is replaced by the variables in its value: after ``ARGS=$@``, ``$ARGS`` becomes
        ``$@``. A variable with itself as a default, such as ``ARGS=${ARGS:-}``, counts as unset.
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
                if names[0] in self._given:
                    found[word] = None
                values = (*self._values_of(word), *self._inside.get(names[0], ()))
                words.extend(part for value in values for part in value.split() if _is_argument(part))
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
            values += [] if default is None or name in self._changed else [default]
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


def open_variables(word: str, loops: Mapping[str, str]) -> list[str]:
    """Return the unset variables in a word, such as ``$LR``. Each ``$(...)`` gives "the output of a command".

    ``loops``: the variables of loops, and the words of each loop.
    """
    found = []
    for name in _OPEN.findall(word):
        shown = "the output of a command" if name == _COMMAND[1:] else f"${name}"
        found.append(f"{shown} (in a loop over {loops[name]})" if name in loops else shown)
    return found
