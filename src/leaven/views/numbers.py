"""Numbers as text, and the ticks of axes."""

import math
from collections.abc import Callable

from leaven.documents.planning import CostRow, Price
from leaven.recipe.units import format_number, format_quantity, format_seconds

MINUS = "−"
NONE = "–"


def value(number: float | None, digits: int = 3) -> str:
    """A hyperparameter in three digits, fit to be copied into a recipe: ``0.004``, ``2.83e-4``, ``1e-8``; a number
    of a run in trouble may be ``nan`` or ``inf``."""
    if number is None:
        return NONE
    if not math.isfinite(number):
        return f"{number}"
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        # 0.95 ** (1/8) is 0.9936: near 1 the distance from 1 is what counts.
        return f"{number:.{digits + 1 if 0.9 <= number < 1 or abs(number) >= 1000 else digits}g}"
    mantissa, _, exponent = f"{number:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def scientific(number: float | None, digits: int = 2) -> str:
    """Return a number in scientific notation with all its digits: ``3.50e-4``."""
    if number is None:
        return NONE
    mantissa, _, exponent = f"{number:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def span(low: float, high: float, spell: Callable[[float], str]) -> str:
    """Return a range, or the one value if both ends read the same."""
    first, last = spell(low), spell(high)
    if first == last:
        return first
    return f"{first.removesuffix('×')}–{last}"


def loss(number: float | None) -> str:
    return NONE if number is None else f"{number:.4f}"


def delta(number: float | None) -> str:
    """Return a difference in nats with its sign."""
    if number is None:
        return NONE
    shown = f"{abs(number):.4f}"
    if not float(shown):
        return shown
    return f"{'+' if number > 0 else MINUS}{shown}"


def ratio(number: float) -> str:
    """Return a factor as text: ``3.6×``. Near 1 it has two decimals, ``0.97×``; 1/n is a fraction, ``1/8×``."""
    if 0 < number <= 0.5 and abs(round(1 / number) * number - 1) < 0.01:
        return f"1/{round(1 / number)}×"
    if 0.9 < number < 1.1:
        return f"{float(f'{number:.2f}'):g}×"
    return f"{number:.2g}×" if number < 10 else f"{number:.0f}×"


def quantity(number: float | None) -> str:
    return NONE if number is None else format_quantity(number)


def tick(number: float) -> str:
    """Return a count beside an axis: ``2.5 M``, where prose would have 2.50 M."""
    digits, _, suffix = format_quantity(number).partition(" ")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{digits} {suffix}".strip()


def seconds(number: float | None) -> str:
    return NONE if number is None else format_seconds(number)


def duration(seconds: float) -> str:
    """Of a step or a part of one, in three digits: ``3.21 ms``, ``100 ms``, ``1.27 s``."""
    unit, number = ("ms", 1e3 * seconds) if seconds < 0.9995 else ("s", seconds)
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f} {unit}" if rounded else "0 s"


def log_ticks(low: float, high: float, label: Callable[[float], str], most: int = 6) -> tuple[list[float], list[str]]:
    """At most ``most`` round places on a logarithmic axis from ``low`` to ``high``, with their labels."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        places = [m * 10.0**k for k in decades for m in mantissas if low <= m * 10.0**k <= high]
        if len(places) <= most:
            break
    else:
        places = places[:: -(-len(places) // most)]
    if len(places) < 2:
        # Less than a decade without two round numbers in it: even steps do.
        choices = (linear_ticks(low, high, fewer) for fewer in (most, 4, 3, 2))
        places = next((some for some in choices if len({label(place) for place in some}) == len(some)), [])
    return places, [label(place) for place in places]


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most ``most`` round places on a linear axis."""
    step = 10.0 ** math.floor(math.log10((high - low) / most)) if high > low else 1.0
    step = next(step * m for m in (1, 2, 5, 10, 20) if (high - low) / (step * m) < most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def money(price: Price, hours: float = 1.0) -> str:
    """Return the price of so many GPU-hours: ``$2,150``, ``$2.50``, ``EUR 2.50``, ``2.50``."""
    total = price.amount * hours
    before = f"{price.currency} " if price.currency[-1:].isalpha() else price.currency
    return f"{before}{total:,.0f}" if total >= 100 else f"{before}{total:,.2f}"


def costs(cost: CostRow) -> list[str]:
    """Return a cost in words: ``21,504 GPU-h``, ``15.1 MWh (boards at 700 W)``, ``$53,760 at $2.50 a GPU-h``."""
    hours = f"{cost.gpu_hours:,.0f}" if cost.gpu_hours >= 10 else f"{cost.gpu_hours:.2g}"
    texts = [f"{hours} {cost.device}-h"]
    if cost.energy_kwh is not None:
        unit, scale = ("MWh", 1_000) if cost.energy_kwh >= 1_000 else ("kWh", 1)
        building = "" if cost.pue == 1 else f" x {cost.pue:g}"
        texts.append(
            f"{format_number(cost.energy_kwh / scale)} {unit} (boards at {cost.board_power_w:g} W{building})"
        )
    if (price := cost.price_per_gpu_hour) is not None:
        unit = "" if price.currency else " (no currency given)"
        texts.append(f"{money(price, cost.gpu_hours)}{unit} at {money(price)} a {cost.device}-h")
    return texts
