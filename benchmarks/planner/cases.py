"""From a row to what the planner is asked: the model, the arrangement, the machine and the code that ran it."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner.tables import Row, number
from pydantic import ValidationError

from leaven.planning.accelerators import ACCELERATORS, Accelerator
from leaven.planning.arrangement import Arrangement
from leaven.planning.conventions import CONVENTIONS, counted
from leaven.planning.hardware import Cluster, find_accelerator
from leaven.planning.implementations import (
    LLM_FOUNDRY,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_DEEPSPEED_BF16,
    MEGATRON_DEEPSPEED_FP16,
    NANOTRON,
    TORCHTITAN,
    Implementation,
)
from leaven.planning.memory import GIB
from leaven.planning.pace import DEEPSPEED_ZERO3_PACE, MEGATRON_2024_PACE, MEGATRON_PACE
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout, Recompute
from leaven.recipe.shape import ModelShape


class Unused(Exception):
    """A row that cannot be used, and why."""


@dataclass(frozen=True)
class Stack:
    """The code that ran a row: what it keeps, how many bytes what it calls GB is, and how it runs a pipeline.

    ``stages``: on a rank where the source says "interleaved" and no number. ``split_batch``: the local batch goes
    through the pipeline in as many micro-batches as there are stages. ``dropout``: of its GPTs.
    """

    code: Implementation
    gb: float = 1e9
    dropout: float = 0.0
    stages: int = 1
    split_batch: bool = False


_FLASH = replace(MEGATRON, flash_attention=True)
_MEGATRON_2024 = replace(_FLASH, pace=MEGATRON_2024_PACE)
# Words of a table's source and optimizer, and what ran it; the first that is found. Llama 3: the 126 blocks and the
# two ends of the 405B are 128 = 16 ranks x 8 stages.
STACKS: dict[str, Stack] = {
    "nanotron": Stack(NANOTRON, gb=GIB),
    "torchtitan": Stack(TORCHTITAN, stages=2, split_batch=True),
    "llm-foundry": Stack(LLM_FOUNDRY),
    "llama 3": Stack(_FLASH, stages=8),
    "megatron-deepspeed": Stack(MEGATRON_DEEPSPEED_FP16, dropout=0.1),
    "deepspeed and megatron": Stack(MEGATRON_DEEPSPEED_FP16, dropout=0.1),
    "korthikanti": Stack(MEGATRON, dropout=0.1),
    "narayanan": Stack(MEGATRON_2021, dropout=0.1),
    "megatron": Stack(_MEGATRON_2024),
}
# Shapes that a name stands for. Llama 3.1: arXiv 2407.21783, table 3. Heads of MPT: llm-foundry,
# scripts/train/yamls/pretrain/mpt-*.yaml.
_LLAMA = {"vocab": 128_256, "kv_heads": 8}
_MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {**_LLAMA, "L": 32, "h": 4096, "a": 32, "ffn": 14_336},
    "llama-70b": {**_LLAMA, "L": 80, "h": 8192, "a": 64, "ffn": 28_672},
    "llama-405b": {**_LLAMA, "L": 126, "h": 16_384, "a": 128, "ffn": 53_248},
    **{
        f"mpt-{size}": {"vocab": 50_368, "a": heads, "L": layers, "h": width}
        for size, heads, layers, width in (
            ("125m", 12, 12, 768), ("350m", 16, 24, 1024), ("760m", 12, 24, 1536), ("1b", 16, 24, 2048),
            ("3b", 20, 32, 2560), ("7b", 32, 32, 4096), ("13b", 40, 40, 5120), ("30b", 64, 48, 7168),
            ("70b", 64, 80, 8192),
        )
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row as the planner is asked. ``gbs`` in sequences."""

    row: Row
    shape: ModelShape
    how: Arrangement
    cluster: Cluster
    stack: Stack

    @property
    def gbs(self) -> int:
        return self.how.layout.dp * self.how.micro_batch * self.how.grad_accumulation

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.gbs * self.shape.seq_len

    def flops(self, of: str) -> tuple[float, bool]:
        """FLOPs of a token as the table counts them for its column ``of``, and whether it says how."""
        named = conventions(self.row)
        if of == "hfu" and "mpt_mfu" in named:
            named = ["mpt_hfu"]
        elif of == "hfu":
            named = [name for name in named if name.endswith("hw")]
        elif of == "mfu":
            named = [name for name in named if not name.endswith("hw")]
        name = named[0] if named else "leaven"
        return counted(self.shape, name, self.how.layout.recompute), bool(named)


def conventions(row: Row) -> list[str]:
    """The FLOP conventions that a table names, in its order."""
    known = sorted(CONVENTIONS, key=len, reverse=True)
    return re.findall("|".join(known), str(row.get("flops_convention", "")))


def stack_of(row: Row) -> Stack:
    """What ran a row; fp8 products where its own precision or options say so, or else the table's first word."""
    origin = row.table.origin.lower()
    stack = next((stack for word, stack in STACKS.items() if word in origin), None)
    if stack is None:
        raise Unused("it is not said which code ran it")
    code = stack.code
    if code is MEGATRON_DEEPSPEED_FP16 and str(row.get("precision", "")).startswith("bf16"):
        code = MEGATRON_DEEPSPEED_BF16
    of_table = str(row.table.fields.get("precision", "")).partition(" ")[0]
    precise = f"{row.own.get('precision', of_table)} {row.get('options', '')}"
    if re.search(r"fp8|float8", precise):
        code = replace(code, pace=replace(code.pace, products="fp8"))
    return replace(stack, code=code)


def named(row: Row) -> dict[str, Any]:
    """The shape that a name stands for: "mpt-30b", "8B" (Llama 3.1), "the 22B model" of the same source's tables."""
    name = str(row.get("model_name", "")).lower().replace(" ", "-").replace("llama-3.1-", "llama-")
    text = f"{row.get('note', '')} {row.get('case', '')}".lower()
    for known, shape in _MODELS.items():
        if known in (name, f"llama-{name}") or (not name and known.replace("llama-", "llama-3.1-") in text):
            return shape
    size = re.search(r"\b([\d.]+b)\b", text)
    if size is None or name or row.get("params_b"):
        return {}
    wanted, keys = (number(size[1].upper()) or 0) / 1e9, ("L", "h", "a", "ffn", "kv_heads", "vocab", "tied")
    same = (other for other in row.table.siblings if other.own.get("params_b") == wanted and "h" in other.own)
    return next(({key: other.get(key) for key in keys if other.get(key)} for other in same), {})


def shape_of(row: Row) -> ModelShape:
    """The model. With ``ffn`` it is a gated one without biases (Llama's), else a GPT of 4h with learned positions; if
    ffn is 4h and it may be either, the one whose parameters are what the row prints."""
    known = named(row)

    def size(name: str) -> int | None:
        own = row.whole(name)
        return own if own is not None else known.get(name)

    needed = {name: size(name) for name in ("L", "h", "vocab", "seq_len")}
    for name, value in needed.items():
        if not value:
            raise Unused(f"no {name}")
    layers, width, vocab, seq_len = (int(value or 0) for value in needed.values())
    heads = size("a") or _usual_heads(row, width)
    if heads is None:
        raise Unused("no heads")
    if width % heads:
        raise Unused(f"{heads} heads do not divide h {width}")
    d_ff, tied = size("ffn"), row.get("tied", known.get("tied"))
    common = {
        "n_layers": layers, "d_model": width, "n_heads": heads, "d_head": width // heads, "vocab_size": vocab,
        "seq_len": seq_len,
    }  # fmt: skip
    gpt = ModelShape(
        **common, n_kv_heads=size("kv_heads") or heads, d_ff=d_ff or 4 * width, norm="layernorm", activation="gelu",
        positions="learned", tied_embeddings=tied is not False, bias=True, dropout=stack_of(row).dropout,
    )  # fmt: skip
    if not d_ff:
        return gpt
    llama = ModelShape(**common, n_kv_heads=size("kv_heads") or heads, d_ff=d_ff, tied_embeddings=tied is True)
    printed = row.number("params_b")
    if d_ff == 4 * width and printed and abs(gpt.params / 1e9 - printed) < abs(llama.params / 1e9 - printed):
        return gpt
    return llama


def _usual_heads(row: Row, width: int) -> int | None:
    """Heads where a row has none: those of most rows of the table that divide the width."""
    counts = Counter(other.own["a"] for other in row.table.rows if "a" in other.own and width % other.own["a"] == 0)
    return max(counts, key=lambda heads: counts[heads]) if counts else None


def machine_of(row: Row) -> Accelerator:
    """The accelerator, with what the words say of it: "8 a node", "96 GB (HBM2e 2.4 TB/s)", "400 Gb/s"."""
    said = str(row.get("hardware", ""))
    text = str(row.get("gpu") or said)
    kind = re.search(r"\b(GB?[23]00|GH200|[ABHLV]\d{2,3}S?|MI\d{3}X|TPUv\w+)", text, re.IGNORECASE)
    if kind is None:
        raise Unused("no GPU is named")
    wanted = [kind[1].upper().replace("TPUV", "TPUv"), *(["PCIe"] if "pcie" in text.lower() else [])]
    memory = re.search(r"\b(\d+) ?GB\b", text)
    try:
        found = find_accelerator("-".join([*wanted, *([f"{memory[1]}GB"] if memory else [])]))
    except InputError:
        try:
            found = find_accelerator("-".join(wanted))
        except InputError:
            raise Unused(f"{kind[1]} is no accelerator of the planner's") from None
    changes: dict[str, Any] = {"memory_gib": float(memory[1])} if memory else {}
    for name, pattern, unit in (
        ("node_size", r"(\d+) a node", int),
        ("memory_tb_s", r"([\d.]+) TB/s", float),
        ("network_gb_s", r"([\d.]+) Gb/s", lambda bits: float(bits) / 8),
    ):
        match = re.search(pattern, said)
        if match:
            changes[name] = unit(match[1])
    held = re.search(r"(\d+) W limit", said)
    if held and found.power_w:  # a board held to less power than its kind: the rate goes with its root, as clocks do
        kind_w = max(other.power_w or 0 for other in ACCELERATORS.values() if other.peak_tflops == found.peak_tflops)
        changes["matmuls"] = tuple(
            (dtype, (found.matmul(dtype) or rate) * (float(held[1]) / kind_w) ** 0.5) for dtype, rate in found.peaks
        )
        changes["best_matmul_tflops"] = dict(changes["matmuls"])["bf16"]
    if "Jean Zay" in said:  # 4 Omni-Path adapters of 100 Gb/s a node of 8: BLOOM's model card
        changes["network_gb_s"] = 6.25
    return replace(found, **changes)


def peak_tflops(row: Row) -> float:
    """What an MFU of the table is a share of."""
    given = row.number("peak_tflops")
    per_kind = re.search(rf"([\d.]+) \({row.get('gpu', '')}\)", str(row.get("hardware", "")), re.IGNORECASE)
    return given or (float(per_kind[1]) if per_kind and row.get("gpu") else machine_of(row).peak_tflops)


def case_of(row: Row, recompute: Recompute | None = None) -> Case:
    """What the planner is asked of a row.

    Raises:
        Unused: saying what it lacks.
    """
    words = row.words.lower()
    if "offload" in words:
        raise Unused("offload is not planned")
    stack, shape, machine = stack_of(row), shape_of(row), machine_of(row)
    gpus = row.whole("gpus") or (row.whole("nodes") or 0) * machine.node_size
    tp, pp = row.whole("tp") or 1, row.whole("pp") or 1
    if row.get("mp") and not row.get("tp"):
        tp = min(int(row.get("mp")), machine.node_size)
        pp = int(row.get("mp")) // tp
    cp, dp = row.whole("cp") or 1, row.whole("dp")
    if not gpus and not dp and not row.number("total_ms"):
        raise Unused("no number of GPUs")
    gpus = gpus or tp * pp * cp * (dp or 1)
    dp = dp or gpus // (tp * pp * cp)
    layout = _layout(row, stack, {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": row.whole("ep") or 1}, recompute)
    if layout.pp * layout.stages_per_rank > shape.n_layers + 2:  # the two ends may be stages of their own
        raise Unused(f"{shape.n_layers} layers do not fill pp {layout.pp} x {layout.stages_per_rank} stages")
    if layout.zero == 3 and stack.code.pace is MEGATRON_PACE:  # DeepSpeed's, which Megatron was compared with
        stack = replace(stack, code=replace(MEGATRON_DEEPSPEED_FP16, pace=DEEPSPEED_ZERO3_PACE))
    micro_batch, accumulation = _batch(row, layout, shape.seq_len, stack)
    return Case(row, shape, Arrangement(layout, micro_batch, accumulation), Cluster(gpus, machine), stack)


def _layout(row: Row, stack: Stack, degrees: dict[str, int], recompute: Recompute | None) -> Layout:
    shard = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}.get(str(row.get("shard")))
    said = re.search(r"zero[- ]?(\d)", f"{row.get('scheme', '')} {row.get('optimizer', '')}", re.IGNORECASE)
    zero = next((z for z in (row.whole("zero"), shard, int(said[1]) if said else None) if z is not None), 0)
    stages = row.whole("vpp") or (stack.stages if "interleaved" in row.words or stack.stages == 8 else 1)
    if zero == 3 and stack.split_batch and degrees["pp"] > 1:  # torchtitan keeps gradients whole in a pipeline
        zero = 1
    interleaved = degrees["pp"] > 1 and stages > 1
    given = row.get("recompute") if row.get("ac") is None else row.get("ac")
    kinds: dict[str, Recompute] = {"full": "full", "true": "full", "sac": "selective", "selective": "selective"}
    try:
        return Layout.model_validate(
            degrees
            | {"zero": zero, "recompute": recompute or kinds.get(str(given).lower(), "none")}
            | {"compile": "compile" in row.words}
            | ({"schedule": "interleaved", "stages_per_rank": stages} if interleaved else {})
            | ({"dp_replicate": max(1, degrees["dp"] // 8)} if row.get("shard") == "HYBRID_SHARD" else {})
        )
    except ValidationError as error:
        raise Unused(f"no such layout: {error.errors()[0]['msg']}") from None


def _batch(row: Row, layout: Layout, seq_len: int, stack: Stack) -> tuple[int, int]:
    """Micro-batch and accumulation; where only memory is asked, enough micro-batches to fill the pipeline."""
    micro_batch, given = row.whole("mbs"), row.whole("gas")
    gbs, tokens, local = row.whole("gbs"), row.number("tokens_per_batch"), row.whole("batch_per_dp")
    if local:
        gbs = local * layout.dp
        micro_batch = micro_batch or 1
    if micro_batch is None:
        raise Unused("no micro-batch")
    if "lbs" in row.own and given is None and gbs is None:
        parts = layout.pp if stack.split_batch else 1
        return max(1, micro_batch // parts), min(parts, micro_batch)
    if gbs is None and tokens:
        gbs = round(tokens / seq_len)
    accumulation = given or (gbs // layout.dp // micro_batch if gbs else layout.pp)
    if not accumulation:
        raise Unused("fewer sequences than dp x mbs")
    return micro_batch, accumulation
