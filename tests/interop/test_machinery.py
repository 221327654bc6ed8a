"""Groups and results are the same under torch.compile, on the meta device and sharded by FSDP2."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.families import Home, gpt2, llama, logits, sharded, stepped, tokens, values
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import leaven
from leaven.errors import InputError
from leaven.interop.parametrize import groups

KEPT = {"lr": 0.01, "weight_decay": 0.1}  # no init: the model keeps its values
TUNED = KEPT | {"init_std": 0.1}


@pytest.mark.long
@pytest.mark.parametrize("how", ["before, and run", "after", "in place", "blocks"])
def test_a_compiled_model_gets_its_multipliers(how: str) -> None:
    """A graph that was compiled before does not contain the hooks."""
    model: Any = Home(64, 4).eval()
    expected, unscaled = copy.deepcopy(model), logits(model, tokens())
    run: Any = torch.compile(model, backend="eager") if how == "before, and run" else model
    if how == "in place":
        model.compile(backend="eager")
    if how == "blocks":
        for layer in range(4):
            model.blocks[layer] = torch.compile(model.blocks[layer], backend="eager")
    if how != "after":
        torch.testing.assert_close(logits(run, tokens()), unscaled)
    found = leaven.parametrize(run, base=Home(32, 2), hyperparameters=TUNED)
    assert values(found) == values(leaven.parametrize(expected, base=Home(32, 2), hyperparameters=TUNED))
    if how == "after":
        run = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(run, tokens()), logits(expected, tokens()))
    assert not torch.allclose(logits(run, tokens()), unscaled)


def test_an_interrupted_call_leaves_nothing_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = [llama(64, 4, heads=4) for _ in range(2)]
    for model in models:
        model.model.layers[1].self_attn.scaling *= 3  # so the new scales are relative to the current ones
    options: Any = {"base": llama(32, 2, heads=4), "hyperparameters": TUNED, "rule": "completep"}
    wanted = leaven.parametrize(models[0], **options)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.Module, "register_state_dict_post_hook", interrupted)  # after hooks and attention scales
    with pytest.raises(KeyboardInterrupt):
        leaven.parametrize(models[1], **options)
    monkeypatch.undo()
    assert values(leaven.parametrize(models[1], **options)) == values(wanted)
    assert torch.equal(logits(models[1], tokens()), logits(models[0], tokens()))


def test_blocks_compiled_or_checkpointed_one_by_one_keep_their_names() -> None:
    model: Any = llama(64, 4)
    layers = model.model.layers
    layers[0], layers[1] = torch.compile(layers[0], backend="eager"), checkpoint_wrapper(layers[1])
    found = leaven.parametrize(model, base=llama(32, 2), hyperparameters=TUNED)
    assert values(found) == values(leaven.parametrize(llama(64, 4), base=llama(32, 2), hyperparameters=TUNED))


def test_on_the_meta_device_and_after_it() -> None:
    with torch.device("meta"):
        model: Any = llama(64, 4)
        base = llama(32, 2)
    found = leaven.parametrize(model, base=base, hyperparameters=KEPT)
    plain = llama(64, 4)
    assert values(found) == values(leaven.parametrize(plain, base=base, hyperparameters=KEPT))
    assert all(parameter.is_meta for group in found for parameter in group["params"])
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    model.model.rotary_emb = plain.model.rotary_emb
    torch.testing.assert_close(logits(model, tokens()), logits(plain, tokens()))
    again = {id(parameter) for group in groups(model) for parameter in group["params"]}
    assert again == set(map(id, model.parameters()))


def test_initialising_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = llama(64, 4)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta device.*to_empty"):
        leaven.parametrize(model, base=llama(32, 2), hyperparameters=TUNED, initialise=True)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.long
@pytest.mark.parametrize("build", [llama, gpt2])
def test_sharded_by_fsdp2(build: Any, one_rank: Any) -> None:
    options = {"base": build(32, 2), "hyperparameters": TUNED, "initialise": True}
    plain, before, after = (build(64, 4) for _ in range(3))
    reference = leaven.parametrize(plain, **options)
    wanted, expected = values(reference), stepped(plain, reference)
    # Hooks first, then shards: the parameters are new, so the groups are built again.
    leaven.parametrize(before, **options)
    sharded(before, one_rank)
    # Shards first: their initial values are drawn in place.
    found = leaven.parametrize(sharded(after, one_rank), **options)
    for model, its in ((before, groups(before)), (after, found)):
        assert values(its) == wanted
        assert all(isinstance(parameter, DTensor) for group in its for parameter in group["params"])
        for name, parameter in stepped(model, its).items():
            torch.testing.assert_close(parameter, expected[name], msg=name)


def test_muon_is_refused_on_shards(one_rank: Any) -> None:
    with pytest.raises(InputError, match="optimizer is muon, which needs whole matrices"):
        leaven.parametrize(
            sharded(llama(64, 2), one_rank), base=llama(32, 2), hyperparameters=TUNED | {"optimizer": "muon"}
        )


@pytest.mark.slow
def test_sharded_over_two_ranks() -> None:
    """Real shards: by FSDP2, from the meta device, and by tensor."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("on_ranks.py"))],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as the whole") == 4
