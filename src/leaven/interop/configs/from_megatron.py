"""A recipe from a Megatron-LM argument list.

What its flags mean for a recipe; :mod:`leaven.interop.configs.megatron_flags` has the flags and their defaults.
Megatron gives every matrix one lr, one decay and one standard deviation but for the embedding and the ends of
branches; the recipe has these as multipliers of modules, and no scaling rule.
"""

import math
import re

from pydantic import ValidationError

from leaven.interop.configs import flags as f
from leaven.interop.configs.draft import Draft, Imported
from leaven.interop.configs.export import target
from leaven.interop.configs.from_megatron_shape import read_shape
from leaven.interop.configs.megatron_flags import MegatronFlags, as_number, known_flags
from leaven.recipe.batch import Batch, BatchSchedule
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.shape import BRANCH_ENDS, ModelShape

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read(text: str, origin: str, name: str, ranks: int | None = None) -> Imported:
    """The recipe in an argument list; ``ranks`` is the number of processes that it is started with.

    Raises:
        InputError: naming what is of another kind of model, missing or malformed.
    """
    draft = Draft(origin)
    given = known_flags(f.parse(text, origin), origin, draft)
    shape = read_shape(given, draft)
    _groups(given, shape, draft)
    _batch_and_duration(given, shape, draft)
    _schedule(given, shape, draft)
    _layout(given, draft, ranks)
    return draft.finish(name, shape)


def _groups(given: MegatronFlags, shape: ModelShape, draft: Draft) -> None:
    if given.word("optimizer") != "adam":
        raise InputError(f"{given.origin}: --optimizer {given.word('optimizer')}: leaven has adam")
    std = given.number("init-method-std")
    for path, name in {
        "hyperparameters.init_std": "init-method-std",
        "hyperparameters.weight_decay": "weight-decay",
        "hyperparameters.beta1": "adam-beta1",
        "hyperparameters.beta2": "adam-beta2",
        "hyperparameters.eps": "adam-eps",
        "hyperparameters.grad_clip": "clip-grad",
    }.items():
        draft.set(path, given.number(name), given.why(name))
    ends = 1 / math.sqrt(2 * shape.n_layers)
    for module in BRANCH_ENDS:
        draft.set(f"hyperparameters.modules.{module}.init_std", ends, "Megatron starts these at 1 / sqrt(2 L) of it")
    if "embedding-init-method-std" in given.numbers:
        relative = given.number("embedding-init-method-std") / std
        for module in ("embedding", *(["positions"] if shape.positions == "learned" else [])):
            path = f"hyperparameters.modules.{module}.init_std"
            draft.set(path, relative, "--embedding-init-method-std / --init-method-std")
    if "lr" in given.numbers:
        draft.set("hyperparameters.lr", given.number("lr"), given.why("lr"))
        if "decoupled-lr" in given.numbers:
            relative = given.number("decoupled-lr") / given.number("lr")
            for module in ("embedding", *([] if shape.tied_embeddings else ["unembedding"])):
                draft.set(f"hyperparameters.modules.{module}.lr", relative, "--decoupled-lr / --lr")
    draft.set("data.seed", given.count("seed"), given.why("seed"))
    compute = "bf16" if "bf16" in given.switches else "fp16" if "fp16" in given.switches else "fp32"
    draft.set("precision.compute", compute, given.why("bf16", "fp16"))
    isolated = {"reset-position-ids", "reset-attention-mask"} <= given.switches
    draft.set(
        "data.documents",
        "isolated" if isolated else "packed",
        given.why("reset-attention-mask", "reset-position-ids"),
    )


def _batch_and_duration(given: MegatronFlags, shape: ModelShape, draft: Draft) -> None:
    length = shape.seq_len
    if "micro-batch-size" in given.numbers:
        draft.set("batch.micro_batch", given.count("micro-batch-size"), given.why("micro-batch-size"))
    if "step-batch-size-schedule" in given.words:
        stages = _stages(given, length)
        draft.set("batch.stages", stages, given.why("step-batch-size-schedule"))
        draft.set("batch.tokens", stages[-1]["tokens"], given.why("step-batch-size-schedule"))
    elif "global-batch-size" in given.numbers:
        draft.set("batch.tokens", given.count("global-batch-size") * length, "--global-batch-size x --seq-length")
        if "rampup-batch-size" in given.words:
            _ramp(given, length, draft)
    sizes = _sizes(given, draft)
    if "train-samples" in given.numbers:
        draft.set("data.tokens", given.count("train-samples") * length, "--train-samples x --seq-length")
    elif "train-iters" in given.numbers and sizes is not None:
        tokens = BatchSchedule(sizes).tokens_at_step(given.count("train-iters"))
        draft.set("data.tokens", tokens, "--train-iters x batch")


def _sizes(given: MegatronFlags, draft: Draft) -> tuple[tuple[int, int], ...] | None:
    parts = {
        key: draft.values[f"batch.{key}"] for key in ("tokens", "ramp", "stages") if f"batch.{key}" in draft.values
    }
    if not parts:
        return None
    try:
        return Batch.model_validate(parts).sizes
    except ValidationError as error:
        raise InputError(f"{given.origin}: no batch of leaven's: {explain(error)}") from None


def _stages(given: MegatronFlags, length: int) -> list[dict[str, int]]:
    stages = []
    for entry in re.split(r"[\s,]+", given.word("step-batch-size-schedule").strip()):
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise InputError(f"{given.origin}: --step-batch-size-schedule {entry}: write it as TOKENS:BATCH")
        tokens, sequences = (_suffixed(each, given.origin) for each in (threshold, size))
        stages.append({"from_tokens": tokens // length * length, "tokens": sequences * length})
    return stages


def _suffixed(word: str, origin: str) -> int:
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(word[-1:].upper(), 1)
    return int(as_number(word[:-1] if scale > 1 else word, "step-batch-size-schedule", origin) * scale)


def _ramp(given: MegatronFlags, length: int, draft: Draft) -> None:
    words = given.word("rampup-batch-size").split()
    if len(words) != 3 or any(f.open_variables(word) for word in words):
        draft.unknown.append(f"--rampup-batch-size {' '.join(words)}: wants START INCREMENT SAMPLES, all three set")
        return
    start, increment, samples = (int(as_number(word, "rampup-batch-size", given.origin)) * length for word in words)
    ramp = {"start_tokens": start, "increment_tokens": increment, "over_tokens": samples}
    draft.set("batch.ramp", ramp, "--rampup-batch-size, which a Megatron-LM since April 2026 parses and ignores")


def _schedule(given: MegatronFlags, shape: ModelShape, draft: Draft) -> None:
    style = given.word("lr-decay-style")
    ours = {theirs: ours for ours, theirs in target("megatron").decays.items()}
    if style not in ours:
        raise InputError(f"{given.origin}: --lr-decay-style {style}: leaven reads {', '.join(ours)}")
    draft.set("schedule.decay", ours[style], given.why("lr-decay-style"))
    if "lr" in given.numbers:
        ratio = float(f"{given.number('min-lr') / given.number('lr'):.12g}")
        draft.set("schedule.min_lr_ratio", ratio, f"{given.why('min-lr')} / --lr")
    duration, batch = draft.values.get("data.tokens"), draft.values.get("batch.tokens")
    decay = _span(given, "lr-decay", shape.seq_len, batch)
    if decay is not None and duration is not None and decay != duration:
        draft.unread.append(f"--lr-decay-samples or -iters: {decay:,} tokens; leaven's schedule ends with the run")
    warmup = _span(given, "lr-warmup", shape.seq_len, batch)
    if warmup is None and "lr-warmup-fraction" in given.numbers and duration is not None:
        warmup = round(given.number("lr-warmup-fraction") * (decay or duration))
    names = ("lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    draft.set("schedule.warmup_tokens", warmup or 0, given.why(*names))
    if ours[style] == "wsd":
        if given.word("lr-wsd-decay-style") != "minus_sqrt":
            draft.unread.append(f"--lr-wsd-decay-style {given.word('lr-wsd-decay-style')}: leaven has minus_sqrt")
        cooldown = _span(given, "lr-wsd-decay", shape.seq_len, batch)
        if cooldown is not None and duration:
            draft.set(
                "schedule.decay_ratio", cooldown / duration, given.why("lr-wsd-decay-samples", "lr-wsd-decay-iters")
            )


def _span(given: MegatronFlags, prefix: str, length: int, batch: int | None) -> int | None:
    """Tokens, from ``--PREFIX-samples`` or ``--PREFIX-iters``."""
    if f"{prefix}-samples" in given.numbers:
        return given.count(f"{prefix}-samples") * length
    if f"{prefix}-iters" in given.numbers and batch is not None:
        return given.count(f"{prefix}-iters") * batch
    return None


def _layout(given: MegatronFlags, draft: Draft, ranks: int | None) -> None:
    for path, name in {
        "layout.tp": "tensor-model-parallel-size",
        "layout.pp": "pipeline-model-parallel-size",
        "layout.cp": "context-parallel-size",
    }.items():
        draft.set(path, given.count(name), given.why(name))
    if "use-megatron-fsdp" in given.switches:
        strategy = given.word("data-parallel-sharding-strategy") or "no_shard"
        draft.set("layout.zero", SHARDING.get(strategy, 0), given.why("data-parallel-sharding-strategy"))
    elif "use-distributed-optimizer" in given.switches:
        draft.set("layout.zero", 1, "--use-distributed-optimizer")
    recompute = given.word("recompute-granularity") or (
        "selective" if "recompute-activations" in given.switches else ""
    )
    if recompute in {"full", "selective"}:
        draft.set("layout.recompute", recompute, given.why("recompute-granularity", "recompute-activations"))
    if "num-virtual-stages-per-pipeline-rank" in given.numbers:
        stages = given.count("num-virtual-stages-per-pipeline-rank")
        draft.set("layout.stages_per_rank", stages, given.why("num-virtual-stages-per-pipeline-rank"))
        draft.set("layout.schedule", "interleaved", given.why("num-virtual-stages-per-pipeline-rank"))
    if ranks is None:
        draft.unknown.append("layout.dp: follows from the number of processes, which --ranks tells; here 1")
        return
    each = math.prod(draft.values[f"layout.{degree}"] for degree in ("tp", "pp", "cp"))
    if ranks % each:
        raise InputError(f"--ranks {ranks}: tp x pp x cp is {each} in {given.origin}; give a multiple of it")
    draft.set("layout.dp", ranks // each, f"--ranks {ranks} / (tp x pp x cp)")
