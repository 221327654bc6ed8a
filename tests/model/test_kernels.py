"""Kernels equal their definitions in float64; bf16 attention is compared with torch's kernel."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from leaven.model import kernels
from leaven.model.kernels import causal_attention, gate, linear, rms_norm, rotate


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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_flops_of_products_on_onednn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PREFERS_ONEDNN", True)
    monkeypatch.setattr(kernels, "SMALL_PRODUCT", 0)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    product = 2 * 6 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * product
    with FlopCounterMode(display=False) as counter:
        torch.ops.leaven.onednn(x.detach(), weight.detach())
    assert counter.get_total_flops() == product


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("sizes", "wide"), [((5, 3), 0), ((3, 5), 0), ((3, 5), 6)])
def test_a_linear_layer_on_onednn(
    sizes: tuple[int, int], wide: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PREFERS_ONEDNN", True)
    monkeypatch.setattr(kernels, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(kernels, "WIDE", wide)  # 6: torch computes the gradient of the weight
    x, weight = torch.randn(2, 7, sizes[0], requires_grad=True), torch.randn(sizes[::-1], requires_grad=True)
    function = torch.compile(linear, backend="aot_eager") if compiled else linear
    y = function(x, weight)
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    g = torch.randn_like(y)
    found, right = (torch.autograd.grad(out, (x, weight), g.to(out.dtype)) for out in (y, expected))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert found[1].is_contiguous()


Case = tuple[torch.Tensor, ...]


def case(heads: int, kv_heads: int, length: int, size: int = 6) -> Case:
    """Return queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, size) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int = 99,
    softcap: float | None = None,
    allowed_B1TT: torch.Tensor | None = None,
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    ones, scores = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool), scale * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    masked = ones.triu(1) | ones.tril(-window)
    if allowed_B1TT is not None:
        masked = masked | ~allowed_B1TT
    return scores.masked_fill(masked, -torch.inf).softmax(-1) @ v


def results(function: object, given: Case, dtype: torch.dtype = torch.float64, **how: Any) -> list[torch.Tensor]:
    """Return the output and the three gradients."""
    *inputs, gradient = (x.to(dtype) for x in given)
    inputs = [x.requires_grad_() for x in inputs]
    y = function(*inputs, scale=0.3, **how)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


@pytest.mark.parametrize("length", [1, 5, 12])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (3, 1)])
@pytest.mark.parametrize("kept_length", [0, 12])
def test_output_and_gradients_in_float64(
    heads: int, kv_heads: int, length: int, kept_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 4)
    monkeypatch.setattr(kernels, "KEPT_LENGTH", kept_length)
    given = case(heads, kv_heads, length)
    for ours, theirs in zip(results(causal_attention, given), results(whole, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("window", [1, 3, 4, 6, 20])
@pytest.mark.parametrize(("softcap", "kept_length"), [(None, 0), (None, 12), (0.7, 12)])
def test_windows_and_softcaps_in_float64(
    window: int, softcap: float | None, kept_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 4)
    monkeypatch.setattr(kernels, "KEPT_LENGTH", kept_length)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 11 + [1]])
    same = documents[:, None, :, None] == documents[:, None, None, :]
    given = case(4, 2, 12)
    for allowed in (None, same):
        how = {"window": window, "softcap": softcap, "allowed_B1TT": allowed}
        for ours, theirs in zip(results(causal_attention, given, **how), results(whole, given, **how), strict=True):
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
