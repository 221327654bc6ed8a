"""The order of samples against plain integers and statistics, and mixtures against Tijdeman's bound."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaven.data.stream import Mixture, Stream, permute, place, validation_windows
from leaven.errors import InputError
from leaven.recipe.data import LONGEST_PERIOD, Data


def permutation(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(size, dtype=np.uint64), size, seed, np.full(size, epoch, dtype=np.uint64))


def test_the_permutation_looks_random() -> None:
    size = 100_003
    places, order = np.arange(size), permutation(size).astype(np.int64)
    # Of a random permutation: mean displacement N/3, half of the steps up, one fixed point, no correlation.
    assert abs(np.abs(order - places).mean() / (size / 3) - 1) < 0.01
    assert abs((np.diff(order) > 0).mean() - 0.5) < 0.005
    assert (order == places).sum() < 8
    assert abs(np.corrcoef(places, order)[0, 1]) < 0.015
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015
    # Places and orders are independent: chi-squared over 100 x 100 cells has 99^2 degrees of freedom.
    counts, _, _ = np.histogram2d(places, order, bins=100)
    chi_squared = ((counts - size / 1e4) ** 2 / (size / 1e4)).sum()
    assert abs(chi_squared - 99**2) < 5 * (2 * 99**2) ** 0.5


def test_all_orders_of_a_small_epoch_are_equally_frequent() -> None:
    epochs = np.repeat(np.arange(24_000, dtype=np.uint64), 4)
    places = np.tile(np.arange(4, dtype=np.uint64), 24_000)
    orders, counts = np.unique(permute(places, 4, 0, epochs).reshape(-1, 4), axis=0, return_counts=True)
    assert len(orders) == 24
    assert ((counts - 1_000) ** 2 / 1_000).sum() < 23 + 5 * 46**0.5


def permute_one(place: int, size: int, seed: int, epoch: int) -> int:
    """Return the permutation of one place, computed with Python integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    a = next(root for root in range(1, size + 1) if root * root >= size)
    sides = [a, (size + a - 1) // a]
    key = mix(mix((seed & mask) + golden & mask) ^ mix(epoch + golden & mask))
    while True:
        halves = [place % a, place // a]
        for number in range(8):
            now, other = number % 2, 1 - number % 2
            round_key = key + (number + 1) * golden & mask
            halves[now] += mix(mix(halves[other] ^ round_key) + round_key & mask)
            halves[now] %= sides[now]
        place = halves[0] + a * halves[1]
        if place < size:
            return place


@given(st.integers(1, 500), st.integers(-(2**70), 2**70), st.integers(0, 2**63))
def test_the_permutation_agrees_with_plain_integers(size: int, seed: int, epoch: int) -> None:
    expected = [permute_one(place, size, seed, epoch) for place in range(size)]
    assert permutation(size, seed, epoch).tolist() == expected


def test_the_order_is_the_same_on_every_machine() -> None:
    assert permutation(10).tolist() == [9, 6, 4, 8, 0, 1, 5, 3, 2, 7]
    stream = Stream(np.arange(7_001, dtype=np.uint16), 7, seed=1234)
    numbers = (0, 1, 999, 1_000, 10**12, 10**18)
    assert [int(stream.batch(n, 1)[0][0]) // 7 for n in numbers] == [252, 233, 970, 255, 522, 413]


@given(st.integers(1, 9), st.integers(10, 200), st.integers(0, 5))
def test_an_epoch_has_every_token_once_as_input_and_target(seq_len: int, length: int, epoch: int) -> None:
    stream = Stream(np.arange(length), seq_len, seed=5)
    size = stream.samples_per_epoch
    rows = stream.batch(epoch * size, size)
    assert size == (length - 1) // seq_len
    assert sorted(rows[:, :-1].ravel()) == list(range(size * seq_len))
    assert sorted(rows[:, 1:].ravel()) == list(range(1, size * seq_len + 1))
    assert (np.diff(rows, axis=1) == 1).all()


def test_validation_windows_are_spread_evenly_and_in_order() -> None:
    tokens = np.arange(1_001, dtype=np.uint16)
    assert validation_windows(tokens, 10, 50)[:, 0].tolist() == [0, 200, 400, 600, 800]
    assert validation_windows(tokens, 10, 30)[:, 0].tolist() == [0, 330, 660]
    assert validation_windows(tokens, 10, 1).shape == (1, 11)
    everything = validation_windows(tokens, 10, 10**9)
    assert np.array_equal(everything[:, :-1].ravel(), np.arange(1_000))
    assert everything.dtype == np.int64


@pytest.mark.parametrize(
    ("length", "advice"), [(0, "; add text"), (1, "; add text"), (8, "set seq_len to 7 or less, or add text")]
)
def test_too_few_tokens_are_refused(length: int, advice: str) -> None:
    with pytest.raises(InputError, match="a window needs seq_len \\+ 1 = 9") as caught:
        Stream(np.arange(length), 8, seed=0)
    assert advice in str(caught.value)
    with pytest.raises(InputError, match="the validation split has"):
        validation_windows(np.arange(length), 8, 100)


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


def test_the_order_of_sources_is_the_same_on_every_machine() -> None:
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
