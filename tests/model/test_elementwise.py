"""Hand-written gradients equal those of the definitions, in float64."""

import pytest
import torch

from leaven.model.elementwise import rms_norm, rotate


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (2, 3, 4, 8)])
def test_rms_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    x, gain, g = random(*shape), random(8, seed=1), random(*shape, seed=2)
    ours = rms_norm(x, gain, 0.1, torch.float64)
    theirs = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * gain
    for a, b in zip(torch.autograd.grad(ours, (x, gain), g), torch.autograd.grad(theirs, (x, gain), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)


def test_rms_norm_computes_in_the_dtype_of_its_gain() -> None:
    x, gain, g = random(5, 8), random(8, seed=1).float().detach().requires_grad_(), random(5, 8, seed=2).bfloat16()
    narrow = x.detach().bfloat16().requires_grad_()
    y = rms_norm(narrow, gain, 1e-6, torch.bfloat16)
    grads = torch.autograd.grad(y, (narrow, gain), g)
    wide = narrow.detach().float().requires_grad_()
    exact = torch.nn.functional.rms_norm(wide, (8,), gain, 1e-6)
    assert torch.equal(y, exact.bfloat16())
    expected = torch.autograd.grad(exact, (wide, gain), g.float())
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(grads[0].float(), expected[0], rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(grads[1], expected[1])


def test_rotation_is_a_complex_product_and_its_gradient_the_inverse() -> None:
    x, angles = random(2, 5, 3, 8), random(5, 4, seed=1).detach()
    y = rotate(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1).transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)
    g = random(2, 3, 5, 8, seed=2)
    (ours,), (theirs,) = torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
