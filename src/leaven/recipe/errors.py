"""Errors that the user sees as one line."""


class InputError(ValueError):
    """The input is wrong. The message is one line that says what is wrong and what to type.

    The command line prints it and exits with code 2; nothing has been written.
    """


class Settled(InputError):
    """An input error that every process of a run raises; one of them prints it."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, numpy or torch says that memory is full."""
    said = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in said or "bad_alloc" in said))
    )


class Lost(RuntimeError):
    """A process of a run is gone or hangs. The message says what is known; the run can be resumed."""
