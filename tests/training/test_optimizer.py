"""Steps of Adam and of clipping against their formulas, in float64. test_trainer.py has clipping after a stop."""

import math

import pytest
import torch

from leaven.distributed.sharded_model import ShardedModel
from leaven.model.initialisation import build_model
from leaven.recipe.hyperparameters import Clip
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import optimizer_groups, parameter_table
from leaven.training.optimizer import Clipper


def test_a_missing_or_doubled_parameter_is_an_error(tiny: Recipe) -> None:
    table = parameter_table(tiny)
    model = build_model(tiny.model, table, 0)
    with pytest.raises(ValueError, match=r"parameters not in both model and table: embedding.weight"):
        optimizer_groups(table.rows[1:], dict(model.named_parameters()))
    with pytest.raises(ValueError, match="twice"):
        optimizer_groups((*table.rows, table.rows[0]), dict(model.named_parameters()))
    model.register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="parameters not in both model and table: stray"):
        optimizer_groups(table.rows, dict(model.named_parameters()))


Gradients = dict[str, torch.Tensor]


def clipped(recipe: Recipe, clip: Clip, sizes: list[float]) -> list[tuple[float, Gradients, Gradients]]:
    """Return (returned norm, gradients before, gradients after) of a step for each size, in float64."""
    table = parameter_table(recipe)
    sharded = ShardedModel(
        recipe.model, table, seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=recipe.layout
    )
    model = sharded.stages[0].model.double()
    clipper = Clipper.build(clip, sharded, table)
    generator = torch.Generator().manual_seed(0)
    steps = []
    for size in sizes:
        for parameter in model.parameters():
            parameter.grad = size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = float(clipper.unscale_and_clip())
        after = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        steps.append((norm, before, after))
    return steps


def size(*gradients: torch.Tensor) -> float:
    return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))


def test_global_scales_everything_by_one_factor(tiny: Recipe) -> None:
    small, large = clipped(tiny, Clip(mode="global", limit=1.0), [1e-6, 1.0])
    assert all(torch.equal(small[2][name], small[1][name]) for name in small[1])  # below the limit: not touched
    assert large[0] == pytest.approx(size(*large[1].values()))
    for name, gradient in large[1].items():
        torch.testing.assert_close(large[2][name], gradient / large[0], rtol=1e-5, atol=0)


def test_per_module_limits_each_module_of_each_block_by_itself(tiny: Recipe) -> None:
    # A gain of 16 entries has a norm of about 4, the embedding of 5,120 one of about 70: only the latter is above 20.
    ((norm, before, after),) = clipped(tiny, Clip(mode="per-module", limit=20.0), [1.0])
    assert norm == pytest.approx(size(*before.values()))
    touched = set()
    for name, gradient in before.items():
        own = size(gradient)
        torch.testing.assert_close(after[name], gradient * min(1.0, 20.0 / own), rtol=1e-5, atol=0)
        touched |= {name} if own > 20 else set()
    assert {"embedding.weight", "layers.1.mlp.in.weight"} <= touched
    assert "layers.0.norm.mlp.weight" not in touched


def test_running_limits_to_a_multiple_of_the_running_root_mean_square(tiny: Recipe) -> None:
    """The running norm is r_t^2 = sum of (1 - b) b^(t-i) n_i^2 / (1 - b^t) over the clipped norms n_i. The first step
    is not clipped."""
    limit, beta = 2.0, tiny.hyperparameters.beta2
    steps = clipped(tiny, Clip(mode="running", limit=limit), [1.0, 1.1, 30.0, 0.5, 1.0])
    seen: list[float] = []
    for norm, before, after in steps:
        assert norm == pytest.approx(size(*before.values()))
        weights = [(1 - beta) * beta ** (len(seen) - 1 - i) for i in range(len(seen))]
        mean = (
            sum(w * n * n for w, n in zip(weights, seen, strict=True)) / (1 - beta ** len(seen)) if seen else math.inf
        )
        seen.append(min(norm, limit * math.sqrt(mean)))
        assert size(*after.values()) == pytest.approx(seen[-1], rel=1e-5)
    assert seen[2] < 3 * seen[0]  # the spike was cut, and did not lift the limit
    assert seen[0] == steps[0][0]


def test_no_limit_touches_nothing(tiny: Recipe) -> None:
    for mode in ("global", "per-module", "running"):
        for _, before, after in clipped(tiny, Clip(mode=mode, limit=0.0), [1.0, 1e6]):
            assert all(torch.equal(before[name], after[name]) for name in before)
