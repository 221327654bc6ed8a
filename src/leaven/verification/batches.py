"""Make the batches for checks. The batches of one seed form one stream of sequences."""

from collections.abc import Callable

import torch
from torch import Tensor

from leaven.data.stream import Stream
from leaven.data.tokens import TokenSet
from leaven.model.initialisation import name_seed
from leaven.recipe.data import Data

TokenBatch = tuple[Tensor, Tensor]
Batches = Callable[[int, int], TokenBatch]
"""A pure function from (seed, step) to a batch. Inputs and targets are token ids of shape (sequences, positions)."""

Prepare = Callable[[Data, int], TokenSet]
"""A function from (data, vocabulary size) to the tokenised data, such as :func:`leaven.data.tokens.prepare`."""

HELD_OUT = 1_000_000  # the seed of the batches for the validation loss; no model is trained on them


def corpus(tokens: TokenSet, seq_len: int, count: int) -> Batches:
    """Return a function that makes batches of ``count`` text sequences. Seed `HELD_OUT` gives validation text."""

    def batch(seed: int, step: int) -> TokenBatch:
        split = tokens.validation if seed == HELD_OUT else tokens.train
        windows = torch.from_numpy(Stream(split, seq_len, seed).batch(step * count, count))
        return windows[:, :-1], windows[:, 1:]

    return batch


def synthetic(vocab_size: int, seq_len: int, count: int) -> Batches:
    """Return a function that makes batches of ``count`` sequences of made-up token ids.

    A fixed random permutation gives each id a successor. An id is followed by its successor with a probability of
    70%, and otherwise by an id drawn by Zipf's law.
    """
    chain = torch.Generator().manual_seed(name_seed(0, "chain"))
    successor = torch.randperm(vocab_size, generator=chain)
    zipf = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)

    def batch(seed: int, step: int) -> TokenBatch:
        generator = torch.Generator().manual_seed(name_seed(seed, "text", step))
        drawn = torch.multinomial(zipf, count * (seq_len + 1), replacement=True, generator=generator)
        windows = drawn.view(count, seq_len + 1)
        follows = torch.rand(windows.shape, generator=generator) < 0.7
        for position in range(1, seq_len + 1):
            expected = successor[windows[:, position - 1]]
            windows[:, position] = torch.where(follows[:, position], expected, windows[:, position])
        return windows[:, :-1], windows[:, 1:]

    return batch


def sequences(batches: Batches, size: int, seed: int, first: int, count: int) -> TokenBatch:
    """Return sequences ``first`` to ``first + count - 1`` of the stream of ``seed``, made of batches of ``size``."""
    steps = range(first // size, -(-(first + count) // size))
    inputs, targets = zip(*(batches(seed, step) for step in steps), strict=True)
    here = slice(first % size, first % size + count)
    return torch.cat(inputs)[here], torch.cat(targets)[here]
