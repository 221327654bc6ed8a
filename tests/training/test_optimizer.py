"""One step of each group against the formula, in float64."""

import pytest
import torch

from leaven.model.initialise import build_model
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer
from leaven.training.optimizer import Optimizer, parameter_groups


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
