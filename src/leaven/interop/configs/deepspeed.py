"""DeepSpeed: the JSON of ``deepspeed.initialize(config=...)``.

Source: deepspeed 0.19.8 (``runtime/config.py``, ``runtime/engine.py``, ``runtime/lr_schedules.py``). Model, init and
parameter groups are the client's: groups that it passes as ``model_parameters`` (``leaven.parametrize`` makes them)
keep their own lr, decay, betas and eps, and ``WarmupCosineLR`` and ``WarmupLR`` multiply each group's own lr. What
is written here is for a client without groups.

Type ``Adam`` means AdamW there unless ``adam_w_mode`` is false. ``WarmupCosineLR`` warms up in the logarithm unless
told otherwise, and for two steps at least.
"""

from typing import Any

from leaven.interop.configs import formats
from leaven.interop.configs.losses import common_notes, of_clip, of_ramp, of_schedule, of_start, rounding_notes
from leaven.interop.configs.vocabulary import Export, Loss, Wanted
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import optimiser_groups

TARGET = "DeepSpeed"
DECAYS = ("cosine", "constant")
LEAST_WARM_UP = 2


def export(recipe: Recipe) -> Export:
    """One JSON file; losses and notes are under ``_leaven``, a key that DeepSpeed does not read."""
    wanted = Wanted.of(recipe)
    losses = of_start(recipe) + of_ramp(recipe, TARGET) + of_clip(wanted, folded=False)
    losses += of_schedule(recipe, TARGET, DECAYS, "cosine")
    warmup = wanted.in_steps(recipe.schedule.warmup_tokens)
    if warmup < LEAST_WARM_UP:
        why = f"would be {LEAST_WARM_UP} steps, the fewest it has"
        losses.append(Loss("schedule.warmup_tokens", recipe.schedule.warmup_tokens, why))
    groups = len(optimiser_groups(wanted.table.rows))
    notes = [
        f"model, init and the {groups} parameter groups of the table are the client's: pass "
        "model_parameters = leaven.parametrize(...); the optimizer here has the values of most matrices, and decays "
        "whatever it is given",
        *common_notes(wanted),
        *rounding_notes(wanted),
    ]
    if recipe.layout.tp * recipe.layout.pp * recipe.layout.cp > 1:
        notes.append("tp, pp and cp are the client's")
    said = {"_leaven": {"lost": [loss.text for loss in losses], "notes": notes}}
    return Export({"": formats.json_text(_document(wanted, warmup) | said)}, tuple(losses), tuple(notes))


def _document(wanted: Wanted, warmup: int) -> dict[str, Any]:
    recipe, hidden, schedule = wanted.recipe, wanted.hidden, wanted.recipe.schedule
    optimiser = {
        "lr": hidden.lr,
        "betas": [hidden.beta1, hidden.beta2],
        "eps": hidden.eps,
        "weight_decay": hidden.weight_decay,
    }
    if not wanted.decoupled:
        optimiser["adam_w_mode"] = False
    shared = {"warmup_num_steps": max(warmup, LEAST_WARM_UP), "warmup_type": "linear"}
    cosine = {
        "total_num_steps": wanted.steps,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": schedule.min_lr_ratio,
        **shared,
    }
    constant = {"warmup_min_lr": 0.0, **shared}  # without warmup_max_lr each group goes to its own
    document: dict[str, Any] = {
        "train_batch_size": wanted.sequences,
        "train_micro_batch_size_per_gpu": wanted.micro_batch,
        "gradient_accumulation_steps": wanted.accumulate,
        "optimizer": {"type": "AdamW" if wanted.decoupled else "Adam", "params": optimiser},
        "scheduler": {"type": "WarmupLR", "params": constant}
        if schedule.decay == "constant"
        else {"type": "WarmupCosineLR", "params": cosine},
        "gradient_clipping": recipe.hyperparameters.grad_clip.limit,
        "zero_optimization": {"stage": recipe.layout.zero},
    }
    if recipe.precision.compute != "fp32":
        document[recipe.precision.compute] = {"enabled": True}
        document["data_types"] = {"grad_accum_dtype": "fp32"}
    return document
