"""Equivalent parametrizations count as equal, and differences are listed."""

import pytest
import torch
import yaml as reader
from hypothesis import given as sampled
from hypothesis import settings
from hypothesis import strategies as st
from tests.conftest import TINY
from tests.interop.configs.recipes import PER_MODULE, transferred

from leaven.documents.runs import LossRow
from leaven.errors import InputError
from leaven.interop.configs.compare import SAME_START, ParameterSettings, ResolvedRecipe, compare
from leaven.interop.configs.export import export
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe, flatten


def losses_of(run: ResolvedRecipe, given: dict[str, ParameterSettings], *, plain: bool = False) -> list[LossRow]:
    return compare(run, given, None, {"*": "why"}, plain=plain)[0]


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_matrix_with_its_multiplier_folded_in_trains_the_same(decoupled: bool) -> None:
    """Compares twenty steps of torch's optimizers in float64."""
    torch.manual_seed(0)
    x, y, start = torch.randn(32, 8).double(), torch.randn(32, 4).double(), torch.randn(4, 8).double()
    outputs = []
    plain = ParameterSettings(0.0, 1.0, lr=0.01, weight_decay=0.3, beta1=0.9, beta2=0.95, eps=0.1)
    for factor, given in ((3.0, plain), (1.0, plain.folded(3.0, decoupled))):
        weight = (start * given.init_std).requires_grad_()
        algorithm = torch.optim.AdamW if decoupled else torch.optim.Adam
        settings = {"lr": given.lr, "eps": given.eps, "weight_decay": given.weight_decay}
        optimizer = algorithm([weight], betas=(given.beta1, given.beta2), **settings)
        for _ in range(20):
            optimizer.zero_grad()
            (factor * x @ weight.T - y).square().mean().backward()
            optimizer.step()
        outputs.append((factor * x @ weight.T).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_a_table_and_its_folded_form_lose_nothing(tiny: Recipe, tied: bool, optimizer: str) -> None:
    changed = {"model.tied_embeddings": tied, "hyperparameters.optimizer": optimizer}
    run = ResolvedRecipe(transferred(tiny.replace(PER_MODULE | changed)))
    assert run.folding
    assert losses_of(run, run.rows) == []
    assert losses_of(run, run.plain, plain=True) == []
    assert tied == bool(losses_of(run, run.plain))  # the multiplier of tied logits is folded into a norm
    assert {given.multiplier for given in run.plain.values()} == {1.0}


@settings(max_examples=10)
@sampled(factor=st.floats(1.00001, 10), name=st.sampled_from(["lr", "eps", "weight_decay", "init_std"]))
def test_small_differences_are_found(factor: float, name: str) -> None:
    if name == "init_std":
        factor = max(factor, 1 + 2 * SAME_START)
    run = ResolvedRecipe(parse_recipe(TINY, "tiny"))
    rows = run.rows
    changed = rows["embedding.weight"].__dict__ | {name: getattr(rows["embedding.weight"], name) * factor}
    assert len(losses_of(run, rows | {"embedding.weight": ParameterSettings(**changed)})) == 1


def test_a_batch_that_does_not_divide_over_ranks_is_refused(tiny: Recipe) -> None:
    recipe = tiny.replace({"layout.dp": 3})
    with pytest.raises(InputError, match="8 sequences does not divide over 3"):
        _ = ResolvedRecipe(recipe).micro_batch
    ramp = {"start_tokens": 128, "increment_tokens": 64, "over_tokens": 2048}
    recipe = tiny.replace({"batch.ramp": ramp, "batch.micro_batch": 4})  # 4, 6, 8 sequences
    assert (ResolvedRecipe(recipe).micro_batch, ResolvedRecipe(recipe).accumulate) == (2, 4)


def test_yaml_numbers_are_read_as_numbers(tiny: Recipe) -> None:
    """YAML 1.1 reads ``1e-08`` as a string; 3e-05 must not be written as 2.9999999999999997e-05."""
    recipe = tiny.replace({"hyperparameters.eps": 1e-8, "hyperparameters.lr": 0.1 * 3e-4, "model.norm_eps": 1.5e-12})
    for name in ("nanotron", "litgpt"):
        text = export(name, recipe).files[""]
        found = list(flatten(reader.safe_load(text)).values())
        assert all(value in found for value in (1e-8, 3e-5, 1.5e-12))
        assert "2.99" not in text
