"""What cannot be classified is refused by name, in one line that says what to do, and the model is left as it was."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.families import VOCABULARY, gpt2, llama, logits, tokens
from torch import nn
from transformers import Gemma2Config, MixtralConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

import leaven
from leaven.interop.torch_models import groups
from leaven.recipe.errors import InputError
from leaven.recipe.shape import Role

TUNED = {"lr": 0.01, "init_std": 0.1}


def decoder(
    width: int, depth: int, *, scalar: bool = False, neck: bool = False, names: tuple[str, ...] = ()
) -> nn.Module:
    """A Llama with something odd about it."""
    model: Any = llama(width, depth)
    for layer in model.model.layers:
        if scalar:
            layer.mlp.gain = nn.Parameter(torch.ones(width))
        for name in names:
            layer.mlp.register_module(name, nn.Linear(width, 16, bias=False))
    if neck:
        model.neck = nn.Linear(width, width)
    return model


def gemma2(width: int, depth: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    return Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **sizes)
    )


def mixtral(width: int, depth: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth, "num_local_experts": 4}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, **sizes)
    )


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


def refused(build: Callable[..., nn.Module], *, base: nn.Module | None = None, **options: Any) -> str:
    model = build(64, 3)
    with pytest.raises(InputError) as refusal:
        leaven.parametrize(model, base=base or build(32, 2), **{"hyperparameters": TUNED, **options})
    assert "\n" not in str(refusal.value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(model, "leaven_rows")
    return str(refusal.value)


def test_a_raw_parameter_is_named_with_its_shapes_and_what_to_say() -> None:
    text = refused(lambda width, depth: decoder(width, depth, scalar=True))
    assert text == (
        "model.layers.0.mlp.gain (64, 32 in the base): a parameter of LlamaMLP is no embedding, matrix, gain or "
        "bias; say what it is, as in roles={'model.layers.0.mlp.gain': 'hidden_weight'}"
    )


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda n, d: decoder(n, d, names=("gate_2",)), "mlp.gate_2.weight .* its name does not say what it is"),
        (lambda n, d: decoder(n, d, names=("gate",)), "mlp.gate.weight .* not the fan in of .*down_proj.*: a router"),
        (lambda n, d: decoder(n, d, names=("out",)), "one matrix that ends it and has .*down_proj.*out.weight"),
        (lambda n, d: decoder(n, d, neck=True), "^neck.weight .* outside the blocks"),
        (gemma2, "post_feedforward_layernorm.weight .* pre-norm"),
        (mixtral, r"mlp\.(gate|experts)\S* \("),
        (headless, "nothing makes the logits.*embed_tokens.*'tied_embedding'"),
        (TorchDecoder, "in_proj_weight .*MultiheadAttention"),
        (lambda n, d: nn.Linear(n, n), "no nn.Embedding"),
    ],
)
def test_what_is_in_doubt_is_refused_by_name(build: Callable[..., nn.Module], says: str) -> None:
    assert re.search(says, refused(build))


def test_a_branch_whose_end_is_never_called_is_refused() -> None:
    roles = {"*.in_proj_weight": "hidden_weight", "*.in_proj_bias": "hidden_bias"}
    modules = {"*.in_proj_weight": "attention.query_key_value"}
    assert "never called as a module" in refused(TorchDecoder, roles=roles, modules=modules)


def test_what_ends_a_branch_writes_to_the_residual_stream() -> None:
    swapped = {"*.up_proj.weight": "mlp.out", "*.down_proj.weight": "mlp.in"}
    assert "up_proj.weight (192 x 64, 96 x 32 in the base): it ends a branch" in refused(llama, modules=swapped)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "mupp"}, "rule"),
        ({"alpha": 0.2}, "alpha"),
        ({"hyperparameters": {"init_std": 0.1}}, "lr: missing"),
        ({"hyperparameters": {"lr": 0.1}, "initialise": True}, "init_std: missing"),
        ({"hyperparameters": {"lr": 0.1, "weight_decy": 0.1}}, "weight_decy: no such key"),
        ({"hyperparameters": TUNED | {"modules": {"mlp.ou": {"lr": 2.0}}}}, "did you mean mlp.out"),
        ({"hyperparameters": TUNED | {"modules": {"mlp.in": {"residual": 2.0}}}}, "ends no branch"),
        ({"ratios": leaven.Ratios(width=4)}, "width is 4, but the two models say 2"),
        ({"ratios": leaven.Ratios(tokens=0)}, "tokens is 0"),
        ({"roles": {"*.no_proj.weight": "hidden_weight"}}, r"no parameter is named '\*.no_proj.weight'"),
        ({"roles": {"lm_head.weight": "readout"}}, "no role 'readout'; there are embedding"),
        ({"modules": {"model.norm.weight": "mlp.out"}}, "model.norm.weight is a final_norm"),
        ({"base": gpt2(32, 2)}, "transformer.wte.weight is in the base and not in the model"),
        ({"base": llama(32, 2, tied=True)}, "lm_head.weight is in the model and not in the base.*tied"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], says: str) -> None:
    assert re.search(says, refused(llama, **options))


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
    with pytest.raises(InputError, match="extra.bias came or went"):
        groups(model)
    with pytest.raises(InputError, match="call leaven.parametrize"):
        groups(llama(64, 6))


def test_what_is_said_goes_before_what_is_found() -> None:
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
