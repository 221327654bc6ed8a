"""Folding the multipliers of a parametrized model: save_folded, fold, and refusals."""

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.families import FAMILIES as ANOTHER
from tests.interop.families import FAMILIES, MIXTURES, Build, Home, gpt2, gpt_neox, llama, logits, loss_of, tokens
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import leaven
from leaven.errors import InputError
from leaven.interop.parametrize import groups

TUNED = {"lr": 0.01, "init_std": 0.1, "weight_decay": 0.1, "residual": 0.7}
BUILDS: dict[str, Build] = FAMILIES | {
    "llama, larger heads": partial(llama, heads=4),
    "gpt2, larger heads": partial(gpt2, heads=4),
    "gpt-neox, larger heads": partial(gpt_neox, heads=4),
    "llama, tied": partial(llama, tied=True),
    "olmo 2": ANOTHER["olmo2"].model,
    "gemma 3": ANOTHER["gemma3"].model,
    "mixtral": MIXTURES["mixtral"],
    "deepseek-v3": MIXTURES["deepseek-v3"],
}


def trained(build: Build) -> nn.Module:
    """A parametrized model after some steps, so that biases and gains are not at 0 and 1."""
    model = build(64, 3)
    # The rule that multiplies logits and branches, and the attention logits of larger heads.
    found = leaven.parametrize(model, base=build(32, 2), hyperparameters=TUNED, rule="completep")
    optimizer = torch.optim.AdamW(found)
    for step in range(2):
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    return logits(model.eval(), tokens(9))


@pytest.mark.long
@pytest.mark.parametrize("name", BUILDS)
def test_a_folded_model_gives_the_same_logits_without_hooks_and_from_its_file(name: str, tmp_path: Path) -> None:
    build = BUILDS[name]
    model = trained(build)
    before = copy.deepcopy(dict(model.named_parameters()))
    wanted = outputs(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this state dict lacks")
        leaven.save_folded(model, tmp_path / "folded")
    again = outputs(type(model).from_pretrained(tmp_path / "folded"))
    torch.testing.assert_close(again, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
    assert torch.equal(outputs(model), wanted)
    # Without folding, the saved model computes something else, and a warning says so.
    with pytest.warns(UserWarning, match=r"lacks the \d+ multipliers .* leaven.save_folded"):
        model.save_pretrained(tmp_path / "plain")
    assert (outputs(type(model).from_pretrained(tmp_path / "plain")) - wanted).abs().max() > 0.02 * wanted.abs().max()

    model.double()
    wanted = outputs(model)
    folded = leaven.fold(copy.deepcopy(model))
    # The norms of OLMo and Gemma compute in fp32 in any case.
    close = {"rtol": 1e-10, "atol": 1e-12} if name not in {"olmo 2", "gemma 3"} else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outputs(folded), wanted, **close)
    assert torch.equal(outputs(model), wanted)
    plain = build(64, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.load_state_dict(folded.state_dict())
    torch.testing.assert_close(outputs(plain), wanted, **close)
    with pytest.raises(InputError, match="no groups yet"):
        groups(folded)
    with pytest.raises(InputError, match="no multipliers to fold"):
        leaven.fold(folded)


def test_a_model_in_the_folder_is_replaced_with_a_warning(tmp_path: Path, one_rank: DeviceMesh) -> None:
    model = trained(llama)
    (tmp_path / "tokenizer.json").write_text("{}")  # save_pretrained of a tokenizer may come first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leaven.save_folded(model, tmp_path)
    other = trained(partial(llama, heads=4))
    with pytest.warns(
        UserWarning, match="had a model, which was replaced; pass overwrite=True to replace it without"
    ):
        leaven.save_folded(other, tmp_path)
    with pytest.raises(InputError, match=r"config.json exists already; give another name"):
        leaven.save_folded(other, tmp_path / "config.json")
    torch.testing.assert_close(outputs(type(other).from_pretrained(tmp_path)), outputs(other), rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leaven.save_folded(other, tmp_path, overwrite=True)


def test_a_hand_written_model_is_folded(tmp_path: Path) -> None:
    model = trained(Home)
    wanted = outputs(model)
    with pytest.raises(InputError, match=r"Home has no save_pretrained; call leaven.fold on a copy"):
        leaven.save_folded(model, tmp_path)
    torch.testing.assert_close(outputs(leaven.fold(model)), wanted)


def test_a_model_whose_folding_was_interrupted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, left = trained(llama), [True, False]
    head = torch.compile(model.get_submodule("lm_head"), backend="eager")
    head(torch.zeros(1, 64))

    def mul(self: torch.Tensor, factor: float) -> torch.Tensor:
        if not left.pop(0):
            raise KeyboardInterrupt
        return torch.Tensor.mul_(self, factor)

    monkeypatch.setattr(nn.Parameter, "mul_", mul, raising=False)
    with pytest.raises(KeyboardInterrupt):
        leaven.fold(model)
    monkeypatch.undo()
    for use in (outputs, leaven.fold, partial(leaven.save_folded, folder=tmp_path / "folded"), nn.Module.state_dict):
        with pytest.raises(InputError, match="interrupted on this LlamaForCausalLM.*load the weights again"):
            use(model)
    inside = model.get_submodule("model")
    for call in (partial(head, torch.zeros(1, 64)), partial(inside, tokens(9)), inside.state_dict):
        with pytest.raises(InputError, match="interrupted on this L.*load the weights again"):
            call()
    assert not any(tmp_path.iterdir())


def test_compiled_and_pickled_models_fold_too() -> None:
    model = trained(llama)
    wanted = outputs(model)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(
        outputs(leaven.fold(torch.compile(again, backend="eager"))._orig_mod), wanted, rtol=1e-4, atol=1e-5
    )


def test_blocks_compiled_or_checkpointed_one_by_one_are_saved_under_their_own_names(tmp_path: Path) -> None:
    model = trained(llama)
    wanted = outputs(model)
    layers: Any = model.get_submodule("model.layers")
    layers[0], layers[1] = torch.compile(layers[0], backend="eager"), checkpoint_wrapper(layers[1])
    leaven.save_folded(model, tmp_path)
    torch.testing.assert_close(outputs(type(model).from_pretrained(tmp_path)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_sharded_models_fold_in_place(build: Build, one_rank: DeviceMesh, tmp_path: Path) -> None:
    model = fully_shard(build(64, 3, heads=4), mesh=one_rank)
    leaven.parametrize(model, base=build(32, 2, heads=4), hyperparameters=TUNED, rule="completep")
    wanted = outputs(model)
    with pytest.raises(InputError, match="sharded over processes; call leaven.fold"):
        leaven.save_folded(model, tmp_path)
    leaven.fold(model)
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-5)


def test_a_model_that_has_lost_multipliers_is_refused(tmp_path: Path) -> None:
    """As when nn.Linear modules are replaced by those of another class, which have no hooks."""
    model = trained(llama)
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        replacement = nn.Linear(192, 64, bias=False)
        replacement.weight = layer.mlp.down_proj.weight
        layer.mlp.down_proj = replacement
    for use in (leaven.fold, partial(leaven.save_folded, folder=tmp_path / "folded"), groups):
        with pytest.raises(InputError, match=r"^3 of the multipliers of this LlamaForCausalLM are gone, because"):
            use(model)


class OnePlus(nn.Module):
    """A norm that multiplies by 1 + gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * (1 + self.weight)


class Exponential(OnePlus):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * self.weight.exp()


class Odd(Home):
    def __init__(self, width: int, depth: int, norm: type[OnePlus] = Exponential) -> None:
        super().__init__(width, depth)
        self.norm = norm(width)


class Headless(Home):
    """A model without final norm: the multiplier of the logits acts on the input of the readout."""

    def __init__(self, width: int, depth: int, tied: bool = False) -> None:
        super().__init__(width, depth)
        del self.norm
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class NormLinear(nn.Linear):
    """A matrix whose rows have the norm 1, whatever their weights are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight, dim=-1), self.bias)


class Gained(nn.Linear):
    """A matrix of another class whose output is still proportional to its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape  # as in many models, it takes sequences only
        return 2 * super().forward(x.view(batch, length, -1))


class Asking(nn.Linear):
    """A matrix that takes another argument, so that it cannot be tried on one tensor."""

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return scale * super().forward(x)


def with_linear(kind: type[nn.Linear], *paths: str) -> Build:
    """Return the build of a llama with larger heads than its base, whose matrices at ``paths`` are of a ``kind``."""

    def build(width: int, depth: int) -> nn.Module:
        model = llama(width, depth, heads=4)
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and path.endswith(paths):
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, kind(module.in_features, module.out_features, bias=False))
        return model

    return build


@pytest.mark.parametrize("path", ["o_proj", "down_proj", "q_proj"])
def test_a_multiplier_is_folded_only_into_a_linear_module_that_is_proportional_to_its_weight(path: str) -> None:
    model = trained(with_linear(NormLinear, path))
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(InputError, match="folded into a NormLinear, whose output is not known to be proportional"):
        leaven.fold(model)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
    other = trained(with_linear(Gained, path))
    wanted = outputs(other)
    torch.testing.assert_close(outputs(leaven.fold(other)), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


def test_a_linear_module_that_cannot_be_tried_is_not_folded_into() -> None:
    model = trained(with_linear(NormLinear, "o_proj"))
    for module in model.modules():
        if isinstance(module, NormLinear):
            module.__class__ = Asking
    with pytest.raises(InputError, match="folded into a Asking, whose output is not known to be proportional"):
        leaven.fold(model)


def test_a_multiplier_on_the_input_of_a_normalised_unembedding_is_not_folded() -> None:
    def build(width: int, depth: int) -> Headless:
        model = Headless(width, depth)
        model.head = NormLinear(width, model.head.out_features)
        return model

    model = build(64, 2)
    leaven.parametrize(model, base=build(32, 2), hyperparameters=TUNED, rule="completep")
    with pytest.raises(InputError, match="folded into a NormLinear, whose output is not known to be proportional"):
        leaven.fold(model)


def test_models_that_cannot_be_folded_are_refused() -> None:
    model = Odd(64, 2)
    leaven.parametrize(model, base=Odd(32, 2), hyperparameters={"lr": 0.01}, rule="completep")
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(InputError, match="folded into a Exponential, whose output is not known to be prop"):
        leaven.fold(model)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
    one_plus = Odd(64, 2, OnePlus)
    leaven.parametrize(one_plus, base=Odd(32, 2, OnePlus), hyperparameters=TUNED, rule="completep")
    assert not one_plus.norm.weight.any()  # where its gain is neutral
    wanted = outputs(one_plus)
    torch.testing.assert_close(outputs(leaven.fold(one_plus)), wanted)
    untied = Headless(64, 2)
    leaven.parametrize(untied, base=Headless(32, 2), hyperparameters=TUNED, rule="completep")
    wanted = outputs(untied)
    torch.testing.assert_close(outputs(leaven.fold(untied)), wanted)
    tied = Headless(64, 2, tied=True)
    leaven.parametrize(tied, base=Headless(32, 2, tied=True), hyperparameters=TUNED, rule="completep")
    with pytest.raises(InputError, match=r"embedding.weight is shared with another module.*untie"):
        leaven.fold(tied)
