"""What is said to the user in one line."""


class InputError(ValueError):
    """The input is wrong. The message is one line that says what is wrong and how to mend it.

    The command line prints it and exits with code 2; nothing has been written.
    """


class Settled(InputError):
    """One that every process of a run raises, so that one of them says it for all."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is full: Python's, numpy's or torch's, which has one for each device."""
    said = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in said or "bad_alloc" in said))
    )


class Lost(RuntimeError):
    """Of the processes of a run one is gone or hangs. Says what is known of it; the run can be taken up again."""
