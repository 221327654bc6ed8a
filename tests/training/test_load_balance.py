"""Experts in training: the gradients of the routers' losses, the biases, and what is logged of the load."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leaven
from leaven.data.tokens import TokenSet
from leaven.model.experts import MixtureOfExperts
from leaven.model.initialisation import build_model
from leaven.model.loss import IGNORED
from leaven.model.transformer import Stage, Transformer
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.training.engine import Training
from leaven.training.spikes import Limits
from leaven.training.trainer import train

EXPERTS: dict[str, Any] = {"number": 4, "active": 2, "d_expert": 16, "shared": 1}
BIAS: dict[str, Any] = EXPERTS | {"router": "sigmoid", "balance": "bias", "bias_step": 0.05}


def with_experts(tiny: Recipe, experts: dict[str, Any], **more: Any) -> Recipe:
    return tiny.replace({"model.experts": experts, "batch.micro_batch": 4} | more)


def watch_routers(model: nn.Module) -> list[Tensor]:
    """Return a list to which each forward pass adds the logits of each router, (B, T, E)."""
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.router.register_forward_hook(lambda _module, _args, logits: seen.append(logits))
    return seen


def mean_balance_loss(logits: Tensor, router: str, active: int) -> Tensor:
    """Return the balance loss of each sequence (B,), computed with loops from equations 17 to 20 of DeepSeek-V3."""
    losses = []
    for logits_TE in logits:
        length, number = logits_TE.shape
        scores = logits_TE.softmax(-1) if router == "softmax" else logits_TE.sigmoid()
        loss = torch.zeros((), dtype=logits.dtype)
        for expert in range(number):
            chosen = sum(int(expert in token.topk(active).indices.tolist()) for token in scores)
            share = number / (active * length) * chosen
            loss = loss + share * (scores[:, expert] / scores.sum(-1)).mean()
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize(("router", "active", "balance"), [("softmax", 2, "loss"), ("sigmoid", 3, "both")])
def test_gradients_are_those_of_a_loss_that_is_written_out(
    tiny: Recipe, router: str, active: int, balance: str
) -> None:
    """The written-out loss is the cross-entropy plus the balance loss and the z-loss of every router. Its gradients
    come from plain autograd in float64."""
    experts = EXPERTS | {"router": router, "active": active, "balance": balance}
    experts |= {"balance_loss": 0.3, "router_z_loss": 0.2}
    # At twice the depth of the base, the rule halves the branches and the losses of the routers.
    base = {"width": 16, "depth": 1, "batch_tokens": 256, "tokens": 10_240, "d_head": 8}
    recipe = with_experts(tiny, experts, **{"scaling.base": base})
    table = parameter_table(recipe)
    assert table.router_losses == (0.15, 0.1)
    stage = Stage(build_model(recipe.model, table, seed=0).double(), 0, 2, torch.float64)
    plain: Transformer = copy.deepcopy(stage.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 320, (3, 32), generator=generator)
    targets = torch.randint(0, 320, (3, 32), generator=generator)
    targets[1, :10] = IGNORED
    targets[2] = IGNORED  # a sequence that only fills the micro-batch: the losses of its routers do not count
    stage.factor = 0.01
    stage(tokens, targets).sum().backward()

    seen = watch_routers(plain)
    loss = 0.01 * nn.functional.cross_entropy(
        plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    counted = (targets != IGNORED).sum(1)
    for logits in seen:
        loss = loss + 0.01 * 0.15 * mean_balance_loss(logits, router, active) @ counted.double()
        loss = loss + 0.01 * 0.1 * logits.logsumexp(-1).square().mean(1) @ counted.double()
    loss.backward()
    assert len(seen) == 2
    for (name, ours), other in zip(stage.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_reports_the_load_and_moves_the_biases_against_it(
    tiny: Recipe, tokens: TokenSet, recompute: str
) -> None:
    recipe = with_experts(tiny, BIAS, **{"layout.recompute": recompute})
    training = Training(recipe, tokens)
    biases = training.load_balance.bias_LE
    before = torch.zeros(2, 4)
    for number in range(3):
        seen = watch_routers(training.model)
        windows = torch.from_numpy(training.stream.batch(8 * number, 8))
        with torch.no_grad():
            training.model(windows[:, :-1])
        loads = torch.stack(
            [
                torch.bincount((logits.sigmoid() + bias).topk(2).indices.flatten(), minlength=4)
                for logits, bias in zip(seen, before, strict=True)
            ]
        )
        training.evaluate()  # adds nothing to the tally
        step = training.step()
        assert step.max_load == pytest.approx(float((loads.amax(1) / loads.double().mean(1)).max()))
        assert 0.9 < step.balance_loss < 1.5
        expected = before + 0.05 * (loads.double().mean(1, keepdim=True) - loads).sign()
        torch.testing.assert_close(biases, expected.float())
        before = biases.clone()
    assert before.abs().min() < 0.1  # not all steps moved each bias the same way


def test_the_balance_loss_that_is_logged_is_the_mean_over_sequences_and_layers_with_experts(
    tiny: Recipe, tokens: TokenSet
) -> None:
    """The model has a layer without experts. The last micro-batch has a sequence that only fills it."""
    recipe = with_experts(tiny, EXPERTS | {"dense_layers": 1}, **{"batch.tokens": 7 * 32})
    training = Training(recipe, tokens)
    seen = watch_routers(training.model)
    with torch.no_grad():
        training.model(torch.from_numpy(training.stream.batch(0, 7))[:, :-1])
    (logits,) = seen
    loads = torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
    step = training.step()
    assert step.balance_loss == pytest.approx(float(mean_balance_loss(logits, "softmax", 2).mean()), rel=1e-5)
    assert step.max_load == pytest.approx(float(loads.max() / loads.double().mean()))


def test_passes_that_are_given_up_count_for_nothing(tiny: Recipe, tokens: TokenSet) -> None:
    plain, after = (Training(with_experts(tiny, BIAS), tokens) for _ in range(2))
    windows = torch.from_numpy(after.stream.batch(64, 8))
    after.sharded.forward_backward([(windows[:, :-1], windows[:, 1:], None)], 1.0)
    after.abandon_step()
    ours, theirs = plain.step(), after.step()
    assert (ours.balance_loss, ours.max_load) == (theirs.balance_loss, theirs.max_load)


def test_scores_that_underflow_are_no_error(tiny: Recipe) -> None:
    mixture = MixtureOfExperts(with_experts(tiny, BIAS).model, None, 1.0, (0.0, 0.0))
    with torch.no_grad():
        mixture.router.weight.fill_(-100.0)
    assert mixture(torch.ones(1, 3, tiny.model.d_model)).isfinite().all()


def test_a_skipped_step_leaves_the_biases(tiny: Recipe, tokens: TokenSet) -> None:
    training = Training(with_experts(tiny, BIAS), tokens)
    training.step()
    before = training.load_balance.bias_LE.clone()
    training.limits = Limits(loss=0.0, grad_norm=math.inf)
    assert training.step().skipped
    assert torch.equal(training.load_balance.bias_LE, before)
    assert before.any()


@pytest.mark.long
def test_biases_even_out_the_load(tiny: Recipe, tokens: TokenSet) -> None:
    """Without a balance loss, the biases correct a router that sends nearly everything to two experts."""

    def highest(step: float) -> float:
        training = Training(with_experts(tiny, BIAS | {"bias_step": step}), tokens)
        for mixture in training.sharded.mixtures.values():
            mixture.bias_E += torch.tensor([0.5, 0.4, 0.0, 0.0])
        return [training.step().max_load for _ in range(20)][-1]

    assert highest(1e-9) == 2.0  # two of four experts get all tokens
    assert highest(0.05) < 1.6


def test_a_loaded_model_routes_as_the_trained_one(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    recipe = with_experts(tiny, BIAS, **{"data.tokens": 2_560})
    train(recipe, tokens, tmp_path / "run")
    model, _ = leaven.load(tmp_path / "run")
    inputs = torch.from_numpy(tokens.validation_windows(32, 1024)[:2, :-1])
    logits = model(inputs)
    training = Training(recipe, tokens, device="cpu")
    for _ in range(10):
        training.step()
    assert torch.equal(logits, training.model(inputs))
    for mixture in training.sharded.mixtures.values():
        mixture.bias_E = None
    assert not torch.equal(logits, training.model(inputs))


@pytest.mark.parametrize(
    ("experts", "more", "says"),
    [
        ({"active": 5}, {}, "active 5 is more than number 4"),
        ({"active": 1}, {}, "the weight of the expert is always 1.*set normalise = false"),
        ({"active": 4}, {}, 'all 4 experts are active, so their load is always balanced; set balance = "none"'),
        ({"dense_layers": 2}, {}, "none of the 2 layers has experts"),
        ({}, {"model.bias": True}, "experts have no biases"),
        ({}, {"model.norm_placement": "output"}, "experts need norm_placement"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Recipe, experts: dict[str, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        with_experts(tiny, EXPERTS | experts, **more)


def test_lower_precision_is_near(tiny: Recipe, tokens: TokenSet) -> None:
    one: Callable[..., Recipe] = lambda compute: with_experts(tiny, EXPERTS, **{"precision.compute": compute})  # noqa: E731
    whole, lower = Training(one("fp32"), tokens), Training(one("bf16"), tokens)
    for _ in range(5):
        assert lower.step().loss == pytest.approx(whole.step().loss, abs=2e-2)
