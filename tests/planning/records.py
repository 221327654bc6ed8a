"""A line of the history."""

from typing import Any

from tests.planning.shapes import SMALL

from leaven.planning.calibration import CalibrationRecord, StepCost
from leaven.recipe.layout import Layout


def record(number: int = 1, **changes: Any) -> CalibrationRecord:
    """A run on an H100 that took 1.5 times what was predicted."""
    values: dict[str, Any] = {
        "by": "run",
        "device": "NVIDIA H100 80GB HBM3",
        "accelerator": "H100-SXM-80GB",
        "compute": "bf16",
        "model": SMALL,
        "layout": Layout(),
        "batch_tokens": 8192,
        "micro_batch": 8,
        "grad_accumulation": 1,
        "predicted": StepCost(step_seconds=1.0, memory_gib=10.0),
        "measured": StepCost(step_seconds=1.5, memory_gib=12.0),
        "steps": 50,
        "torch": "2.13.0",
        "leaven": "0.1.0",
        "seconds": float(number),
    }
    return CalibrationRecord.model_validate(values | changes)
