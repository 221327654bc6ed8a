"""Cells of a scaling rule's table: how a quantity changes, as a product of powers of the ratios target / base.

A cell is written as in the papers, with a letter for each ratio::

    I  fan in       O  fan out      H  head dimension
    L  depth        B  batch        D  tokens

``I^-1 L^(alpha-1)`` is ``fan_in**-1 * depth**(alpha-1)``. An exponent is a sum of numbers and of ``alpha`` (the depth
exponent), ``t`` (the token exponent) and ``w`` (1 - alpha if weight decay is scaled with depth, else 0). ``1`` means
that the quantity does not change.
"""

import re
from dataclasses import dataclass

LETTERS = {
    "I": "fan_in",
    "O": "fan_out",
    "H": "head",
    "L": "depth",
    "B": "batch",
    "D": "tokens",
}


@dataclass(frozen=True)
class Ratios:
    """The ratios of a run's scale to its base; all are 1 at the base."""

    width: float = 1.0
    depth: float = 1.0
    batch: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True)
class TensorRatios:
    """The ratios of one tensor, target over base. Dimensions that do not grow, such as the vocabulary, count as 1."""

    fan_in: float = 1.0  # of this tensor, so that d_ff / d_model and heads per kv head may change
    fan_out: float = 1.0
    head: float = 1.0  # head dimension
    depth: float = 1.0
    batch: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True)
class Exponents:
    """The exponents that a recipe can choose; :class:`leaven.recipe.recipe.Scaling` explains them."""

    alpha: float = 1.0
    token_exponent: float = 0.5
    scale_decay_with_depth: bool = False

    def symbol(self, name: str) -> float:
        match name:
            case "alpha":
                return self.alpha
            case "t":
                return self.token_exponent
            case _:
                return 1 - self.alpha if self.scale_decay_with_depth else 0.0


@dataclass(frozen=True)
class Cell:
    """A factor as a product of powers of the ratios, for example ``I^-1 L^(alpha-1)``, and its source."""

    text: str
    source: str

    def factor(self, at: TensorRatios, exponents: Exponents) -> float:
        """Return the value of this factor; exactly 1.0 if all ratios in it are 1."""
        if self.text == "1":
            return 1.0
        value = 1.0
        for power in self.text.split():
            letter, _, exponent = power.partition("^")
            value *= float(getattr(at, LETTERS[letter])) ** _exponent(exponent or "1", exponents)
        return value


_TERM = re.compile(r"([+-]?)(?:(\d+)(?:/(\d+))?|(alpha|t|w))")


def _exponent(text: str, exponents: Exponents) -> float:
    inside = text.strip("()")
    terms = list(_TERM.finditer(inside))
    assert "".join(term.group() for term in terms) == inside, f"not an exponent: {text}"
    value = 0.0
    for sign, numerator, denominator, symbol in (term.groups() for term in terms):
        size = exponents.symbol(symbol) if symbol else int(numerator) / int(denominator or 1)
        value += -size if sign == "-" else size
    return value
