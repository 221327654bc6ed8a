"""Folding the multipliers of a parametrized model: save_folded, fold, and refusals."""

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.interop.families import FAMILIES, Build, Home, gpt2, llama, logits, loss_of, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import leaven
from leaven.interop.torch_models import groups
from leaven.recipe.errors import InputError

TUNED = {"lr": 0.01, "init_std": 0.1, "weight_decay": 0.1, "residual": 0.7}
LARGER_HEADS = {
    "llama, larger heads": (partial(llama, heads=4), partial(llama, heads=4)),
    "gpt2, larger heads": (partial(gpt2, heads=4), partial(gpt2, heads=4)),
}
BUILDS = {name: (build, build) for name, build in FAMILIES.items()} | LARGER_HEADS
BUILDS["llama, tied"] = (partial(llama, tied=True),) * 2


def trained(build: Build, base: Build) -> nn.Module:
    """A parametrized model after some steps, so that biases and gains are not at 0 and 1."""
    model = build(64, 3)
    # The rule that multiplies logits and branches, and the attention logits of larger heads.
    found = leaven.parametrize(model, base=base(32, 2), hyperparameters=TUNED, rule="completep")
    optimizer = torch.optim.AdamW(found)
    for step in range(3):
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    return logits(model.eval(), tokens(9))


@pytest.mark.parametrize("name", BUILDS)
def test_from_pretrained_of_a_folded_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model = trained(*BUILDS[name])
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


@pytest.mark.parametrize("name", BUILDS)
def test_a_folded_model_gives_the_same_logits_without_hooks(name: str) -> None:
    model = trained(*BUILDS[name]).double()
    wanted = outputs(model)
    folded = leaven.fold(copy.deepcopy(model))
    torch.testing.assert_close(outputs(folded), wanted, rtol=1e-10, atol=1e-12)
    assert torch.equal(outputs(model), wanted)
    plain = BUILDS[name][0](64, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.load_state_dict(folded.state_dict())
    torch.testing.assert_close(outputs(plain), wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match="no groups yet"):
        groups(folded)
    with pytest.raises(InputError, match="no multipliers to fold"):
        leaven.fold(folded)
    leaven.parametrize(folded, base=BUILDS[name][1](32, 2), hyperparameters={"lr": 0.01})  # a new start


def test_a_neox_with_larger_heads_is_folded(tmp_path: Path) -> None:
    """The fused matrix has query, key and value of each head side by side."""
    build = FAMILIES["gpt-neox"]
    model = build(64, 3)
    leaven.parametrize(model, base=build(32, 2), hyperparameters=TUNED, head_ratio=4.0)
    wanted = outputs(model)
    leaven.save_folded(model, tmp_path)
    torch.testing.assert_close(outputs(type(model).from_pretrained(tmp_path)), wanted, rtol=1e-4, atol=1e-5)


def test_a_hand_written_model_is_folded(tmp_path: Path) -> None:
    model = trained(Home, Home)
    wanted = outputs(model)
    with pytest.raises(InputError, match=r"Home has no save_pretrained; fold a copy with leaven.fold"):
        leaven.save_folded(model, tmp_path)
    torch.testing.assert_close(outputs(leaven.fold(model)), wanted)


def test_compiled_and_pickled_models_fold_too() -> None:
    model = trained(llama, llama)
    wanted = outputs(model)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(outputs(leaven.fold(torch.compile(again))._orig_mod), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_sharded_models_fold_in_place(build: Build, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, base = build(64, 3, heads=4), build(32, 2, heads=4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        leaven.parametrize(model, base=base, hyperparameters=TUNED, rule="completep")
        wanted = outputs(model)
        with pytest.raises(InputError, match="sharded over processes; call leaven.fold"):
            leaven.save_folded(model, tmp_path)
        leaven.fold(model)
        torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-5)
    finally:
        dist.destroy_process_group()


class OnePlus(nn.Module):
    """A norm that multiplies by 1 + gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * (1 + self.weight)


class Odd(Home):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.norm = OnePlus(width)


class Headless(Home):
    """A model without final norm: the multiplier of the logits acts on the input of the readout."""

    def __init__(self, width: int, depth: int, tied: bool = False) -> None:
        super().__init__(width, depth)
        del self.norm
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def test_models_that_cannot_be_folded_are_refused() -> None:
    model = Odd(64, 2)
    leaven.parametrize(model, base=Odd(32, 2), hyperparameters={"lr": 0.01}, rule="completep")
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(InputError, match="OnePlus has the multiplier of the logits, and its output is not prop"):
        leaven.fold(model)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
    untied = Headless(64, 2)
    leaven.parametrize(untied, base=Headless(32, 2), hyperparameters=TUNED, rule="completep")
    wanted = outputs(untied)
    torch.testing.assert_close(outputs(leaven.fold(untied)), wanted)
    tied = Headless(64, 2, tied=True)
    leaven.parametrize(tied, base=Headless(32, 2, tied=True), hyperparameters=TUNED, rule="completep")
    with pytest.raises(InputError, match=r"embedding.weight is shared with another module.*untie"):
        leaven.fold(tied)


# init_std -----------------------------------------------------------------------------------------------------------


def test_initial_values_are_drawn_only_with_init_std() -> None:
    model, given = llama(64, 3), llama(64, 3)
    before = copy.deepcopy(given.state_dict())
    leaven.parametrize(given, base=llama(32, 2), hyperparameters={"lr": 0.01})
    assert all(torch.equal(before[key], value) for key, value in dict(given.named_parameters()).items())
    leaven.parametrize(model, base=llama(32, 2), hyperparameters=TUNED, seed=3)
    found = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    assert found.std().item() == pytest.approx(0.1 / 2**0.5, rel=0.03)  # the rule's: width x 2
    again = llama(64, 3)
    leaven.parametrize(again, base=llama(32, 2), hyperparameters=TUNED, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_init_std_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(InputError, match="init_std is given, but initialise=False") as refused:
        leaven.parametrize(llama(64, 2), base=llama(32, 2), hyperparameters=TUNED, initialise=False)
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="init_std: missing"):
        leaven.parametrize(llama(64, 2), base=llama(32, 2), hyperparameters={"lr": 0.01}, initialise=True)
    # A recipe's hyperparameters always have an init; False keeps trained weights.
    model = llama(64, 2)
    before = copy.deepcopy(dict(model.named_parameters()))
    whole = leaven.Hyperparameters(lr=0.01, init_std=0.1)
    leaven.parametrize(model, base=llama(32, 2), hyperparameters=whole, initialise=False)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
