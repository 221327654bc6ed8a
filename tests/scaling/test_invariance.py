"""The rules on the real model and optimizer: neutral at the base, and unchanged by the symmetry of AdamW."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leaven.model.initialisation import build_model
from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.scaling.cells import Cell
from leaven.scaling.rules import COMPLETE_D_P, RULES, Rule
from leaven.scaling.table import optimizer_groups, parameter_table
from leaven.scaling.transfer import transfer
from leaven.training.optimizer import Optimizer


def batches(recipe: Recipe, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(0, recipe.model.vocab_size, (4, recipe.model.seq_len + 1), generator=generator)


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def trained(recipe: Recipe, steps: int, dtype: torch.dtype = torch.float32) -> tuple[Transformer, list[float]]:
    table = parameter_table(recipe)
    model = build_model(recipe.model, table, 0).to(dtype)
    optimizer = Optimizer.build(optimizer_groups(table.rows, dict(model.named_parameters())), recipe.hyperparameters)
    losses = []
    for windows in batches(recipe, steps):
        loss = loss_of(model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(1.0)
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_at_its_base_is_plain_adamw_to_the_last_bit(tiny: Recipe, rule: str) -> None:
    """The reference is torch's AdamW with one lr, and a model without multipliers."""
    recipe = transfer(tiny.replace({"scaling.rule": rule, "scaling.alpha": 0.7}))  # the base pinned where it is
    ours, losses = trained(recipe, steps=3)
    hp = recipe.hyperparameters
    plain = Transformer(recipe.model)
    plain.load_state_dict(build_model(recipe.model, parameter_table(recipe), 0).state_dict())
    gains = [p for name, p in plain.named_parameters() if "norm" in name]
    others = [p for name, p in plain.named_parameters() if "norm" not in name]
    adamw = torch.optim.AdamW(
        [{"params": others, "weight_decay": hp.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=hp.lr,
        betas=(hp.beta1, hp.beta2),
        eps=hp.eps,
        fused=True,
    )
    for windows, expected in zip(batches(recipe, 3), losses, strict=True):
        adamw.zero_grad()
        loss = loss_of(plain, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        adamw.step()
        assert loss.item() == expected
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def with_unembedding(**cells: str) -> Rule:
    """complete-d-p (the form of Tensor Programs V, Table 3) with other cells for the unembedding."""
    moved = {
        quantity: {**by_role, Role.UNEMBEDDING: Cell(cells[quantity], "moved in this test")}
        for quantity, by_role in COMPLETE_D_P.cells.items()
        if quantity in cells
    }
    return replace(COMPLETE_D_P, cells={**COMPLETE_D_P.cells, **moved})


TABLE_8 = dict(init_variance="1", lr="1", forward="I^-1")


@pytest.mark.parametrize(
    ("cells", "same"),
    [
        (TABLE_8 | {"eps": "I^-1", "weight_decay": "1"}, True),
        (TABLE_8 | {"eps": "1", "weight_decay": "1"}, False),  # as CompleteP leaves it
        (TABLE_8 | {"eps": "I^-1", "weight_decay": "I"}, False),
    ],
    ids=["moved", "eps left", "decay left"],
)
def test_the_forms_of_table_3_and_table_8_train_alike_if_eps_and_decay_move_too(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch, cells: dict[str, str], same: bool
) -> None:
    """forward x c, std / c, lr / c, eps x c, decay x c leaves AdamW's training unchanged; c = 1/4, and float64.

    eps is as large as the gradient here, so that it counts.
    """
    recipe = tiny.replace({"hyperparameters.eps": 1e-3, "hyperparameters.weight_decay": 1.0})
    wide = transfer(recipe, width=64, depth=4, tokens=40_960)
    table_3, losses_3 = trained(wide, 4, torch.float64)
    monkeypatch.setattr("leaven.scaling.table.RULES", {"complete-d-p": with_unembedding(**cells)})
    table_8, losses_8 = trained(wide, 4, torch.float64)
    assert (losses_8 == pytest.approx(losses_3, rel=1e-9)) is same
    close = dict(table_8.named_parameters())
    for name, parameter in table_3.named_parameters():
        scale = 4 if name == "unembedding.weight" else 1
        if same:
            torch.testing.assert_close(close[name], scale * parameter, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("module", ["attention.out", "attention.value", "mlp.in", "mlp.out"])
@pytest.mark.parametrize("placement", ["output", "sandwich", "pre"])
def test_a_norm_behind_a_branch_undoes_the_scale_of_its_matrices(tiny: Recipe, placement: str, module: str) -> None:
    """Std and lr times c, eps and decay divided by c: before a norm, the same training in float64."""
    changes = {"model.norm_placement": placement, "model.norm_eps": 1e-30}
    plain = tiny.replace(changes | {"hyperparameters.eps": 1e-3, "hyperparameters.weight_decay": 1.0})
    c = 4.0
    scaled = {"init_std": c, "lr": c, "eps": 1 / c, "weight_decay": 1 / c}
    _, losses = trained(plain, 3, torch.float64)
    _, others = trained(plain.replace({"hyperparameters.modules": {module: scaled}}), 3, torch.float64)
    assert (others == pytest.approx(losses, rel=1e-9)) is (placement != "pre")
    alone = plain.replace({"hyperparameters.modules": {module: {"init_std": c}}})
    assert trained(alone, 3, torch.float64)[1] != pytest.approx(losses, rel=1e-6)
