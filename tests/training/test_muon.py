"""Muon: equal to torch.optim.Muon bit by bit, close to the singular value decomposition, and unchanged by a skipped
step."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import losses
from tests.training.planted import STEP, in_order, text
from tests.training.planted import recipe as planted
from torch import nn

from leaven.data.tokens import TokenSet
from leaven.recipe.hyperparameters import Muon
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.training.engine import Training
from leaven.training.muon import COEFFICIENTS, MuonWithAdamW, orthogonal
from leaven.training.optimizer import Optimizer
from leaven.training.rewind import ManualRewind
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train

SHAPES = [(8, 24), (24, 8), (16, 16)]


def drawn(shape: tuple[int, ...], seed: int, **how: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **how)


@pytest.mark.parametrize(
    ("settings", "adjust"),
    [
        (Muon(match="spectral", lr=0.02), "original"),
        (Muon(match="adamw_rms", momentum=0.8, ns_steps=3), "match_rms_adamw"),
        (Muon(match="spectral", lr=0.02, nesterov=False), "original"),
    ],
)
def test_steps_are_those_of_torch_to_the_last_bit(settings: Muon, adjust: str) -> None:
    ours, theirs = ([nn.Parameter(drawn(shape, 0)) for shape in SHAPES] for _ in range(2))
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter],
            "param_names": [str(number)],
            "lr": 0.02,
            "weight_decay": 0.1,
            "momentum": settings.momentum,
            "match": settings.matching(*parameter.shape),
        }
        for number, parameter in enumerate(ours)
    ]
    how = {"nesterov": settings.nesterov, "ns_steps": settings.ns_steps}
    muon = MuonWithAdamW(groups, dtype=torch.bfloat16, fused=True, **how)
    torchs = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=settings.momentum, adjust_lr_fn=adjust, **how
    )
    for step in range(3):
        for number, parameters in enumerate(zip(ours, theirs, strict=True)):
            for parameter in parameters:
                parameter.grad = drawn(SHAPES[number], 10 * step + number)
        muon.step()
        torchs.step()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("how", ["load_state_dict", "deepcopy"])
def test_a_resume_and_a_copy_take_the_same_steps(how: str) -> None:
    """The settings of Muon that only the constructor knows are copied, too."""

    def built() -> tuple[list[nn.Parameter], MuonWithAdamW]:
        matrix, gain = parameters = [nn.Parameter(drawn(shape, 0)) for shape in ((8, 24), (8,))]
        muon = {"params": [matrix], "param_names": ["0"], "momentum": 0.9, "match": 0.2, "weight_decay": 0.1}
        groups = [muon, {"params": [gain], "param_names": ["1"]}]
        return parameters, MuonWithAdamW(groups, lr=0.02, nesterov=False, ns_steps=3)

    def train(parameters: list[nn.Parameter], optimizer: MuonWithAdamW, steps: range) -> None:
        for step in steps:
            for number, parameter in enumerate(parameters):
                parameter.grad = drawn(tuple(parameter.shape), 10 * step + number)
            optimizer.step()

    parameters, optimizer = built()
    train(parameters, optimizer, range(2))
    if how == "deepcopy":
        others, other = copy.deepcopy((parameters, optimizer))
    else:
        others, other = built()
        for mine, theirs in zip(others, parameters, strict=True):
            mine.data.copy_(theirs)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(parameters, optimizer, range(2, 4))
    train(others, other, range(2, 4))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, parameters, strict=True))


def test_a_closure_clears_all_gradients_and_each_hook_is_called_once_per_step() -> None:
    torch.optim.AdamW([nn.Parameter(drawn((8,), 0))])  # torch wraps the step of AdamW when one is made
    matrix, gain = parameters = [nn.Parameter(drawn(shape, 0)) for shape in ((8, 24), (8,))]
    muon = {"params": [matrix], "param_names": ["0"], "momentum": 0.9, "match": 0.2, "weight_decay": 0.1}
    optimizer = MuonWithAdamW([muon, {"params": [gain], "param_names": ["1"]}], lr=0.02)
    groups: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: groups.append(len(optimizer.param_groups)))
    optimizer.register_step_post_hook(lambda *_: groups.append(len(optimizer.param_groups)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((2 * parameter).sum() for parameter in parameters), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(2):
        assert optimizer.step(closure).requires_grad
    assert all((parameter.grad == 2).all() for parameter in parameters)
    assert groups == [2] * 4


def test_the_state_of_another_optimizer_is_refused() -> None:
    groups = [{"params": [nn.Parameter(drawn((8, 24), 0))], "param_names": ["0"]}]
    muon = MuonWithAdamW([groups[0] | {"momentum": 0.9, "match": 0.2}], lr=0.02)
    with pytest.raises(ValueError, match="the state has Muon in the groups none, this optimizer in 0; load a state"):
        muon.load_state_dict(torch.optim.AdamW([groups[0] | {}], lr=0.02).state_dict())
    more = {"params": [nn.Parameter(drawn((3,), 0))], "param_names": ["1"]}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        muon.load_state_dict(torch.optim.AdamW([groups[0] | {}, more], lr=0.02).state_dict())
    assert "match" in muon.param_groups[0]


def test_maximize_and_changed_settings_of_a_group_are_obeyed() -> None:
    def stepped(settings: dict[str, Any], sign: float = 1, **how: Any) -> torch.Tensor:
        matrix = nn.Parameter(drawn((8, 24), 0))
        group = {"params": [matrix], "param_names": ["0"], "momentum": 0.9, "match": 0.2, "weight_decay": 0.0}
        optimizer = MuonWithAdamW([group], lr=0.02, **how)
        optimizer.param_groups[0] |= settings
        matrix.grad = sign * drawn((8, 24), 1)
        optimizer.step()
        return matrix.detach()

    assert torch.equal(stepped({}, maximize=True), stepped({}, sign=-1))
    assert torch.equal(stepped({"ns_steps": 1, "nesterov": False}), stepped({}, ns_steps=1, nesterov=False))
    assert not torch.equal(stepped({"ns_steps": 1}), stepped({}))


def test_groups_with_several_ns_steps_are_refused() -> None:
    matrices = [nn.Parameter(drawn((8, 24), seed)) for seed in (0, 1)]
    how = {"momentum": 0.9, "match": 0.2, "weight_decay": 0.0}
    groups = [{"params": [each], "param_names": [str(n)], **how} for n, each in enumerate(matrices)]
    optimizer = MuonWithAdamW(groups, lr=0.02)
    optimizer.param_groups[1]["ns_steps"] = 3
    for each in matrices:
        each.grad = torch.ones_like(each)
    with pytest.raises(ValueError, match=r"different ns_steps, \[3, 5\]"):
        optimizer.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_acts_on_singular_values(shape: tuple[int, int], steps: int) -> None:
    matrix = drawn(shape, 1, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / matrix.norm()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonal(matrix, steps), u * s @ v, rtol=0, atol=1e-12)
    if steps == 5:
        assert 0.6 < s.min() < s.max() < 1.3


@pytest.fixture
def muon(tiny: Recipe) -> Recipe:
    return tiny.replace(
        {
            "hyperparameters.optimizer": "muon",
            "hyperparameters.muon": {"match": "spectral", "lr": 0.05, "weight_decay": 0.3},
            "precision.compute": "bf16",
            "scaling.base": {"width": 8, "depth": 1, "batch_tokens": 128, "tokens": 5_120, "d_head": 4},
        }
    )


def test_a_run_is_torchs_muon_for_matrices_and_adamw_for_the_rest(
    muon: Recipe, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(muon, tokens, "cpu")
    rows = {row.name: row for row in parameter_table(muon).rows}
    assert {row.module for row in rows.values() if row.match} == {
        *("attention.query", "attention.key", "attention.value", "attention.out", "mlp.gate", "mlp.in", "mlp.out")
    }
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in training.model.named_parameters()}
    reference = {
        name: torch.optim.Muon([copy], lr=1.0, weight_decay=rows[name].weight_decay, momentum=0.95)
        if rows[name].match
        else torch.optim.AdamW(
            [copy],
            betas=(rows[name].beta1, rows[name].beta2),
            eps=rows[name].eps,
            weight_decay=rows[name].weight_decay,
            fused=True,
        )
        for name, copy in copies.items()
    }

    def stepping(optimizer: Optimizer, multiplier: float, **more: Any) -> None:
        for name, parameter in training.model.named_parameters():
            copies[name].grad = parameter.grad
            reference[name].param_groups[0]["lr"] = rows[name].lr * multiplier
            reference[name].step()
        plain(optimizer, multiplier, **more)

    plain = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", stepping)
    for _ in range(5):
        training.step()
    for name, parameter in training.model.named_parameters():
        assert torch.equal(parameter, copies[name]), name


def test_a_skipped_step_changes_nothing(muon: Recipe, tokens: TokenSet) -> None:
    training = Training(muon, tokens, "cpu")
    training.step()
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    moments = {key: value.clone() for key, value in training.optimizer.state_dict().items()}
    for parameter in training.model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    training.optimizer.step(1.0, skip=torch.tensor(True))
    assert all(torch.equal(p, before[name]) for name, p in training.model.named_parameters())
    after = training.optimizer.state_dict()
    assert all(torch.equal(after[key], value) for key, value in moments.items())
    matrices = {row.name for row in parameter_table(muon).rows if row.match}
    assert {name for kind, name in after if kind == "momentum_buffer"} == matrices
    assert not {name for kind, name in after if kind == "exp_avg"} & matrices


@pytest.mark.long
def test_a_rollback_and_a_rewind_restore_the_momentum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch)
    kept = {"data__tokens": 90 * STEP, "stability__keep_every_tokens": 9 * STEP}
    recipe, garbage, run = planted(hyperparameters__optimizer="muon", **kept), text(74, 3), RunFolder(tmp_path)
    assert train(recipe, garbage, run.path).rollbacks == 1
    before = losses(run.path)
    train(recipe, garbage, run.path, rewind=ManualRewind(40 * STEP))
    assert losses(run.path) == before
    # The user may change the momentum then, as the betas of Adam.
    slower = recipe.replace({"hyperparameters.muon": {"momentum": 0.8, "weight_decay": 0.2}})
    train(slower, garbage, run.path, rewind=ManualRewind(40 * STEP))
    assert run.recipe().hyperparameters == slower.hyperparameters
    assert before[:30] == losses(run.path)[:30]
    assert before[-1] != losses(run.path)[-1]
