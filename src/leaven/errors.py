"""Errors that are shown to the user as one line, and what makes foreign text safe to show."""

import re

# Characters that control a terminal, change the direction of text, break lines, or have no UTF-8. Line feed and
# tab are text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# A path has :/ where the URL has ://. A password may contain any character, also @; a number after the colon is a
# port.
_PASSWORD = re.compile(
    r"(?<=:/)(/{0,2}[^\s:/@]*):(?:(?!\d{1,5}[/\s])[^\n]*|\S*)@|(?<=[?&])(\w*password)=[^&\s'\"]*", re.IGNORECASE
)


def shown(text: str) -> str:
    """Return foreign text as a terminal may show it: without passwords of URLs, and without control characters.

    A control character becomes an escape such as ``\\u001b``, which TOML and JSON read.
    """
    text = _PASSWORD.sub(lambda found: f"{found[2]}=***" if found[2] else f"{found[1]}:***@", text)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class InputError(ValueError):
    """An error in the user's input, with a message of one line: what is wrong and what to type.

    The command line prints the message and exits with code 2.
    """


class Settled(InputError):
    """An input error that every process of a run raises with the same message.

    Only the first process prints the message.
    """


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
