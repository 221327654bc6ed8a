"""Steps of Adam and of clipping against their formulas, in float64. test_trainer.py has clipping after a stop."""

import math

import pytest
import torch

from leaven.distributed.sharded_model import ShardedModel
from leaven.model.initialise import build_model
from leaven.recipe.hyperparameters import Clip
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer
from leaven.training.optimizer import Clipper, Optimizer, parameter_groups


def test_every_parameter_is_in_one_group_with_its_rows_values(tiny: Recipe) -> None:
    big = transfer(tiny, width=32, depth=4, tokens=40_960)
    table = parameter_table(big)
    groups = parameter_groups(dict(build_model(big.model, table, 0).named_parameters()), table.rows)
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(row.name for row in table.rows)
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            row = table[name]
            assert tuple(parameter.shape) == row.shape
            assert (group["lr"], group["weight_decay"], *group["betas"], group["eps"], group["module"]) == (
                row.lr,
                row.weight_decay,
                row.beta1,
                row.beta2,
                row.eps,
                row.module,
            )


def test_a_missing_or_doubled_parameter_is_an_error(tiny: Recipe) -> None:
    table = parameter_table(tiny)
    model = build_model(tiny.model, table, 0)
    with pytest.raises(ValueError, match=r"differ in embedding.weight"):
        parameter_groups(dict(model.named_parameters()), table.rows[1:])
    with pytest.raises(ValueError, match="twice"):
        parameter_groups(dict(model.named_parameters()), (*table.rows, table.rows[0]))
    model.register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="differ in stray"):
        parameter_groups(dict(model.named_parameters()), table.rows)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_steps_follow_the_formula(tiny: Recipe, kind: str) -> None:
    """Kingma and Ba 2015, algorithm 1; decay decoupled (Loshchilov and Hutter 2019, algorithm 2) or in the loss."""
    big = transfer(tiny.replace({"hyperparameters.eps": 1e-3}), width=32, tokens=40_960)
    table = parameter_table(big)
    model = build_model(big.model, table, 0).double()
    optimizer = Optimizer.build(dict(model.named_parameters()), table.rows, kind)
    generator = torch.Generator().manual_seed(0)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step, multiplier in enumerate((0.5, 1.0, 0.7), start=1):
        for name, parameter in model.named_parameters():
            row = table[name]
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.clone()
            lr, w = row.lr * multiplier, expected[name]
            if kind == "adamw":
                w = w * (1 - lr * row.weight_decay)
            else:
                gradient = gradient + row.weight_decay * w
            first[name] = row.beta1 * first[name] + (1 - row.beta1) * gradient
            second[name] = row.beta2 * second[name] + (1 - row.beta2) * gradient**2
            mean, square = first[name] / (1 - row.beta1**step), second[name] / (1 - row.beta2**step)
            expected[name] = w - lr * mean / (square.sqrt() + row.eps)
        optimizer.step(multiplier)
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-9, atol=1e-12)


Gradients = dict[str, torch.Tensor]


def clipped(recipe: Recipe, clip: Clip, sizes: list[float]) -> list[tuple[float, Gradients, Gradients]]:
    """Returns for each size a step: (returned norm, gradients before, gradients after), in float64."""
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
    """r_t^2 = sum of (1 - b) b^(t-i) n_i^2 / (1 - b^t) over the clipped norms n_i; the first step is left alone."""
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
