"""The average of the weights: equal to the average over all steps, also after a stop, and without influence on the
run."""

import numpy as np
import pytest
import torch
from torch import Tensor

from leaven.data.tokens import TokenSet
from leaven.recipe.recipe import Average, Recipe
from leaven.training.engine import Training

RAMP = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 800}
STEPS = 12


def counts(average: Average, ends: list[int]) -> np.ndarray:
    """Return the weight of each step in the average after the last step."""
    shares = [average.share(before, end, 10_000) for before, end in zip([0, *ends], ends, strict=False)]
    found = np.zeros(len(ends))
    for step, share in enumerate(shares):
        found *= 1 - share
        found[step] += share
    return found


def test_without_a_half_life_every_token_since_the_beginning_counts_alike() -> None:
    found = counts(Average(last=0.25), [1_000, 4_000, 7_400, 7_600, 8_200, 10_000])  # it begins at 7,500
    assert found == pytest.approx([0, 0, 0, 100 / 2_500, 600 / 2_500, 1_800 / 2_500])


def test_with_a_half_life_weights_count_half_after_it() -> None:
    ends = [*range(50, 6_000, 50), *range(6_000, 10_001, 100)]
    found = counts(Average(half_life_tokens=400), ends)
    assert found.sum() == pytest.approx(1)
    assert found[-5] / found[-1] == pytest.approx(0.5)  # 400 tokens earlier
    assert found[0] < 1e-4
    young = counts(Average(half_life_tokens=400), [50, 100, 150, 200])
    assert young == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("average", [{"half_life_tokens": 300}, {"last": 0.6}], ids=str)
def test_the_average_is_that_of_the_weights_of_every_step(
    tiny: Recipe, tokens: TokenSet, average: dict[str, float]
) -> None:
    plain = tiny.replace({"batch.ramp": RAMP, "data.tokens": 2_048})
    recipe = plain.replace({"average": average})
    training, other = Training(recipe, tokens), Training(plain, tokens)
    ends: list[int] = []
    seen: list[list[Tensor]] = []
    for _ in range(STEPS):
        assert training.step().loss == other.step().loss
        ends.append(training.tokens)
        seen.append([parameter.detach().double() for parameter in training.sharded.local_parameters])
    assert recipe.average
    shares = [recipe.average.share(before, end, 2_048) for before, end in zip([0, *ends], ends, strict=False)]
    expected = [torch.zeros_like(parameter) for parameter in seen[0]]
    for share, weights in zip(shares, seen, strict=True):
        expected = [old + share * (new - old) for old, new in zip(expected, weights, strict=True)]
    assert training.average
    for found, right in zip(training.average.state_dict().values(), expected, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-7)

    loss, averaged = training.evaluate(), training.evaluate(averaged=True)
    assert loss == other.evaluate() == training.evaluate()  # the weights are back
    with torch.no_grad():
        for parameter, right in zip(other.sharded.local_parameters, expected, strict=True):
            parameter.copy_(right)
    assert averaged == pytest.approx(other.evaluate(), rel=1e-6)
    assert averaged != loss


def test_before_the_average_begins_the_weights_are_validated(tiny: Recipe, tokens: TokenSet) -> None:
    training = Training(tiny.replace({"average": {"last": 0.5}}), tokens)
    training.step()
    assert training.average
    assert not training.average.begun
    assert training.evaluate(averaged=True) == training.evaluate()


def test_a_stop_and_a_return_to_a_checkpoint_do_not_change_the_average(tiny: Recipe, tokens: TokenSet) -> None:
    recipe = tiny.replace({"average": {"last": 0.9}, "data.tokens": 2_560})
    whole = Training(recipe, tokens)
    early = whole.checkpoint().copied()  # before the average begins
    for _ in range(4):
        whole.step()
    middle = whole.checkpoint().copied()
    for _ in range(3):
        whole.step()
    for checkpoint, steps in ((middle, 3), (early, 7)):
        resumed = Training(recipe, tokens)
        for _ in range(2):
            resumed.step()
        resumed.restore(checkpoint)
        for _ in range(steps):
            resumed.step()
        assert whole.average
        assert resumed.average
        expected = whole.average.state_dict()
        found = resumed.average.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
