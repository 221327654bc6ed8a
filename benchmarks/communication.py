"""Count the bytes that a layout sends and compare with theory: `PYTHONPATH=src python -m benchmarks.communication`.

A torch dispatch mode records every collective of one training step: of FSDP, DTensor, the loss, the pipeline, and the
sums of loss and norms. Bytes are counted as in ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 7):
all-gather, reduce-scatter and send count the size of the whole tensor, all-reduce counts it twice. Each of n ranks
actually sends (n - 1) / n of these bytes.

The theory is computed from the model's shape alone. Gradients are sent in fp32, and so are parameters, except that
matrices are sent in bf16 in a bf16 run. Psi is the size of all parameters in fp32.
"""

from collections import Counter
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from benchmarks._tiny import tiny_recipe
from tests.distributed.pool import Pool
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leaven.data.tokens import TokenSet, prepare
from leaven.distributed.process_group import AXES, ProcessGroup, join_process_group
from leaven.planning.stages import stage_layers
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training

Kind = tuple[str, str]
"""(axis of the device mesh, or "all" if the group is no axis; collective)."""
Count = dict[Kind, tuple[int, int]]
"""(calls, bytes) of one rank in one step, by kind."""

_COLLECTIVES = {  # torch's operator: (collective, how often the largest tensor is counted)
    "allreduce_": ("all-reduce", 2),
    "all_reduce": ("all-reduce", 2),
    "_allgather_base_": ("all-gather", 1),
    "all_gather_into_tensor": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "send": ("send", 1),
}
_NO_TRAFFIC = {"recv_", "wait_tensor", "_wrap_tensor_autograd"}


class Wires(TorchDispatchMode):
    """A dispatch mode that counts the calls and bytes of this process's collectives."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        assert group.mesh is not None
        self._axes = {group.mesh.get_group(axis).group_name: axis for axis in AXES}
        self.calls, self.bytes = Counter[Kind](), Counter[Kind]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls this mode again with local tensors
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in {"c10d", "_c10d_functional"} and name not in _NO_TRAFFIC:
            leaves = tree_leaves((args, kwargs, result))
            collective, times = _COLLECTIVES[name]
            size = max(leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor))
            kind = self._axis(leaves), collective
            self.calls[kind] += 1
            self.bytes[kind] += times * size
        return result

    def _axis(self, leaves: list[Any]) -> str:
        names = [leaf for leaf in leaves if isinstance(leaf, str) and leaf in self._axes]
        groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)]
        names += [dist.ProcessGroup.unbox(group).group_name for group in groups]
        return self._axes.get(names[0], "all")


def counted(recipe: Recipe, tokens: TokenSet) -> Count:
    """Return calls and bytes of this process's second step; the first step includes one-time work."""
    with join_process_group(recipe.layout, torch.device("cpu")) as group:
        training = Training(recipe, tokens, device="cpu", group=group)
        training.step()
        with Wires(group) as wires:
            training.step()
        return {kind: (calls, wires.bytes[kind]) for kind, calls in wires.calls.items()}


def whole_world(layout: Layout) -> str:
    """Return the axis that contains all ranks, or "all" if there is none."""
    degrees = {"pp": layout.pp, "tp": layout.tp, "shard": layout.dp // layout.dp_replicate}
    if layout.zero == 0:
        degrees["replicate"] = degrees.pop("shard")
    return next((axis for axis, degree in degrees.items() if degree == layout.ranks), "all")


def theory(recipe: Recipe, rank: int) -> Count:
    """Return the expected calls and bytes of a Llama with one stage per rank; tp and pp only in fp32."""
    shape, layout = recipe.model, recipe.layout
    stage = rank // (layout.dp * layout.tp)
    first, last, layers = stage == 0, stage == layout.pp - 1, stage_layers(shape, layout.pp)[stage]
    sequences = int(recipe.batch.micro_batch)
    m = recipe.batch.tokens // shape.seq_len // layout.dp // sequences  # micro-batches
    element = 2 if recipe.precision.compute == "bf16" else 4  # bytes of a matrix
    calls, sizes = Counter[Kind](), Counter[Kind]()

    def expect(axis: str, collective: str, times: int, size: int) -> None:
        if times and size:
            calls[axis, collective] += times
            sizes[axis, collective] += times * size * (2 if collective == "all-reduce" else 1)

    # Data parallelism exchanges each attention and each MLP on its own, and the rest of the stage (norms, embedding,
    # unembedding) together. ZeRO 3 gathers attention and MLP in the forward and in the backward pass, the embedding
    # on its own in the forward pass, and the rest once per micro-batch.
    d_model, d_head = shape.d_model, shape.d_head
    attention = 2 * d_model * d_head * (shape.n_heads + shape.n_kv_heads) // layout.tp
    mlp = 3 * d_model * shape.d_ff // layout.tp
    rest = layers * (2 * d_model + 2 * d_head) + last * d_model
    vocabulary = d_model * shape.vocab_size // layout.tp
    replicas = layout.dp if layout.zero == 0 else layout.dp_replicate
    shards, zero3, exchanges = layout.dp // replicas, layout.zero == 3, m if layout.zero >= 2 else 1
    for parameters, units, travelling, gathers in (
        (attention, layers, element, 2 * m if zero3 else 1),
        (mlp, layers, element, 2 * m if zero3 else 1),
        (vocabulary, int(first and zero3), 4, m),
        (rest + (last + (first and not zero3)) * vocabulary, 1, 4, m if zero3 else 1),
    ):
        if shards > 1:
            expect("shard", "all-gather", units * gathers, travelling * parameters)
            expect("shard", "reduce-scatter", units * exchanges, 4 * parameters)
        if replicas > 1:  # once per step
            expect("replicate", "all-reduce", units, 4 * parameters // shards)

    # Tensor parallelism: a layer gathers the inputs of attention and MLP and scatters their outputs, in the forward
    # and in the backward pass. The embedding scatters its output, and the loss gathers its input. The loss also sums
    # three numbers per token.
    if layout.tp > 1:
        stretch = 4 * sequences * shape.seq_len * d_model
        expect("tp", "all-gather", m * (4 * layers + first + last), stretch)
        expect("tp", "reduce-scatter", m * (4 * layers + first + last), stretch)
        expect("tp", "all-reduce", last * m, 4 * sequences * shape.seq_len)
        expect("tp", "all-reduce", last * m, 8 * sequences * shape.seq_len)
        expect("tp", "all-reduce", exchanges * (2 * layers + last), 4 * d_model)  # gains of norms
        expect("tp", "all-reduce", exchanges * 2 * layers, 4 * d_head)
    if layout.pp > 1:
        boundaries = (not first) + (not last)
        expect("pp", "send", m * boundaries, 4 * sequences * shape.seq_len // layout.tp * d_model)
    # The trainer sums the loss, the norms of gradients, and the norms of updates and parameters.
    rows = len(list(shape.parameters()))
    for size in (4, 8 * rows, 16 * rows):
        expect(whole_world(recipe.layout), "all-reduce", 1, size)
    return {kind: (times, sizes[kind]) for kind, times in calls.items()}


def layout(dp: int = 1, tp: int = 1, pp: int = 1, zero: int = 0, dp_replicate: int = 1) -> dict[str, Any]:
    degrees = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "dp_replicate": dp_replicate}
    return {f"layout.{key}": value for key, value in degrees.items()}


SHAPE = {"model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_head": 4, "batch.micro_batch": 2}
LAYOUTS = {
    "dp 2 zero 0": layout(dp=2),
    "dp 2 zero 1": layout(dp=2, zero=1),
    "dp 2 zero 2": layout(dp=2, zero=2),
    "dp 2 zero 3": layout(dp=2, zero=3),
    "dp 2 zero 3 bf16": layout(dp=2, zero=3) | {"precision.compute": "bf16"},
    "dp 4 zero 2 on two nodes": layout(dp=4, zero=2, dp_replicate=2) | {"batch.micro_batch": 1},
    "tp 2": layout(tp=2),
    "pp 2": layout(pp=2),
    "dp 2 pp 2 zero 0": layout(dp=2, pp=2),
    "dp 2 pp 2 zero 1": layout(dp=2, pp=2, zero=1),
    "dp 2 pp 2 zero 2": layout(dp=2, pp=2, zero=2),
    "dp 2 pp 2 zero 3": layout(dp=2, pp=2, zero=3),
    "dp 2 tp 2 zero 3": layout(dp=2, tp=2, zero=3),
    "tp 2 pp 2": layout(tp=2, pp=2),
}


def main() -> None:
    with tiny_recipe() as (tiny, _), closing(Pool()) as pool:
        recipe = tiny.replace(SHAPE)
        tokens = prepare(recipe.data, recipe.model.vocab_size)
        psi = 4 * sum(parameter.size for parameter in recipe.model.parameters())
        print(f"Psi = {psi:,} bytes in fp32; 4 micro-batches on one data-parallel rank, 2 on two or four")
        print(f"{'layout':<26}rank  {'axis':<10}{'collective':<15}{'calls':>6}{'bytes':>9}{'theory':>9}  ratio")
        for name, changes in LAYOUTS.items():
            changed = recipe.replace(changes)
            ranks = pool(changed.layout.ranks, counted, changed, tokens)
            for rank in sorted({0, changed.layout.ranks - 1} if changed.layout.pp > 1 else {0}):
                expected = theory(changed, rank)
                for kind in sorted(ranks[rank].keys() | expected.keys()):
                    (calls, size), (_, should) = ranks[rank].get(kind, (0, 0)), expected.get(kind, (0, 0))
                    ratio = f"{size / should:7.3f}" if should else "      -"
                    print(f"{name:<26}{rank:>4}  {kind[0]:<10}{kind[1]:<15}{calls:>6}{size:>9,}{should:>9,}{ratio}")


if __name__ == "__main__":
    main()
