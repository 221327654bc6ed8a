"""Checks that the values of a published run agree: shape, parameters, batch, tokens, schedule, layout.

Sources often contradict each other; a file holds the value that was decided on, and its notes say why. A
contradiction that is left is a mistake in the file.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from leaven.catalogue.counting import count_parameters
from leaven.catalogue.groups import PublishedGroup

if TYPE_CHECKING:
    from leaven.catalogue.run import PublishedRun

_PARAMS = 0.03  # of a count from the shape against one that is published rounded
_TOKENS = 0.02  # of steps x batch against tokens: most are published as "300B"
_WARMUP = 0.02  # of one way to say a warm-up against another


def contradictions(run: "PublishedRun") -> Iterator[str]:
    """Yield every contradiction as ``field: what is wrong``."""
    yield from _names(run)
    yield from _shape(run)
    yield from _count(run)
    yield from _batch(run)
    yield from _ramp(run)
    yield from _schedule(run)
    yield from _layout(run)


def _names(run: "PublishedRun") -> Iterator[str]:
    """Check that ``exceptions`` and ``derived`` name existing fields."""
    for name, group in run:
        if not isinstance(group, PublishedGroup):
            continue
        for field in (*group.exceptions, *group.derived):
            if field not in group.model_fields_set:
                where = "exceptions" if field in group.exceptions else "derived"
                yield f"{name}.{where}: there is no {field} in [{name}]"


def _shape(run: "PublishedRun") -> Iterator[str]:
    arch = run.arch
    own_width = arch.d_head is not None or arch.kv_lora_rank is not None
    if arch.d_model and arch.n_heads and not own_width and arch.d_model % arch.n_heads:
        yield f"arch.n_heads: d_model {arch.d_model} does not divide over {arch.n_heads} heads; give d_head"
    if arch.n_heads and arch.n_kv_heads and arch.n_heads % arch.n_kv_heads:
        yield f"arch.n_kv_heads: {arch.n_heads} heads do not divide over {arch.n_kv_heads} key heads"
    if arch.vocab_size and arch.vocab_padded and arch.vocab_padded < arch.vocab_size:
        yield f"arch.vocab_padded: {arch.vocab_padded} is below vocab_size {arch.vocab_size}"
    if arch.gated is not None and arch.gated != (arch.activation in ("swiglu", "geglu")):
        yield f"arch.gated: {str(arch.gated).lower()}, but the activation is {arch.activation}"
    if arch.n_layers is not None and (arch.n_dense_layers or 0) > arch.n_layers:
        yield f"arch.n_dense_layers: {arch.n_dense_layers} of {arch.n_layers} layers"
    if arch.n_experts is not None and (arch.experts_per_token is None or arch.experts_per_token > arch.n_experts):
        yield f"arch.experts_per_token: {arch.experts_per_token} of {arch.n_experts} experts"
    if (run.kind == "moe") != (arch.n_experts is not None):
        yield f"arch.n_experts: a run of kind {run.kind} has {arch.n_experts or 'no'} experts"
    latent = (arch.kv_lora_rank, arch.qk_nope_head_dim, arch.qk_rope_head_dim, arch.v_head_dim)
    if len({value is None for value in latent}) > 1:
        yield "arch.kv_lora_rank: latent attention needs kv_lora_rank, qk_nope_, qk_rope_ and v_head_dim together"


def _count(run: "PublishedRun") -> Iterator[str]:
    if run.params_active > run.params_total or (run.kind == "dense" and run.params_active != run.params_total):
        yield f"params_active: {run.params_active:,} of {run.params_total:,} parameters in a {run.kind} model"
    check = run.params.shape_check
    if check is not None and check.startswith("skip"):
        return
    count = count_parameters(run.arch, run.data.seq_len if run.data else None)
    if count is None:
        yield "params.shape_check: the shape is incomplete; add what is missing, or 'skip: ' and the reason"
        return
    expected = run.params_total + (run.params.shape_excess or 0)
    if run.params.precision == "exact" and count.total != expected:
        yield f"params_total: the shape gives {count.total:,}, not {expected:,}; params.shape_excess may say why"
    elif abs(count.total / run.params_total - 1) > _PARAMS:
        yield f"params_total: the shape gives {count.total:,}, not within 3% of {run.params_total:,}"


def _batch(run: "PublishedRun") -> Iterator[str]:
    if run.batch is None or run.data is None:
        return
    samples, tokens, seq_len = run.batch.global_batch_samples, run.batch.global_batch_tokens, run.data.seq_len
    if samples and tokens and seq_len and samples * seq_len != tokens:
        yield f"batch.global_batch_tokens: {samples:,} samples of {seq_len:,} are not {tokens:,} tokens"
    steps = run.schedule.total_steps if run.schedule else None
    constant = run.batch.rampup is not None and run.batch.rampup.kind == "none"
    if not (steps and tokens and run.tokens and constant) or run.data.note is not None:
        return
    if not math.isclose(steps * tokens, run.tokens, rel_tol=_TOKENS):
        yield (
            f"data.tokens_total: {steps:,} steps of {tokens:,} are {steps * tokens:,}, not {run.tokens:,}; "
            "data.note may say why"
        )


def _ramp(run: "PublishedRun") -> Iterator[str]:
    if run.batch is None or run.batch.rampup is None:
        return
    ramp, samples, tokens = run.batch.rampup, run.batch.global_batch_samples, run.batch.global_batch_tokens
    end_samples = ramp.final_samples or ramp.end_samples
    end_tokens = ramp.end_tokens
    if ramp.stages:
        last = ramp.stages[-1]
        end_samples, end_tokens = last.get("samples"), last.get("tokens")
    if end_samples and samples and end_samples != samples:
        yield f"batch.rampup: it ends at {end_samples:,} samples, the batch is {samples:,}"
    if end_tokens and tokens and end_tokens != tokens:
        yield f"batch.rampup: it ends at {end_tokens:,} tokens, the batch is {tokens:,}"
    if ramp.n_increments and ramp.start_samples and ramp.increment_samples and ramp.final_samples:
        reached = ramp.start_samples + ramp.n_increments * ramp.increment_samples
        if reached != ramp.final_samples:
            yield f"batch.rampup: {ramp.n_increments} increments reach {reached:,} samples, not {ramp.final_samples}"


def _schedule(run: "PublishedRun") -> Iterator[str]:
    schedule = run.schedule
    if schedule is None:
        return
    peak, low, ratio = schedule.peak_lr, schedule.min_lr, schedule.min_lr_ratio
    if (
        peak is not None
        and low is not None
        and ratio is not None
        and not math.isclose(peak * ratio, low, rel_tol=0.01, abs_tol=1e-12)
    ):
        yield f"schedule.min_lr_ratio: {ratio:g} of {peak:g} is {peak * ratio:g}, not {low:g}"
    warmups = dict(_warmups(run))
    for name, tokens in warmups.items():
        first_name, first = next(iter(warmups.items()))
        if not math.isclose(tokens, first, rel_tol=_WARMUP):
            yield f"schedule.{name}: {tokens:.4g} tokens, but {first_name} makes {first:.4g}"


def _warmups(run: "PublishedRun") -> Iterator[tuple[str, float]]:
    """Return the warm-up in tokens for each way the file states it."""
    schedule, batch, data = run.schedule, run.batch, run.data
    if schedule is None or data is None:
        return
    constant = batch is not None and batch.rampup is not None and batch.rampup.kind == "none"
    if schedule.warmup_tokens is not None:
        yield "warmup_tokens", schedule.warmup_tokens
    if schedule.warmup_samples is not None and data.seq_len:
        yield "warmup_samples", schedule.warmup_samples * data.seq_len
    if schedule.warmup_steps is not None and constant and run.batch_tokens:
        yield "warmup_steps", schedule.warmup_steps * run.batch_tokens
        if schedule.warmup_fraction is not None and schedule.total_steps:
            yield "warmup_fraction", schedule.warmup_fraction * schedule.total_steps * run.batch_tokens


def _layout(run: "PublishedRun") -> Iterator[str]:
    layout = run.parallel
    if layout is None:
        return
    count = run.hardware.count if run.hardware else None
    if count and layout.tp and layout.pp and layout.dp:
        ranks = layout.tp * layout.pp * layout.dp * (layout.cp or 1)
        if ranks != count:
            yield f"parallel.dp: tp x pp x dp x cp is {ranks:,}, the accelerators are {count:,}"
    samples = run.batch.global_batch_samples if run.batch else None
    if samples and layout.micro_batch and layout.dp:
        at_once = layout.micro_batch * layout.dp * (layout.grad_accum or 1)
        if layout.grad_accum and at_once != samples:
            yield f"parallel.grad_accum: micro-batch x accumulation x dp is {at_once:,}, the batch {samples:,}"
        elif samples % at_once:
            yield f"parallel.micro_batch: the batch of {samples:,} does not divide by micro-batch x dp = {at_once:,}"
