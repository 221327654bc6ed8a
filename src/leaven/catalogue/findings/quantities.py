"""Compute what each check compares, in a recipe and in a published run, and the changes that it suggests.

A function has the name of its check and returns None if there is nothing to compare. The check's entry in
``checks.toml`` supplies what a function omits: fixed limits, the published value, suggestions, messages.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from leaven.catalogue.findings.case import Bounds, Case, OfRun, Suggestion, critical_batches, ratio
from leaven.catalogue.laws import evaluate, find_law, power_lines_tau
from leaven.catalogue.neighbours import FACTOR, size_ratio
from leaven.catalogue.run import PublishedRun
from leaven.catalogue.runs import find_run, load_runs
from leaven.recipe.data import STDLIB_TOKENS
from leaven.recipe.shape import BRANCH_ENDS, Role

_CHINCHILLA = 20  # tokens per parameter
_STEPS_OF_WARMUP = 2000  # usual for runs of any length
# In batches of up to this many tokens a higher beta2 is usual, because it averages over more steps and so over about
# as many tokens as at a larger batch (Porian et al. 2024, arXiv 2406.19146).
_SMALL_BATCH = 2**18


class CheckLimits(NamedTuple):
    """The ranges of a check.

    A value is reported as a note beyond ``usual``, as outside beyond ``outside``, and as far outside beyond ``far``.
    """

    usual: Bounds
    outside: Bounds
    far: Bounds


def upward(usual: float, outside: float, far: float) -> CheckLimits:
    """Return limits that have an upper end only, for a quantity that cannot be too small."""
    return CheckLimits((-math.inf, usual), (-math.inf, outside), (-math.inf, far))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One quantity of a recipe and what it is compared with.

    If neither the reading nor ``checks.toml`` has limits, the finding is always a note: the choice has caused trouble
    in published runs.
    """

    value: float | None = None
    of_run: OfRun | None = None
    limits: CheckLimits | None = None
    suggestions: Sequence[Suggestion] = ()  # changes of the recipe, the best first
    facts: Mapping[str, Any] | None = None  # fields of the message besides `value`, `low` and `high`
    runs: Iterable[PublishedRun] | None = None  # runs to name; by default the nearest with a usual value
    did_so: Sequence[PublishedRun] = ()  # only without limits: runs with this unusual value
    bounds: tuple[float | None, float | None] = (None, None)  # only without limits: the usual range
    factor: float | None = None  # only without limits: how far the value is outside the usual range
    sure: bool = True  # whether the limits hold at this size; if not, a finding is a note at most
    path: str | None = None  # path of the finding, if it is not the one in `checks.toml`


def size(case: Case) -> Reading | None:
    """Report that no published run is near the recipe's size."""
    if case.neighbours:
        return None
    nearest = case.runs[0]
    apart = size_ratio(nearest, case.params)
    side = "larger" if nearest.params_total > case.params else "smaller"
    return Reading(
        value=float(case.params),
        bounds=case.published(lambda run: float(run.params_total)),
        factor=apart,
        runs=[nearest],
        facts={"nearest": nearest.id, "apart": apart, "side": side},
    )


def lr(case: Case) -> Reading | None:
    """Compare the lr with the lrs of the neighbours.

    The lr is outside if it is beyond all lrs of the neighbours, and also over three times or under a third of their
    median.

    A published run has one lr for all parameters. If the scaling rule gives the hidden matrices another lr than the
    embedding, the lr nearest to the published median is compared.
    """
    known = case.near(attrgetter("peak_lr"))
    if not known:
        return None
    middle, lowest, highest = median(known), known[0], known[-1]
    lrs = [row.lr for row in case.rows if row.role in (Role.HIDDEN_WEIGHT, Role.EMBEDDING, Role.TIED_EMBEDDING)]
    value = case.hidden("lr")
    value = min(middle, max(value, *lrs)) if value < middle else max(middle, min(value, *lrs))
    outside = (min(lowest, middle / 3), max(highest, 3 * middle))
    results = evaluate(case.params, case.tokens, params_non_embedding=case.recipe.model.params_non_embedding)
    laws = [result.lr for result in results if result.lr and not result.form_of]
    return Reading(
        value=value,
        limits=CheckLimits((lowest, highest), outside, (outside[0] / 3, outside[1] * 3)),
        suggestions=[case.at_base("lr", middle)],
        runs=case.neighbours,
        facts={"middle": middle, "times": value / middle, "least": min(laws), "most": max(laws)},
    )


def qk_norm(case: Case) -> Reading | None:
    """Report that QK-norm is missing if the lr is above the lr of every neighbour without QK-norm."""
    without = [run for run in case.neighbours if run.arch.qk_norm is False]
    if case.recipe.model.qk_norm or not without:
        return None
    highest = max(run.peak_lr or 0.0 for run in without)
    return Reading(
        value=case.hidden("lr"),
        of_run=lambda run: None if run.arch.qk_norm else run.peak_lr,
        limits=upward(highest, 1.5 * highest, 5 * highest),
        suggestions=[{"model.qk_norm": True}, case.at_base("lr", highest, math.floor)],
        runs=without,
        facts={"unstable": [f"{run.id}: {what}; {action}" for run, what, action in _unstable("without qk-norm")]},
    )


def _unstable(words: str) -> list[tuple[PublishedRun, str, str | None]]:
    """Return the published instabilities whose description contains ``words``, as (run, what happened, remedy)."""
    return [
        (run, one.what, one.action) for run in load_runs() for one in run.instabilities if words in one.what.lower()
    ]


def z_loss(case: Case) -> Reading | None:
    """Report an lr more than 1.5 times the highest lr of the neighbours that had no z-loss."""

    def has_z_loss(run: PublishedRun) -> bool:
        return bool(run.optim and (run.optim.z_loss or run.optim.z_loss_used))

    value, without = case.hidden("lr"), [run for run in case.neighbours if not has_z_loss(run)]
    users = [run for run in case.runs if has_z_loss(run) and (run.peak_lr or 0) >= value / 2]
    highest = max((run.peak_lr or 0.0 for run in without), default=math.inf)
    if not (len(without) > 1 and value > 1.5 * highest and users):
        return None
    suggestions = [case.at_base("lr", highest, math.floor)]
    return Reading(
        value=value, bounds=(None, highest), factor=value / highest, suggestions=suggestions, runs=users[:5]
    )


def beta2(case: Case) -> Reading:
    """Compare beta2 with limits that depend on the batch.

    Adam's default of 0.999 is usual at small batches, but rare in runs with half a million tokens a batch.
    """
    known = [run.optim.beta2 for run in case.runs if run.optim and run.optim.beta2]
    small = CheckLimits((0.94, 0.999), (0.9, 0.9995), (0.8, 0.99995))
    return Reading(
        limits=small if case.batch <= _SMALL_BATCH else None,
        facts={"usual": known.count(0.95), "known": len(known), "batch": case.batch},
    )


def weight_decay(case: Case) -> Reading | None:
    """Compare the weight decay, unless the scaling rule changes it.

    A rule that lowers the lr with the width raises the decay by the same factor. In that case the check of the
    timescale compares lr and decay together.
    """
    value, tuned = case.hidden("weight_decay"), case.recipe.hyperparameters
    moved = value and ratio(value, tuned.weight_decay) > 1.02
    return None if moved or tuned.optimizer == "adam" else Reading()


def l2_decay(case: Case) -> Reading | None:
    """Report the optimizer ``adam`` with a weight decay.

    This optimizer adds the decay to the gradient, and Adam divides the sum by the gradient's size. The effect of the
    decay thus depends on the gradients and cannot be compared with published decays. Papers may write Adam and mean
    AdamW.
    """
    adam = case.recipe.hyperparameters.optimizer == "adam"
    return Reading() if adam and case.hidden("weight_decay") else None


def timescale(case: Case) -> Reading | None:
    """Compare the timescale of weight decay, B / (lr x decay x D), with the best timescale by Power Lines.

    B and D are the batch and the run in tokens. Published runs have 0.34 to 10.9 times the best timescale, except for
    GPT-NeoX-20B with 33 times.
    """
    decay = case.hidden("weight_decay")
    if not decay or case.recipe.hyperparameters.optimizer == "adam":
        return None

    def of_run(run: PublishedRun) -> float | None:
        decay = run.optim and run.optim.weight_decay
        if not (decay and run.peak_lr and run.batch_tokens and run.tokens):
            return None
        tau = run.batch_tokens / (run.peak_lr * decay * run.tokens)
        return tau / power_lines_tau(run.params_total, run.tokens)

    tau, best = case.batch / (case.hidden("lr") * decay * case.tokens), power_lines_tau(case.params, case.tokens)
    limits = CheckLimits((1 / 3, 5.0), (1 / 5, 12.0), (1 / 20, 50.0))
    by = tau / best / min(max(tau / best, limits.usual[0]), limits.usual[1])  # to the nearest end of the usual
    inside = math.ceil if by > 1 else math.floor
    fitted = find_law("Power Lines 2025 timescale").fitted
    return Reading(
        value=tau / best,
        of_run=of_run,
        limits=limits,
        suggestions=[
            case.at_base("weight_decay", decay * by, inside),
            case.at_base("lr", case.hidden("lr") * by, inside),
            case.with_batch(case.batch / by),
        ],
        sure=not fitted.beyond(case.params, case.tokens, 6 * case.params * case.tokens),
        facts={"tau": tau, "best": best},
    )


def decay_of_gains(case: Case) -> Reading | None:
    if not any(row.weight_decay for row in case.rows if not row.role.is_matrix):
        return None
    did_so = [run for run in case.runs if run.optim and run.optim.decay_norm_and_bias]
    return Reading(value=1.0, did_so=did_so)


def decay_of_embeddings(case: Case) -> Reading | None:
    """Report weight decay of an embedding that is not tied to the unembedding.

    A tied embedding decays like any other matrix.
    """
    decays = [row.weight_decay for row in case.rows if row.role is Role.EMBEDDING and row.module == "embedding"]
    if not any(decays) or case.recipe.model.embedding_norm:
        return None
    return Reading(
        value=next(filter(None, decays)),
        bounds=(None, 0.0),
        runs=[run for run in load_runs() if run.optim and run.optim.decay_embeddings is False],
    )


def clip(case: Case) -> Reading:
    written = case.recipe.hyperparameters.grad_clip
    if written.limit and written.mode != "global":
        return Reading(value=written.limit, facts={"other": written.mode})
    return Reading(
        value=written.limit or math.inf,
        limits=CheckLimits((0.1, 1.0), (0.01, 1.0), (0.001, 10.0)),
        facts={"limit": written.limit or None, "off": not written.limit},
    )


def tokens_per_parameter(case: Case) -> Reading:
    value, most = case.tokens / case.params, case.published(attrgetter("tokens_per_parameter"))[1]
    return Reading(
        value=value,
        limits=CheckLimits((16.0, most), (5.0, 1.5 * most), (1.0, 5 * most)),
        suggestions=[case.with_tokens(math.floor(most if value > most else _CHINCHILLA) * case.params)],
        facts={"few": value < _CHINCHILLA, "most": most},
    )


def steps(case: Case) -> Reading:
    def of_run(run: PublishedRun) -> float | None:
        return run.tokens / run.batch_tokens if run.tokens and run.batch_tokens else None

    smaller = case.tokens / 10_000
    # Half that batch is suggested as well, in case rounding to whole sequences leaves too few steps.
    batches = [case.with_batch(smaller), case.with_batch(smaller / 2)]
    return Reading(
        value=float(case.recipe.steps),
        of_run=of_run,
        suggestions=[*batches, case.with_tokens(10_000 * case.batch)],
        facts={"fewest": case.published(of_run)[0]},
    )


def epochs(case: Case) -> Reading | None:
    if case.corpus_tokens is None:
        stand_in = "python-stdlib" in {source.source for source in case.recipe.data.sources}
        if stand_in and case.tokens > 16 * STDLIB_TOKENS:
            return Reading(path="data.source", facts={"stand_in": STDLIB_TOKENS})
        return None

    def of_run(run: PublishedRun) -> float | None:
        known = run.data.tokens_in_dataset if run.data else None
        return run.tokens / known if run.tokens and known else None

    return Reading(
        value=case.tokens / case.corpus_tokens,
        of_run=of_run,
        limits=upward(4, 4, 16),
        suggestions=[case.with_tokens(4 * case.corpus_tokens)],
    )


def batch(case: Case) -> Reading | None:
    """Report a batch larger than the neighbours' batches. A small batch is no fault: it costs time, not quality."""
    known = case.near(attrgetter("batch_tokens"))
    if not known:
        return None
    return Reading(
        limits=upward(known[-1], 3 * known[-1], 10 * known[-1]),
        suggestions=[case.with_batch(median(known)), case.with_batch(known[-1])],
        runs=case.neighbours,
        facts={"least": known[0], "most": known[-1]},
    )


def critical_batch(case: Case) -> Reading:
    """Compare the batch with the median of the critical batches that the laws predict.

    The batch is outside if it exceeds that median by a larger factor than in any published run.
    """

    def of_run(run: PublishedRun) -> float | None:
        if not (run.batch_tokens and run.tokens):
            return None
        return run.batch_tokens / median(critical_batches(run.params_total, run.tokens).values())

    laws = critical_batches(case.params, case.tokens, case.recipe.model.params_non_embedding)
    middle, most = median(laws.values()), case.published(of_run)[1]
    return Reading(
        value=case.batch / middle,
        of_run=of_run,
        limits=upward(1.0, most, 4 * most),
        suggestions=[case.with_batch(middle), case.with_batch(0.9 * middle)],
        facts={"laws": laws, "batch": case.batch},
    )


def no_ramp(case: Case) -> Reading | None:
    if case.recipe.batch.ramp is not None or case.recipe.batch.stages:
        return None

    def of_run(run: PublishedRun) -> float | None:
        """Return the batch of a run that had its full batch from the first step, else None."""
        return run.batch_tokens if run.constant_batch or run.ramp_start == 1 else None

    most, start = case.published(of_run)[1], case.sequences(case.batch / 8)
    over = round(0.03 * case.tokens)
    ramp = {"start_tokens": start, "increment_tokens": case.batch - start, "over_tokens": over}
    return Reading(
        of_run=of_run,
        limits=upward(4.2e6, most, 4 * most),
        suggestions=[{"batch.ramp": ramp}],
        runs=[run for run in case.runs if run.ramp_start and (run.batch_tokens or 0) >= 2e6][:5],
        facts={"most": most},
    )


def ramp_start(case: Case) -> Reading | None:
    ramp = case.recipe.batch.ramp
    if ramp is None:
        return None
    tenth, least = case.sequences(case.batch / 10), case.published(attrgetter("ramp_start"))[0]
    start = {"batch.ramp.start_tokens": case.batch - 9 * tenth, "batch.ramp.increment_tokens": tenth}
    return Reading(
        value=ramp.start_tokens / case.batch,
        limits=CheckLimits((least, 1.0), (least / 2, 1.0), (least / 10, 1.0)),
        suggestions=[start],
        facts={"start": ramp.start_tokens, "least": least},
    )


def ramp_length(case: Case) -> Reading | None:
    """Compare the length of a batch ramp with published ramps that grew in small increments, not by doubling."""
    ramp = case.recipe.batch.ramp
    if ramp is None:
        return None

    def of_run(run: PublishedRun) -> float | None:
        over, in_stages = run.ramp_tokens, run.ramp and run.ramp.kind == "stages"
        return over / run.tokens if over and run.tokens and not in_stages else None

    shorter = {"batch.ramp.over_tokens": round(0.04 * case.tokens)}
    return Reading(value=ramp.over_tokens / case.tokens, of_run=of_run, suggestions=[shorter])


def warm_up(case: Case) -> Reading:
    """Compare the length of the warm-up: 0.1% to 10% of the run is usual.

    A shorter warm-up is outside, but only a note if it has the 2,000 steps of most runs. A longer warm-up is outside
    if it takes a larger share of the run than in every published run.
    """
    value, batches = case.recipe.schedule.warmup_tokens, case.recipe.batches
    taken, longest = batches.first_step_at(value), case.published(attrgetter("warmup_fraction"))[1]
    least, far = (0.0, 0.0) if taken >= _STEPS_OF_WARMUP else (0.001, 0.0001)
    hundredth = round(0.01 * case.tokens)
    usual = min(hundredth, batches.tokens_at_step(_STEPS_OF_WARMUP))
    others = (usual, math.ceil(0.001 * case.tokens), hundredth)
    return Reading(
        value=value / case.tokens,
        limits=CheckLimits((0.001, 0.1), (least, longest), (far, max(0.5, longest))),
        suggestions=[{"schedule.warmup_tokens": tokens} for tokens in others],
        facts={"steps": taken},
    )


def final_lr(case: Case) -> Reading:
    schedule = case.recipe.schedule
    never_falls = schedule.decay in ("constant", "inverse_sqrt")
    decays = {"schedule.decay": "cosine"} if never_falls else {}
    return Reading(
        value=schedule.multiplier(case.tokens, case.tokens),
        suggestions=[{"schedule.min_lr_ratio": 0.1, **decays}],
        path="schedule.decay" if never_falls else None,
    )


def init_std(case: Case) -> Reading | None:
    """Compare the init std with sqrt(1 / (3 d)), the std of MT-NLG 530B and BLOOM-176B at their width d.

    The largest published rule, fan-in with 1 / sqrt(d), gives 1.73 times this std. BigScience's 104B model diverged
    at 3.7 times.
    """
    tuned, std, unit = case.recipe.hyperparameters, case.init_std, math.sqrt(1 / (3 * case.recipe.model.d_model))
    if not std:
        return None

    def of_run(run: PublishedRun) -> float | None:
        return run.init_std * math.sqrt(3 * run.arch.d_model) if run.init_std and run.arch.d_model else None

    named = tuned.init != "rule"
    written = {"hyperparameters.init_std": float(f"{(tuned.init_std or 0.0) * unit / std:.3g}")}
    return Reading(
        value=std / unit,
        of_run=of_run,
        suggestions=[{"hyperparameters.init": "mt-nlg"} if named else written],
        path="hyperparameters.init" if named else None,
        facts={"std": std, "unit": unit, "width": case.recipe.model.d_model},
    )


def residual_std(case: Case) -> Reading | None:
    """Compare the std of matrices that write to the residual stream with the std of matrices that read it.

    The ratio of the two is multiplied by sqrt(2 L), for L layers, so that it is 1 for GPT-2.
    """
    if not case.init_std:
        return None

    def of_run(run: PublishedRun) -> float | None:
        known = run.residual_init_std and run.init_std and run.arch.norm_placement == "pre"
        if not (known and run.residual_init_std and run.init_std and run.arch.n_layers):
            return None
        return run.residual_init_std / run.init_std * math.sqrt(2 * run.arch.n_layers)

    ends, share, most = 2 * case.recipe.model.n_layers, case.residual_std / case.init_std, case.published(of_run)[1]
    value, modules = share * math.sqrt(ends), case.recipe.hyperparameters.modules
    written = {module: modules[module].init_std if module in modules else 1.0 for module in BRANCH_ENDS}
    other = {
        f"hyperparameters.modules.{module}.init_std": float(f"{std / value:.2g}") for module, std in written.items()
    }
    return Reading(
        value=value,
        of_run=of_run,
        limits=upward(3.0, most, 3 * most),
        suggestions=[other],
        facts={"share": share, "ends": ends},
    )


def dropout(case: Case) -> Reading | None:
    """Report dropout if the text is seen only once and thus cannot be memorised.

    The option ``--corpus-tokens`` states the length of the text.
    """
    if case.corpus_tokens is not None and case.tokens > 1.5 * case.corpus_tokens:
        return None
    rates = [run.optim.dropout for run in case.runs if run.optim and run.optim.dropout is not None]
    return Reading(
        facts={"none": rates.count(0), "known": len(rates), "guessed": not case.corpus_tokens},
    )


def precision(case: Case) -> Reading | None:
    """Report fp16: leaven always scales the loss, but fp16 still overflows where bf16 does not."""
    if case.recipe.precision.compute != "fp16":
        return None
    unstable = _unstable("fp16")
    return Reading(
        runs=[run for run, *_ in unstable],
        did_so=[run for run in case.runs if run.precision and run.precision.dtype == "fp16"],
        facts={"unstable": [f"{run.id}: {what}" for run, what, _ in unstable]},
    )


def aspect_ratio(case: Case) -> Reading:
    model = case.recipe.model
    near = [run.aspect for run in case.runs if size_ratio(run, case.params) <= FACTOR and run.aspect]
    low, high = case.published(attrgetter("aspect"))
    return Reading(
        value=model.d_model / model.n_layers,
        limits=CheckLimits((min(near), max(near)), (low, high), (low / 2, 2 * high)),
        suggestions=[{"model.n_layers": max(round(model.d_model / 80), 1)}],
        facts={"least": low, "most": high},
    )


def head_size(case: Case) -> Reading:
    model = case.recipe.model
    width = model.n_heads * model.d_head
    size = next((size for size in (128, 64) if width % size == 0), model.d_head)
    heads = {"model.d_head": size, "model.n_heads": width // size, "model.n_kv_heads": width // size}
    return Reading(suggestions=[heads])


def mlp_ratio(case: Case) -> Reading:
    model = case.recipe.model
    gated = CheckLimits((2.6, 3.6), (2.0, 5.5), (1.0, 8.0))
    width = round(model.d_model * (8 / 3 if model.gated else 4) / 64) * 64
    return Reading(
        value=model.d_ff / model.d_model,
        of_run=lambda run: run.mlp_ratio if bool(run.arch.gated) is model.gated else None,
        limits=gated if model.gated else CheckLimits((3.9, 4.1), (3.0, 6.0), (2.0, 10.0)),
        suggestions=[{"model.d_ff": max(width, 64)}],
        facts={"gated": model.gated},
    )


def vocabulary(case: Case) -> Reading | None:
    vocab, unit = case.recipe.model.vocab_size, 64 * case.recipe.layout.tp
    if vocab % unit == 0:
        return None
    return Reading(
        value=float(vocab),
        suggestions=[{"model.vocab_size": -(-vocab // unit) * unit}],
        runs=[find_run("gpt2-124m-nanogpt")],
        facts={"unit": unit},
    )


def sequence_length(case: Case) -> Reading:
    return Reading(suggestions=[{"model.seq_len": 1024 if case.recipe.model.seq_len < 1024 else 8192}])
