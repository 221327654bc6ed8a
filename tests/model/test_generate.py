"""Sampling tokens: compared with the distributions and the greedy search of ``transformers``."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.test_weights import foreign, start
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from leaven.errors import InputError
from leaven.interop.weights import read_huggingface
from leaven.model.generate import Sampling, generate
from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape

SHAPE = ModelShape(n_layers=2, d_model=16, n_heads=2, n_kv_heads=2, d_head=8, d_ff=32, vocab_size=60, seq_len=12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.8, 20, 0.5), (2.0, 3, 0.99), (1.0, 0, 1e-9)],
)
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(8, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected: Any = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    sampling = Sampling(temperature, top_k, top_p)
    found = torch.stack([sampling.probabilities(row) for row in logits])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found > 0, expected > 0)


@pytest.mark.parametrize("hot", [Sampling(top_p=0.0), Sampling(1e-320), Sampling(5e-324, 3, 0.5), Sampling(top_k=1)])
def test_extreme_settings_choose_the_likeliest_token(hot: Sampling) -> None:
    logits = 3 * torch.randn(60, generator=torch.Generator().manual_seed(0))
    assert hot.probabilities(logits).tolist() == Sampling(0).probabilities(logits).tolist()
    assert hot.probabilities(logits)[logits.argmax()] == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": math.inf}, "temperature inf is out of range; give 0 or a finite"),
        ({"top_k": -1}, "top-k -1 is negative; give a number of tokens"),
        ({"top_p": 1.5}, "top-p 1.5 is out of range; give a number from 0 to 1"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**values)


def model(**changes: Any) -> Transformer:
    made = Transformer(SHAPE.model_copy(update=changes))
    generator = torch.Generator().manual_seed(4)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4, generator=generator)
    return made.eval()


def drawn(made: Transformer, tokens: list[int], seed: int = 0, **how: Any) -> list[int]:
    options: dict[str, Any] = {"sampling": Sampling(), "vocabulary": 60, "end": 59, "max_tokens": 9} | how
    return list(generate(made, tokens, generator=torch.Generator().manual_seed(seed), **options))


def test_greedy_search_equals_that_of_transformers(tiny: Recipe, tmp_path: Path) -> None:
    """Their model has the same weights and a key-value cache; ours has no cache."""
    theirs = foreign("llama", tmp_path)
    shape = read_huggingface(tmp_path).shape
    ours = Transformer(shape).eval()
    start(ours, tiny.replace({"model": shape.model_dump(), "scaling.base": None}), tmp_path)
    expected = theirs.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=29, do_sample=False, use_cache=True)
    how = {"vocabulary": 320, "end": theirs.config.eos_token_id, "max_tokens": 29}
    found = drawn(ours, [3, 1, 4], sampling=Sampling(temperature=0), **how)
    assert found == expected[0, 3:].tolist()
    assert len(set(found)) > 3


def test_tokens_are_drawn_by_their_probabilities() -> None:
    made, sampling = model(n_layers=1), Sampling(temperature=1.2, top_k=8)
    with torch.no_grad():
        likely = sampling.probabilities(made(torch.tensor([[7, 7]]))[0, -1])
    counts = torch.zeros(60)
    for seed in range(500):
        counts[drawn(made, [7, 7], seed, sampling=sampling, max_tokens=1, end=-1)[0]] += 1
    # Five standard errors of a share are at most 5 / (2 sqrt n).
    torch.testing.assert_close((counts / 500).double(), likely, rtol=0, atol=0.112)
    assert counts.count_nonzero() > 4


def test_generation_stops_at_end_of_text_and_uses_the_last_window() -> None:
    made = model(positions="learned")
    greedy = Sampling(temperature=0)
    free = drawn(made, [1, 2, 3], sampling=greedy, max_tokens=30, end=-1)  # more than the 12 positions
    assert len(free) == 30
    end = next(token for token in free if token != free[0])
    stopped = drawn(made, [1, 2, 3], sampling=greedy, max_tokens=30, end=end)
    assert stopped == free[: free.index(end)]
    long = list(range(30))
    assert drawn(made, long, sampling=greedy, end=-1) == drawn(made, long[-12:], sampling=greedy, end=-1)


def test_more_tokens_than_learned_positions_are_an_error() -> None:
    tokens = torch.ones(1, 13, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"has 13 tokens, but the model has learned only seq_len = 12 positions; pass at most 12"
    ):
        model(positions="learned")(tokens)
    assert model(positions="rope")(tokens).shape == (1, 13, 60)


def test_tokens_outside_the_vocabulary_are_not_drawn() -> None:
    made = model()
    torch.nn.init.zeros_(made.unembedding.weight)  # makes all tokens equally likely
    assert max(max(drawn(made, [1], seed, vocabulary=20)) for seed in range(20)) == 19
