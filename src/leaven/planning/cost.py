"""What a run costs: time, GPU-hours, energy and money."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from leaven.planning.hardware import Cluster
from leaven.recipe.errors import InputError
from leaven.recipe.units import format_number

PUE = 1.0
"""Power of the building over that of its boards. 1 counts the boards alone: hosts, network and cooling differ from
place to place and are often as much as another half."""
_PRICE = re.compile(r"\s*([^\d\s.,+\-]{0,3})\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([^\d\s.,+\-]{0,3})\s*")


@dataclass(frozen=True)
class Price:
    """Money for one GPU-hour; ``currency`` as it was typed."""

    amount: float
    currency: str = ""

    def said(self, hours: float = 1.0) -> str:
        """``$2,150``, ``$2.50``, ``EUR 2.50``, ``2.50`` for so many GPU-hours."""
        money = self.amount * hours
        before = f"{self.currency} " if self.currency[-1:].isalpha() else self.currency
        return f"{before}{money:,.0f}" if money >= 100 else f"{before}{money:,.2f}"


@dataclass(frozen=True)
class Cost:
    """Time, energy and money of a run; energy is None for a board of unknown power, money without a price."""

    seconds: float
    gpus: int
    board_power_w: float | None  # of one GPU
    pue: float  # power of the building over that of the boards
    price: Price | None  # of a GPU for an hour
    device: str = "GPU"  # what is paid by the hour, as :func:`device` names it

    @property
    def days(self) -> float:
        return self.seconds / 86_400

    @property
    def gpu_hours(self) -> float:
        return self.seconds / 3_600 * self.gpus

    @property
    def energy_kwh(self) -> float | None:
        return None if self.board_power_w is None else self.gpu_hours * self.board_power_w / 1_000 * self.pue

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.gpu_hours * self.price.amount

    @property
    def said(self) -> list[str]:
        """``21,504 GPU-h``, ``15.1 MWh (boards at 700 W)``, ``$53,760 at $2.50 a GPU-h``."""
        hours = f"{self.gpu_hours:,.0f}" if self.gpu_hours >= 10 else f"{self.gpu_hours:.2g}"
        said = [f"{hours} {self.device}-h"]
        if self.energy_kwh is not None:
            unit, scale = ("MWh", 1_000) if self.energy_kwh >= 1_000 else ("kWh", 1)
            building = "" if self.pue == 1 else f" x {self.pue:g}"
            energy = format_number(self.energy_kwh / scale)
            said.append(f"{energy} {unit} (boards at {self.board_power_w:g} W{building})")
        if self.price is not None:
            unit = "" if self.price.currency else " (no currency given)"
            said.append(f"{self.price.said(self.gpu_hours)}{unit} at {self.price.said()} a {self.device}-h")
        return said

    def to_json(self) -> dict[str, Any]:
        return {
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "energy_kwh": self.energy_kwh,
            "board_power_w": self.board_power_w,
            "pue": self.pue,
            "price_per_gpu_hour": None if self.price is None else asdict(self.price),
            "money": self.money,
        }


def cost(
    seconds: float, cluster: Cluster, price_per_gpu_hour: Price | float | None = None, *, pue: float = PUE
) -> Cost:
    """What ``seconds`` of a whole cluster cost."""
    price = Price(price_per_gpu_hour) if isinstance(price_per_gpu_hour, int | float) else price_per_gpu_hour
    return Cost(seconds, cluster.gpus, cluster.accelerator.power_w, pue, price, device(cluster))


def device(cluster: Cluster) -> str:
    """``GPU``, or ``process`` on a CPU."""
    return "process" if cluster.accelerator.name == "cpu" else "GPU"


def parse_price(text: str) -> Price:
    """A price of one GPU-hour: ``2.5``, ``$2.50``, ``2.2 EUR``.

    Raises:
        InputError: if it is none.
    """
    match = _PRICE.fullmatch(text)
    if match is None or (match[1] and match[3]):
        raise InputError(f"--price {text}: not the price of a GPU for an hour; write for example 2.50 or $2.50")
    return Price(float(match[2]), match[1] or match[3])
