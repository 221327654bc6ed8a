"""Steps of the engine and the loop around them: isolated documents, the z-loss, and when callbacks are due."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from leaven.data.tokens import TokenSet, prepare
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.loop import Callback, Loop, PlainTraining


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


def test_a_step_reports_the_z_loss_beside_the_cross_entropy(tiny: Recipe, tokens: TokenSet) -> None:
    recipe = tiny.replace({"batch.micro_batch": 3, "hyperparameters.z_loss": 0.5})
    training, plain = Training(recipe, tokens), Training(tiny.replace({"batch.micro_batch": 3}), tokens)
    windows = torch.from_numpy(training.stream.batch(0, 8))
    with torch.no_grad():
        expected = 0.5 * float(training.model(windows[:, :-1]).logsumexp(-1).square().mean())
    step, other = training.step(), plain.step()
    assert step.z_loss == pytest.approx(expected, rel=1e-5)
    assert (step.loss, other.z_loss) == (other.loss, None)
    assert step.grad_norm != other.grad_norm
    training.evaluate()
    assert training.step().z_loss < step.z_loss  # the z-loss pulls log Z to 0, and is the sum of one step


@pytest.mark.parametrize("lookahead", [False, True])
def test_on_due_is_not_called_after_the_last_step(lookahead: bool) -> None:
    weight = torch.zeros(1, requires_grad=True)
    training = PlainTraining(torch.optim.SGD([weight], 0.1), lambda tokens: weight.sum(), batch_tokens=10, end=60)
    called = []

    class Every20(Callback):
        every_tokens = 20

        def on_due(self) -> None:
            called.append(training.tokens)

    assert Loop(training, [Every20()], lookahead=lookahead).run()
    assert called == [20, 40]
