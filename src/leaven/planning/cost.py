"""Compute GPU-hours, energy and money of a run on a cluster."""

import re

from leaven.documents.planning import CostRow, Price
from leaven.errors import InputError
from leaven.planning.hardware import Cluster

# An amount, and a currency before or after it: a sign, or three capital letters.
_CURRENCY = r"([^\w\s.,+\-/]|[A-Z]{3}|)"
_PRICE = re.compile(rf"\s*{_CURRENCY}\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*{_CURRENCY}\s*")
# Power of the building / power of the boards. 1 counts only the boards, because what hosts, network and cooling add
# (often 50%) differs from place to place.
_PUE = 1.0


def cluster_cost(cluster: Cluster, seconds: float, price: Price | None = None) -> CostRow:
    """Return the cost of the whole cluster for ``seconds`` seconds. ``price`` is the price of one GPU-hour."""
    gpu_hours, power = seconds / 3_600 * cluster.gpus, cluster.accelerator.power_w
    return CostRow(
        days=seconds / 86_400,
        device="process" if cluster.accelerator.name == "cpu" else "GPU",
        gpu_hours=gpu_hours,
        energy_kwh=None if power is None else gpu_hours * power / 1_000 * _PUE,
        board_power_w=power,
        pue=_PUE,
        price_per_gpu_hour=price,
        money=None if price is None else gpu_hours * price.amount,
    )


def parse_price(text: str) -> Price:
    """Parse the price of one GPU-hour: ``2.5``, ``$2.50`` or ``2.2 EUR``. Raise InputError for other text."""
    match = _PRICE.fullmatch(text)
    if match is None or (match[1] and match[3]):
        raise InputError(
            f"--price {text}: not a price per GPU-hour; give a number, and a currency as a sign or three "
            "capital letters: 2.50, $2.50 or 2.50 EUR"
        )
    return Price(amount=float(match[2]), currency=match[1] or match[3])
