"""Norms on the outputs of branches, and factors on the embedding, in leaven.parametrize."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.families import FAMILIES
from tests.interop.families import VOCABULARY, Home, logits, loss_of, tokens
from torch import nn

import leaven
from leaven.errors import InputError
from leaven.recipe.shape import Role
from leaven.scaling.table import ParameterRow

TUNED = {"lr": 0.01, "init_std": 0.5, "weight_decay": 0.1, "residual": 0.7}
NORMED = [name for name, family in FAMILIES.items() if family.normed]


def parametrized(name: str, width: int = 64, depth: int = 6) -> tuple[Any, dict[str, ParameterRow]]:
    model: Any = FAMILIES[name].model(width, depth).double().eval()
    leaven.parametrize(model, base=FAMILIES[name].model(32, 2), hyperparameters=TUNED, head_ratio=1.0)
    return model, {row.name.removeprefix("model.layers.1."): row for row in model.leaven_rows}


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_norms_behind_branches_are_found(name: str) -> None:
    _, rows = parametrized(name)
    found = {part: row.module for part, row in rows.items() if row.role is Role.OUTPUT_NORM and "layers" not in part}
    if name in NORMED:
        assert found == {
            "post_attention_layernorm.weight": "norm.attention_out",
            "post_feedforward_layernorm.weight": "norm.mlp_out",
        }
    else:
        assert not found
    ends = {row.module for row in rows.values() if row.multiplier != 1.0 and row.role.in_branches}
    of_experts = {"mlp.experts.out", "mlp.shared.out"} if name == "deepseek3" else {"mlp.experts.out"}
    assert ends == {"attention.out"} | (of_experts if "experts" in FAMILIES[name].faults else {"mlp.out"})


@pytest.mark.parametrize("name", NORMED)
def test_the_multiplier_acts_behind_the_norm(name: str) -> None:
    """Compared with a model whose gains are multiplied by hand. Gemma's gain is 1 + weight; norms are in fp32."""
    model, _ = parametrized(name)
    plain = FAMILIES[name].model(64, 6).double().eval()
    with pytest.warns(UserWarning, match=r"lacks the \d+ multipliers"):
        plain.load_state_dict(model.state_dict())
    final = next((row.multiplier for row in model.leaven_rows if row.role is Role.TIED_EMBEDDING), 1.0)
    offset = 1.0 if "gemma" in name else 0.0
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            factor = final if path == "model.norm.weight" else 0.7 / 3 if ".post_" in path else 1.0
            parameter.copy_(factor * (parameter + offset) - offset if factor != 1 else parameter)
    batch = tokens() % VOCABULARY
    size = logits(model, batch).abs().max().item()
    torch.testing.assert_close(logits(model, batch), logits(plain, batch), rtol=0, atol=1e-6 * size)
    # A multiplier before the norm would have no effect.
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            if path.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.5)
    torch.testing.assert_close(logits(model, batch), logits(plain, batch), rtol=0, atol=1e-3 * size)


class Block(nn.Module):
    """A block whose norm follows its branch, under a name that usually means a norm before it."""

    def __init__(self, width: int, gain: bool = True) -> None:
        super().__init__()
        self.mlp_norm = nn.LayerNorm(width, elementwise_affine=gain)
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp_norm(self.mlp["down"](self.mlp["up"](x).relu()))


class Masked(Home):
    def forward(self, tokens: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        if not more:
            raise TypeError("the mask is missing")
        return super().forward(tokens)


def test_a_norm_is_found_by_what_it_does_and_not_by_its_name() -> None:
    model: Any = Home(64, 3, Block)
    leaven.parametrize(model, base=Home(32, 2, Block).to("meta"), hyperparameters=TUNED)
    row = next(row for row in model.leaven_rows if row.name == "blocks.0.mlp_norm.weight")
    assert (row.role, row.module) == ("output_norm", "norm.mlp_out")
    assert not model.blocks[0].mlp["down"]._forward_hooks
    hook = next(iter(model.blocks[2].mlp_norm._forward_hooks.values()))
    assert hook.factor == pytest.approx(0.7 * 2 / 3)


def test_a_norm_without_a_gain_has_the_multiplier_but_cannot_be_folded() -> None:
    block = partial(Block, gain=False)
    model: Any = Home(64, 3, block)
    leaven.parametrize(model, base=Home(32, 2, block), hyperparameters=TUNED)
    assert next(iter(model.blocks[0].mlp_norm._forward_hooks.values())).factor == pytest.approx(0.7 * 2 / 3)
    with pytest.raises(InputError, match="LayerNorm cannot be folded, because this module has no gain"):
        leaven.fold(model)


def test_a_norm_is_found_in_a_model_of_matrices_only() -> None:
    def without_vectors(width: int, depth: int) -> Any:
        model = Home(width, depth, partial(Block, gain=False))
        model.norm = nn.LayerNorm(width, elementwise_affine=False)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.bias = None
        return model

    model = without_vectors(64, 3)
    assert all(parameter.ndim == 2 for parameter in model.parameters())
    leaven.parametrize(model, base=without_vectors(32, 2), hyperparameters=TUNED)
    assert not model.blocks[0].mlp["down"]._forward_hooks
    assert next(iter(model.blocks[0].mlp_norm._forward_hooks.values())).factor == pytest.approx(0.7 * 2 / 3)


def test_the_norms_of_a_model_that_cannot_be_run_are_named_by_the_user() -> None:
    model, base = Masked(64, 3, Block), Masked(32, 2, Block)
    with pytest.warns(UserWarning, match=r"mask is missing.*blocks\.0\.mlp_norm\.weight': NAME.*'norm.mlp_out'"):
        leaven.parametrize(Masked(64, 3, Block), base=base, hyperparameters=TUNED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = {"*.mlp_norm.weight": "norm.mlp_out"}
        leaven.parametrize(model, base=base, hyperparameters=TUNED, modules=names)
    assert model.blocks[1].mlp_norm._forward_hooks
    olmo: Any = FAMILIES["olmo2"].model(64, 2)
    broken: Any = FAMILIES["olmo2"].model(32, 2)
    broken.forward = None
    with (
        pytest.raises(
            InputError, match=r"post_feedforward_layernorm.weight .*norm on a branch's output.*running the base fail"
        ),
        pytest.warns(UserWarning, match="cannot be run on token ids alone"),
    ):
        leaven.parametrize(olmo, base=broken, hyperparameters=TUNED)


class Undone(Block):
    """A block that normalises its branch without a module, or both of its branches together."""

    def __init__(self, width: int, together: bool) -> None:
        super().__init__(width)
        self.attention = nn.ModuleDict({"value": nn.Linear(width, width), "out": nn.Linear(width, width)})
        self.together = together

    def forward(self, x: torch.Tensor) -> Any:
        mlp = self.mlp["down"](self.mlp["up"](x).relu())
        attention = self.attention["out"](self.attention["value"](x))
        if self.together:
            return x + self.mlp_norm(mlp + attention)
        return x + self.mlp_norm(mlp) + nn.functional.rms_norm(attention, attention.shape[-1:])


@pytest.mark.parametrize("together", [False, True])
def test_a_norm_that_undoes_a_multiplier_and_cannot_have_it_is_refused(together: bool) -> None:
    model, base = (Home(width, 3, partial(Undone, together=together)) for width in (64, 32))
    with pytest.raises(InputError, match="would have no effect: a norm after the branch cancels"):
        leaven.parametrize(model, base=base, hyperparameters=TUNED, head_ratio=1.0)


@pytest.mark.parametrize(("name", "depth"), [("mistral", 40), ("phi", 1)])
def test_branches_without_a_norm_behind_them_are_never_refused(name: str, depth: int) -> None:
    models = (FAMILIES[name].model(width, depth) for width in (64, 32))
    leaven.parametrize(next(models), base=next(models), hyperparameters=TUNED, head_ratio=1.0)


@pytest.mark.parametrize("scalar", [16, 32])
def test_the_scale_of_attention_falls_with_the_head_dimension(scalar: int) -> None:
    """Also if the scale is a number of the configuration, 1 / sqrt(query_pre_attn_scalar), in Gemma 2."""
    gemma = FAMILIES["gemma2"]
    model: Any = replace(gemma, config={"head_dim": 32, "query_pre_attn_scalar": scalar}).model(64, 2)
    base = replace(gemma, config={"query_pre_attn_scalar": 16}).model(32, 2)
    leaven.parametrize(model, base=base, hyperparameters=TUNED)
    assert model.model.layers[1].self_attn.scaling == pytest.approx(16**-0.5 * 16 / 32)


def test_the_embedding_of_gemma_trains_as_without_its_growing_factor() -> None:
    """The factor is sqrt(width): 8 at width 64. The other model keeps that of the base, sqrt(32), in float64."""
    losses = []
    for factor in (8.0, 32**0.5):
        model: Any = FAMILIES["gemma3"].model(64, 2).double().eval()
        embedding = model.model.embed_tokens
        embedding.scalar_embed_scale, embedding.embed_scale = factor, torch.tensor(factor, dtype=torch.float64)
        tuned = TUNED | {"eps": 1e-3, "weight_decay": 1.0}
        optimizer = torch.optim.AdamW(
            leaven.parametrize(model, base=FAMILIES["gemma3"].model(32, 2), hyperparameters=tuned, head_ratio=1.0)
        )
        found = []
        for seed in range(4):
            loss = loss_of(model, tokens(seed))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] - losses[0][-1] > 0.01  # it learns
