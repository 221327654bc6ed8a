"""Test `make prove-exports` with a training loop written here in place of the trainers of the targets."""

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.prove_exports import (
    FOLDED,
    ISOLATED,
    LATE_DECAY,
    NO_CLIP,
    QWEN3,
    TRANSFERRED,
    TWO_LATE,
    ProofCase,
    TargetDifference,
    apart,
    batches,
    prove,
    renewed,
    small_recipe,
)
from transformers import AutoModelForCausalLM

from benchmarks import prove_exports
from leaven.data.tokens import TokenSet, prepare
from leaven.recipe.recipe import Recipe

CASE = ProofCase("transformers", "transferred", QWEN3 | TRANSFERRED, (FOLDED,))
TEN_STEPS = {"data.tokens": 5_120, "schedule.warmup_tokens": 1_024}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return small_recipe(tmp_path_factory.mktemp("text")).replace(TEN_STEPS)


@pytest.fixture(scope="module")
def tokens(recipe: Recipe, cache: Path) -> TokenSet:
    return prepare(recipe.data, recipe.model.vocab_size)


def trained(lr_factor: float = 1.0) -> Callable[[ProofCase, Path], list[float]]:
    """Return a function that trains the exported files of transformers, with the lr times a factor."""

    def losses(_: ProofCase, folder: Path) -> list[float]:
        spec = importlib.util.spec_from_file_location("prepare", folder / "export" / "prepare.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = AutoModelForCausalLM.from_pretrained(folder / "weights")
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = module.prepare(model, folder / "export" / "parameters.json")
        model.load_state_dict(weights)
        for group in optimizer.param_groups:
            group["lr"] *= lr_factor
        said = json.loads((folder / "export" / "training_args.json").read_text())
        schedule = module.schedule(optimizer, folder / "export" / "parameters.json")
        found = []
        for rows in torch.split(batches(folder), said["per_device_train_batch_size"] * 2):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), said["max_grad_norm"] or math.inf)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    return losses


@pytest.mark.long
def test_an_export_is_proved_once_its_difference_is_taken_into_account(recipe: Recipe, tokens: TokenSet) -> None:
    proof = prove(CASE, recipe, tokens, trained())
    assert proof.left < 3e-6
    assert proof.apart > 1e-4
    assert proof.effects["clipping of folded weights"] == pytest.approx(proof.apart, rel=0.01)
    assert proof.row.startswith(f"| transformers {transformers.__version__}")
    assert f"clipping of folded weights: {proof.apart:.1e}" in proof.row


@pytest.mark.long
def test_folded_multipliers_train_as_leavens_multipliers(recipe: Recipe, tokens: TokenSet) -> None:
    """Without clipping nothing differs, so the reference has the multipliers that the export folds."""
    proof = prove(replace(CASE, changes=CASE.changes | NO_CLIP, differences=()), recipe, tokens, trained())
    assert proof.left == proof.apart < 3e-6
    assert "| nothing |" in proof.row


@pytest.mark.long
def test_a_wrong_export_is_found(recipe: Recipe, tokens: TokenSet) -> None:
    proof = prove(CASE, recipe, tokens, trained(lr_factor=1.01))
    assert proof.left > 10 * prove_exports.ROUNDING


def test_a_loss_that_a_case_does_not_list_is_an_error(recipe: Recipe, tokens: TokenSet) -> None:
    with pytest.raises(ValueError, match=r"the export loses hyperparameters\.grad_clip.* which the case"):
        prove(replace(CASE, differences=()), recipe, tokens, trained())


@pytest.mark.parametrize(
    ("target", "differences", "error"),
    [
        ("transformers", (FOLDED,), "the case lists clipping of folded weights, which the export does not lose"),
        ("transformers", (LATE_DECAY,), "the case lists decay one step late, which no note of the export says"),
        ("torchtitan", (), "the export says '.* one step late', which the case does not list"),
        ("torchtitan", (TWO_LATE,), "the export says '.* one step late', which the case does not list"),
    ],
)
def test_a_difference_that_an_export_does_not_declare_is_an_error(
    recipe: Recipe, tokens: TokenSet, target: str, differences: tuple[TargetDifference, ...], error: str
) -> None:
    case = ProofCase(target, "Llama", ISOLATED if target == "torchtitan" else {}, differences)
    with pytest.raises(ValueError, match=f"^{target}, Llama: {error}$"):
        prove(case, recipe, tokens, trained())


def test_losses_that_are_not_finite_are_not_proved() -> None:
    for ours, theirs in (([1.0, 2.0], [math.nan, 2.0]), ([1.0, math.inf], [1.0, math.inf])):
        assert apart(ours, theirs) == math.inf
    assert apart([1.0, 2.0], [1.5, 2.0]) == 0.5


def test_rows_of_targets_that_were_not_trained_stay() -> None:
    rows = {"litgpt": ["| litgpt 1 | a |"], "deepspeed": ["| DeepSpeed 1 | b |"]}
    page = renewed(f"before\n{prove_exports.BEGIN}{prove_exports.END}after\n", rows, "below 1")
    assert "| DeepSpeed 1 | b |\n| litgpt 1 | a |\n" in page
    again = renewed(page, {"litgpt": ["| litgpt 2 | c |"]}, "below 2")
    assert again == page.replace("| litgpt 1 | a |", "| litgpt 2 | c |").replace("below 1", "below 2")
