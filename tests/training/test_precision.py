import math

import pytest
import torch

from leaven.data.tokens import TokenSet
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.loop import Diverged
from leaven.training.optimizer import GROW_AFTER, LossScale


def compute(recipe: Recipe, dtype: str) -> Recipe:
    return recipe.replace({"precision.compute": dtype})


def test_the_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale.build(torch.device("cpu"))
    first = float(scale.value)
    scale.update(torch.tensor(False))
    assert float(scale.value) == first / 2
    for _ in range(GROW_AFTER):
        assert float(scale.value) == first / 2
        scale.update(torch.tensor(True))
    assert float(scale.value) == first
    for _ in range(40):
        scale.update(torch.tensor(False))
    assert float(scale.value) == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_follows_fp32(dtype: str, tiny: Recipe, tokens: TokenSet) -> None:
    runs = {}
    for name in ("fp32", dtype):
        training = Training(compute(tiny, name), tokens)
        runs[name] = [training.step().loss for _ in range(15)]
        assert all(parameter.dtype == torch.float32 for parameter in training.model.parameters())
        assert all(state["exp_avg"].dtype == torch.float32 for state in training.optimizer.adam.state.values())
    assert runs[dtype] != runs["fp32"]
    assert max(abs(a - b) for a, b in zip(runs[dtype], runs["fp32"], strict=True)) < 0.03


def test_an_overflow_skips_the_step_and_halves_the_scale(tiny: Recipe, tokens: TokenSet) -> None:
    training = Training(compute(tiny, "fp16"), tokens)
    training.step()
    training.loss_scale.value.fill_(2.0**40)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    step = training.step()
    assert step.skipped
    assert not step.diverged
    assert math.isfinite(step.loss)
    assert (step.loss_scale, float(training.loss_scale.value)) == (2.0**40, 2.0**39)
    assert step.update_norm == 0
    assert all(torch.equal(before[name], p) for name, p in training.model.named_parameters())
    training.loss_scale.value.fill_(2.0**10)
    assert training.step().update_norm > 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_nan_loss_does_not_change_the_parameters(dtype: str, tiny: Recipe, tokens: TokenSet) -> None:
    training = Training(compute(tiny, dtype), tokens)
    training.step()
    with torch.no_grad():
        training.model.embedding.weight[:, 0] = torch.nan
    before = training.model.layers[0].mlp.out.weight.detach().clone()
    with pytest.raises(Diverged, match="loss nan"):
        training.step()
    assert torch.equal(before, training.model.layers[0].mlp.out.weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["global", "per-module", "running"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_is_issued_without_waiting_for_the_device(
    dtype: str, mode: str, tiny: Recipe, tokens: TokenSet
) -> None:
    changes = {"hyperparameters.grad_clip": {"limit": 1.0, "mode": mode}, "data.documents": "isolated"}
    changes |= {"batch.micro_batch": 4, "model.dropout": 0.1}
    training = Training(compute(tiny.replace(changes), dtype), tokens)
    for _ in range(2):
        training.issue()()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ahead = training.issue()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ahead().step == 3


def test_norms_of_the_modules_add_up(tiny: Recipe, tokens: TokenSet) -> None:
    training = Training(tiny, tokens)
    step = training.step()
    assert set(step.modules) == set(tiny.model.modules)
    updates, sizes = zip(*step.modules.values(), strict=True)
    assert math.hypot(*updates) == pytest.approx(step.update_norm)
    whole = sum(float(p.detach().pow(2).sum()) for p in training.model.parameters())
    assert math.hypot(*sizes) ** 2 == pytest.approx(whole, rel=1e-5)
    query = [p for name, p in training.model.named_parameters() if name.endswith("attention.query.weight")]
    assert step.modules["attention.query"][1] == pytest.approx(float(torch.stack(query).detach().norm()), rel=1e-5)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_losses(tiny: Recipe, tokens: TokenSet) -> None:
    shallow = tiny.replace({"model.n_layers": 1})  # the compiler takes seconds a block
    plain = Training(shallow, tokens)
    compiled = Training(shallow.replace({"layout.compile": True}), tokens)
    a, b = ([training.step().loss for _ in range(10)] for training in (plain, compiled))
    assert a == pytest.approx(b, abs=1e-4)
    assert plain.evaluate() == pytest.approx(compiled.evaluate(), abs=1e-4)
    assert list(plain.checkpoint().model) == list(compiled.checkpoint().model)


@pytest.mark.slow
def test_models_with_other_multipliers_use_the_compiled_code(tiny: Recipe, tokens: TokenSet) -> None:
    def train(residual: float) -> None:
        training = Training(tiny.replace({"layout.compile": True, "hyperparameters.residual": residual}), tokens)
        training.step()
        training.evaluate()

    train(1.0)
    train(0.9)  # from a second value on, the compiled code takes the multiplier as an argument
    torch.compiler.set_stance("fail_on_recompile")
    try:
        train(0.8)
        train(0.7)
    finally:
        torch.compiler.set_stance("default")
