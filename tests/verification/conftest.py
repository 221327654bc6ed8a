"""Fixtures of the tests of checks: the command line of tests/cli, and torch with one thread."""

from collections.abc import Iterator

import pytest
import torch
from tests.cli.conftest import leaven

__all__ = ["leaven"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
