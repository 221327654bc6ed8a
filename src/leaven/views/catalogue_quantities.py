"""What the charts of published runs show: lr, batch, tokens, init std, and the laws and rules drawn beside them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leaven.catalogue.groups import PublishedGroup
from leaven.catalogue.laws import evaluate
from leaven.catalogue.run import PublishedRun
from leaven.views import numbers

TOKENS_PER_PARAMETER = 20.0  # where the laws are drawn
ASPECT = 80.0  # d_model / n_layers where the rules for the init, functions of the width, are drawn


@dataclass(frozen=True)
class Line:
    """A law: x and y where it is drawn solid, and where it is stretched beyond its fit."""

    name: str
    points: Sequence[tuple[float, float, bool]]  # size, value, inside the fitted range


@dataclass(frozen=True)
class Quantity:
    """What one chart shows of a run, where its file says it, and the lines that are drawn with it."""

    key: str
    title: str
    told: str
    unit: str
    of_run: Callable[[PublishedRun], float | None]
    group: Callable[[PublishedRun], PublishedGroup | None]
    field: str
    spell: Callable[[float | None], str]
    lines: Callable[[Sequence[float]], list[Line]]


def _law_lines(pick: str) -> Callable[[Sequence[float]], list[Line]]:
    """What each law says at 20 tokens a parameter; another form of the same law is no other."""

    def lines(sizes: Sequence[float]) -> list[Line]:
        said: dict[str, list[tuple[float, float, bool]]] = {}
        for size in sizes:
            for result in evaluate(size, TOKENS_PER_PARAMETER * size):
                value = getattr(result, pick)
                if value and result.form_of is None:
                    said.setdefault(result.law, []).append((size, value, result.in_range is True))
        return [Line(name, points) for name, points in said.items()]

    return lines


def _chinchilla(sizes: Sequence[float]) -> list[Line]:
    return [Line("Chinchilla, 20 tokens a parameter", [(size, 20 * size, True) for size in sizes])]


def _inits(sizes: Sequence[float]) -> list[Line]:
    """N = 12 L d^2 without embeddings, so d = (N x aspect / 12)^(1/3)."""
    widths = [(size, (size * ASPECT / 12) ** (1 / 3)) for size in sizes]
    rules: dict[str, Callable[[float], float]] = {
        "fan-in, 1 / sqrt(d)": lambda d: d**-0.5,
        "small-init, sqrt(2 / (5 d))": lambda d: math.sqrt(2 / (5 * d)),
        "MT-NLG, sqrt(1 / (3 d))": lambda d: math.sqrt(1 / (3 * d)),
        "GPT-2, 0.02": lambda d: 0.02,
    }
    return [Line(name, [(size, std(d), True) for size, d in widths]) for name, std in rules.items()]


_AT_20 = f"at {TOKENS_PER_PARAMETER:g} tokens a parameter; dotted beyond their fit"
QUANTITIES = (
    Quantity(
        "lr", "Peak learning rate", f"Thin lines: laws {_AT_20}.", "peak lr", lambda run: run.peak_lr,
        lambda run: run.schedule, "peak_lr", lambda value: f"peak lr {numbers.value(value)}", _law_lines("lr"),
    ),
    Quantity(
        "batch", "Batch", f"The final one. Thin lines: optimal and critical ones by laws {_AT_20}.", "tokens a step",
        lambda run: run.batch_tokens, lambda run: run.batch, "global_batch_tokens",
        lambda value: f"batch {numbers.quantity(value)} tokens", _law_lines("batch_tokens"),
    ),
    Quantity(
        "tokens", "Duration", "Tokens consumed. The thin line: what Chinchilla found compute-optimal.", "tokens",
        lambda run: run.tokens, lambda run: run.data, "tokens_total",
        lambda value: f"{numbers.quantity(value)} tokens", _chinchilla,
    ),
    Quantity(
        "init", "Init std",
        f"Of the matrices that read the residual stream. Thin lines: rules of the width, at d_model = {ASPECT:g} "
        "n_layers.", "standard deviation", lambda run: run.init_std, lambda run: run.init, "std",
        lambda value: f"init std {numbers.value(value)}", _inits,
    ),
)  # fmt: skip
