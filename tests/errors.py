"""A check of the messages that a user reads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from leaven.errors import InputError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect an InputError from the block, with a message of one line that contains every part."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
