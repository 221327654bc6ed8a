"""Compute linear layers, causal attention, RMSNorm and rotary positions with hand-written gradients.

Also here: functions that call torch's private functions, such as :func:`norms`. Shape suffixes: B sequences, T
positions, H query heads, K key/value heads, G = H / K, N = B x K, E entries of a head. Attention is computed in
blocks: a block has t queries, which attend to s keys. Outside attention, D, F, K, M and N are any sizes. In
:func:`grouped_linear`, E is the number of groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

from leaven.planning.this_machine import processor

# Number of queries in a block of attention. Smaller blocks make small, slow products. Larger blocks compute more
# scores that the causal mask discards (measured).
BLOCK = 128
# Without a softcap, sequences of at most this many tokens keep their attention probabilities for the backward pass.
# A step is then 3 to 4% faster (measured: docs/log.md). Longer sequences would need too much memory.
KEPT_LENGTH = 512
# Products with fewer multiplications are computed by torch, because a call of oneDNN takes longer (measured).
SMALL_PRODUCT = 2**24
# oneDNN computes the gradient of a weight only if its longer side has at least this length (measured: docs/log.md):
# oneDNN needs a transposed copy, which torch makes on one thread.
WIDE = 1024
# Whether to multiply fp32 matrices with oneDNN: on AMD it is faster than torch's MKL (measured: docs/log.md).
PREFERS_ONEDNN = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    and "AMD" in processor()
)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of the tensors as one tensor, (number of tensors,)."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def multiply_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply tensors in place. ``factors`` is a scalar for all tensors, or has one factor for each tensor."""
    if factors.dim() == 0:
        torch._foreach_mul_(list(tensors), factors)
    else:
        torch._foreach_mul_(list(tensors), list(factors.unbind()))


def subtract_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    torch._foreach_sub_(list(tensors), list(others))


def lerp_(tensors: Sequence[Tensor], others: Sequence[Tensor], share: float) -> None:
    """Interpolate in place: add ``share`` x (other - tensor) to each tensor."""
    torch._foreach_lerp_(list(tensors), list(others), share)


def wide(device: torch.device) -> torch.dtype:
    """Return the widest dtype of a device: float64, or float32 on mps, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(x: Tensor) -> Tensor:
    return x.to(wide(x.device))


def gate(adam: torch.optim.Adam, skip: Tensor) -> None:
    """If the scalar ``skip`` is true, make a fused Adam skip its steps until the next call of ``gate``. Adam does not
    count skipped steps."""
    adam.found_inf = skip.float()  # type: ignore[attr-defined]


def grouped_linear(x_ND: Tensor, weight_EFD: Tensor, sizes_E: Tensor) -> Tensor:
    """Multiply each group of rows by the matrix of the group, and return (N, F). Group e is the next ``sizes_E[e]``
    rows; its matrix is ``weight_EFD[e]``. Without one kernel for all groups, the host waits for the sizes."""
    device = x_ND.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    even = not (weight_EFD.shape[1] % 8 or weight_EFD.shape[2] % 8)  # the kernel needs rows of whole 16 bytes
    if has_grouped_kernel(device) and compute == torch.bfloat16 and even:
        ends_E = sizes_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_ND.to(compute), weight_EFD.to(compute).mT, offs=ends_E)
    rows = torch.split(x_ND, on_host(sizes_E, len(x_ND)))
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows, weight_EFD.unbind(), strict=True)])


def has_grouped_kernel(device: str) -> bool:
    """Return whether :func:`grouped_linear` can compute all groups in one kernel on this type of device."""
    return device == "cuda"


def on_host(sizes: Tensor, total: int) -> list[int]:
    """Return the elements of ``sizes`` as a list. On a GPU, the host waits until they are computed. ``total``, their
    sum, is used only by :mod:`leaven.verification.dry_run`, which replaces this function."""
    found: list[int] = sizes.tolist()
    return found


def uses_onednn(x: Tensor, weight_FD: Tensor) -> bool:
    """Return whether :func:`linear` computes x @ weight.T with oneDNN."""
    plain = type(x) is not DTensor and type(weight_FD) is not DTensor
    fp32 = x.is_cpu and x.dtype == weight_FD.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return plain and fp32 and x.numel() * len(weight_FD) >= SMALL_PRODUCT and PREFERS_ONEDNN


def linear(x: Tensor, weight_FD: Tensor) -> Tensor:
    """Return x @ weight.T, computed by oneDNN if :func:`uses_onednn`, otherwise by torch."""
    if not uses_onednn(x, weight_FD):
        return F.linear(x, weight_FD)
    y: Tensor = _Linear.apply(x, weight_FD)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_FD)
        return times_transposed(x.flatten(0, -2), weight_FD).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_FD = ctx.saved_tensors
        g_NF = g.flatten(0, -2)
        grad_weight_FD = transposed_times(g_NF, x.flatten(0, -2)).contiguous()
        return times_transposed(g_NF, weight_FD.T).view(x.shape), grad_weight_FD


def times_transposed(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    """Return a @ b.T, (N, M). Call this only where autograd does not record."""
    if not uses_onednn(a_NK, b_MK):
        return a_NK @ b_MK.T
    # A call of an operator of our own takes longer, so it serves only compiled code.
    product = torch.ops.leaven.onednn if torch.compiler.is_compiling() else _onednn
    y_NM: Tensor = product(a_NK.contiguous(), b_MK)
    return y_NM


def transposed_times(a_KN: Tensor, b_KM: Tensor) -> Tensor:
    """Return a.T @ b, (N, M), perhaps as a transposed view. Call this only where autograd does not record. oneDNN
    needs a contiguous first factor: if ``a`` is larger, compute (b.T @ a).T, which copies ``b`` instead of ``a``."""
    if max(a_KN.shape[1], b_KM.shape[1]) < WIDE:
        return a_KN.T @ b_KM
    if a_KN.shape[1] > b_KM.shape[1]:
        return times_transposed(b_KM.T, a_KN.T).T
    return times_transposed(a_KN.T, b_KM.T)


def _onednn(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    y_NM: Tensor = torch.ops.mkldnn._linear_pointwise(a_NK, b_MK, None, "none", [], "")
    return y_NM


# torch compiles its private oneDNN product only if the second matrix is constant. So compiled code calls our own.
torch.library.define("leaven::onednn", "(Tensor a_NK, Tensor b_MK) -> Tensor")
torch.library.impl("leaven::onednn", "cpu")(_onednn)
torch.library.register_fake("leaven::onednn")(lambda a_NK, b_MK: a_NK.new_empty(len(a_NK), len(b_MK)))


def _onednn_flops(a_NK: tuple[int, ...], b_MK: tuple[int, ...], *others: Any, **named: Any) -> int:
    return 2 * a_NK[0] * a_NK[1] * b_MK[0]


# torch's FlopCounterMode counts no FLOPs of operators that it does not know.
_COUNTED = [torch.ops.leaven.onednn]
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _COUNTED.append(torch.ops.mkldnn._linear_pointwise)
register_flop_formula(_COUNTED)(_onednn_flops)


def prefers_causal_attention(device: str) -> bool:
    """Return whether :func:`causal_attention` is faster than torch's own attention on this type of device."""
    return device == "cpu"


def causal_attention(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    allowed_B1TT: Tensor | None = None,
) -> Tensor:
    """Return the causal attention softmax(scale x query . key) . value, (B, H, T, E).

    The softmax is in fp32 or wider. Compared with this function, torch's own attention kernel has no softcap, and
    takes up to 1.9 times as long on a CPU in bf16 (measured: docs/log.md).

    Args:
        window: the number of keys to which a query attends: its own and the last ones before it; None: no window.
        softcap: scores become softcap x tanh(score / softcap); None: no soft cap.
        allowed_B1TT: False where a query (row) must not attend to a key (column); None: True everywhere.
    """
    if has_torch_function((q_BHTE, k_BKTE, v_BKTE)):
        tensors = q_BHTE, k_BKTE, v_BKTE
        how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "allowed_B1TT": allowed_B1TT}
        return handle_torch_function(causal_attention, tensors, *tensors, **how)
    y_BHTE: Tensor = _CausalAttention.apply(  # type: ignore[no-untyped-call]
        q_BHTE, k_BKTE, v_BKTE, allowed_B1TT, scale, window, softcap
    )
    return y_BHTE


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (torch passes by position)
        ctx: Any,
        q_BHTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        allowed_B1TT: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.how = scale, softcap
        q_NGTE = q_BHTE.reshape(-1, q_BHTE.shape[1] // k_BKTE.shape[1], *q_BHTE.shape[2:])
        k_NTE, v_NTE = k_BKTE.flatten(0, 1), v_BKTE.flatten(0, 1)
        ctx.blocks, kept = _blocks(q_BHTE.shape[2], window), []
        keeps = any(ctx.needs_input_grad) and q_BHTE.shape[2] <= KEPT_LENGTH and softcap is None
        # Stored in memory as (B, T, H, E), the order in which the next product reads it; so is the gradient of v.
        y_BHTE = _heads_last(q_BHTE, q_BHTE.dtype)
        for block in ctx.blocks:
            rows, keys = block
            p_Nts, _ = _probabilities(q_NGTE, k_NTE, allowed_B1TT, block, window, *ctx.how)
            y_BHTE[:, :, rows] = (p_Nts @ v_NTE[:, keys]).view_as(y_BHTE[:, :, rows])
            kept += [p_Nts] if keeps else []
        ctx.window = window
        ctx.save_for_backward(q_NGTE, k_NTE, v_NTE, allowed_B1TT, *kept)
        return y_BHTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        q_NGTE, k_NTE, v_NTE, allowed_B1TT, *kept = ctx.saved_tensors
        scale = ctx.how[0]
        g_NGTE = g_BHTE.reshape(q_NGTE.shape)
        wide = torch.promote_types(g_BHTE.dtype, torch.float32)
        dq_NGTE = torch.empty_like(q_NGTE)
        dk_NTE, dv_NTE = torch.zeros_like(k_NTE, dtype=wide), torch.zeros_like(v_NTE, dtype=wide)
        for number, block in enumerate(ctx.blocks):
            rows, keys = block
            if kept:
                p_Nts, tanh_Nts = kept[number], None
            else:
                p_Nts, tanh_Nts = _probabilities(q_NGTE, k_NTE, allowed_B1TT, block, ctx.window, *ctx.how)
            g_NtE, q_NtE = g_NGTE[:, :, rows].flatten(1, 2), q_NGTE[:, :, rows].flatten(1, 2)
            dv_NTE[:, keys] += p_Nts.mT @ g_NtE
            dp_Nts = g_NtE @ v_NTE[:, keys].mT
            ds_Nts = torch.ops.aten._softmax_backward_data(dp_Nts, p_Nts, -1, p_Nts.dtype)
            if tanh_Nts is not None:
                ds_Nts = (ds_Nts * (1 - tanh_Nts.square())).to(ds_Nts.dtype)
            dq_NGTE[:, :, rows] = (ds_Nts @ k_NTE[:, keys]).mul_(scale).view_as(dq_NGTE[:, :, rows])
            dk_NTE[:, keys] += ds_Nts.mT @ q_NtE
        dk_BKTE, dv_BKTE = (x.view(len(g_BHTE), -1, *x.shape[1:]) for x in (dk_NTE.mul_(scale), dv_NTE))
        dv_BKTE = _heads_last(dv_BKTE, g_BHTE.dtype).copy_(dv_BKTE)
        return dq_NGTE.view(g_BHTE.shape), dk_BKTE.to(g_BHTE.dtype), dv_BKTE, None, None, None, None


def _blocks(length: int, window: int | None) -> list[tuple[slice, slice]]:
    """Return (positions of the queries, positions of their keys) for each block of queries."""
    ends = [(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]
    starts = [max(first - window + 1, 0) if window else 0 for first, _ in ends]
    return [(slice(*end), slice(start, end[1])) for end, start in zip(ends, starts, strict=True)]


def probabilities_kept(length: int) -> int:
    """Return how many attention probabilities a head keeps for backward, without window and softcap."""
    if length > KEPT_LENGTH:
        return 0
    return sum((rows.stop - rows.start) * keys.stop for rows, keys in _blocks(length, None))


def _probabilities(  # noqa: PLR0917 (the arguments of the backward pass)
    q_NGTE: Tensor,
    k_NTE: Tensor,
    allowed_B1TT: Tensor | None,
    block: tuple[slice, slice],
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return (attention probabilities, tanh(score / softcap)) of a block with t queries and s keys, both (N, G x t,
    s). The second is None without a softcap."""
    rows, keys = block
    first, last, start, tanh_Nts = rows.start, rows.stop, keys.start, None
    size, groups = last - first, q_NGTE.shape[1]
    bias_ts = q_NGTE.new_zeros(size, last - start)
    bias_ts[:, first - start :] = q_NGTE.new_full((size, size), -torch.inf).triu(1)
    if window and last > window:
        row_t = torch.arange(first, last, device=q_NGTE.device)[:, None]
        bias_ts.masked_fill_(torch.arange(start, last, device=q_NGTE.device) <= row_t - window, -torch.inf)
    bias_ts, q_NtE = bias_ts.repeat(groups, 1), q_NGTE[:, :, rows].flatten(1, 2)
    if softcap is None:
        scores_Nts = torch.baddbmm(bias_ts, q_NtE, k_NTE[:, keys].mT, alpha=scale)
    else:
        wide_Nts = (q_NtE @ k_NTE[:, keys].mT).to(torch.promote_types(q_NtE.dtype, torch.float32))
        tanh_Nts = wide_Nts.mul_(scale / softcap).tanh_()
        scores_Nts = tanh_Nts * softcap + bias_ts
    if allowed_B1TT is not None:
        scores_BHts = scores_Nts.view(len(allowed_B1TT), -1, size, last - start)
        scores_BHts.masked_fill_(~allowed_B1TT[:, :, rows, keys], -torch.inf)
    # For a lower precision, torch computes the softmax in fp32.
    return scores_Nts.softmax(-1).to(q_NGTE.dtype), tanh_Nts


def _heads_last(like_BHTE: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor of shape (B, H, T, E) that is stored in memory as (B, T, H, E)."""
    batch, heads, length, size = like_BHTE.shape
    return like_BHTE.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def rms_norm(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return gain * x / sqrt(mean(x^2) + eps) in ``dtype``. The mean is over the last dimension. The gradient
    is written by hand, and needs half the memory accesses of autograd's."""
    y: Tensor = _RMSNorm.apply(x, gain_D, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(gain_D.dtype)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain_D, inverse)
        y: Tensor = (wide * inverse).mul_(gain_D).to(dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_D, inverse = ctx.saved_tensors
        unit, g = x * inverse, g.to(gain_D.dtype)
        by_gain = g * unit
        along = (by_gain @ gain_D)[..., None].div_(x.shape[-1])  # the gradient's component along x
        grad_x = (g * gain_D).sub_(unit.mul_(along)).mul_(inverse)
        return grad_x.to(x.dtype), by_gain.flatten(0, -2).sum(0), None, None


def rotate(x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Apply rotary positions to x, (B, T, H, E), and return (B, H, T, E). Entries i and i + E/2 of a head are a pair.
    Cosines and sines are (T, E/2), or (B, T, E/2) if each sequence has its own positions."""
    y_BHTE: Tensor = _Rotate.apply(x_BTHE, cos_TE, sin_TE)  # type: ignore[no-untyped-call]
    return y_BHTE


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TE, sin_TE)
        return _turned(x_BTHE.transpose(1, 2), cos_TE.unsqueeze(-3), sin_TE.unsqueeze(-3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        cos_TE, sin_TE = ctx.saved_tensors
        cos_T1E, sin_T1E = cos_TE.unsqueeze(-2), sin_TE.unsqueeze(-2)
        return _turned(g_BHTE.transpose(1, 2), cos_T1E, -sin_T1E), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x by the angles with the given cosines and sines. The result is contiguous in memory."""
    left, right = x.chunk(2, dim=-1)
    if torch.compiler.is_compiling():  # the compiler merges these products, but would split those below
        turned = torch.addcmul(left * cos, right, sin, value=-1), torch.addcmul(right * cos, left, sin)
        return torch.cat(turned, dim=-1)
    y = x.new_empty(x.shape)
    first, second = y.chunk(2, dim=-1)
    torch.mul(left, cos, out=first).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=second).addcmul_(left, sin)
    return y
