"""Errors that a user sees as one line, and :func:`shown`, which makes text from files safe to print."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Characters that control a terminal, change the direction of text, break lines, or cannot be encoded in UTF-8. Line
# feed and tab are allowed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What stands before the password of a URL, also of one that was made a path, with :/ instead of ://. A number after
# the colon is a port, except in the address of a database.
_LOGIN = re.compile(
    r"\b(?:postgres|mysql|mariadb|redis|mongodb)[\w+]*:/{1,3}[^\s:/@]*:"
    r"|:/{1,3}[^\s:/@\[]*:(?!\s|\d{1,5}(?![\w%+=-]|$))",
    re.IGNORECASE,
)
# A quotation mark at the end of an option is not part of its value.
_SECRET = re.compile(
    r"""http://127\.0\.0\.1:\d+/\?token=[\w-]+  # the page of leaven serve: it stays
    |(?<=[?&\#])([\w-]*(?:passw(?:or)?d|pwd|auth|credentials?|token|signature|sig|key|accesskeyid|secret)
        |x-amz-[\w-]+)
        =[^&\s]*?(?=['"]?:?(?:[&\s]|$))  # an option of a URL
    |\b(\w*password)[ ]*=[ ]*(?:'(?:[^'\\\n]|\\.)*'|\S*?(?=['"]?:?(?:\s|$)))  # of a database without a URL""",
    re.IGNORECASE | re.VERBOSE,
)


def _without_login(line: str) -> str:
    """Replace the password of a URL by ``***``. A password may contain @ and spaces, so the last @ ends it."""
    before, at, after = line.rpartition("@")
    login = _LOGIN.search(before) if at else None
    return f"{before[: login.end()]}***@{after}" if login else line


def _masked(found: re.Match[str]) -> str:
    option = found[1] or found[2]
    return f"{option}=***" if option else found[0]


def shown(text: str) -> str:
    """Make text safe to print: ``***`` for secrets, escapes such as ``\\u001b`` for control characters."""
    text = "\n".join(map(_without_login, text.split("\n"))) if "@" in text else text
    text = _SECRET.sub(_masked, text)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return ``did you mean NAME?`` with the most similar known name, or ``otherwise`` if none is close."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise


AGAIN_AFTER = 1.0  # seconds after the first Ctrl-C; others are ignored until then, as torchrun may send them, too
STOPPING = "stopping at the next safe point; press Ctrl-C again to stop at once"


class InputError(ValueError):
    """An error in the user's input. The message is one line: what is wrong and what to type. The exit code is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))  # Python may print it in a traceback


class Settled(InputError):
    """An input error that every process of a run raises with the same message. Only the first process prints it."""


class TextUnreadable(InputError):
    """Raised if the batch of a training step cannot be read. The run still has the state from before the step."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, numpy or torch means that memory is full."""
    message = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (
            isinstance(error, RuntimeError)
            and any(part in message for part in ("can't allocate memory", "bad_alloc", "MPS backend out of memory"))
        )
    )


class ProcessLost(RuntimeError):
    """Raised when a process of a distributed run has died or hangs. The run can be resumed."""
