"""Private functions of torch that leaven uses."""

import torch

from leaven.model.kernels import gate, softmax_backward

SHAPES = [(3,), (4, 5), (2, 3, 4)]


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_a_gated_adam_step_changes_nothing() -> None:
    def adam() -> tuple[torch.nn.Parameter, torch.optim.Adam]:
        parameter = torch.nn.Parameter(torch.ones(5))
        return parameter, torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1, fused=True)

    gated, optimizer = adam()
    gated.grad = torch.full((5,), torch.nan)
    gate(optimizer, torch.tensor(True))
    optimizer.step()
    assert torch.equal(gated, torch.ones(5))
    gated.grad = torch.arange(5.0)
    gate(optimizer, torch.tensor(False))
    optimizer.step()

    plain, reference = adam()
    plain.grad = torch.arange(5.0)
    reference.step()
    assert torch.equal(gated, plain)
    assert float(optimizer.state[gated]["step"]) == 1


def test_softmax_backward() -> None:
    scores, grad = (tensor.double() for tensor in (tensors(0)[1].requires_grad_(), tensors(1)[1]))
    p = scores.softmax(-1)
    (expected,) = torch.autograd.grad(p, scores, grad)
    torch.testing.assert_close(softmax_backward(grad, p.detach()), expected)
