"""Write numbers as text, and choose the ticks of axes."""

import math
import re
from collections.abc import Callable
from typing import Any

from leaven.documents.planning import CostRow, PlanDocument, Price
from leaven.recipe.units import format_number, format_quantity, format_seconds

NONE = "–"
LEAST_GIB = 0.05  # smaller parts of memory are not shown


def value(number: float | None, digits: int = 3) -> str:
    """Return a hyperparameter with ``digits`` significant digits, such as ``0.004``, ``2.83e-4`` or ``1e-8``.

    Numbers from 0.9 to 1 and from 1,000 to 10,000 have one digit more. None becomes `NONE`.
    """
    if number is None:
        return NONE
    if not math.isfinite(number):
        return f"{number}"
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        # Near 1, the distance from 1 matters: 0.95 ** (1/8) is 0.9936.
        return f"{number:.{digits + 1 if 0.9 <= number < 1 or abs(number) >= 1000 else digits}g}"
    mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def scientific(number: float | None, digits: int = 2) -> str:
    """Return a number such as ``3.50e-4`` (with 3 ``digits``). None becomes `NONE`."""
    if number is None:
        return NONE
    mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def setting(value_of: Any) -> str:
    match value_of:
        case bool():
            return str(value_of).lower()
        case int():
            return f"{value_of:,}"
        case float() | None:
            return value(value_of, 6)
        case dict():
            return ", ".join(f"{key} {setting(inner)}" for key, inner in value_of.items())
        case list() | tuple():
            return ", ".join(map(setting, value_of))
        case _:
            return str(value_of)


def published_range(plan: PlanDocument) -> list[str]:
    """Return lines with the range in which the real step time probably lies, judging by published runs."""
    rows, step, waiting = plan.published_times, plan.speed.step_seconds, plan.time["host"]
    device = plan.cluster.rpartition("x")[2].partition("-")[0]
    if plan.calibration is not None or plan.cluster == "cpu":
        return []
    instead = "to measure the time, type on a machine with this GPU: leaven plan RECIPE --measure"
    if not rows:
        return [f"not known: no published run on {plan.cluster.rpartition('x')[2]} was compared", instead]
    edges = min(row.low for row in rows), max(row.high for row in rows)
    least = step if waiting else 0.0  # the host needs as long, however fast the GPU is
    low, high = (duration(max(least, (step - waiting) * edge)) for edge in edges)
    if waiting and low == high:
        return [
            "not known: the host decides the time of a step, and published runs do not report the speed of hosts",
            instead,
        ]
    most = sorted(rows, key=lambda row: -row.rows)[:3]
    codes = [f"x{row.low:.2f} to x{row.high:.2f} of the planned time: {row.code} ({row.rows} runs)" for row in most]
    return [f"{low} to {high} a step, judging by published runs on {device} boards", *codes, instead]


def span(low: float, high: float, spell: Callable[[float], str]) -> str:
    """Return a range such as ``2–4×``, or one number if both ends have the same text."""
    first, last = spell(low), spell(high)
    if first == last:
        return first
    return f"{first.removesuffix('×')}–{last}"


def known(spell: Callable[[float], str]) -> Callable[[float | None], str]:
    """Return a function that writes None as `NONE`, and a number as ``spell`` does."""
    return lambda number: NONE if number is None else spell(number)


loss = known("{:.4f}".format)
quantity = known(format_quantity)
seconds = known(format_seconds)


def fixed(number: float, digits: int, sign: str = "") -> str:
    """Return a number with ``digits`` decimals; ``sign="+"`` puts a plus before positive numbers. 0 has no sign."""
    rounded = round(number, digits) + 0.0
    return f"{rounded:{sign if rounded else ''}.{digits}f}"


def delta(number: float | None) -> str:
    """Return a difference in nats with its sign, or ``0.0000`` if it rounds to 0. None becomes `NONE`."""
    if number is None:
        return NONE
    shown = f"{abs(number):.4f}"
    if not float(shown):
        return shown
    return f"{'+' if number > 0 else '−'}{shown}"


def ratio(number: float) -> str:
    """Return a factor as text, such as ``3.6×``, ``0.97×`` or ``1/8×``."""
    if 0 < number <= 0.5 and abs(round(1 / number) * number - 1) < 0.01:
        return f"1/{round(1 / number)}×"
    if 0.9 < number < 1.1:
        return f"{float(f'{number:.2f}'):g}×"
    return f"{number:.2g}×" if number < 10 else f"{number:.0f}×"


def tick(number: float) -> str:
    """Return a count as the label of a tick: ``2.5 M``, not ``2.50 M``."""
    text = format_quantity(number)
    return re.sub(r"\.?0+(?= |$)", "", text) if "." in text else text


def duration(seconds: float) -> str:
    """Return the time of a step with three digits, for example ``3.21 ms``, ``100 ms`` or ``1.27 s``."""
    unit, number = ("ms", 1e3 * seconds) if seconds < 0.9995 else ("s", seconds)
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f} {unit}" if rounded else "0 s"


def log_ticks(low: float, high: float, label: Callable[[float], str], most: int = 6) -> tuple[list[float], list[str]]:
    """Return at most ``most`` round numbers on a logarithmic axis from ``low`` to ``high``, and their labels."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        places = [m * 10.0**k for k in decades for m in mantissas if low <= m * 10.0**k <= high]
        if len(places) <= most:
            break
    else:
        places = places[:: -(-len(places) // most)]
    if len(places) < 2:
        # A short axis has at most one of these numbers, so choose evenly spaced ticks.
        choices = (linear_ticks(low, high, fewer) for fewer in (most, 4, 3, 2))
        places = next((some for some in choices if len({label(place) for place in some}) == len(some)), [])
    return places, [label(place) for place in places]


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / most)) if high > low else 1.0
    step = next(step * m for m in (1, 2, 5, 10, 20) if (high - low) / (step * m) < most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def money(price: Price, hours: float = 1.0) -> str:
    """Return the cost of ``hours`` GPU-hours, such as ``$2,150``, ``EUR 2.50`` or (without a currency) ``2.50``."""
    total = price.amount * hours
    before = f"{price.currency} " if price.currency[-1:].isalpha() else price.currency
    return f"{before}{total:,.0f}" if total >= 100 else f"{before}{total:,.2f}"


def costs(cost: CostRow) -> list[str]:
    """Return the GPU-hours of a run as text and, if they are known, its energy and its cost in money."""
    hours = f"{cost.gpu_hours:,.0f}" if cost.gpu_hours >= 10 else f"{cost.gpu_hours:.2g}"
    texts = [f"{hours} {cost.device}-h"]
    if cost.energy_kwh is not None:
        unit, scale = ("MWh", 1_000) if cost.energy_kwh >= 1_000 else ("kWh", 1)
        texts.append(f"{format_number(cost.energy_kwh / scale)} {unit} (boards at {cost.board_power_w:g} W)")
    if (price := cost.price_per_gpu_hour) is not None:
        unit = "" if price.currency else " (no currency given)"
        texts.append(f"{money(price, cost.gpu_hours)}{unit} at {money(price)} a {cost.device}-h")
    return texts
