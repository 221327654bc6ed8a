"""A derivation as a person reads it: its steps, then the commands to type next."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from leaven.catalogue.starter.decisions import Derivation
from leaven.views.terminal import Facts


def derivation(derived: Derivation, commands: Sequence[str]) -> Group:
    steps = Facts([(f"{step.number} {step.title}", step.lines) for step in derived.steps])
    lines = [Text(f"{'' if n else 'next':<11}{command}") for n, command in enumerate(commands)]
    return Group(steps, *lines)
