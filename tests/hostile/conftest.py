"""Fixtures of the tests of hostile input."""

from tests.cli.conftest import leaven

__all__ = ["leaven"]
