"""Errors that are shown to the user as one line."""


class InputError(ValueError):
    """Wrong input. The message is one line that says what is wrong and what to type.

    The command line prints it and exits with code 2. Nothing has been written.
    """


class Settled(InputError):
    """An input error that every process of a run raises; one of them prints it."""


def out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch raised this error because memory is full."""
    message = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in message or "bad_alloc" in message))
    )


class Lost(RuntimeError):
    """A process of a run is gone or hangs. The message says what is known; the run can be resumed."""
