"""Shapes of published measurements, the training codes that ran them, and a short way to plan a shape."""

from typing import Any

from leaven.planning.calibration import CalibrationRecord, StepCost
from leaven.planning.hardware import parse_cluster
from leaven.planning.layouts import Job
from leaven.planning.plan import ClusterPlan
from leaven.planning.plan import plan as plan_job
from leaven.planning.training_codes import TRAINING_CODES
from leaven.recipe.batch import Batch
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

NAMES = "megatron megatron-2021 megatron-deepspeed-fp16 megatron-deepspeed-bf16 nanotron torchtitan llm-foundry"
MEGATRON, MEGATRON_2021, MEGATRON_FP16, MEGATRON_BF16, NANOTRON, TORCHTITAN, LLM_FOUNDRY = (
    TRAINING_CODES[name] for name in NAMES.split()
)


def gpt(
    n_layers: int, width: int, heads: int, vocab: int = 51_200, seq_len: int = 2048, dropout: float = 0.1
) -> ModelShape:
    return ModelShape(
        n_layers=n_layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        d_head=width // heads,
        d_ff=4 * width,
        vocab_size=vocab,
        seq_len=seq_len,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        tied_embeddings=True,
        bias=True,
        dropout=dropout,
    )


def bloom(n_layers: int = 72, heads: int = 64) -> ModelShape:
    """The shape of most rows of BLOOM's layout search: width 14336."""
    return gpt(n_layers, 14_336, heads, vocab=250_880)


def llama(n_layers: int, width: int, heads: int, kv_heads: int, d_ff: int, vocab: int, seq_len: int) -> ModelShape:
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "d_head": width // heads, "vocab_size": vocab}
    return ModelShape(n_layers=n_layers, d_model=width, d_ff=d_ff, seq_len=seq_len, **sizes)


LLAMA_8B = llama(32, 4096, 32, 8, 14_336, 128_256, 8192)
LLAMA_405B = llama(126, 16_384, 128, 8, 53_248, 128_256, 8192)
SMALL = llama(12, 768, 12, 12, 2048, 32_768, 1024)


def plan(model: Any, batch: int | Batch, gpus: str, layout: str | None = None, **job: Any) -> ClusterPlan:
    """Plan 10^12 tokens of a model on a cluster."""
    batch = Batch(tokens=batch) if isinstance(batch, int) else batch
    return plan_job(Job(model, batch, parse_cluster(gpus), **job), 10**12, layout)


def record(number: int = 1, **changes: Any) -> CalibrationRecord:
    """A line of the calibration history: a run on an H100 that took 1.5 times what was predicted."""
    values: dict[str, Any] = {
        "by": "run", "device": "NVIDIA H100 80GB HBM3", "accelerator": "H100-SXM-80GB", "compute": "bf16",
        "model": SMALL, "layout": Layout(), "batch_tokens": 8192, "micro_batch": 8, "grad_accumulation": 1,
        "predicted": StepCost(step_seconds=1.0, memory_gib=10.0),
        "measured": StepCost(step_seconds=1.5, memory_gib=12.0),
        "steps": 50, "torch": "2.13.0", "leaven": "0.1.0", "seconds": float(number),
    }  # fmt: skip
    return CalibrationRecord.model_validate(values | changes)
