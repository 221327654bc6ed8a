"""Attention in blocks equals attention over the whole matrix in float64; bf16 is compared with torch's kernel."""

import pytest
import torch
import torch.nn.functional as F

from leaven.model import attention
from leaven.model.attention import causal_attention

Case = tuple[torch.Tensor, ...]


def case(heads: int, kv_heads: int, length: int, size: int = 6) -> Case:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, size) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (scale * q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v


def results(function: object, given: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The output and the three gradients."""
    *inputs, gradient = (x.to(dtype) for x in given)
    inputs = [x.requires_grad_() for x in inputs]
    y = function(*inputs, scale=0.3)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


@pytest.mark.parametrize("length", [1, 5, 12])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (3, 1)])
def test_output_and_gradients_in_float64(
    heads: int, kv_heads: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", 4)
    given = case(heads, kv_heads, length)
    for ours, theirs in zip(results(causal_attention, given), results(whole, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_bf16_is_about_as_exact_as_the_kernel_of_torch() -> None:
    """Scores are rounded once more than in torch's kernel: products on a CPU have the dtype of their factors."""
    given = case(2, 2, 300, 32)
    exact = results(whole, given)

    def errors(function: object) -> list[float]:
        found = results(function, given, torch.bfloat16)
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    for ours, theirs in zip(errors(causal_attention), errors(kernel), strict=True):
        assert ours < 2 * theirs
