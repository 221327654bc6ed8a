"""Reads Megatron-LM's arguments from a list of arguments or a shell script, without running the script.

A list of arguments begins with a flag or has only one line, such as the line that ``echo`` prints before the training
command. Everything else is a script, which is read from top to bottom:

- The training command is the one that has ``--num-layers``. Its flags are those after the name of a Python file.
- A variable has the value that the last assignment gives it. If a variable is not set, as in ``${LR:-1e-4}``, its
  default counts.
- A variable is unknown if a branch, loop, function or subshell assigns it, a command after ``&&``, ``||`` or ``|``,
  or a command such as ``read``, ``let`` or ``((`` that names it. If words are only appended there, only they are.
- ``$1``, ``$(...)``, placeholders such as ``<PATH>``, and all expansions other than ``$A``, ``${A[@]}`` and
  ``${A:-default}`` are unknown.

If several commands train, or one in a branch, loop or function, or if the script has another syntax, it is refused.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NoReturn

from leaven.errors import InputError

TABLE = tomllib.loads((Path(__file__).parent / "targets/megatron_flags.toml").read_text(encoding="utf-8"))

LONGEST = 2**17  # most characters of a script; Linux takes no longer argument
MOST_READ = 2**20  # most characters of a script and of all values that its variables insert
ADVICE = "write echo before the training command, run the script, and import the line that it prints"

_UNKNOWN = re.compile("\0([^\0]*)\0")  # a part of a word that only the shell knows, such as \0$LR\0
_KEPT = "\0kept\0"  # stands for the value that a variable has before it is changed
_ONLY_UNKNOWN = re.compile("(?:\0[^\0]*\0)+")
_FLAGS_BY_NAME = re.compile("ARG|OPT|FLAG|EXTRA|--|[@*]", re.IGNORECASE)  # in $ARGS, $@ and $(cat flags)
_DASHES = re.compile("-?[\u2010-\u2015\u2212]")  # the last one is the minus sign

_SPACE = re.compile(r"(?:[ \t\r]|\\\r?\n|#[^\n]*)+")  # where a word can begin, so that # begins a comment
_OPERATOR = re.compile(
    r"(?P<redirect>\d*(?:&>>?|>>|>\||[<>]&|<>|<<<|<<-?|[<>](?!\()))|\n|;;?&|;;?|&&|\|\||\|&?|&|\(\(?|\)"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLACEHOLDER = re.compile(r"<[^\s<>(&](?:[^<>\n;|]*[^\s<>&;|\d])?>")  # such as <Specify path>
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_VARIABLE = (
    r"\$\{(?P<name>\w+)(?P<every>\[[@*]\])?(?::-(?P<default>[^{}()`\\]*))?\}|\$(?P<bare>[A-Za-z_]\w*|[\d@*#?$!-])"
)
_WORD, _WORD_OF_LIST = (
    re.compile(
        rf"(?P<text>[^\s'\"\\$`\0{operators}]+|\$(?=\s|$))|(?P<mark>\0[^\0]*\0)|'(?P<single>[^']*)'|\\\r?\n|\\(?P<escaped>.)|{_VARIABLE}"
        r"|(?P<unknown>\$[({]|`|[<>]\(|\$'(?:\\.|[^'\\])*')|(?P<quote>\")",
        re.DOTALL,
    )
    for operators in (";&|()<>", "")
)
_IN_QUOTES = re.compile(
    rf"(?P<text>[^\"\\$`\0]+)|(?P<mark>\0[^\0]*\0)|\\\r?\n|\\(?P<escaped>[\"\\$`])|{_VARIABLE}|(?P<unknown>\$[({{]|`)|(?P<quote>\")"
    r"|(?P<other>[\\$])"
)
_NESTED = re.compile(r"\0[^\0]*\0|(?<=[\s;&|(])#[^\n]*|'[^']*'|\\.|\$[({]|[()}`\"]|[^'\\$()}`\"#]+|.", re.DOTALL)
_CLOSING = {"(": ")", "$(": ")", "${": "}", "`": "`", '"': '"'}

_BLOCKS = dict.fromkeys(("for", "select", "while", "until"), "done") | {"if": "fi", "case": "esac", "{": "}"}
_KEYWORDS = {"then", "else", "elif", "do", "!", "time", "function", *_BLOCKS, *_BLOCKS.values()}
_ENDS = {"", "\n", ";", ";;", "(", ")"}  # of commands that run in any case
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
_SETTERS = {"read", "readarray", "mapfile", "let", "printf", "getopts", "unset", "for", "select"}


@dataclass
class Arguments:
    """The arguments of Megatron-LM in a script or list."""

    # The name of each flag -> the words after it
    flags: dict[str, list[str]] = field(default_factory=dict)
    # Each flag without a known value -> what is unknown, such as $LR
    unknown: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)  # what may have more flags, such as $@
    defaults: list[str] = field(default_factory=list)  # variables whose default is used


def parse_arguments(text: str, origin: str) -> Arguments:
    """Return the arguments in a script or list, as the docstring of this module describes.

    If a flag is repeated, its last value counts. Raise InputError if a word is neither a flag nor the value of one.
    """
    if len(text) > LONGEST:
        raise InputError(
            f"{origin}: has {len(text):,} characters, and leaven reads at most {LONGEST:,}; give a file with only "
            "the arguments"
        )
    script = _Script(origin)
    text = re.sub("[\0\1]", "", text)
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    is_line = len(lines) == 1 and not re.search(r"(?:^|\s)(?:&&|\|\|?|&)(?:\s|$)|;(?:\s|$)|=\(", lines[0])
    if is_line or (lines and lines[0].lstrip().startswith("-")):
        words = _after_program(script.fields(_Lexer("\n".join(lines), origin).words("")))
    else:
        script.run(text)
        words = script.trained_with()
    found = _sorted(words, origin, script.may_be_flags)
    found.defaults = list(script.defaults)
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
    """Return the words after the name of the Python file or, without such a name, from the first flag on.

    Flags of a launcher may come before it, so it is the last one before the first flag that leaven knows of Megatron.
    """
    flags = [place for place, word in enumerate(words) if word.startswith("--")]
    known = (place for place in flags if _is_known(_name(words[place][2:].partition("=")[0])))
    names = [place for place, word in enumerate(words[: next(known, None)]) if word.endswith(".py")]
    return words[names[-1] + 1 if names else min(flags, default=0) :]


def _unknown_in(text: str) -> list[str]:
    return [each.replace("\1", " ") for each in _UNKNOWN.findall(text)]


def _sorted(words: list[str], origin: str, may_be_flags: Callable[[str], bool]) -> Arguments:
    """Sort the words of a command into flags, their values, and what is unknown.

    An unknown word stands in the place of flags if the flag before it needs no value, or if leaven does not read that
    flag and ``may_be_flags`` is true of the word.
    """
    found, flag = Arguments(), ""
    for word in words:
        kind, given = kind_of(flag), found.flags.get(flag, [])
        name, equals, value = word[2:].partition("=")
        is_flag, unknown = word.startswith("--") and name, _unknown_in(word)
        needs_no_value = not flag or given or kind == "switch" or (not kind and any(map(may_be_flags, unknown)))
        if (is_flag and "\0" in name) or (_ONLY_UNKNOWN.fullmatch(word) and needs_no_value):
            found.open += [each for each in unknown if each not in found.open]
        elif is_flag:
            flag = _name(name)
            given = found.flags[flag] = [value] if equals else []
        elif _DASHES.match(word):
            raise InputError(f"{origin}: {word} has a dash instead of hyphens; write -- before the name of a flag")
        elif not flag or kind == "switch" or (kind in {"count", "number"} and given):
            shown = re.sub("\0", "", word).replace("\1", " ") + (f" after --{flag}" if flag else "")
            raise InputError(f"{origin}: {shown} is not the value of any flag; correct or remove it")
        else:
            given.append(word)
    for flag, given in found.flags.items():
        if kind_of(flag) and "\0" in (text := " ".join(given)):
            found.unknown[flag] = ", ".join(_unknown_in(text))
    return found


@dataclass(frozen=True)
class _Piece:
    """A part of a word: a text, or the value of a variable."""

    text: str = ""
    name: str = ""  # the variable
    default: str | None = None  # of ${NAME:-default}
    every: bool = False  # ${NAME[@]}
    quoted: bool = False


def _unknown(text: str) -> _Piece:
    """Return the piece of a word that has an expansion or a placeholder. Messages show its first 30 characters."""
    shown = "\1".join(re.sub("[\0\1]", " ", text[:60]).split())  # \1 is a space at which the word is not split
    return _Piece("\0" + (shown if len(shown) <= 30 else f"{shown[:30]}...") + "\0", quoted=True)


@dataclass(frozen=True)
class _Word:
    """A word of a script before variables are replaced."""

    pieces: list[_Piece]
    elements: list["_Word"] | None = None  # of NAME=(...), whose only piece is NAME=

    @property
    def literal(self) -> str:
        """The word if it is one text without quotes, otherwise ""."""
        return self.pieces[0].text if len(self.pieces) == 1 and not self.pieces[0].quoted else ""

    @property
    def assignment(self) -> re.Match[str] | None:
        """NAME=, NAME+= or NAME[...]= at the begin of the word, and the text after it."""
        return _ASSIGNMENT.fullmatch(self.pieces[0].text) if self.pieces and not self.pieces[0].quoted else None


class _Lexer:
    """Splits a script into words and operators, without comments, redirections and here-documents."""

    def __init__(self, text: str, origin: str) -> None:
        self._text, self._origin, self._at = text, origin, 0

    def tokens(self) -> Iterator[_Word | str]:
        """Yield words and operators, and "" at the end. For ``((N += 1))``, yield the words of ``let "N += 1"``."""
        documents: list[tuple[str, bool]] = []  # last line of each here-document, and whether tabs may be before it
        redirect = ""
        while not self._ended():
            begin = self._at
            found = _OPERATOR.match(self._text, begin)
            if not found or _PLACEHOLDER.match(self._text, begin):
                word = self._array() if _ARRAY.match(self._text, begin) else self._word()
                if redirect in {"<<", "<<-"}:
                    documents.append(("".join(piece.text for piece in word.pieces), redirect == "<<-"))
                elif not redirect:
                    yield word
                redirect = ""
            elif found["redirect"] and not redirect:
                self._at, redirect = found.end(), found["redirect"]
            elif redirect:
                self.refuse(f"no file after {redirect}; replace placeholders such as <PATH>", begin)
            elif found[0] == "((":
                self._skip_nested()
                yield _Word([_Piece("let")])
                yield _Word([_Piece(self._text[begin : self._at], quoted=True)])
            else:
                self._at = found.end()
                yield found[0]
                while found[0] == "\n" and documents:
                    last, tabs = documents.pop(0)
                    end = re.compile(("^\t*" if tabs else "^") + re.escape(last) + "$", re.MULTILINE)
                    self._at = line.end() if (line := end.search(self._text, self._at)) else len(self._text)
        if redirect:
            self.refuse(f"no file after {redirect}; replace placeholders such as <PATH>")
        yield ""

    def words(self, last: str) -> list[_Word]:
        """Return the words before the character ``last`` or, if it is "", the words of a list of arguments."""
        found = []
        while not self._ended() and (not last or self._text[self._at] != last):
            if self._text[self._at] == "\n":
                self._at += 1
            else:
                found.append(self._word(_WORD if last else _WORD_OF_LIST))
        return found

    def refuse(self, what: str, at: int | None = None) -> NoReturn:
        """Raise InputError for a script that leaven cannot read."""
        line = self._text.count("\n", 0, max(self._at - 1, 0) if at is None else at) + 1
        raise InputError(f"{self._origin}: leaven cannot read line {line} ({what}); {ADVICE}")

    def _ended(self) -> bool:
        """Skip spaces and comments, and return whether the script has ended."""
        if found := _SPACE.match(self._text, self._at):
            self._at = found.end()
        return self._at >= len(self._text)

    def _array(self) -> _Word:
        begin = self._at
        self._at = self._text.index("(", begin) + 1
        name, elements = self._text[begin : self._at - 1], self.words(")")
        if self._at >= len(self._text):
            self.refuse(f"{name}( has no end", begin)
        self._at += 1
        return _Word([_Piece(name)], elements)

    def _word(self, unquoted: re.Pattern[str] = _WORD) -> _Word:
        pieces: list[_Piece] = []
        begin, quoted = self._at, False
        while True:
            if not quoted and (found := _PLACEHOLDER.match(self._text, self._at)):
                self._at = found.end()
                pieces.append(_unknown(found[0]))
                continue
            if not (found := (_IN_QUOTES if quoted else unquoted).match(self._text, self._at)):
                break
            self._at, kind = found.end(), found.lastgroup
            if kind == "quote":
                if not quoted and self._text.startswith('"', self._at):  # "" is a word, too
                    pieces.append(_Piece(quoted=True))
                quoted = not quoted
            elif name := found["name"] or found["bare"]:
                pieces.append(_Piece("", name, found["default"], bool(found["every"]), quoted))
            elif kind == "unknown":
                if not found[0].endswith("'"):
                    self._at -= 1 if found[0] == "`" or found[0][0] in "<>" else 2
                    self._skip_nested()
                pieces.append(_unknown(self._text[found.start() : self._at]))
            elif kind:
                pieces.append(_Piece(found[kind], quoted=quoted or kind != "text"))
        if quoted or self._at == begin:
            self.refuse(f"{self._text[begin]} without a partner", begin)
        return _Word(pieces)

    def _skip_nested(self) -> None:
        """Skip the parenthesis, brace or quote that begins here, and what is in it."""
        begin, ends = self._at, list[str]()
        while found := _NESTED.match(self._text, self._at):
            token, self._at = found[0], found.end()
            quoted = ends[-1:] == ['"']
            if quoted and token[0] in "'#":
                self._at = found.start() + 1
            elif [token] == ends[-1:]:
                ends.pop()
            elif token in _CLOSING and not (quoted and token == "("):
                ends.append(_CLOSING[token])
            if not ends:
                return
        self.refuse(f"{self._text[begin : begin + 2].strip()} without a partner", begin)


class _Script:
    """The variables of a script and its training commands. See the docstring of this module."""

    def __init__(self, origin: str) -> None:
        self.defaults: dict[str, None] = {}  # variables whose default is used
        self._origin = origin
        self._read = 0  # characters of the script and of inserted values
        self._values: dict[str, list[str]] = {}  # elements of an array, or one text
        self._unknown: set[str] = set()  # variables that may be changed where it cannot be known
        self._extended: set[str] = set()  # variables to which something may be appended
        self._with_flags: set[str] = set()  # variables to which a text with flags is assigned
        self._blocks: list[str] = []  # last word of each open block
        self._runs = False  # whether the script has a command
        self._trainings: list[list[str] | None] = []  # words of each training command; None in a block

    def trained_with(self) -> list[str]:
        """Return the arguments of the only training command, or of a file that only has one array."""
        if not self._runs and len(self._values) == 1:
            return [text for each in self._values for text in self._elements(_Piece(name=each, every=True))]
        (only, *more) = self._trainings or [None]
        if only is None or more:
            number = "several commands have" if more else "no command outside of branches, loops and functions has"
            raise InputError(f"{self._origin}: {number} --num-layers; {ADVICE}")
        return only

    def may_be_flags(self, shown: str) -> bool:
        """Return whether a variable or an expansion such as ``$(cat flags)`` may have flags."""
        return shown[1:] in self._extended | self._with_flags or bool(_FLAGS_BY_NAME.search(shown))

    def run(self, text: str) -> None:
        """Read the commands of a script."""
        self._charge(text, at_least=2**13)  # so that scripts within scripts end
        lexer, open_blocks = _Lexer(text, self._origin), len(self._blocks)
        command: list[_Word] = []
        before = ""
        for token in lexer.tokens():
            if isinstance(token, _Word):
                command.append(token)
                continue
            if token == "\n" and not command and before not in _ENDS:  # a && or | goes on in the next line
                continue
            rest = self._without_keywords(command, lexer)
            certain = not self._blocks and before in _ENDS and token in _ENDS
            if token == "(":
                if len(rest) > 1:  # one word is the name of a function
                    lexer.refuse("unexpected (")
                self._blocks.append(")")
            elif token != ")" or self._blocks[-1:] != ["esac"]:  # otherwise the words are a pattern of a case
                if rest and (flag := rest[0].literal).startswith("--") and self._blocks[-1:] != ["esac"]:
                    lexer.refuse(f"{flag} begins a command; end the line before with a backslash")
                self._execute(rest, certain)
                if token == ")" and (not self._blocks or self._blocks.pop() != ")"):
                    lexer.refuse("unexpected )")
            command, before = [], token
        if len(self._blocks) != open_blocks:
            lexer.refuse(f"{self._blocks[-1]} is missing")

    def _without_keywords(self, words: list[_Word], lexer: _Lexer) -> list[_Word]:
        """Open and close blocks, and return the words after keywords."""
        for place, word in enumerate(words):
            keyword, before = word.literal, words[place - 1].literal if place else ""
            if before == "function":  # the name of one
                continue
            if keyword not in _KEYWORDS:
                return words[place:]
            if keyword in _BLOCKS:
                self._blocks.append(_BLOCKS[keyword])
            elif keyword in _BLOCKS.values() and (not self._blocks or self._blocks.pop() != keyword):
                lexer.refuse(f"unexpected {keyword}")
            if keyword in {"for", "select", "case"}:
                self._change(words[place + 1 : place + 3] if keyword != "case" else [])
                return []
        return []

    def _execute(self, words: list[_Word], certain: bool) -> None:
        """Record what a command assigns, or its arguments if it trains. ``certain``: whether it runs in any case."""
        command = list(dropwhile(lambda word: word.assignment, words))
        program = command[0].literal if command else ""
        if program in _DECLARATIONS or not command:
            plain = all(word.assignment or word.literal.isidentifier() for word in words)  # no option
            for word in words:
                if found := word.assignment:
                    self._assign(found, word, certain and plain)
            return
        self._runs = True
        if program in _SETTERS:
            self._change([word for word in command if program == "let" or word.literal.isidentifier()])
        elif program in {"source", "."}:
            self._unknown |= self._values.keys()
        elif program not in {"echo", "[["}:
            self._run_program(self.fields(command))

    def _run_program(self, words: list[str]) -> None:
        """Read the script after ``eval`` or ``bash -c``, or record the arguments of a command that trains."""
        names = [_name(word[2:].partition("=")[0]) for word in words if word.startswith("--")]
        if words[:1] == ["eval"]:
            self.run(" ".join(words[1:]))
            if any("\0" in word for word in words):
                self._unknown |= self._values.keys()
        elif "num-layers" in names:
            self._trainings.append(None if self._blocks else _after_program(words))
        elif any(word.rpartition("/")[2] in {"bash", "sh"} for word in words):
            for option, inside in pairwise(words):
                if re.fullmatch(r"-\w*c", option):
                    values = self._values.copy()
                    self.run(inside)
                    self._values = values

    def _assign(self, assigned: re.Match[str], word: _Word, certain: bool) -> None:
        """Set a variable or, if the assignment is not certain, record that it may be changed or extended."""
        name, index, append, first = assigned.groups()
        is_array, before = word.elements is not None, self._values.get(name)
        if not certain and not index:
            self._values[name] = [_KEPT]
        words = word.elements or [_Word([] if is_array else [_Piece(first, quoted=True), *word.pieces[1:]])]
        old = self._elements(_Piece(name=name, every=True)) if append else []
        added = self.fields(words) if is_array else [self._text(words[0].pieces)]
        text = ["".join([*old[:1], *added]), *self._values.get(name, [])[1:]]  # of an array, the first element
        value = [*old, *added] if is_array else text
        found = " ".join(value).split()
        if any(each.startswith("-") for each in found):
            self._with_flags.add(name)
        if certain and not index:
            self._values[name] = value
            return
        if before is not None:
            self._values[name] = before
        else:
            self._values.pop(name, None)
        (self._extended if _KEPT in found and not index else self._unknown).add(name)

    def _change(self, words: list[_Word]) -> None:
        """Make all variables unknown that these words name."""
        self._unknown.update(name for word in words for piece in word.pieces for name in _NAME.findall(piece.text))

    def _elements(self, piece: _Piece) -> list[str]:
        """Return the elements of an array, or the text of another variable or of a piece without one."""
        name, unknown, found = piece.name, f"\0${piece.name}\0", self._values.get(piece.name)
        if not name:
            return [piece.text]
        if name in self._unknown or (found is None and (piece.default is None or name in self._extended)):
            return [unknown]
        if found is None or (piece.default is not None and not any(found)):
            if found is None:
                self.defaults[f"${name}"] = None
            default = re.sub("[\"']", "", piece.default or "")
            return [re.sub(r"\$(\w+)", lambda each: self._text([_Piece(name=each[1])]), default)]
        found = found if piece.every else found[:1]
        if name in self._extended:
            return [*found, unknown] if piece.every else [" ".join([*found, unknown])]
        return found

    def _text(self, pieces: list[_Piece]) -> str:
        """Return the text of a word in which no value is split."""
        text = "".join(" ".join(self._elements(piece)) for piece in pieces)
        self._charge(text)
        return text

    def fields(self, words: list[_Word]) -> list[str]:
        """Return the words that a command gets for ``words``. Values that are not in quotes are split at spaces."""
        found: list[str] = []
        for word in words:
            joined = False  # whether the next text belongs to the last field
            for piece in word.pieces:
                splits = piece.name and not piece.quoted
                for number, text in enumerate(self._elements(piece)):
                    self._charge(text)
                    parts = text.split() if splits else [text]
                    if joined and parts and not number and not (splits and text[0].isspace()):
                        found[-1] += parts.pop(0)
                    found += parts
                    joined = not (splits and text[-1:].isspace()) if text or not splits else joined
        return found

    def _charge(self, text: str, at_least: int = 1) -> None:
        self._read += max(len(text), at_least)
        if self._read > MOST_READ:
            raise InputError(
                f"{self._origin}: has more than {MOST_READ:,} characters with the values of its variables; {ADVICE}"
            )
