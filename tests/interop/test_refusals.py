"""Models that cannot be classified are refused in one line that names the parameter; the model does not change."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.families import VOCABULARY, built, gpt2, llama, logits, sizes, tokens
from torch import nn
from transformers import LlamaModel

import leaven
from leaven.errors import InputError
from leaven.interop.parametrize import groups
from leaven.recipe.hyperparameters import Clip, Hyperparameters
from leaven.recipe.shape import Role

TUNED = {"lr": 0.01, "init_std": 0.1}
MITCHELL = {"lr": 0.01, "init": "mitchell"}


def decoder(
    width: int, depth: int, *, scalar: bool = False, neck: bool = False, names: tuple[str, ...] = ()
) -> nn.Module:
    """A Llama with unusual parameters."""
    model: Any = llama(width, depth)
    for layer in model.model.layers:
        if scalar:
            layer.mlp.gain = nn.Parameter(torch.ones(width))
        for name in names:
            layer.mlp.register_module(name, nn.Linear(width, 16, bias=False))
    if neck:
        model.neck = nn.Linear(width, width)
    return model


def gpt_oss(width: int, depth: int) -> nn.Module:
    """Return a model whose experts have biases. It stores their matrices as (experts, fan in, fan out)."""
    more = {"intermediate_size": 2 * width, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16}
    return built("GptOssForCausalLM", **sizes(width, depth, 4), **more, eos_token_id=0)


def headless(width: int, depth: int) -> nn.Module:
    return LlamaModel(llama(width, depth).config)


class TorchBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)


class TorchDecoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(TorchBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.unembedding = nn.Linear(width, VOCABULARY)


class SmallBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})


class NanoBlock(SmallBlock):
    """Attention without attributes for its head dimension and scale."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})


class PreNormMLP(nn.Module):
    """Matrices in a class with "Norm" in its name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.w1 = nn.Parameter(torch.ones(4 * width, width))
        self.w2 = nn.Parameter(torch.ones(width, 4 * width))


def stacked(
    blocks: Callable[[int, int], list[nn.Module]], first_norm: bool = False
) -> Callable[[int, int], nn.Module]:
    """Return a function that builds a decoder with the given blocks."""

    def build(width: int, depth: int) -> nn.Module:
        model = nn.Module()
        model.embedding = nn.Embedding(VOCABULARY, width)
        if first_norm:
            model.first_norm = nn.LayerNorm(width)
        model.blocks = nn.ModuleList(blocks(width, depth))
        model.norm = nn.LayerNorm(width)
        model.unembedding = nn.Linear(width, VOCABULARY)
        return model

    return build


def flat(width: int, depth: int) -> nn.Module:
    blocks = (SmallBlock(width) for _ in range(depth))
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def shared(width: int, depth: int) -> list[nn.Module]:
    """Return blocks that share the matrix at the end of the branch."""
    blocks: list[Any] = [SmallBlock(width) for _ in range(depth)]
    for block in blocks[1:]:
        block.mlp["down"].weight = blocks[0].mlp["down"].weight
    return blocks


def refused(build: Callable[..., nn.Module], *, base: nn.Module | None = None, **options: Any) -> str:
    model = build(64, 3)
    with pytest.raises(InputError) as refusal:
        leaven.parametrize(model, base=base or build(32, 2), **{"hyperparameters": TUNED, **options})
    assert "\n" not in str(refusal.value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(model, "leaven_rows")
    return str(refusal.value)


NANO = stacked(lambda n, d: [NanoBlock(n) for _ in range(d)])
NORM_FIRST = stacked(lambda n, d: [SmallBlock(n) for _ in range(d)], first_norm=True)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda n, d: decoder(n, d, scalar=True),
            r"mlp.gain \(64, 32 in the base\): .*'hidden_norm'} or 'hidden_bias'",
        ),
        (NANO, "^blocks.0.attn.c_attn.weight: its attention module has no .* pass head_ratio"),
        (NORM_FIRST, "first_norm.weight .* before the blocks; .*'embedding_norm'"),
        (lambda n, d: decoder(n, d, names=("gate_2",)), "mlp.gate_2.weight .* its name does not show which matrix"),
        (lambda n, d: decoder(n, d, names=("gate",)), "mlp.gate.weight .* not the fan in of .* a router, pass roles"),
        (lambda n, d: decoder(n, d, names=("out",)), "in exactly one matrix, but ends in .*down_proj.*out.weight"),
        (lambda n, d: decoder(n, d, neck=True), "^neck.weight .* outside the blocks"),
        (gpt_oss, r"mlp\.experts\.gate_up_proj_bias \(.*no rule for biases of experts"),
        (headless, "found no parameter that computes the logits.*embed_tokens.*'tied_embedding'"),
        (TorchDecoder, "in_proj_weight .*MultiheadAttention"),
        (lambda n, d: nn.Linear(n, n), "no nn.Embedding"),
        (flat, "^3.weight exists only in the base .no nn.ModuleList or nn.Sequential contains all blocks"),
        (lambda n, d: flat(n, 2), "^1.mlp.up.weight .* as no nn.ModuleList or nn.Sequential contains all blocks"),
        (stacked(lambda n, d: [SmallBlock(n)] * d), "^blocks contains a block twice"),
        (stacked(shared), r"^blocks.0.mlp.down.weight and blocks.1.mlp.down.weight are the same parameter"),
        (stacked(lambda n, d: [nn.ModuleDict({"mlp": PreNormMLP(n)}) for _ in range(d)]), "^blocks.0.mlp.w1 "),
    ],
)
def test_ambiguous_models_are_refused(build: Callable[..., nn.Module], says: str) -> None:
    assert re.search(says, refused(build))


IN_PROJ = {"*.in_proj_weight": "hidden_weight", "*.in_proj_bias": "hidden_bias"}
SWAPPED = {"*.up_proj.weight": "mlp.out", "*.down_proj.weight": "mlp.in"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hyperparameters": {"init_std": 0.1}}, "lr: missing"),
        ({"hyperparameters": {"lrr": 0.1}}, "lrr: no such key; did you mean lr"),
        ({"hyperparameters": {"lr": 0.1}, "initialise": True}, "init_std: missing"),
        ({"initialise": False}, "init_std is given, but initialise=False"),
        ({"hyperparameters": MITCHELL, "initialise": True}, "but rule complete-d-p would also scale this std"),
        ({"hyperparameters": TUNED | {"modules": {"mlp.ou": {"lr": 2.0}}}}, "did you mean mlp.out"),
        ({"ratios": leaven.Ratios(width=4)}, "width is 4, but width of model / width of base is 2"),
        ({"hyperparameters": TUNED | {"optimizer": "adam"}}, "optimizer is adam, but the groups are for AdamW"),
        ({"hyperparameters": TUNED | {"grad_clip": 0.5}}, "grad_clip.*torch.nn.utils.clip_grad_norm_"),
        (
            {"hyperparameters": TUNED | {"z_loss": 1e-4}},
            r"z_loss is 0.0001.*add nothing to the loss; set z_loss to 0",
        ),
        (
            {"hyperparameters": {"lr": 0.01, "modules": {"mlp.in": {"init_std": 2.0}}}},
            "modules.mlp.in.init_std is given, but the model keeps its initial values; leave out",
        ),
        ({"roles": {"*.no_proj.weight": "hidden_weight"}}, r"no parameter matches '\*.no_proj.weight'"),
        ({"roles": {"lm_head.weight": "readout"}}, "unknown role 'readout'; the roles are embedding"),
        (
            {"modules": {"model.norm.weight": "mlp.out"}},
            "model.norm.weight has the role final_norm, so its module cannot be mlp.out",
        ),
        ({"modules": SWAPPED}, r"up_proj.weight \(192 x 64, 96 x 32 in the base\): it ends a branch"),
        ({"base": gpt2(32, 2)}, "transformer.wte.weight exists only in the base"),
        ({"build": NANO, "head_ratio": 2.0}, "0 of 3 blocks have the scale of the attention logits"),
        (
            {"build": TorchDecoder, "roles": IN_PROJ, "modules": {"*.in_proj_weight": "attention.query_key_value"}},
            "is not an nn.Linear that the model calls",
        ),
    ],
)
def test_wrong_arguments(options: dict[str, Any], says: str) -> None:
    assert re.search(says, refused(**({"build": llama} | options)))


def test_what_refusals_suggest_is_accepted() -> None:
    leaven.parametrize(NANO(64, 3), base=NANO(32, 2), hyperparameters=TUNED, head_ratio=1.0)
    model: Any = NORM_FIRST(64, 3)
    roles = {"first_norm.weight": "embedding_norm", "first_norm.bias": "embedding_bias"}
    leaven.parametrize(model, base=NORM_FIRST(32, 2), hyperparameters=TUNED, roles=roles)
    (row,) = (row for row in model.leaven_rows if row.name == "first_norm.weight")
    assert row.module == "norm.embedding"


def test_the_rule_is_not_applied_twice() -> None:
    model: Any = llama(64, 6)
    found = leaven.parametrize(model, base=llama(32, 2), hyperparameters=TUNED)
    before = logits(model, tokens())
    for part in (model, torch.compile(model, backend="eager")):
        with pytest.raises(InputError, match="twice"):
            leaven.parametrize(part, base=llama(32, 2), hyperparameters=TUNED)
    assert torch.equal(logits(model, tokens()), before)
    assert groups(model) == found
    model.extra = nn.Linear(3, 3)
    with pytest.raises(InputError, match="extra.bias was added or removed"):
        groups(model)
    with pytest.raises(InputError, match="call leaven.parametrize"):
        groups(llama(64, 6))


def test_a_base_whose_attention_scales_are_changed_is_refused() -> None:
    """The scales of the model are derived from those of the base."""
    options: Any = {"hyperparameters": TUNED, "rule": "completep"}
    base, model = llama(32, 2, heads=4), llama(64, 2, heads=4)
    leaven.parametrize(base, base=llama(16, 2, heads=4), **options)
    with pytest.raises(InputError, match=r"changed the attention scales of this base; give a new model"):
        leaven.parametrize(model, base=base, **options)
    leaven.parametrize(model, base=llama(32, 2, heads=4), **options)


def test_given_roles_and_modules_take_precedence() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return decoder(width, depth, scalar=True, names=("gate_2",))

    model: Any = build(64, 2)
    leaven.parametrize(
        model,
        base=build(32, 2),
        hyperparameters=TUNED,
        roles={"*.gain": "hidden_norm", "*.gate_2.weight": "unembedding"},
        modules={"*.gain": "norm.gain", "*.gate_2.weight": "mlp.router"},
    )
    rows = {row.name: row for row in model.leaven_rows}
    assert rows["model.layers.1.mlp.gain"].role is Role.HIDDEN_NORM
    assert rows["model.layers.1.mlp.gate_2.weight"].module == "mlp.router"
    assert rows["model.layers.1.mlp.gate_2.weight"].init_std == pytest.approx(0.1 / 2)


def test_a_clip_that_groups_cannot_apply_is_named() -> None:
    tuned = Hyperparameters(lr=0.01, init_std=0.1, grad_clip=Clip(mode="global", limit=0.1))
    for given in (tuned, tuned.model_copy(update={"grad_clip": Clip(mode="global", limit=0.0)})):
        with warnings.catch_warnings(record=True, action="always") as seen:
            leaven.parametrize(llama(64, 2), base=llama(32, 2), hyperparameters=given)
        expected = ["grad_clip 0.1 (global) is not applied"] * (given is tuned)
        assert [str(each.message).partition(": ")[2][:37] for each in seen] == expected


def test_ratios_that_a_rule_does_not_use_are_named() -> None:
    ratios = leaven.Ratios(batch=2, tokens=8)
    with pytest.warns(UserWarning, match="ratios: mup has no rule for batch and tokens"):
        leaven.parametrize(llama(64, 2), base=llama(32, 2), hyperparameters=TUNED, rule="mup", ratios=ratios)
    with warnings.catch_warnings(action="error"):
        leaven.parametrize(llama(64, 2), base=llama(32, 2), hyperparameters=TUNED, ratios=ratios)
