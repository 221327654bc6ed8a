"""Interleaving of sources: its definition, and Tijdeman's bound."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaven.data.stream import Mixture, Stream, place
from leaven.recipe.data import LONGEST_PERIOD, Data

weights = st.lists(st.integers(1, 60), min_size=1, max_size=7)


def shares(weights: list[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


@given(weights, st.integers(0, 3))
@settings(max_examples=50)
def test_every_prefix_has_the_proportions_to_within_one_sample(weights: list[int], periods: int) -> None:
    proportions, k = shares(weights), len(weights)
    first = periods * sum(weights)
    sources, numbers = place(np.arange(first + 2 * sum(weights)), proportions)
    bound = 1 - Fraction(1, 2 * k - 2) if k > 1 else Fraction(0)
    for source, share in enumerate(proportions):
        counts = (sources == source).cumsum()
        worst = max(abs(int(count) - share * (n + 1)) for n, count in enumerate(counts))
        assert worst <= bound < 1
        # The samples of a source are numbered without a gap.
        assert numbers[sources == source].tolist() == list(range(counts[-1]))


@given(weights, st.integers(0, 10**15), st.integers(1, 50))
def test_the_source_of_a_sample_does_not_depend_on_the_batch(weights: list[int], first: int, count: int) -> None:
    proportions = shares(weights)
    together = place(np.arange(first, first + count), proportions)
    for n in range(count):
        source, number = place(np.array([first + n]), proportions)
        assert (source[0], number[0]) == (together[0][n], together[1][n])
        # A source's number is the count of its samples before: its share of n, to within one.
        assert abs(int(number[0]) - proportions[source[0]] * (first + n)) <= 1


def test_the_order_is_the_same_on_every_machine() -> None:
    sources, numbers = place(np.arange(12), shares([5, 3, 2]))
    assert sources.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0, 0, 1]
    assert numbers.tolist() == [0, 0, 1, 0, 2, 1, 3, 1, 2, 4, 5, 3]
    far, there = place(np.array([10**17 + 1]), shares([5, 3, 2]))
    assert (far[0], there[0]) == (1, 3 * 10**16)


@given(weights, st.integers(0, 500), st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=25)
def test_a_mixture_does_not_depend_on_the_batch_size(weights: list[int], first: int, counts: list[int]) -> None:
    streams = tuple(Stream(np.arange(n * 1_000, n * 1_000 + 41 + n), 4, seed=n) for n in range(len(weights)))
    mixture = Mixture(streams, shares(weights))
    whole = mixture.batch(first, sum(counts))
    starts = np.cumsum([first, *counts])
    parts = [mixture.batch(int(start), count) for start, count in zip(starts, counts, strict=False)]
    assert np.array_equal(whole, np.concatenate(parts))
    sources, numbers = place(np.arange(first, first + sum(counts)), mixture.proportions)
    for row, source, number in zip(whole, sources, numbers, strict=True):
        assert np.array_equal(row, streams[source].batch(int(number), 1)[0])


def test_the_longest_period_is_exact() -> None:
    proportions = (Fraction(49_999, LONGEST_PERIOD), Fraction(1, LONGEST_PERIOD), Fraction(1, 2))
    sources, _ = place(np.arange(LONGEST_PERIOD), proportions)
    assert [(sources == source).sum() for source in range(3)] == [49_999, 1, 50_000]


@pytest.mark.parametrize(
    ("given_weights", "expected"),
    [((0.7, 0.2, 0.1), "7/10 1/5 1/10"), ((3, 1), "3/4 1/4"), ((1e-3, 0.999), "1/1000 999/1000")],
)
def test_decimal_weights_give_exact_proportions(given_weights: tuple[float, ...], expected: str) -> None:
    sources = [{"source": f"{n}", "weight": weight} for n, weight in enumerate(given_weights)]
    data = Data.model_validate({"source": sources, "tokens": 1})
    assert " ".join(map(str, data.proportions)) == expected
