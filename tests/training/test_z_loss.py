"""A run with a z-loss: what it logs is the mean cross-entropy, and beside it the mean z-loss."""

import pytest
import torch

from leaven.data.tokens import TokenSet
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training


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
    assert training.step().z_loss < step.z_loss  # it pulls log Z to 0, and counts only its own step
