"""Parse and format quantities as people write them: 7B, 2T, 0.5M, 32_768."""

import re
from collections.abc import Iterable
from fractions import Fraction

from leaven.errors import InputError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
# A whole number. Commas may only separate groups of three digits. The comma of 0,5 would be a decimal comma.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9][0-9_]*)"
_QUANTITY = re.compile(rf"({WHOLE}(?:\.[0-9]+)?|\.[0-9]+)(?:e([+-]?[0-9]+))?\s*([KMBGT]?)", re.IGNORECASE)


def parse_quantity(text: str) -> int:
    """Return a count from a text such as ``7B`` (7e9), ``64k`` (64,000) or ``32_768``, or raise InputError."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a quantity; write for example 7B, 2.5T, 500M, 64k or 32_768")
    digits, exponent, suffix = match.groups()
    if max(len(digits), len(exponent or "")) > 100:
        raise InputError(f"{text[:20]!r}... is too long; give a number with fewer digits")
    power = max(int(exponent or 0), -200)
    if power > 30:
        raise InputError(f"{text!r} has an exponent above 30; give a smaller one")
    # Fractions are exact: float("0.58") * 1e9 would not be a whole number.
    value = Fraction(digits.replace("_", "").replace(",", "")) * Fraction(10) ** power * _SUFFIXES[suffix.upper()]
    if value.denominator != 1:
        raise InputError(f"{text!r} is not a whole number; round it")
    return int(value)


def format_quantity(value: float) -> str:
    """Return a count with three significant digits and a suffix: ``1.03 B``, ``524 k``, ``96``, ``2.22e+19``."""
    rounded = abs(float(f"{value:.3g}"))  # so that 999,999 is shown as 1.00 M and not as 1,000 k
    if rounded >= 1e15:
        return f"{value:.2e}"
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= scale:
            return f"{_significant(value / scale)} {suffix}"
    return _significant(value)


def format_parameters(params: int, params_active: int) -> str:
    """Return a number of parameters as text: ``6.9 B parameters (of which a token uses 1.3 B)``."""
    size = f"{format_quantity(params)} parameters"
    return size if params_active == params else f"{size} (of which a token uses {format_quantity(params_active)})"


def listed(values: Iterable[object], word: str = "or") -> str:
    """Return values as text: ``1, 2 or 4``."""
    *most, last = map(str, values)
    return f"{', '.join(most)} {word} {last}" if most else last


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits, and commas if it is large: ``0.31``, ``15,600``."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 10**digits <= abs(rounded) < 1e15 else f"{rounded:.{digits}g}"


def _significant(value: float) -> str:
    """Return a number with three significant digits: ``12.0`` for 12.04, but ``12`` for the whole number 12."""
    rounded = float(f"{value:.3g}")
    if value == int(value) and abs(rounded) < 1_000:
        return f"{int(rounded)}"
    whole = len(f"{int(abs(rounded))}") if abs(rounded) >= 1 else 1
    return f"{rounded:.{max(3 - whole, 0)}f}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``8.2 s``, ``4 min 05 s``, ``13 h 41`` (13 hours, 41 minutes), ``6.3 days``."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5_970:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds < 100 * 3_600:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest:02d}"
    return f"{seconds / 86_400:,.1f} days"
