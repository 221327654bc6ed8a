"""Find the training command in a shell script for Megatron-LM, without running the script.

The script is read from top to bottom:

- The training command is the command with ``--num-layers``. If a file only sets variables, the variable that contains
  ``--num-layers`` has the arguments.
- A variable has the value of its last assignment. If LR is not set, ``${LR:-1e-4}`` has its default, 1e-4.
- A variable is unknown if it is assigned in a branch, loop, function or subshell, or after ``&&``, ``||`` or ``|``.
  If such an assignment only appends words, only these words are unknown.
- A variable is also unknown if a command such as ``read``, ``let`` or ``((`` may set it.
- ``$1``, ``$(...)``, placeholders such as ``<PATH>``, and all expansions other than ``$A``, ``${A[@]}`` and
  ``${A:-default}`` are unknown.

A script is refused if its syntax is not supported, if several commands train, or if the training command is in a
branch, loop, function or subshell.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import NoReturn

from leaven.errors import InputError

MOST_READ = 2**20  # most characters of a script and of all values that its variables insert
ADVICE = "write echo before the training command, run the script, and import the line that it prints"

UNKNOWN = re.compile("\0([^\0]*)\0")  # a part of a word that only the shell knows, such as \0$LR\0
_KEPT = "\0kept\0"  # stands for the value that a variable has before it is changed
ONLY_UNKNOWN = re.compile("(?:\0[^\0]*\0)+")
_LAYERS = re.compile(r"(?:^|\s)--num[-_]layers(?=[\s=]|$)")
_FLAGS_BY_NAME = re.compile("ARG|OPT|FLAG|EXTRA|--|[@*]", re.IGNORECASE)  # in $ARGS, $@ and $(cat flags)

_SPACE = re.compile(r"(?:[ \t\r]|\\\r?\n|#[^\n]*)+")  # where a word can begin, so that # begins a comment
_OPERATOR = re.compile(
    r"(?P<redirect>\d*(?:&>>?|>>|>\||[<>]&|<>|<<<|<<-?|[<>](?!\()))|\n|;;?&|;;?|&&|\|\||\|&?|&|\(\(?|\)"
)
_CHANGED = re.compile(  # variables in LR, LR[0], LR = 2, LR *= 2, LR++ and --LR
    r"^(\w+)(?:\[.*\])?$|\b(\w+)\b(?:\[[^][]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*(\w+)"
)
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
_ENDS = {"", "\n", ";", ";;", "(", ")"}  # of commands that run in this shell
_CONTINUED = {"&&", "||", "|", "|&"}  # before commands that run in some cases, or in a subshell
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
# Commands that set variables, and the option with which they do
_SETTERS = dict.fromkeys(("read", "readarray", "mapfile", "let", "getopts", "unset"), "")
_SETTERS |= {"printf": "-v", "wait": r"-\w*p"}
_NEUTRAL = {"echo", "[", "test", "[[", "source", "."}  # neither train nor start a program


def unknown_in(text: str) -> list[str]:
    """Return the parts of a word whose values only the shell knows, such as ``$LR``."""
    return [each.replace("\1", " ") for each in UNKNOWN.findall(text)]


@dataclass(frozen=True)
class _Piece:
    """A part of a shell word: literal text, or the value of a variable."""

    text: str = ""
    name: str = ""  # the variable
    default: str | None = None  # of ${NAME:-default}
    every: bool = False  # ${NAME[@]}
    quoted: bool = False


def _unknown(text: str) -> _Piece:
    """Return a piece for an expansion or a placeholder of unknown value. Messages show its first 30 characters."""
    shown = "\1".join(re.sub("[\0\1]", " ", text[:60]).split())  # \1 is a space at which the word is not split
    return _Piece("\0" + (shown if len(shown) <= 30 else f"{shown[:30]}...") + "\0", quoted=True)


@dataclass(frozen=True)
class _Word:
    """A word of a script before variables are replaced."""

    pieces: list[_Piece]
    elements: list["_Word"] | None = None  # of NAME=(...), whose only piece is NAME=

    @property
    def literal(self) -> str:
        """The word if it has neither quotes nor variables, otherwise ""."""
        return self.pieces[0].text if len(self.pieces) == 1 and not self.pieces[0].quoted else ""

    @property
    def text(self) -> str:
        """The word without quotes, or "" if it has a variable."""
        return "" if any(piece.name for piece in self.pieces) else "".join(piece.text for piece in self.pieces)

    @property
    def assignment(self) -> re.Match[str] | None:
        return _ASSIGNMENT.fullmatch(self.pieces[0].text) if self.pieces and not self.pieces[0].quoted else None


class Lexer:
    """Splits a script into words and operators, without comments, redirections and here-documents."""

    def __init__(self, text: str, origin: str, line: int = 0) -> None:
        """``line``: for a text given to ``eval`` or ``bash -c``, the line of this command in the script, else 0."""
        self._text, self._origin, self._line, self._at = text, origin, line, 0
        self.begin, self.line = 0, line or 1  # of the newest token

    def tokens(self) -> Iterator[_Word | str]:
        """Yield words and operators, and "" at the end. For ``((N += 1))``, yield the words of ``let "N += 1"``."""
        documents: list[tuple[str, bool]] = []  # last line of each here-document, and whether tabs may be before it
        redirect = ""
        while not self._ended():
            begin = self._at
            self.line += 0 if self._line else self._text.count("\n", self.begin, begin)
            self.begin = begin
            found = _OPERATOR.match(self._text, begin)
            if not found or _PLACEHOLDER.match(self._text, begin):
                word = self._array() if _ARRAY.match(self._text, begin) else self._word()
                if redirect in {"<<", "<<-"}:
                    documents.append((word.text, redirect == "<<-"))
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
        """Return the words before the character ``last``. If ``last`` is "", return all words of the text, and read
        operators such as ``;`` as parts of words."""
        found = []
        while not self._ended() and (not last or self._text[self._at] != last):
            if self._text[self._at] == "\n":
                self._at += 1
            else:
                found.append(self._word(_WORD if last else _WORD_OF_LIST))
        return found

    def refuse(self, what: str, at: int | None = None) -> NoReturn:
        line = self._line or self._text.count("\n", 0, max(self._at - 1, 0) if at is None else at) + 1
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
            self.refuse(f"unmatched {self._text[begin]}", begin)
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
        self.refuse(f"unmatched {self._text[begin : begin + 2].strip()}", begin)


class Script:
    """The variables of a script and its training commands. See the docstring of this module."""

    def __init__(self, origin: str, use_defaults: bool = True) -> None:
        self._use_defaults = use_defaults  # whether the default of ${LR:-1e-4} counts; otherwise LR is unknown
        self.defaults: dict[str, None] = {}  # variables whose default is used
        self._origin = origin
        self._read = 0  # characters of the script and of inserted values
        self._values: dict[str, list[str]] = {}  # elements of an array, or one text
        self._line = 0  # of the current command
        # The line of the command that may change a variable, or append something to it
        self._unknown: dict[str, int] = {}
        self._extended: dict[str, int] = {}
        self._with_flags: set[str] = set()  # variables to which a text with flags is assigned
        self._blocks: list[str] = []  # last word of each open block
        self._used: set[str] = set()  # variables that echo and the like use
        self._runs = False  # whether the script has another command
        self._hidden: dict[str, None] = {}  # what is unknown of a Python program without --num-layers
        self._trainings: list[list[str] | None] = []  # words of each training command; None in a block

    def trained_with(self) -> list[str]:
        """Return the words of the only command with --num-layers. If the file only sets variables, return the
        arguments in the only variable with this flag. Raise InputError if there is not exactly one."""
        unused = {name: value for name, value in self._values.items() if name not in self._used}
        names = [name for name, value in unused.items() if _LAYERS.search(" ".join(value))]
        if not self._runs and len(names) == 1:
            value = self._elements(_Piece(name=names[0], every=True))
            others = [f"\0${name}\1(no\1command\1uses\1it)\0" for name in self._with_flags if name != names[0]]
            return [*(value[0].split() if len(value) == 1 else value), *sorted(others)]
        if len(self._trainings) == 1 and self._trainings[0] is not None:
            return self._trainings[0]
        if self._trainings:
            what = (
                "several commands have --num-layers"
                if self._trainings[1:]
                else ("the command with --num-layers is in a branch, loop or function, or in ( ) or { }")
            )
        elif self._hidden:
            hidden = ", ".join(list(self._hidden)[:3])
            what = f"no command has --num-layers; it may be in {hidden}, which is unknown until the script runs"
        else:
            raise InputError(
                f"{self._origin}: no command has --num-layers (here-documents and commands after ssh or sbatch are "
                "not searched); give the script that trains, or a file with only its flags"
            )
        raise InputError(f"{self._origin}: {what}; {ADVICE}")

    def may_be_flags(self, shown: str) -> bool:
        """Return whether a variable or an expansion such as ``$(cat flags)`` may contain flags."""
        name = shown[1:].partition(" ")[0]
        return name in self._extended or name in self._with_flags or bool(_FLAGS_BY_NAME.search(shown))

    def run(self, text: str) -> None:
        self._charge(text, at_least=2**13)  # so that scripts within scripts end
        lexer, open_blocks = Lexer(text, self._origin, self._line), len(self._blocks)
        command: list[_Word] = []
        before, begin = "", 0
        for token in lexer.tokens():
            if isinstance(token, _Word):
                if not command:
                    self._line, begin = lexer.line, lexer.begin
                command.append(token)
                continue
            if token == "\n" and not command and before in _CONTINUED:
                continue
            rest = self._without_keywords(command, lexer)
            certain = not self._blocks and before not in _CONTINUED and token in _ENDS
            if token == "(":
                if len(rest) > 1:  # one word is the name of a function
                    lexer.refuse("unexpected (")
                self._blocks.append(")")
            elif token != ")" or self._blocks[-1:] != ["esac"]:  # otherwise the words are a pattern of a case
                first = "" if not rest or rest[0].assignment else " ".join(self.fields(rest[:1]))
                if first.startswith("--") and self._blocks[-1:] != ["esac"]:
                    comment = text[:begin].rstrip().rpartition("\n")[2].lstrip().startswith("#")
                    advice = "remove the comment above" if comment else "end the line before with a backslash"
                    lexer.refuse(f"{re.split('[^-A-Za-z0-9_]', first)[0]} starts a new command; {advice}", begin)
                self._execute(rest, certain)
                if token == ")" and (not self._blocks or self._blocks.pop() != ")"):
                    lexer.refuse("unexpected )")
            command, before = [], token
        if len(self._blocks) != open_blocks:
            lexer.refuse(f"{self._blocks[-1]} is missing")

    def _without_keywords(self, words: list[_Word], lexer: Lexer) -> list[_Word]:
        """Return the words after shell keywords such as ``then``. Update the list of open blocks."""
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
        """Record what a command assigns, or a training command. ``certain``: it always runs, and in this shell."""
        command = list(dropwhile(lambda word: word.assignment or word.text in {"command", "builtin"}, words))
        program = command[0].text if command else ""
        for opened in (re.fullmatch(r"\{(\w+)\}", word.text) for word in words):  # as in exec {LOG}>file
            if opened:
                self._unknown.setdefault(opened[1], self._line)
        if program in _DECLARATIONS or not command:
            plain = all(word.assignment or re.fullmatch(r"-[arxg]+|[A-Za-z_]\w*", word.text) for word in words)
            for word in words:
                if found := word.assignment:
                    self._assign(found, word, certain and plain)
                elif not re.fullmatch(r"[-+][^\Wn]*|\w+", word.text):  # -n makes a name for another variable
                    self._change_all()
        elif program in _SETTERS:
            if any(re.match(_SETTERS[program], word.text) for word in command[1:]):
                self._change(command[1:])
        elif program in _NEUTRAL:
            self._used.update(piece.name for word in command for piece in word.pieces)
            if program in {"source", "."}:
                self._change_all()
        else:
            self._runs = True
            self._run_program(self.fields(command))

    def _run_program(self, words: list[str]) -> None:
        """Read the script after ``eval`` or ``bash -c`` in ``words``, or record ``words`` if they start training."""
        if words[:1] == ["eval"]:
            self.run(" ".join(words[1:]))
            if any("\0" in word for word in words):
                self._change_all()
        elif any(map(_LAYERS.match, words)):
            self._trainings.append(None if self._blocks else words)
        elif any(word.rpartition("/")[2] in {"bash", "sh"} for word in words):
            for option, inside in pairwise(words):
                if re.fullmatch(r"-\w*c", option):
                    values = self._values.copy()
                    self.run(inside)
                    self._values = values
        elif any(word.endswith(".py") for word in words):
            unknown = (each for word in words if ONLY_UNKNOWN.fullmatch(word) for each in unknown_in(word))
            self._hidden.update(dict.fromkeys(unknown))

    def _assign(self, assigned: re.Match[str], word: _Word, certain: bool) -> None:
        """Set a variable. Mark it as unknown instead if the assignment is not ``certain`` or sets an array element.

        If an uncertain assignment keeps the old value, as in ``A="$A more"``, mark the variable as extended.
        """
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
        (self._extended if _KEPT in found and not index else self._unknown).setdefault(name, self._line)

    def _change(self, words: list[_Word]) -> None:
        """Mark as unknown each variable named in ``words``, or all variables if a word begins with ``$NAME``."""
        for piece in (piece for word in words for piece in word.pieces):
            names = [name for found in _CHANGED.findall(piece.text) for name in found if name]
            if option := re.fullmatch(r"-(\w+)", piece.text):  # -vLR is -v LR
                names += [option[1][begin:] for begin in range(1, len(option[1]))]
            self._unknown.update((name, self._line) for name in names if name not in self._unknown)
        if any(word.pieces and (word.pieces[0].name or "\0" in word.pieces[0].text) for word in words):
            self._change_all()

    def _change_all(self) -> None:
        self._unknown = dict.fromkeys(self._values, self._line) | self._unknown

    def _elements(self, piece: _Piece) -> list[str]:
        """Return all elements of an array for ``${NAME[@]}``. For other pieces, return a list with their text."""
        if not (name := piece.name):
            return [piece.text]
        found, line = self._values.get(name), self._unknown.get(name, self._extended.get(name))
        unknown = f"\0${name}\1(line\1{line}\1may\1change\1it)\0" if line else f"\0${name}\0"
        if name in self._unknown or (found is None and (piece.default is None or name in self._extended)):
            return [unknown]
        if found is None or (piece.default is not None and not any(found)):
            if found is None:
                self.defaults[f"${name}"] = None
                if not self._use_defaults:
                    return [unknown]
            default = re.sub("[\"']", "", piece.default or "")
            return [re.sub(r"\$(\w+)", lambda each: self._text([_Piece(name=each[1])]), default)]
        found = found if piece.every else found[:1]
        if name in self._extended:
            return [*found, unknown] if piece.every else [" ".join([*found, unknown])]
        return found

    def _text(self, pieces: list[_Piece]) -> str:
        """Return the text of a word. Unlike :meth:`fields`, do not split values of variables at spaces."""
        text = "".join(" ".join(self._elements(piece)) for piece in pieces)
        self._charge(text)
        return text

    def fields(self, words: list[_Word]) -> list[str]:
        """Return ``words`` after variables are replaced. Values of unquoted variables are split at spaces."""
        found: list[list[str]] = []  # parts of each
        for word in words:
            joined = False  # whether the next text belongs to the last field
            for piece in word.pieces:
                splits = piece.name and not piece.quoted
                for number, text in enumerate(self._elements(piece)):
                    self._charge(text)
                    parts = text.split() if splits else [text]
                    if joined and parts and not number and not (splits and text[0].isspace()):
                        found[-1].append(parts.pop(0))
                    found += [[part] for part in parts]
                    joined = not (splits and text[-1:].isspace()) if text or not splits else joined
        return ["".join(parts) for parts in found]

    def _charge(self, text: str, at_least: int = 1) -> None:
        self._read += max(len(text), at_least)
        if self._read > MOST_READ:
            raise InputError(
                f"{self._origin}: the script and the inserted values of its variables have more than {MOST_READ:,} "
                f"characters; {ADVICE}"
            )
