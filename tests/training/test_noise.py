"""The noise scale of a run: computed from separate gradients, kept over a stop, and without influence on the run."""

import math
from collections.abc import Callable

import pytest
import torch

from leaven.catalogue.noise_scale import gradient_noise, squared_gradient
from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.planning.trainable import require_trainable
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.optimizer import KEEP, NoiseScale

KEY = "stability.noise_scale_every_tokens"


@pytest.fixture
def measured(tiny: Recipe) -> Recipe:
    """Return a recipe with eight sequences in a step, in micro-batches of 3, 3 and 2."""
    return tiny.replace({"batch.micro_batch": 3, KEY: 256})


def gradient_norm(training: Training, sequences: range) -> float:
    """Return the norm of the gradient of the mean loss over sequences of the next batch, from one forward pass and
    autograd."""
    windows = torch.from_numpy(training.stream.batch(training.progress.tokens // training.recipe.model.seq_len, 8))
    training.sharded.stages[0].factor = 1.0  # a step leaves another factor on the loss
    total, *_ = training.sharded.stages[0](*training.micro_batch_of(windows[list(sequences)], len(sequences)))
    mean = total / (len(sequences) * training.recipe.model.seq_len)
    gradients = torch.autograd.grad(mean, list(training.model.parameters()))
    return math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients))


def expected(training: Training, first: range) -> tuple[float, float]:
    """Return tr(Sigma) and |G|^2, from the gradients over the first sequences and over all sequences."""
    small, big = gradient_norm(training, first) ** 2, gradient_norm(training, range(8)) ** 2
    pair = (len(first) * training.recipe.model.seq_len, small, 8 * training.recipe.model.seq_len, big)
    return gradient_noise(*pair), squared_gradient(*pair)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_noise_scale_follows_from_two_gradients(measured: Recipe, tokens: TokenSet, precision: str) -> None:
    training = Training(measured.replace({"precision.compute": precision}), tokens)
    noise = signal = 0.0
    for _ in range(6):
        found = expected(training, range(3))
        if precision == "fp16" and training.step().skipped:
            continue  # the loss scale was too large, so nothing was measured
        step = training.step() if precision == "fp32" else None
        noise, signal = KEEP * noise + (1 - KEEP) * found[0], KEEP * signal + (1 - KEEP) * found[1]
        assert training.noise.averages.tolist() == pytest.approx([noise, signal], rel=2e-3, abs=1e-6)
        if step is not None:
            assert step.noise_scale == (pytest.approx(noise / signal, rel=2e-3) if signal > 0 else None)


def test_targets_that_do_not_count_are_excluded(measured: Recipe, tokens: TokenSet) -> None:
    training = Training(measured.replace({"data.documents": "isolated"}), tokens)
    counts = []
    for start in range(0, 80 * 32, 8 * 32):
        _, targets, _ = next(training._batch_at(start).micro_batches)
        counts.append(float(training._first_targets(training._batch_at(start))))
        assert counts[-1] == float((targets >= 0).sum())
    assert min(counts) < max(counts) == 3 * 32  # some documents begin there


def test_the_noise_scale_is_measured_every_so_many_tokens(measured: Recipe, tokens: TokenSet) -> None:
    training = Training(measured.replace({KEY: 1_000}), tokens)
    seen = []
    for _ in range(8):
        before = training.noise.averages
        training.step()
        seen.append(training.noise.averages is not before)
    assert seen == [False, False, False, True, False, False, False, True]  # at 1,024 and 2,048 tokens


def test_steps_without_a_finite_estimate_do_not_change_the_averages() -> None:
    noise = NoiseScale(1, None, torch.zeros(2, dtype=torch.float64))
    one = torch.tensor(1.0)
    noise.add(one, 2 * one, 2, 1.5 * one)
    before = noise.averages.tolist()
    noise.add(one, one * torch.inf, 2, one)
    assert noise.averages.tolist() == before
    # If the first micro-batch is the whole batch, nothing is measured.
    assert float(noise.add(2 * one, one, 2, one)) == pytest.approx(7)
    assert noise.averages.tolist() == before


Change = Callable[[Recipe], Recipe]


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"batch.micro_batch": 8}, 1, r"two micro-batches per step, and a rank's 8 .* batch.micro_batch=4"),
        ({"layout.pp": 2}, 2, r"a pipeline \(pp = 2\)"),
        ({"layout.dp": 2}, 2, r"--set layout.zero=2 --set layout.dp_replicate=1"),
    ],
)
def test_recipes_without_two_gradients_are_refused(
    measured: Recipe, changes: dict[str, object], processes: int, said: str
) -> None:
    with pytest.raises(InputError, match=said) as refused:
        require_trainable(measured.replace(changes), processes)
    assert "\n" not in str(refused.value)
    require_trainable(measured.replace({**changes, KEY: None}), processes)
