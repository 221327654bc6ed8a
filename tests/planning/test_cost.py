"""The cost of a run against values computed by hand."""

from dataclasses import replace

import pytest

from leaven.documents.planning import Price
from leaven.planning.hardware import Cluster, parse_cluster, parse_price
from leaven.recipe.errors import InputError
from leaven.views.numbers import costs, money


def test_cost_of_64_boards_of_700_w_for_a_fortnight() -> None:
    found = parse_cluster("64xH100").cost(14 * 86_400, Price(amount=2.5))
    assert found.days == 14
    assert found.gpu_hours == 14 * 24 * 64 == 21_504
    assert found.energy_kwh == pytest.approx(21_504 * 0.7)
    assert found.money == 53_760
    assert costs(found) == [
        "21,504 GPU-h",
        "15.1 MWh (boards at 700 W)",
        "53,760 (no currency given) at 2.50 a GPU-h",
    ]


def test_cost_of_boards_of_unknown_power_and_of_a_processor() -> None:
    unknown = Cluster(4, replace(parse_cluster("4xH100").accelerator, power_w=None)).cost(3_600)
    assert (unknown.energy_kwh, unknown.money, unknown.gpu_hours) == (None, None, 4)
    processor = costs(parse_cluster("cpu").cost(36_000, parse_price("2.5 EUR")))
    assert (processor[0], processor[-1]) == ("10 process-h", "EUR 25.00 at EUR 2.50 a process-h")


@pytest.mark.parametrize(
    ("text", "amount", "currency", "ten_hours"),
    [
        ("2.5", 2.5, "", "25.00"),
        (" € 2.20 ", 2.2, "€", "€22.00"),
        ("2.2 EUR", 2.2, "EUR", "EUR 22.00"),
        ("US$ 2.2", 2.2, "US$", "US$22.00"),
        (".9", 0.9, "", "9.00"),
    ],
)
def test_prices_are_parsed(text: str, amount: float, currency: str, ten_hours: str) -> None:
    price = parse_price(text)
    assert price == Price(amount=amount, currency=currency)
    assert money(price, 10) == ten_hours


@pytest.mark.parametrize("text", ["", "free", "-2", "$2$", "2,5", "1e3", "nan"])
def test_bad_prices_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"write for example 2\.50 or \$2\.50"):
        parse_price(text)
