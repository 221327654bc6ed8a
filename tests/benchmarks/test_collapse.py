"""Test the text of benchmarks/collapse.py, a random chain of characters with a known entropy."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from math import log

import numpy as np
import pytest
from benchmarks.collapse import CHAINS, ORDER, SEQ_LEN, chain

from leaven.data.sources import SHAKESPEARE


@pytest.mark.slow
def test_the_chain_has_the_conditional_frequencies_of_the_plays_and_their_entropy() -> None:
    drawn, lowest = chain(200 * CHAINS)
    with gzip.open(SHAKESPEARE, "rt") as lines:
        plays = "".join(json.loads(line)["text"] for line in lines)
    letters = "".join(sorted(set(plays)))
    circle = plays + plays[:ORDER]

    counts = [Counter(circle[at : at + length] for at in range(len(plays))) for length in range(1, ORDER + 2)]
    entropies = [
        sum(n * log(contexts[each[:-1]] / n) for each, n in followed.items()) / len(plays)
        for contexts, followed in pairwise(counts)
    ]
    assert lowest == pytest.approx((sum(entropies[:-1]) + (SEQ_LEN - ORDER + 1) * entropies[-1]) / SEQ_LEN)

    # The mean of -log p over the drawn text is the entropy, and all pieces of the text occur in the plays.
    contexts, followed = counts[-2:]
    surprises = []
    for each in drawn.reshape(CHAINS, -1)[:100]:
        text = "".join(letters[number] for number in each)
        pieces = (text[at : at + ORDER + 1] for at in range(len(text) - ORDER))
        surprises += [log(contexts[piece[:-1]] / followed[piece]) for piece in pieces]
    error = np.std(surprises) / len(surprises) ** 0.5
    assert np.mean(surprises) == pytest.approx(entropies[-1], abs=4 * error)
