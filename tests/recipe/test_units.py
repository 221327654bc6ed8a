from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaven.errors import InputError
from leaven.recipe.units import format_number, format_quantity, format_seconds, parse_quantity

DECIMAL_COMMAS = ["1,5M", "0,002", "0,1M", "1,0", "1,00", "1,5e3", "1,0000", "1000,000", "1_0,000", "1,000,5"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.5T", 2_500 * 10**9),
        ("0.58b", 580 * 10**6),
        ("32_768", 32_768),
        ("1,000", 1_000),
        ("12,345,678.5k", 12_345_678_500),
        ("1.5e3", 1_500),
        (" .5 M ", 500_000),
    ],
)
def test_quantities_as_people_write_them(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "B", "7X", "-3", "1.5", "1e-3", "1.2345k", *DECIMAL_COMMAS])
def test_bad_quantities_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="write for example|whole number"):
        parse_quantity(text)


@given(st.integers(1, 10**15))
def test_formatting_keeps_three_digits(value: int) -> None:
    assert parse_quantity(format_quantity(value)) == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (format_quantity, 999_999, "1.00 M"),
        (format_quantity, 0.5, "0.50"),
        (format_quantity, 20e9, "20 B"),
        (format_quantity, 999.6e12, "1.00e+15"),
        (format_seconds, 8.2, "8.2 s"),
        (format_seconds, 245, "4 min 05 s"),
        (format_seconds, 48_960, "13 h 36"),
        (format_seconds, 1e6, "11.6 days"),
        (format_number, 70_426_624.0, "70,400,000"),
        (format_number, 3e20, "3e+20"),
    ],
)
def test_formats(show: Callable[[float], str], value: float, text: str) -> None:
    assert show(value) == text
