"""The rules as data: how each quantity of each role moves with width, depth, batch and tokens.

A cell is a product of powers of the ratios target / base, written as it is printed::

    N  m_N, width        L  m_L, depth        B  m_B, batch        D  m_D, tokens

``N^-1 L^(alpha-1)`` is ``m_N**-1 * m_L**(alpha-1)``; an exponent is a sum of numbers, ``alpha`` and ``t`` (the token
exponent). ``1`` does not move and ``0`` switches the quantity off. The code that applies a rule
(:mod:`leaven.scaling.table`) does not know which rule it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from leaven.recipe.shape import Role


@dataclass(frozen=True)
class Ratios:
    """Target over base. All ones at the base."""

    width: float = 1.0
    depth: float = 1.0
    batch: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True)
class Cell:
    """A product of powers of the ratios, e.g. ``N^-1 L^(alpha-1) B^1/2 D^-t``."""

    text: str

    def factor(self, ratios: Ratios, alpha: float, token_exponent: float) -> float:
        """The number this cell stands for; exactly 1.0 where all its ratios are 1."""
        if self.text in {"0", "1"}:
            return float(self.text)
        value = 1.0
        for power in self.text.split():
            letter, _, exponent = power.partition("^")
            value *= self._ratio(letter, ratios) ** _exponent(exponent or "1", alpha, token_exponent)
        return value

    @staticmethod
    def _ratio(letter: str, ratios: Ratios) -> float:
        return {"N": ratios.width, "L": ratios.depth, "B": ratios.batch, "D": ratios.tokens}[letter]


_TERM = re.compile(r"([+-]?)(?:(\d+)(?:/(\d+))?|(alpha|t))")


def _exponent(text: str, alpha: float, token_exponent: float) -> float:
    inside = text.strip("()")
    terms = list(_TERM.finditer(inside))
    assert "".join(term.group() for term in terms) == inside, f"not an exponent: {text}"
    value = 0.0
    for sign, numerator, denominator, symbol in (term.groups() for term in terms):
        size = {"alpha": alpha, "t": token_exponent}.get(symbol) or int(numerator or 0) / int(denominator or 1)
        value += -size if sign == "-" else size
    return value


@dataclass(frozen=True)
class RoleRule:
    """One row of a rule's table, a cell a quantity."""

    init_variance: str = "1"
    lr: str = "1"
    eps: str = "1"
    weight_decay: str = "1"
    forward: str = "1"


@dataclass(frozen=True)
class Rule:
    """A table: role x quantity, and what all roles share.

    ``lr``, ``eps`` and ``weight_decay`` here multiply every row of their block. ``half_life`` is the factor on the
    number of steps that the Adam moments look back, applied as ``beta ** (1 / half_life)``: to first order
    ``1 - beta`` is divided by it, but beta never leaves (0, 1). ``residual`` multiplies each branch.
    """

    name: str
    source: str
    roles: Mapping[Role, RoleRule]
    residual: str = "1"
    lr: str = "1"
    eps: str = "1"
    weight_decay: str = "1"
    half_life: str = "1"


_GAINS_AND_BIASES = (Role.HIDDEN_BIAS, Role.HIDDEN_NORM, Role.QK_NORM, Role.FINAL_NORM, Role.FINAL_BIAS)

STANDARD = Rule(
    name="standard",
    source="common practice: the same value at every scale; gains and biases are not decayed",
    # Decay pulls a gain towards 0, not towards its neutral 1; published recipes leave it off (nanoGPT, OLMo 2).
    roles=MappingProxyType({role: RoleRule(weight_decay="0" if role in _GAINS_AND_BIASES else "1") for role in Role}),
)

COMPLETE_D_P = Rule(
    name="complete-d-p",
    source="Mlodozeniec et al. 2025, arXiv 2512.22382, Table 1",
    residual="L^-alpha",
    roles=MappingProxyType(
        {
            Role.EMBEDDING: RoleRule(eps="N^-1"),
            Role.HIDDEN_WEIGHT: RoleRule("N^-1", "N^-1 L^(alpha-1)", "N^-1 L^-alpha", "N"),
            Role.HIDDEN_BIAS: RoleRule("1", "L^(alpha-1)", "N^-1 L^-alpha", "0"),
            Role.HIDDEN_NORM: RoleRule("1", "L^(alpha-1)", "N^-1 L^-alpha", "0"),
            # One gain for all heads: its gradient is a coherent sum over heads, constant in width.
            Role.QK_NORM: RoleRule("1", "L^(alpha-1)", "L^-alpha", "0"),
            # Table 1 prints eps x 1. The gradient of this gain is sum_v W_u[v, i] delta_v with W_u of order 1/N, so
            # it falls as 1/N (measured exponent -1.05 at initialisation) and eps has to fall with it.
            Role.FINAL_NORM: RoleRule("1", "1", "N^-1", "0"),
            Role.FINAL_BIAS: RoleRule("1", "1", "N^-1", "0"),
            Role.UNEMBEDDING: RoleRule("N^-2", "N^-1", "1", "N"),
            # Not in the paper. AdamW trains alike under forward x c, std / c, lr / c, eps x c, decay x c; with
            # c = 1/N on the readout its row becomes the embedding's, so one matrix can be both.
            Role.TIED_EMBEDDING: RoleRule(eps="N^-1", forward="N^-1"),
        }
    ),
    lr="B^1/2 D^-t",
    eps="B^-1/2 D^t",
    weight_decay="B^1/2 D^(t-1)",
    half_life="B^-1 D",
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (STANDARD, COMPLETE_D_P)})
