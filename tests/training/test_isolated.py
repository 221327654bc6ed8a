from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe
from leaven.training.trainer import Training


def test_the_first_token_of_a_document_does_not_count(tiny: Recipe, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * (number % 5))
    recipe = tiny.replace(
        {
            "data.source": f"{tmp_path}/*.txt",
            "data.documents": "isolated",
            "batch.micro_batch": 3,
            "hyperparameters.grad_clip": 1e9,
        }
    )
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    training = Training(recipe, tokens)
    windows = torch.from_numpy(tokens.stream(32, recipe.data.seed).batch(0, 8))
    assert (windows == tokens.end_of_text).any(1).sum() > 4

    def alone(windows: torch.Tensor) -> float:
        total, count = 0.0, 0
        for window in windows:
            ends = (window == tokens.end_of_text).nonzero().flatten() + 1
            for part in window.tensor_split(ends):
                if len(part) > 1:
                    total += float(F.cross_entropy(training.model(part[None, :-1])[0], part[1:], reduction="sum"))
                    count += len(part) - 1
        return total / count

    with torch.no_grad():
        expected = alone(windows)
        assert training.evaluate() == pytest.approx(alone(torch.from_numpy(training.validation)), rel=1e-5)
    assert training.step().loss == pytest.approx(expected, rel=1e-5)
    as_packed = Training(recipe.replace({"data.documents": "packed"}), tokens)
    assert abs(as_packed.step().loss - expected) > 1e-3
