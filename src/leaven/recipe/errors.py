"""The one exception that speaks to the user."""


class InputError(ValueError):
    """The input is wrong. The message is one line that says what is wrong and how to mend it.

    The command line prints it and exits with code 2; nothing has been written.
    """
