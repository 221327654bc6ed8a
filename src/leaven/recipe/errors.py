"""Errors that are shown to the user as one line."""


class InputError(ValueError):
    """The input is wrong. The message is one line: what is wrong and what to type.

    The command line prints it and exits with code 2; nothing has been written.
    """


class Settled(InputError):
    """An input error that all processes of a run raise; only one of them prints it."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, numpy or torch means that memory is full."""
    message = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in message or "bad_alloc" in message))
    )


class ProcessLost(RuntimeError):
    """A process of a distributed run has died or hangs. The run can be resumed."""
