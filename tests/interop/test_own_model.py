"""On leaven's own model, groups and forward pass are those of the parameter table."""

from typing import Any

import pytest
import torch

import leaven
from leaven.errors import InputError
from leaven.model.initialisation import build_model
from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.scaling.rules import RULES
from leaven.scaling.table import optimizer_groups, parameter_table
from leaven.scaling.transfer import transfer
from leaven.training.optimizer import Optimizer

GROWN = {"width": 32, "depth": 6, "batch_tokens": 512, "tokens": 71_680}
CASES = {
    "gqa and shared qk gains": ({}, GROWN),
    "width only, to half": (
        {"model.d_model": 32, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_ff": 64},
        {"width": 16},
    ),
    "tied": ({"model.tied_embeddings": True}, GROWN),
    "one kv head fixed": ({"model.n_kv_heads": 2}, GROWN | {"n_kv_heads": 2}),
    "head dimension grows": ({}, GROWN | {"d_head": 16}),
    "gains per head, head dimension grows": ({"model.qk_norm_per_head": True}, GROWN | {"d_head": 16}),
    "biases, layer norms, learned positions": (
        {"model.bias": True, "model.norm": "layernorm", "model.positions": "learned", "model.activation": "gelu"},
        GROWN,
    ),
    "embedding norm, ALiBi, tied": (
        {"model.embedding_norm": True, "model.bias": True, "model.norm": "layernorm", "model.positions": "alibi"}
        | {"model.tied_embeddings": True},
        GROWN,
    ),
    "output norms, all heads together": ({"model.norm_placement": "output", "model.qk_norm_whole": True}, GROWN),
    "sandwich norms, parallel branches, caps": (
        {"model.norm_placement": "sandwich", "model.parallel_branches": True, "model.attention_bias": "qkv"}
        | {"model.attention_softcap": 5.0, "model.logit_softcap": 5.0, "model.window": 5},
        GROWN,
    ),
    "experts, shared ones, a dense layer": (
        {
            "model.experts": {"number": 4, "active": 2, "d_expert": 8, "shared": 1, "dense_layers": 1},
            "hyperparameters.modules": {
                "mlp.router": {"lr": 0.5},
                "mlp.experts.out": {"residual": 0.5},
                "mlp.shared.out": {"residual": 2.0},
            },
        },
        GROWN,
    ),
    "named init": ({"hyperparameters.init": "mitchell", "hyperparameters.init_std": None}, GROWN),
    "named init, smaller in gated MLPs": (
        {"hyperparameters.init": "depth-scaled", "hyperparameters.init_std": None},
        GROWN,
    ),
    "named init, MLPs without gates": (
        {"hyperparameters.init": "depth-scaled", "hyperparameters.init_std": None, "model.activation": "relu"},
        GROWN,
    ),
    "muon": (
        {"hyperparameters.optimizer": "muon", "hyperparameters.muon": {"lr": 0.02, "match": "spectral"}}
        | {"hyperparameters.modules": {"mlp.in": {"lr": 0.5}}},
        GROWN,
    ),
    "multipliers of modules and depth": (
        {
            "hyperparameters.residual": 0.8,
            "hyperparameters.decay_norm_and_bias": True,
            "hyperparameters.modules": {
                "attention.out": {"residual": 0.5, "init_std": 2.0},
                "embedding": {"lr": 3.0, "beta2": 0.5},
                "norm.query": {"eps": 2.0, "weight_decay": 1.5},
            },
            "hyperparameters.depth": {"lr": (1.0, 2.0), "residual": (1.0, 0.5, 2.0), "init_std": (1.0, 3.0)},
        },
        GROWN,
    ),
}


# All cases under the two rules with the most cells, and one case under every rule; a named init needs its own
PAIRS = [(case, rule) for case in CASES for rule in ("completep", "complete-d-p") if "init" not in case]
PAIRS += [(case, "standard") for case in CASES if "init" in case]
PAIRS += [("multipliers of modules and depth", rule) for rule in RULES if rule not in ("completep", "complete-d-p")]


@pytest.mark.long
@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_groups_and_forward_are_those_of_the_table(tiny: Recipe, case: str, rule: str) -> None:
    changes, grown = CASES[case]
    small = tiny.replace(changes | {"scaling.rule": rule, "scaling.alpha": 0.7, "scaling.token_exponent": 0.4})
    recipe = transfer(small, **grown)
    table = parameter_table(recipe)
    model = Transformer(recipe.model)
    groups = leaven.parametrize(
        model,
        base=Transformer(recipe.base_shape),
        hyperparameters=recipe.hyperparameters,
        ratios=leaven.Ratios(batch=table.ratios.batch, tokens=table.ratios.tokens),
        rule=rule,
        alpha=0.7,
        token_exponent=0.4,
        initialise=True,
        seed=5,
    )
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(r.name for r in table.rows)
    parameters = dict(model.named_parameters())
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            row = table[name]
            assert parameter is parameters[name]
            assert group["module"] == row.module
            assert (group["lr"], group["weight_decay"]) == (row.lr, row.weight_decay), name
            if "match" in group:
                assert (group["momentum"], group["match"]) == (row.beta1, row.match), name
            else:
                assert (*group["betas"], group["eps"], 0) == (row.beta1, row.beta2, row.eps, row.match), name
    reference = build_model(recipe.model, table, 5)
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, parameters[name])
    tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    ours, theirs = model.double()(tokens), reference.double()(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("muon", [{}, {"nesterov": False, "ns_steps": 3}])
def test_steps_of_muon_are_those_of_leavens_trainer(tiny: Recipe, muon: dict[str, Any]) -> None:
    """A frozen parameter, which has no gradient, stays as it is."""
    of_muon = {"hyperparameters.optimizer": "muon", "hyperparameters.muon": muon}
    recipe = transfer(tiny.replace(of_muon), width=32, depth=4)
    table, model = parameter_table(recipe), Transformer(recipe.model)
    groups = leaven.parametrize(model, base=Transformer(recipe.base_shape), hyperparameters=recipe.hyperparameters)
    reference = build_model(recipe.model, table, 0)
    theirs = Optimizer.build(optimizer_groups(table.rows, dict(reference.named_parameters())), recipe.hyperparameters)
    ours = leaven.MuonWithAdamW(groups, fused=True)
    frozen = model.layers[1].mlp.out.weight.requires_grad_(False)
    start = frozen.clone()
    for seed in range(2):
        tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(seed))
        for each in (model, reference):
            each(tokens).square().mean().backward()
        ours.step()
        ours.zero_grad()
        reference.layers[1].mlp.out.weight.grad.zero_()
        theirs.step(1.0)
        with torch.no_grad():
            reference.layers[1].mlp.out.weight.copy_(start)
    assert torch.equal(frozen, start)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-5, atol=1e-7)


def test_a_model_with_its_recipes_multipliers_is_refused(tiny: Recipe) -> None:
    recipe = transfer(tiny, depth=4)
    model = build_model(recipe.model, parameter_table(recipe), 0)
    with pytest.raises(InputError, match=r"build it with Transformer\(shape\)"):
        leaven.parametrize(model, base=Transformer(tiny.model), hyperparameters=recipe.hyperparameters)
