"""The command line, as in the tests of the verbs."""

from tests.cli.conftest import leaven

__all__ = ["leaven"]
