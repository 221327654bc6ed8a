"""A text that is read in order, and that is garbage in some steps."""

import tempfile
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

import leaven.data.stream
from leaven.data.shards import ShardedTokens, Shards
from leaven.data.tokens import TokenSet
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe

STEP = 256  # tokens
VOCABULARY = 64

RECIPE = f"""
name = "planted"
[model]
n_layers = 1
d_model = 32
n_heads = 2
n_kv_heads = 2
d_head = 16
d_ff = 64
vocab_size = {VOCABULARY}
seq_len = 32
[data]
tokens = {160 * STEP}
[batch]
tokens = {STEP}
[schedule]
warmup_tokens = {16 * STEP}
[hyperparameters]
lr = 0.01
init_std = 0.1
[evaluation]
tokens = 8_000
every_tokens = {160 * STEP}
"""


def recipe(**changes: object) -> Recipe:
    """Return a recipe of 160 steps of 256 tokens, with a checkpoint every 16 steps. Keys of ``changes`` are dotted
    paths with __ for each dot."""
    return parse_recipe(RECIPE, "planted").replace({key.replace("__", "."): value for key, value in changes.items()})


@cache
def chain(count: int, seed: int) -> NDArray[np.int64]:
    """Return the tokens of a Markov chain. Each token is followed by one of four, with probabilities 0.6, 0.25, 0.1
    and 0.05."""
    followers = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, 4))
    draws = np.random.default_rng(seed).choice(4, count, p=[0.6, 0.25, 0.1, 0.05])
    tokens = np.empty(count, dtype=np.int64)
    token = 0
    for i, draw in enumerate(draws):
        token = tokens[i] = followers[token, draw]
    return tokens


def text(first_step: int = 0, steps: int = 0) -> TokenSet:
    """Return the tokens of the chain. During ``steps`` steps from ``first_step`` on, they are garbage: all tokens are
    equally likely."""
    train = chain(120_000, 1).copy()
    garbage = slice(first_step * STEP, (first_step + steps) * STEP)
    train[garbage] = np.random.default_rng(2).integers(0, VOCABULARY, steps * STEP)
    validation = chain(8_100, 3)
    name = f"garbage {first_step} {steps}"
    shards = Shards(ShardedTokens([train]), ShardedTokens([validation]), 1, 1, name, ())
    return TokenSet(("chain",), (Fraction(1),), (shards,), VOCABULARY, 0, name, tokenizer())


@cache
def tokenizer() -> Path:
    """Return a tokenizer file, which a run copies. Its words are numbers."""
    path = Path(tempfile.mkdtemp(prefix="leaven-")) / "tokenizer.json"
    words = {str(number): number for number in range(VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")).save(str(path))
    return path


def in_order(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Read the text in order. If it were shuffled, every batch would contain some of the garbage."""
    if monkeypatch is None:
        leaven.data.stream.permute = lambda places, size, seed, epochs: places
    else:
        monkeypatch.setattr(leaven.data.stream, "permute", lambda places, size, seed, epochs: places)
