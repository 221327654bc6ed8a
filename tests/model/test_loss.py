"""The loss in chunks equals the loss of the whole logits, in float64."""

import pytest
import torch
import torch.nn.functional as F

from leaven.model import loss
from leaven.model.loss import IGNORED, ZLoss, cross_entropy

N, D, V = 37, 8, 50


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[::7] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize(("softcap", "coefficient"), [(None, 0.0), (1.5, 0.0), (None, 0.02), (1.5, 0.02)])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 100])
def test_loss_and_gradients_are_those_of_the_whole_logits(
    chunk_tokens: int, softcap: float | None, coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The z-loss is part of the gradients and of ``ZLoss.total``, but not of the returned loss."""
    monkeypatch.setitem(loss.CHUNK_ELEMENTS, "cpu", chunk_tokens * V)
    hidden, weight, targets = case()
    z_loss = ZLoss(coefficient) if coefficient else None
    how = {"multiplier": 0.3, "softcap": softcap, "factor": torch.tensor(0.25), "z_loss": z_loss}
    total = cross_entropy(hidden, weight, targets, **how)
    (2 * total).backward()
    hidden_, weight_, _ = case()
    logits = 0.3 * hidden_ @ weight_.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    squares = coefficient * (torch.logsumexp(logits, -1) ** 2)[targets != IGNORED].sum()  # the formula of PaLM
    whole = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    ((whole + squares) / 2).backward()
    torch.testing.assert_close(total, whole / 4, rtol=1e-13, atol=0)
    if z_loss is not None:
        torch.testing.assert_close(z_loss.total, squares.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(hidden.grad, hidden_.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weight.grad, weight_.grad, rtol=1e-12, atol=1e-14)


def test_the_loss_of_a_target_whose_probability_underflows_is_exact() -> None:
    hidden, weight = torch.full((1, 1), 1.0), torch.tensor([[200.0], [0.0]], requires_grad=True)
    assert cross_entropy(hidden, weight, torch.tensor([1])).item() == 200


def test_an_evaluation_adds_no_z_loss() -> None:
    hidden, weight, targets = case()
    z_loss = ZLoss(0.02)
    with torch.no_grad():
        cross_entropy(hidden.detach(), weight, targets, z_loss=z_loss)
    assert z_loss.total == 0


def test_a_tied_weight_gets_the_gradients_of_both_uses() -> None:
    _, weight, targets = case()
    ids = torch.arange(N)
    cross_entropy(weight[ids].tanh(), weight, targets).backward()
    _, weight_, _ = case()
    F.cross_entropy(weight_[ids].tanh() @ weight_.T, targets, ignore_index=IGNORED, reduction="sum").backward()
    torch.testing.assert_close(weight.grad, weight_.grad, rtol=1e-12, atol=1e-14)


def test_an_evaluation_computes_no_gradient_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, IGNORED])
    weight = torch.nn.Parameter(torch.randn(5, 4))
    expected = cross_entropy(hidden, weight, targets).item()
    monkeypatch.setattr(loss, "transposed_times", None)  # computes the gradient of the weight
    with torch.no_grad():
        assert cross_entropy(hidden, weight, targets).item() == expected
    with pytest.raises(TypeError):
        cross_entropy(hidden, weight, targets)


def test_a_loss_scale_keeps_small_gradients_in_half_precision() -> None:
    """Without a loss scale, the gradient of one token in 10 million is below the smallest number of fp16."""
    share = 1e-7 / N
    grads = []
    for factor in (share, share * 2.0**16):
        hidden, weight, targets = case(torch.float32)
        cross_entropy(hidden, weight, targets, factor=factor, compute=torch.float16).backward()
        assert hidden.grad is not None
        grads.append(hidden.grad / factor)
    hidden, weight, targets = case()
    F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum").backward()
    assert hidden.grad is not None
    lost, kept = (float((grad - hidden.grad).norm() / hidden.grad.norm()) for grad in grads)
    assert kept < 0.01
    assert lost > 0.1
