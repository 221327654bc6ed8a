import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaven.recipe.errors import InputError
from leaven.recipe.units import format_number, format_quantity, format_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7B", 7 * 10**9),
        ("2.5T", 2_500 * 10**9),
        ("64k", 64_000),
        ("0.58b", 580 * 10**6),
        ("32_768", 32_768),
        ("1,000", 1_000),
        ("1e9", 10**9),
        ("1.5e3", 1_500),
        (" 3 M ", 3 * 10**6),
        (".5M", 500_000),
    ],
)
def test_quantities_as_people_write_them(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "B", "7X", "-3", "1.5", "7 B tokens", "1e-3", "0x10", "1.2345k"])
def test_bad_quantities_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="write for example|whole number"):
        parse_quantity(text)


@given(st.integers(1, 10**15))
def test_formatting_keeps_three_digits(value: int) -> None:
    assert parse_quantity(format_quantity(value)) == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.03e9, "1.03 B"),
        (524_288, "524 k"),
        (96, "96"),
        (999_999, "1.00 M"),
        (0.5, "0.50"),
        (20e9, "20 B"),
        (2.22e19, "2.22e+19"),
        (999.4e12, "999 T"),
        (999.6e12, "1.00e+15"),
    ],
)
def test_formats(value: float, text: str) -> None:
    assert format_quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.2, "8.2 s"),
        (99.4, "99 s"),
        (245, "4 min 05 s"),
        (48_960, "13 h 36"),
        (1e6, "11.6 days"),
        (8.64e8, "10,000.0 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "written"),
    [(70_426_624.0, "70,400,000"), (15_590, "15,600"), (130.2, "130"), (0.001, "0.001"), (0, "0"), (3e20, "3e+20")],
)
def test_numbers_are_grouped(value: float, written: str) -> None:
    assert format_number(value) == written
