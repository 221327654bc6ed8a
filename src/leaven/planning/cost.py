"""What a run costs: time, GPU-hours, energy and money."""

import re

from leaven.documents.planning import CostRow, Price
from leaven.planning.hardware import Cluster
from leaven.recipe.errors import InputError

PUE = 1.0
"""Power of the building over that of its boards. 1 counts the boards alone: hosts, network and cooling differ from
place to place and often add half as much again."""
_PRICE = re.compile(r"\s*([^\d\s.,+\-]{0,3})\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([^\d\s.,+\-]{0,3})\s*")


def cost(seconds: float, cluster: Cluster, price: Price | None = None, *, pue: float = PUE) -> CostRow:
    """Return the cost of running a whole cluster for ``seconds``; ``price`` is for one GPU-hour.

    Energy is None for a board of unknown power, money without a price.
    """
    gpu_hours, power = seconds / 3_600 * cluster.gpus, cluster.accelerator.power_w
    return CostRow(
        days=seconds / 86_400,
        device=device(cluster),
        gpu_hours=gpu_hours,
        energy_kwh=None if power is None else gpu_hours * power / 1_000 * pue,
        board_power_w=power,
        pue=pue,
        price_per_gpu_hour=price,
        money=None if price is None else gpu_hours * price.amount,
    )


def device(cluster: Cluster) -> str:
    """Return what is paid by the hour: ``GPU``, or ``process`` on a CPU."""
    return "process" if cluster.accelerator.name == "cpu" else "GPU"


def parse_price(text: str) -> Price:
    """Parse the price of one GPU-hour: ``2.5``, ``$2.50``, ``2.2 EUR``.

    Raises:
        InputError: if the text is not a price.
    """
    match = _PRICE.fullmatch(text)
    if match is None or (match[1] and match[3]):
        raise InputError(f"--price {text}: not the price of a GPU for an hour; write for example 2.50 or $2.50")
    return Price(amount=float(match[2]), currency=match[1] or match[3])
