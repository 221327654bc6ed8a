"""leaven.parametrize on mixtures of experts: roles, values, and where the multipliers act."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.interop.families import MIXTURES, VOCABULARY, Home, deepseek_v3, llama, logits, mixtral, rows_of, tokens
from torch import nn

import leaven
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.scaling.rules import RULES
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

TUNED = {"lr": 0.01, "init_std": 0.1, "weight_decay": 0.1}


# The module of each matrix, by the last part of its name before `weight`
MODULES = {
    "q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value", "o_proj": "attention.out",
    "q_a_proj": "attention.query_latent", "kv_a_proj_with_mqa": "attention.key_value_latent",
    "q_b_proj": "attention.query", "kv_b_proj": "attention.key_value",
    "gate_up_proj": "mlp.experts.gate_in", "down_proj": "mlp.experts.out", "gate": "mlp.router",
    "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.in", "mlp.down_proj": "mlp.out",
    "shared_experts.gate_proj": "mlp.shared.gate", "shared_experts.up_proj": "mlp.shared.in",
    "shared_experts.down_proj": "mlp.shared.out",
}  # fmt: skip
# The same shapes in a recipe of leaven, at width 32 and depth 2. Of DeepSeek-V3 all but the attention.
RECIPES: dict[str, dict[str, Any]] = {
    "mixtral": {"qk_norm": False, "n_kv_heads": 2, "experts": {"number": 4, "active": 2, "d_expert": 64}},
    "qwen3-moe": {"n_kv_heads": 2, "experts": {"number": 8, "active": 2, "d_expert": 32}},
    "olmoe": {
        "qk_norm_whole": True,
        "n_kv_heads": 4,
        "experts": {"number": 8, "active": 2, "d_expert": 32, "normalise": False},
    },
    "deepseek-v3": {
        "qk_norm": False,
        "n_kv_heads": 4,
        "experts": {"number": 8, "active": 2, "d_expert": 32, "shared": 1, "dense_layers": 1, "router": "sigmoid"},
    },
}


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        *((family, "complete-d-p") for family in MIXTURES),
        *(("olmoe", rule) for rule in RULES if rule != "complete-d-p"),
    ],
)
def test_values_are_those_of_a_recipe_with_these_experts(family: str, rule: str, tiny: Recipe) -> None:
    """Width x2, depth x3, batch x2, tokens x8. One tensor of gate and input has the values of both."""
    at_base = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 96, "vocab_size": VOCABULARY, "qk_norm": True}
    shape = {f"model.{key}": value for key, value in (at_base | RECIPES[family]).items()}
    values = {f"hyperparameters.{key}": value for key, value in (TUNED | {"residual": 0.7}).items()}
    small = tiny.replace({"data.tokenizer": "bytes"} | shape | values | {"scaling.rule": rule, "scaling.base": None})
    recipe = transfer(small, width=64, depth=6, batch_tokens=2 * small.batch.tokens, tokens=8 * small.data.tokens)
    table = {(row.module, row.layer): row for row in parameter_table(recipe).rows}
    model: Any = MIXTURES[family](64, 6)
    leaven.parametrize(
        model,
        base=MIXTURES[family](32, 2),
        hyperparameters=small.hyperparameters,
        ratios=leaven.Ratios(batch=2, tokens=8),
        rule=rule,
    )
    compared = set()
    for row in model.leaven_rows:
        path, _, last = row.name.removesuffix(".weight").rpartition(".")
        pair = f"{path.rpartition('.')[2]}.{last}"
        assert row.module == MODULES.get(pair, MODULES.get(last, row.module)), row.name
        if "latent" in row.module or (family == "deepseek-v3" and row.module.startswith("attention.")):
            continue
        for module in (
            ("mlp.experts.gate", "mlp.experts.in") if row.module == "mlp.experts.gate_in" else (row.module,)
        ):
            known = table[module, row.layer]
            compared.add((module, row.layer))
            for key in ("init_mean", "init_std", "lr", "eps", "weight_decay", "beta1", "beta2", "multiplier", "role"):
                assert getattr(row, key) == pytest.approx(getattr(known, key)), (row.name, key)
    left = {module for module, layer in table.keys() - compared}
    assert left == (set() if family != "deepseek-v3" else {m for m, _ in table if m.startswith("attention.")})


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((family, "eager") for family in MIXTURES), ("mixtral", "grouped_mm"), ("deepseek-v3", "batched_mm")],
)
def test_multipliers_scale_each_branch_once(family: str, implementation: str) -> None:
    """Compared with a model whose last matrices are scaled by hand."""
    torch.manual_seed(0)
    model: Any = MIXTURES[family](64, 6).eval()
    model.set_experts_implementation(implementation)
    plain = copy.deepcopy(model)
    tuned = {"lr": 0.01, "modules": {"mlp.experts.out": {"residual": 0.5}}}
    leaven.parametrize(model, base=MIXTURES[family](32, 2), hyperparameters=tuned)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1 / 3)
            elif name.endswith("experts.down_proj"):
                parameter.mul_(0.5 / 3)
    size = logits(plain, tokens()).abs().max().item()
    torch.testing.assert_close(logits(model, tokens()), logits(plain, tokens()), rtol=0, atol=1e-5 * size)


def test_the_bias_of_a_router_is_not_trained_by_the_optimizer() -> None:
    model: Any = deepseek_v3(64, 2)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.fill_(0.25)
    found = leaven.parametrize(model, base=deepseek_v3(32, 2), hyperparameters=TUNED)
    assert not any("e_score_correction_bias" in name for group in found for name in group["param_names"])
    assert torch.equal(bias, torch.full((8,), 0.25))


def test_the_fan_of_an_expert_is_its_own() -> None:
    """d_expert grows by a factor of four, the width by two."""
    model: Any = mixtral(64, 2, d_ff=256)
    leaven.parametrize(model, base=mixtral(32, 2, d_ff=64), hyperparameters=TUNED)
    into, out = (rows_of(model)[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    assert (into.lr, into.eps, into.init_std) == pytest.approx((0.01 / 2, 1e-8 / 4, 0.1 * 2**-0.5))
    assert (out.lr, out.eps, out.init_std) == pytest.approx((0.01 / 4, 1e-8 / 2, 0.1 / 2))


def test_latents_of_a_fixed_size() -> None:
    """The matrices that read them have no larger fan in, and their norms no larger size."""
    models: list[Any] = [deepseek_v3(width, 2, latent=16) for width in (64, 32)]
    leaven.parametrize(models[0], base=models[1], hyperparameters=TUNED)
    rows = {name.removeprefix("model.layers.1.self_attn."): row for name, row in rows_of(models[0]).items()}
    for name in ("q", "kv"):
        into = "q_a_proj" if name == "q" else "kv_a_proj_with_mqa"
        assert (rows[f"{into}.weight"].lr, rows[f"{into}.weight"].eps) == pytest.approx((0.01 / 2, 1e-8))
        assert (rows[f"{name}_a_layernorm.weight"].lr, rows[f"{name}_a_layernorm.weight"].eps) == (0.01, 1e-8)
        assert (rows[f"{name}_b_proj.weight"].lr, rows[f"{name}_b_proj.weight"].eps) == pytest.approx(
            (0.01, 1e-8 / 2)
        )
        assert rows[f"{name}_b_proj.weight"].init_std == 0.1


def test_another_number_of_experts_is_refused() -> None:
    with pytest.raises(InputError, match=r"^model.layers.*.mlp: the model has 8 experts and the base has 4;"):
        leaven.parametrize(mixtral(64, 2, experts=8), base=mixtral(32, 2), hyperparameters=TUNED)
    with pytest.raises(InputError, match="experts.4.up.weight exists only in the model; .* same number of experts"):
        leaven.parametrize(mixture(64, 2, experts=8), base=mixture(32, 2), hyperparameters=TUNED, head_ratio=1.0)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Transposed(nn.Module):
    """The matrices of all experts as (experts, fan in, fan out)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.is_transposed = True
        self.up, self.down = nn.Module(), nn.Module()  # not called themselves
        self.up.weight = nn.Parameter(torch.randn(experts, width, 4 * width))
        self.down.weight = nn.Parameter(torch.randn(experts, 4 * width, width))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("...d,edf->...ef", x, self.up.weight).relu()
        return torch.einsum("...ef,efd,...e->...d", inner, self.down.weight, weights)


class MixtureBlock(nn.Module):
    """A hand-written block: every expert reads every token, and their outputs are weighted by the router."""

    def __init__(self, width: int, experts: int, stacked: bool, norm: bool | None) -> None:
        super().__init__()
        self.mlp_norm, self.moe = nn.LayerNorm(width), nn.Module()
        self.moe.router = nn.Linear(width, experts, bias=False)
        self.moe.experts = (
            Transposed(width, experts) if stacked else nn.ModuleList(Expert(width) for _ in range(experts))
        )
        self.moe.shared_expert = Expert(width)
        self.out_norm, self.undone = nn.LayerNorm(width) if norm else nn.Identity(), norm is None

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        x = self.mlp_norm(stream)
        weights = self.moe.router(x).softmax(-1)
        if isinstance(self.moe.experts, Transposed):
            y = self.moe.experts(x, weights)
        else:
            y = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(self.moe.experts))
        y = y + self.moe.shared_expert(x)
        return stream + (nn.functional.rms_norm(y, y.shape[-1:]) if self.undone else self.out_norm(y))


def mixture(width: int, depth: int, experts: int = 4, stacked: bool = False, norm: bool | None = False) -> Home:
    """Return a model of such blocks. ``norm``: of the sum over the experts, True as a module, None as a function."""
    return Home(width, depth, partial(MixtureBlock, experts=experts, stacked=stacked, norm=norm))


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_a_hand_written_model(stacked: bool) -> None:
    """As a list of modules, and as transposed tensors."""
    torch.manual_seed(0)
    model: Any = mixture(64, 6, stacked=stacked).double()
    plain: Any = copy.deepcopy(model)
    leaven.parametrize(model, base=mixture(32, 2, stacked=stacked), hyperparameters={"lr": 0.01})
    rows = rows_of(model)
    assert rows["blocks.1.moe.router.weight"].role is Role.ROUTER
    assert rows["blocks.1.moe.shared_expert.up.weight"].module == "mlp.shared.in"
    experts = "blocks.1.moe.experts" if stacked else "blocks.1.moe.experts.3"
    into, out = (rows[f"{experts}.{name}.weight"] for name in ("up", "down"))
    assert (into.module, out.module) == ("mlp.experts.in", "mlp.experts.out")
    assert (into.shape[-2:], out.shape[-2:]) == ((256, 64), (64, 256))
    assert (into.lr, out.lr, out.multiplier) == pytest.approx((0.005, 0.005, 1 / 3))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "down" in name:
                parameter.mul_(1 / 3)
    torch.testing.assert_close(logits(model, tokens()), logits(plain, tokens()))
    wanted = logits(model, tokens())
    torch.testing.assert_close(logits(leaven.fold(model), tokens()), wanted)


def test_a_layout_of_experts_that_is_not_declared_is_refused() -> None:
    models: list[Any] = [mixture(64, 2, stacked=True), mixture(32, 2, stacked=True)]
    for model in models:
        for block in model.blocks:
            block.moe.experts.is_transposed = False
    with pytest.raises(InputError, match=r"down.weight \(4 x 256 x 64, .*fan out is not the width 64"):
        leaven.parametrize(models[0], base=models[1], hyperparameters=TUNED)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_norm_behind_all_experts_has_their_multiplier_once(stacked: bool) -> None:
    model: Any = mixture(64, 4, stacked=stacked, norm=True)
    base = mixture(32, 2, stacked=stacked, norm=True)
    leaven.parametrize(model, base=base, hyperparameters={"lr": 0.01})
    hooked = {name: list(module._forward_hooks.values()) for name, module in model.named_modules()}
    assert {name for name, hooks in hooked.items() if hooks} == {f"blocks.{n}.out_norm" for n in range(4)}
    (hook,) = hooked["blocks.3.out_norm"]
    assert hook.factor == pytest.approx(1 / 2)
    tuned = {"lr": 0.01, "modules": {"mlp.shared.out": {"residual": 2.0}}}
    with pytest.raises(InputError, match=r"shared_expert.down.weight and .*experts\S* have different multipliers"):
        leaven.parametrize(mixture(64, 4, stacked=stacked, norm=True), base=base, hyperparameters=tuned)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_norm_of_the_sum_over_experts_that_cannot_have_the_multiplier_is_refused(stacked: bool) -> None:
    models = [mixture(width, 3, stacked=stacked, norm=None) for width in (64, 32)]
    with pytest.raises(InputError, match="would have no effect: a norm after the branch cancels"):
        leaven.parametrize(models[0], base=models[1], hyperparameters=TUNED)


def test_a_router_without_experts_beside_it_needs_a_role() -> None:
    def build(width: int, depth: int) -> nn.Module:
        model: Any = llama(width, depth)
        for layer in model.model.layers:
            layer.mlp.gate = nn.Linear(width, 16, bias=False)
        return model

    with pytest.raises(InputError, match="mlp.gate.weight.* not the fan in of .*if it is a router, pass roles"):
        leaven.parametrize(build(64, 2), base=build(32, 2), hyperparameters=TUNED)
    model: Any = build(64, 2)
    leaven.parametrize(model, base=build(32, 2), hyperparameters=TUNED, roles={"*.mlp.gate.weight": "router"})
    row = rows_of(model)["model.layers.1.mlp.gate.weight"]
    assert (row.role, row.module) == ("router", "mlp.router")
