"""Turn a published row into a planner case: model, arrangement, machine and training code."""

import re
from dataclasses import dataclass, replace

from benchmarks.planner.machines import machine_of
from benchmarks.planner.models import shape_of
from benchmarks.planner.stacks import RowStack, Unused, recompute_of, stack_of
from benchmarks.planner.tables import PublishedRow
from pydantic import ValidationError

from leaven.planning.arrangement import Arrangement
from leaven.planning.blueprint import Model
from leaven.planning.hardware import Cluster
from leaven.planning.layouts import USABLE
from leaven.planning.memory import GIB, worst_stage
from leaven.planning.timing import step_time
from leaven.planning.training_codes import TRAINING_CODES
from leaven.recipe.layout import Layout, Recompute

MEGATRON_CODES = [TRAINING_CODES[name] for name in ("megatron", "megatron-flash", "megatron-2021")]


@dataclass(frozen=True)
class PlannerCase:
    """A row as input for the planner. ``gbs``: global batch in sequences. ``chosen``: the row does not state its
    micro-batch, so the fastest is used.
    """

    row: PublishedRow
    shape: Model
    how: Arrangement
    cluster: Cluster
    stack: RowStack
    chosen: bool = False

    @property
    def gbs(self) -> int:
        return self.how.layout.dp * self.how.micro_batch * self.how.grad_accumulation

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.gbs * self.shape.seq_len


def case_of(row: PublishedRow, recompute: Recompute | None = None) -> PlannerCase:
    """The planner case of a row.

    Raises:
        Unused: naming what the row lacks.
    """
    words = row.words.lower()
    if "offload" in words:
        raise Unused("offload is not planned")
    stack, shape, machine = stack_of(row), shape_of(row), machine_of(row)
    gpus = row.whole("gpus") or (row.whole("nodes") or 0) * machine.node_size
    tp, pp = row.whole("tp") or 1, row.whole("pp") or 1
    together = row.whole("mp")
    if together and not row.get("tp"):  # tensor parallelism inside a node, the rest a pipeline
        tp = min(together, machine.node_size)
        pp = together // tp
    cp, dp = row.whole("cp") or 1, row.whole("dp")
    if not gpus and not dp and not row.number("total_ms"):
        raise Unused("no number of GPUs")
    gpus = gpus or tp * pp * cp * (dp or 1)
    dp = dp or gpus // (tp * pp * cp)
    if not dp:
        raise Unused(f"{gpus} GPUs are fewer than tp {tp} x pp {pp} x cp {cp}")
    ep = row.whole("ep") or 1
    if row.whole("etp") == 1 and ep > 1:  # Megatron spreads whole experts over ep ranks, the planner over ep x tp
        ep //= tp
    layout = _layout(row, stack, {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}, recompute)
    if layout.pp * layout.stages_per_rank > shape.n_layers + 2:  # the two ends may be stages of their own
        raise Unused(f"{shape.n_layers} layers do not fill pp {layout.pp} x {layout.stages_per_rank} stages")
    if layout.zero == 3 and stack.code in MEGATRON_CODES:  # DeepSpeed's, which Megatron was compared with
        stack = replace(stack, code=TRAINING_CODES["deepspeed-zero3"])
    cluster = Cluster(gpus, machine)
    micro_batch, accumulation = _batch(row, layout, shape.seq_len, stack)
    if micro_batch:
        return PlannerCase(row, shape, Arrangement(layout, micro_batch, accumulation), cluster, stack)
    if not any(row.get(name) for name in ("tp", "pp", "dp", "mp", "zero", "shard", "scheme", "layout")):
        raise Unused("no layout")
    return PlannerCase(row, shape, _fastest(shape, layout, accumulation, cluster, stack), cluster, stack, chosen=True)


def fits(needed: float, cluster: Cluster) -> bool:
    """Whether the layout fits, as in the search for a layout."""
    return needed <= USABLE * cluster.accelerator.memory_gib * GIB


def _fastest(shape: Model, layout: Layout, sequences: int, cluster: Cluster, stack: RowStack) -> Arrangement:
    """The fastest micro-batch that fits among powers of two that divide a rank's sequences; 1 if none fits."""
    sizes = (2**power for power in range(sequences.bit_length()) if sequences % 2**power == 0)
    ways = [Arrangement(layout, size, sequences // size) for size in sizes]
    room = [how for how in ways if fits(worst_stage(shape, how, stack.code).total, cluster)]
    return min(room or ways[:1], key=lambda how: step_time(shape, how, cluster, stack.code).step)


def _layout(row: PublishedRow, stack: RowStack, degrees: dict[str, int], recompute: Recompute | None) -> Layout:
    shard = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}.get(str(row.get("shard")))
    said = re.search(r"zero[- ]?(\d)", f"{row.get('scheme', '')} {row.get('optimizer', '')}", re.IGNORECASE)
    zero = next((z for z in (row.whole("zero"), shard, int(said[1]) if said else None) if z is not None), None)
    if zero is None:
        zero = 0 if re.search(r"\bddp\b", row.words, re.IGNORECASE) else stack.zero
    stages = row.whole("vpp") or (stack.stages if "interleaved" in row.words or stack.stages == 8 else 1)
    if zero == 3 and stack.split_batch and degrees["pp"] > 1:  # torchtitan keeps gradients whole in a pipeline
        zero = 1
    interleaved = degrees["pp"] > 1 and stages > 1
    try:
        return Layout.model_validate(
            degrees
            | {"zero": zero, "recompute": recompute or recompute_of(row)}
            | {"compile": "compile" in row.words}
            | ({"schedule": "interleaved", "stages_per_rank": stages} if interleaved else {})
            | ({"dp_replicate": max(1, degrees["dp"] // 8)} if row.get("shard") == "HYBRID_SHARD" else {})
        )
    except ValidationError as error:
        raise Unused(f"no such layout: {error.errors()[0]['msg']}") from None


def _batch(row: PublishedRow, layout: Layout, seq_len: int, stack: RowStack) -> tuple[int, int]:
    """Micro-batch and accumulation. Rows that only state memory get enough micro-batches to fill the pipeline; rows
    without a batch get a micro-batch of 0 and all sequences of a rank.
    """
    micro_batch, given = row.whole("mbs"), row.whole("gas")
    gbs, tokens, local = row.whole("gbs"), row.number("tokens_per_batch"), row.whole("batch_per_dp")
    if local:
        gbs = local * layout.dp
        micro_batch = micro_batch or 1
    if micro_batch is None and not (gbs or tokens):
        raise Unused("no micro-batch")
    if row.spelled.get("mbs") == "lbs" and micro_batch and given is None and gbs is None:
        parts = layout.pp if stack.split_batch else 1
        return max(1, micro_batch // parts), min(parts, micro_batch)
    if gbs is None and tokens:
        gbs = round(tokens / seq_len)
    if micro_batch is None:
        if given and gbs and gbs % (layout.dp * given) == 0:
            return gbs // layout.dp // given, given
        accumulation = (gbs or 0) // layout.dp
        if not accumulation:
            raise Unused("fewer sequences than dp")
        return 0, accumulation
    accumulation = given or (gbs // layout.dp // micro_batch if gbs else layout.pp)
    if not accumulation:
        raise Unused("fewer sequences than dp x mbs")
    return micro_batch, accumulation
