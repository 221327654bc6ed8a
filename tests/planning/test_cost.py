"""What a run costs, by hand."""

from dataclasses import replace

import pytest

from leaven.planning.cost import Price, cost, parse_price
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.recipe.errors import InputError


def test_a_fortnight_of_64_boards_of_700_w() -> None:
    found = cost(14 * 86_400, parse_cluster("64xH100"), 2.5)
    assert found.days == 14
    assert found.gpu_hours == 14 * 24 * 64 == 21_504
    assert found.energy_kwh == pytest.approx(21_504 * 0.7)
    assert found.money == 53_760
    assert found.said == ["21,504 GPU-h", "15.1 MWh (boards at 700 W)", "53,760 (no currency given) at 2.50 a GPU-h"]


def test_a_building_takes_more_than_its_boards() -> None:
    bare, whole = (cost(3_600, parse_cluster("8xA100"), pue=pue) for pue in (1.0, 1.3))
    assert bare.energy_kwh == pytest.approx(3.2)
    assert whole.energy_kwh == pytest.approx(3.2 * 1.3)
    assert whole.said == ["8 GPU-h", "4.16 kWh (boards at 400 W x 1.3)"]


def test_the_cpu_is_a_process_and_a_price_has_one_form() -> None:
    found = cost(36_000, parse_cluster("cpu"), parse_price("2.5 EUR"))
    assert found.said[0] == "10 process-h"
    assert found.said[-1] == "EUR 25.00 at EUR 2.50 a process-h"


def test_what_is_not_known_is_none() -> None:
    found = cost(3_600, Cluster(4, replace(parse_cluster("4xH100").accelerator, power_w=None)))
    assert (found.energy_kwh, found.money) == (None, None)
    assert found.to_json() == {
        "days": pytest.approx(1 / 24),
        "gpu_hours": 4,
        "energy_kwh": None,
        "board_power_w": None,
        "pue": 1.0,
        "price_per_gpu_hour": None,
        "money": None,
    }


@pytest.mark.parametrize(
    ("text", "price", "ten_hours"),
    [
        ("2.5", Price(2.5), "25.00"),
        ("$2", Price(2.0, "$"), "$20.00"),
        (" € 2.20 ", Price(2.2, "€"), "€22.00"),
        ("2.2 EUR", Price(2.2, "EUR"), "EUR 22.00"),
        ("EUR2.2", Price(2.2, "EUR"), "EUR 22.00"),
        ("US$ 2.2", Price(2.2, "US$"), "US$22.00"),
        (".9", Price(0.9), "9.00"),
    ],
)
def test_a_price_is_a_number_and_perhaps_a_currency(text: str, price: Price, ten_hours: str) -> None:
    assert parse_price(text) == price
    assert price.said(10) == ten_hours


@pytest.mark.parametrize("text", ["", "free", "-2", "$2$", "2,5", "1e3", "nan"])
def test_what_is_no_price_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(InputError, match=r"write for example 2\.50 or \$2\.50"):
        parse_price(text)
