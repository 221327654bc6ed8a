"""Errors that are shown to the user as one line."""


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
