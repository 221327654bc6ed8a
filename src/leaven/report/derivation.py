"""A derivation as a person reads it: its steps, then the commands that come next, whole, to be copied."""

from rich.console import Group
from rich.text import Text

from leaven.catalogue.derivation import Derivation
from leaven.report.terminal import Facts


def derivation(derived: Derivation) -> Group:
    steps = Facts([(f"{step.number} {step.title}", step.said) for step in derived.steps])
    lines = [Text(f"{'' if n else 'then':<6}{command}") for n, command in enumerate(derived.commands)]
    return Group(steps, *lines)
