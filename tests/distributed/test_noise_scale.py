"""The noise scale over several ranks."""

from typing import Any

import pytest
import torch
from tests.distributed.cases import dtype_of
from tests.distributed.pool import Pool

from leaven.catalogue.noise_scale import gradient_noise, squared_gradient
from leaven.data.tokens import TokenSet, prepare
from leaven.distributed.process_group import join_process_group
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.optimizer import KEEP

KEY = "stability.noise_scale_every_tokens"


def steps(recipe: Recipe, tokens: TokenSet, count: int) -> dict[str, Any]:
    with dtype_of("float64"), join_process_group(recipe.layout, torch.device("cpu")) as group:
        training = Training(recipe, tokens, device="cpu", group=group)
        done = [training.step() for _ in range(count)]
        averages = training.noise.averages.tolist() if training.noise else []
        return {"losses": [step.loss for step in done], "averages": averages}


def squared_norm(training: Training, windows: torch.Tensor) -> float:
    """Return the squared norm of the gradient of the mean loss over the sequences, on one device."""
    batch = training.micro_batch_of(windows, len(windows))
    training.sharded.forward_backward([batch], 1 / (len(windows) * training.recipe.model.seq_len))
    squared = sum(float((leaf.grad**2).sum()) for leaf in training.sharded.local_parameters if leaf.grad is not None)
    training.sharded.drop_gradients()
    return squared


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [{"layout.zero": 3}, {"layout.zero": 2, "layout.tp": 2}],
    ids=["zero 3", "zero 2, tp 2"],
)
def test_ranks_measure_the_same_noise_scale_as_one_device(ranks: Pool, tiny: Recipe, layout: dict[str, int]) -> None:
    plain = tiny.replace({"batch.micro_batch": 2, "model.n_kv_heads": 2, "layout.dp": 2, **layout})
    tokens = prepare(plain.data, plain.model.vocab_size)
    found = ranks(plain.layout.ranks, steps, plain.replace({KEY: 256}), tokens, 1)
    with dtype_of("float64"):
        alone = Training(
            plain.replace({f"layout.{key}": value for key, value in {"dp": 1, "tp": 1, "zero": 0}.items()}), tokens
        )
        windows = torch.from_numpy(alone.stream.batch(0, 8))
        # Each rank has four sequences: 0 to 3 and 4 to 7. Two of each are the first micro-batch.
        small, big = squared_norm(alone, windows[[0, 1, 4, 5]]), squared_norm(alone, windows)
    pair = (4 * plain.model.seq_len, small, 8 * plain.model.seq_len, big)
    expected = [(1 - KEEP) * gradient_noise(*pair), (1 - KEEP) * squared_gradient(*pair)]
    for each in found:
        assert each["averages"] == pytest.approx(expected, rel=1e-9)


def test_measuring_the_noise_scale_does_not_change_the_losses(ranks: Pool, tiny: Recipe) -> None:
    plain = tiny.replace({"batch.micro_batch": 2, "layout.dp": 2, "layout.zero": 2})
    tokens = prepare(plain.data, plain.model.vocab_size)
    off, on = (ranks(2, steps, recipe, tokens, 3) for recipe in (plain, plain.replace({KEY: 256})))
    assert [each["losses"] for each in off] == [each["losses"] for each in on]
