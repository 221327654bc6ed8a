"""The cells of a scaling rule's table. A cell is a factor on one hyperparameter.

The factor is a product of powers of ratios (target scale / base scale). As in the papers, each ratio has a letter::

    I  fan in       O  fan out      H  head dimension
    L  depth        B  batch        D  tokens
    M  Muon's factor on a step, which depends on the shape of the matrix (`Muon.matching`)

``I^-1 L^(alpha-1)`` is ``fan_in**-1 * depth**(alpha-1)``, and ``1`` means no change. An exponent is a sum of numbers
and symbols::

    alpha  ``scaling.alpha``
    t      ``scaling.token_exponent``
    w      1 - alpha if ``scaling.scale_decay_with_depth`` is true, otherwise 0
"""

import re
from dataclasses import dataclass

from leaven.recipe.recipe import Scaling

LETTERS = {
    "I": "fan_in",
    "O": "fan_out",
    "H": "head",
    "L": "depth",
    "B": "batch",
    "D": "tokens",
    "M": "match",
}


@dataclass(frozen=True)
class Ratios:
    """A run's sizes divided by those of its base. If d_model is 1024, and the base has 256, ``width`` is 4."""

    width: float = 1.0  # d_model
    depth: float = 1.0  # number of layers
    batch: float = 1.0  # batch size in tokens
    tokens: float = 1.0  # training tokens


@dataclass(frozen=True)
class TensorRatios:
    """The ratios target / base of one tensor's sizes, and of the run's sizes.

    A tensor dimension that counts the vocabulary, positions or experts has the ratio 1.
    """

    fan_in: float = 1.0
    fan_out: float = 1.0
    head: float = 1.0  # head dimension of the model
    depth: float = 1.0  # number of layers of the model
    batch: float = 1.0  # batch size of the run in tokens
    tokens: float = 1.0  # training tokens of the run
    match: float = 1.0  # Muon's factor on a step (`Muon.matching`) for the shape of this tensor


@dataclass(frozen=True)
class Cell:
    """A factor on a hyperparameter (a product of powers of ratios), and its source."""

    text: str  # for example ``I^-1 L^(alpha-1)``; the docstring of this module explains the letters
    source: str  # table and row of a paper, or the derivation

    def factor(self, at: TensorRatios, scaling: Scaling) -> float:
        """Return the value of the factor, which is exactly 1.0 at the base."""
        if self.text == "1":
            return 1.0
        value = 1.0
        for power in self.text.split():
            letter, _, exponent = power.partition("^")
            value *= float(getattr(at, LETTERS[letter])) ** _exponent(exponent or "1", scaling)
        return value


_TERM = re.compile(r"([+-]?)(?:(\d+)(?:/(\d+))?|(alpha|t|w))")


def _exponent(text: str, scaling: Scaling) -> float:
    inside = text.strip("()")
    terms = list(_TERM.finditer(inside))
    assert "".join(term.group() for term in terms) == inside, f"not an exponent: {text}"
    symbols = {
        "alpha": scaling.alpha,
        "t": scaling.token_exponent,
        "w": 1 - scaling.alpha if scaling.scale_decay_with_depth else 0.0,
    }
    value = 0.0
    for sign, numerator, denominator, symbol in (term.groups() for term in terms):
        size = symbols[symbol] if symbol else int(numerator) / int(denominator or 1)
        value += -size if sign == "-" else size
    return value
