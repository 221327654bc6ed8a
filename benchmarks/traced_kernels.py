"""Count what the kernels between the matrix products of leaven's and torchtitan's blocks move and save.

    python benchmarks/traced_kernels.py [--cases N]
    pip install --no-deps --target FOLDER torchtitan==0.2.1
    python benchmarks/traced_kernels.py --torchtitan FOLDER [--cases N]

Runs leaven's blocks as on a GPU, or torchtitan's blocks of Qwen3 and DeepSeek-V3, on tensors without memory
(FakeTensorMode), forward and backward, at N sizes. Counts for every kernel the bytes of its inputs and outputs,
without matrix products and attention; an RMSNorm counts as the fused kernel that CUDA has. The counts are sums over a
few widths of the block, with factors in bytes per element and token: the least-squares solution over the sizes. These
factors, rounded, are ``moved`` and ``saved`` of the training codes in src/leaven/planning/training_codes.toml.
Packages that torchtitan imports and a block does not use are replaced.
"""

import argparse
import importlib.abc
import importlib.machinery
import random
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen
import torch.nn.functional as F
import torch.utils.flop_counter  # before its optional imports are replaced
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leaven.model import kernels, transformer
from leaven.model.transformer import Block, Positions
from leaven.recipe.shape import ModelShape

SEQUENCES, SEQ_LEN = 32, 8192  # so many tokens that operations on weights hardly count
Traced = tuple[dict[str, float], dict[str, float]]  # widths of a block, and what was counted, in bytes
_REPLACED = {"triton", "tyro", "torchdata", "datasets", "deep_ep", "torchao", "tensorboard", "wandb", "einops"}
_VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "split",
    "split_with_sizes",
    "as_strided",
    "_reshape_alias",
    "unbind",
    "lift_fresh",
    "view_as_complex",
    "view_as_real",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_local_scalar_dense",
}
_PRODUCTS = {"mm", "addmm", "_grouped_mm"}
_FILLS = {
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones_like",
    "fill",
    "full",
    "full_like",
    "ones",
    "arange",
    "zero",
    "scalar_tensor",
}
_READ = {"index", "gather", "index_select"}  # read as much as they write
_WRITTEN = {"index_put", "_index_put_impl", "scatter_add", "scatter", "index_add"}  # read their source, write as much


def size(x: Tensor) -> int:
    """Return the bytes of a tensor; an expanded dimension is stored once."""
    stored = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        stored *= length if stride else 1
    return stored * x.element_size()


class Tracer(TorchDispatchMode):
    """Count the bytes that kernels move, and the most that lives at a time."""

    now: "Tracer"  # the one that runs, for the kernels below

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.phase, self.live, self.peak = "forward", 0, 0
        self._known: set[int] = set(weights)

    def add(self, moved: int) -> None:
        self.moved[self.phase] += moved

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        ins = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for out in outs:
            self._follow(out.untyped_storage())
        name = func.overloadpacket.__name__
        kind = name.rstrip("_")
        if func.namespace != "aten" or kind in _VIEWS:
            return result
        written = sum(map(size, outs))
        if name in _PRODUCTS:
            moved = 0
        elif kind in _FILLS:
            moved = written
        elif kind in _READ:
            moved = 2 * written + sum(map(size, ins[1:]))
        elif kind in _WRITTEN:
            adds = kind in {"scatter_add", "index_add"} or (len(args) > 3 and args[3] is True)
            moved = (3 if adds else 2) * size(ins[-1]) + sum(map(size, ins[1:-1]))
            moved += 0 if name.endswith("_") else 2 * written
        else:
            moved = sum(map(size, ins)) + written
        self.add(moved)
        return result

    def _follow(self, storage: Any) -> None:
        key, held = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += held
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self._known.discard(key)
            self.live -= held

        weakref.finalize(storage, freed)


class _Norm(torch.autograd.Function):
    """RMSNorm as one kernel forward and two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        Tracer.now.add(2 * size(x))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        Tracer.now.add(3 * size(x))
        return torch.empty_like(x), torch.empty_like(weight)


class _Attention(torch.autograd.Function):
    """Flash attention, which moves nothing that counts here."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def trace(
    make: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]], dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Return the bytes that a module moves forward and backward, saves, and needs at most beside what it saves."""
    saved: dict[int, int] = {}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(F, "rms_norm", lambda x, _, weight=None, eps=None: _Norm.apply(x, weight)),
        patch.object(F, "scaled_dot_product_attention", lambda q, k, v, *_, **__: _Attention.apply(q, k, v)),
        # Not implemented for integers without memory.
        patch.object(torch, "histc", lambda x, bins, **_: torch.zeros(bins, dtype=torch.int64)),
    ):
        torch.set_default_dtype(dtype)
        module = make()
        torch.set_default_dtype(torch.float32)
        for owner in module.modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.float())
        given = inputs()
        weights = {p.untyped_storage()._cdata for p in module.parameters()}
        of_inputs = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
        tracer = Tracer.now = Tracer(weights | of_inputs)

        def keep(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in weights:
                saved[storage._cdata] = storage.nbytes()
            return x

        with tracer, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = module(*given)
            tracer.phase = "backward"
            out.backward(torch.empty_like(out))
    kept = sum(saved.values())
    return dict(tracer.moved) | {"saved": kept, "temporary": tracer.peak - kept}


class _Replacement(types.ModuleType, importlib.abc.Loader):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replace packages that a block does not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if top in _REPLACED else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Replacement(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _padded(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sort and pad tokens as expert parallelism does (torchtitan/models/moe/utils.py), without its triton kernel."""

    def run(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, loads: Tensor) -> Tensor:
        order = torch.zeros(x.shape[0], dtype=torch.int64)
        x = torch.vstack((x, x.new_zeros(x.shape[-1])))
        out = experts(w1, w2, w3, x[order, :], loads)
        unsorted = out.new_empty(x.shape)
        unsorted[order, :] = out
        return unsorted[:-1]

    return run


def _with_deepep(moe: Any) -> type:
    """Return the mixture of experts that runs with DeepEP (models/moe/moe_deepep.py), on one rank."""

    class DeepEP(moe.MoE):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            shape, x = x.shape, x.view(-1, x.shape[-1])
            scores, chosen, loads = self.router(x, self.expert_bias)
            chosen.masked_fill(scores == 0, -1)
            rows = torch.zeros(chosen.numel(), dtype=torch.int64)
            h = self.experts(x.index_select(0, rows), loads)
            h = h * scores.reshape(-1).to(h.dtype).reshape(-1, 1)
            out = torch.zeros(x.shape, dtype=h.dtype)
            out.scatter_add_(0, rows.unsqueeze(1).expand(-1, x.shape[1]), h)
            return (out if self.shared_experts is None else self.shared_experts(x) + out).reshape(shape)

    return DeepEP


def _qwen3(moe: Any, of: type, draw: random.Random) -> Traced:
    """Trace a block of Qwen3 at a random size. Return its widths and its bytes per token."""
    from torchtitan.models.qwen3.model import model
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    d, heads, kv, d_head = draw.choice([1024, 2048, 4096]), draw.choice([16, 32, 64]), draw.choice([2, 4, 8]), 128
    width, used, shared = draw.choice([512, 768, 1536]), draw.choice([2, 4, 8]), draw.choice([0, 1, 2])
    experts = _experts(moe, used, shared, "softmax")
    dense = draw.random() < 0.3
    sizes = {"dim": d, "n_heads": heads, "n_kv_heads": kv, "head_dim": d_head, "hidden_dim": 4 * width}
    args = Qwen3ModelArgs(**sizes, qk_norm=True, moe_enabled=not dense, moe_inter_dim=width, moe_args=experts)
    model.MoE = of
    found = trace(
        lambda: model.TransformerBlock(0, args),
        lambda: (_stream(d), torch.empty(SEQ_LEN, 2 * d_head), None),
    )
    widths = {"stream": d, "queries": heads * d_head, "keys": 2 * kv * d_head}
    return widths | _mlp_widths(d, width, used, shared, dense=dense), found


def _deepseek(moe: Any, of: type, draw: random.Random) -> Traced:
    """Trace a block of DeepSeek-V3 at a random size, with positions on a third of a query."""
    from torchtitan.models.deepseek_v3.model import model
    from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs

    d, heads, rope, values = draw.choice([2048, 4096, 7168]), draw.choice([16, 32]), draw.choice([32, 64]), 128
    latent, of_queries = draw.choice([256, 512]), draw.choice([512, 1536])
    width, used, shared = draw.choice([512, 1024, 2048]), draw.choice([2, 4, 8]), draw.choice([0, 1, 2])
    experts = _experts(moe, used, shared, "sigmoid")
    dense = draw.random() < 0.3
    args = DeepSeekV3ModelArgs(
        dim=d, n_heads=heads, qk_nope_head_dim=2 * rope, qk_rope_head_dim=rope, v_head_dim=values,
        kv_lora_rank=latent, q_lora_rank=of_queries, inter_dim=4 * width, moe_inter_dim=width,
        n_dense_layers=2 if dense else 0, moe_args=experts,
    )  # fmt: skip
    args.moe_impl = "standard"
    model.build_moe = lambda args, dim, hidden_dim, **_: of(args, dim, hidden_dim)
    found = trace(
        lambda: model.TransformerBlock(1, args),
        lambda: (_stream(d), torch.empty(SEQ_LEN, rope // 2, dtype=torch.complex64), None),
    )
    widths = {"stream": d, "latent_queries": 3 * heads * rope, "latent_values": heads * values}
    widths["latents"] = latent + of_queries
    return widths | _mlp_widths(d, width, used, shared, dense=dense), found


def _experts(moe: Any, used: int, shared: int, score: str) -> Any:
    return moe.MoEArgs(
        num_experts=16, num_shared_experts=shared, top_k=used, score_func=score, route_norm=True,
        score_before_experts=False,
    )  # fmt: skip


def _stream(d: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(SEQUENCES, SEQ_LEN, d, dtype=dtype, requires_grad=True)


def _mlp_widths(d: int, width: int, used: int, shared: int, *, dense: bool) -> dict[str, float]:
    names = ("experts", "shared", "hidden", "routed", "routed_hidden")
    if dense:
        return dict.fromkeys(names, 0) | {"hidden": 4 * width}
    return dict(zip(names, (d, d * (shared > 0), shared * width, used * d, used * width), strict=True))


class _LeavenBlock(nn.Module):
    """A block of leaven with fp32 weights, computed in bf16 with autocast, or in fp32."""

    def __init__(self, shape: ModelShape, fp32: bool) -> None:
        super().__init__()
        self.block = Block(shape, {}, 1.0, 0, (0.0, 0.0))
        self.shape, self.fp32 = shape, fp32

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.fp32):
            return self.block(x, Positions(self.shape, SEQ_LEN, x))


def leaven_block(draw: random.Random, fp32: bool) -> Traced:
    """Trace one of leaven's blocks at a random size, with random norms and activation. In fp32, only dense blocks."""
    d, heads, kv = draw.choice([1024, 2048, 4096]), draw.choice([16, 32, 64]), draw.choice([2, 4, 8])
    width, used, shared = draw.choice([512, 768, 1536]), draw.choice([2, 4, 8]), draw.choice([0, 1, 2])
    dense = fp32 or draw.random() < 0.5
    placement = draw.choice(["pre", "output", "sandwich"]) if dense else "pre"
    gated = not dense or draw.random() < 0.5
    shape = ModelShape.model_validate(
        {
            "n_layers": 1, "d_model": d, "n_heads": heads, "n_kv_heads": kv, "d_attention": 128 * heads,
            "d_head": 128,
            "d_ff": 4 * width, "vocab_size": 512, "seq_len": SEQ_LEN, "qk_norm": draw.random() < 0.5,
            "activation": "swiglu" if gated else "gelu", "norm_placement": placement,
            "parallel_branches": dense and placement == "pre" and draw.random() < 0.4,
            "experts": None if dense else {"number": 16, "active": used, "d_expert": width, "shared": shared},
        }
    )  # fmt: skip
    gpu = (
        patch.object(transformer.RMSNorm, "forward", _on_gpu),
        patch.object(transformer, "causal_attention", lambda q, k, v, **_: _Attention.apply(q, k, v)),
        patch.object(kernels, "has_grouped_kernel", lambda _: True),
        patch.object(kernels, "uses_onednn", lambda *_: False),
    )
    with gpu[0], gpu[1], gpu[2], gpu[3]:
        found = trace(lambda: _LeavenBlock(shape, fp32), lambda: (_stream(d, torch.float32),), dtype=torch.float32)
    outputs = sum(name.endswith("_out") for name in shape.block_norms)
    widths: dict[str, float] = {
        "stream": d,
        "norms": d * (len(shape.block_norms) - outputs),
        "output_norms": d * outputs,
    }
    widths |= {"queries": heads * 128, "keys": 2 * kv * 128, "normed": (heads + kv) * 128 * shape.qk_norm}
    of_mlp = _mlp_widths(d, width, used, shared, dense=dense)
    return widths | of_mlp | {
        "hidden": of_mlp["hidden"] * gated,
        "plain_hidden": of_mlp["hidden"] * (not gated),
    }, found


def _on_gpu(norm: transformer.RMSNorm, x: Tensor) -> Tensor:
    """Compute leaven's RMSNorm as on a GPU."""
    return nn.RMSNorm.forward(norm, x.to(norm.weight.dtype)).to(transformer._compute_dtype(x))


def _report(title: str, case: Callable[[random.Random], Traced], number: int) -> None:
    """Print the factors of each width."""
    draw, tokens = random.Random(0), SEQUENCES * SEQ_LEN
    cases = [case(draw) for _ in range(number)]
    names = list(cases[0][0])
    table = np.array([list(widths.values()) for widths, _ in cases], float)
    print(f"\n{title}: bytes per element and token")
    print(f"{'':10}" + "".join(f"{width:>15}" for width in names) + f"{'worst error':>15}")
    for kind in ("forward", "backward", "saved", "temporary"):
        measured = np.array([found[kind] / tokens for _, found in cases])
        factors = np.linalg.lstsq(table, measured, rcond=None)[0]
        worst = np.abs(table @ factors / measured - 1).max()
        print(f"{kind:10}" + "".join(f"{factor:15.1f}" for factor in factors) + f"{worst:15.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torchtitan", metavar="FOLDER", help="where torchtitan is installed; default: leaven's blocks"
    )
    parser.add_argument("--cases", type=int, default=60)
    args = parser.parse_args()
    if args.torchtitan is None:
        for fp32 in (False, True):
            _report(f"leaven in {'fp32' if fp32 else 'bf16'}", partial(leaven_block, fp32=fp32), args.cases)
        return
    sys.path.insert(0, args.torchtitan)
    torch.compile = lambda f=None, *_, **__: f if f is not None else (lambda g: g)
    sys.modules["torch.utils.tensorboard"] = _Replacement("torch.utils.tensorboard")
    sys.meta_path.insert(0, _Finder())
    from torchtitan.models.moe import moe

    for name, of, pad in (("torch's all-to-all", moe.MoE, _padded), ("DeepEP", _with_deepep(moe), lambda f: f)):
        moe.indices_padding_wrapper = pad
        for block in (_qwen3, _deepseek):
            _report(f"{block.__name__[1:]}, {name}", partial(block, moe, of), args.cases)


if __name__ == "__main__":
    main()
