"""Find the code that ran a row, and how its source counts FLOPs."""

import re
from dataclasses import dataclass, replace
from typing import Any

import yaml
from benchmarks.planner.conventions import CONVENTIONS
from benchmarks.planner.tables import PublishedRow

from leaven.planning.memory import GIB
from leaven.planning.training_codes import TRAINING_CODES, TrainingCode
from leaven.recipe.layout import Recompute


class Unused(Exception):
    """A row that cannot be used, and why."""


@dataclass(frozen=True)
class RowStack:
    """The training code of a row, the size of its GB, and how it runs a pipeline."""

    code: TrainingCode
    gb: float = 1e9
    dropout: float = 0.0
    stages: int = 1
    zero: int = 0
    split_batch: bool = False
    first_rank: bool = False


# Words of a table's source and optimizer, and what ran it; the first that is found. Llama 3: the 126 blocks and the
# two ends of the 405B are 128 = 16 ranks x 8 stages. ZeRO where nothing is said: torchtitan's and llm-foundry's FSDP
# shares out everything, Megatron's examples (--use-distributed-optimizer) and Llama 3 the optimizer alone. SimuMax's
# launchers of Megatron switch its overlaps off, NVIDIA's recipes overlap the exchange of gradients.
def _tensors(name: str) -> TrainingCode:
    """A training code whose published memory is what torch counts, without the device context."""
    return TRAINING_CODES[name].tensors_only()


_MEGATRON = _tensors("megatron-2026")
# Megatron-MoE-ModelZoo of May 2025, whose rows are older than the flags of the training codes megatron-moe and
# megatron-deepep: no --tp-comm-overlap and no --cross-entropy-loss-fusion.
_OF_MAY_2025: dict[str, Any] = {"behind_products": False, "logit": TRAINING_CODES["megatron"].logit}
STACKS: dict[str, RowStack] = {
    "simumax": RowStack(_MEGATRON, zero=1),
    "megatron-bridge": RowStack(replace(_MEGATRON, overlap=True), zero=1),
    "megatron-moe-modelzoo": RowStack(replace(_tensors("megatron-moe"), **_OF_MAY_2025), zero=1),
    "nanotron": RowStack(TRAINING_CODES["nanotron"], gb=GIB, first_rank=True),
    "torchtitan": RowStack(TRAINING_CODES["torchtitan"], stages=2, zero=3, split_batch=True),
    "llm-foundry": RowStack(TRAINING_CODES["llm-foundry"], zero=3),
    "llama 3": RowStack(TRAINING_CODES["megatron-flash"], stages=8, zero=1),
    "megatron-deepspeed": RowStack(TRAINING_CODES["megatron-deepspeed-fp16"], dropout=0.1),
    "deepspeed and megatron": RowStack(TRAINING_CODES["megatron-deepspeed-fp16"], dropout=0.1),
    "korthikanti": RowStack(TRAINING_CODES["megatron"], dropout=0.1),
    "narayanan": RowStack(TRAINING_CODES["megatron-2021"], dropout=0.1),
    "megatron": RowStack(TRAINING_CODES["megatron-2024"], zero=1),
}


def conventions(row: PublishedRow) -> list[str]:
    """The FLOP conventions that a table names, in order."""
    known = sorted(CONVENTIONS, key=len, reverse=True)
    return re.findall("|".join(known), str(row.get("flops_convention", "")))


def convention_of(row: PublishedRow, of: str) -> str | None:
    """The convention of a column: for ``mfu`` that of the model, for ``hfu`` that of the hardware, for a rate the
    first; None if the table names none.
    """
    named = conventions(row)
    if of == "hfu":
        named = ["mpt_hfu"] if "mpt_mfu" in named else [name for name in named if name.endswith("hw")]
    elif of == "mfu":
        named = [name for name in named if not name.endswith("hw")]
    return named[0] if named else None


def recompute_of(row: PublishedRow) -> Recompute:
    """The recomputation mode, from ``ac`` or ``recompute``."""
    given = row.get("recompute") if row.get("ac") is None else row.get("ac")
    kinds: dict[str, Recompute] = {"full": "full", "true": "full", "sac": "selective", "selective": "selective"}
    return kinds.get(str(given).lower(), "none")


def in_fp8(row: PublishedRow) -> bool:
    """Whether the row used fp8 matmuls: by its precision or options, else by the first word of the table."""
    of_table = str(row.table.fields.get("precision", "")).partition(" ")[0]
    return bool(re.search(r"fp8|float8", f"{row.own.get('precision', of_table)} {row.get('options', '')}"))


def _named(row: PublishedRow) -> RowStack | None:
    """The stack of a row that names its training code itself (``code``), or None.

    ``code_changes`` is what differs from this code: "logit: 14, grads: 2".
    """
    name = row.get("code")
    if name is None:
        return None
    if name not in TRAINING_CODES:
        raise Unused(f"{name} is no training code of the planner's")
    changes: dict[str, Any] = yaml.safe_load(f"{{{row.get('code_changes') or ''}}}")
    unknown = [key for key in changes if key not in TRAINING_CODES[name].__dataclass_fields__]
    if unknown:
        raise Unused(f"a training code has no setting {unknown[0]}")
    code = replace(TRAINING_CODES[name], **changes)
    return RowStack(replace(code, products="fp8") if in_fp8(row) else code, zero=1)


def stack_of(row: PublishedRow) -> RowStack:
    """The training code of a row, with the dtype of its matmuls."""
    named = _named(row)
    if named is not None:
        return named
    origin = row.table.origin.lower()
    stack = next((stack for word, stack in STACKS.items() if word in origin), None)
    if stack is None:
        raise Unused("it is not said which code ran it")
    if stack is STACKS["megatron"] and "a100" in f"{row.get('hardware')} {row.get('gpu')}".lower():
        stack = STACKS["narayanan"]  # Megatron-LM in those years
    code, options = stack.code, str(row.get("options", ""))
    if "DeepEP" in options:
        name = "megatron-deepep-overlap" if "1f1b overlap" in options else "megatron-deepep"
        code = replace(_tensors(name), **_OF_MAY_2025)
    if code is TRAINING_CODES["megatron-deepspeed-fp16"] and str(row.get("precision", "")).startswith("bf16"):
        code = TRAINING_CODES["megatron-deepspeed-bf16"]
    if in_fp8(row):
        code = replace(code, products="fp8")
    return replace(stack, code=code)
