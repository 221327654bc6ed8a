"""Functions for checks of optimizer, schedule, batch and text.

Each function has the name of a check in ``checks.toml``. It takes that check and the recipe as a ``Case``. It
returns a copy of the check with the compared value and the suggested changes, or None if the check does not apply.
"""

import math
from dataclasses import replace
from functools import cache
from operator import attrgetter
from statistics import median

from leaven.catalogue import laws
from leaven.catalogue.findings.case import Case, Check
from leaven.catalogue.laws import find_law, power_lines_tau
from leaven.catalogue.neighbours import FACTOR, ratio, size_ratio
from leaven.catalogue.runs import PublishedRun, load_runs
from leaven.catalogue.terms import term
from leaven.recipe.data import STDLIB_TOKENS
from leaven.recipe.shape import Role

_CHINCHILLA = 20  # tokens per parameter
_STEPS_OF_WARMUP = 2000  # usual for runs of any length
# For batches of up to this many tokens a higher beta2 is usual: Adam then averages over more steps, and so over about
# as many tokens as with a larger batch (Porian et al. 2024, arXiv 2406.19146).
_SMALL_BATCH = 2**18


def size(check: Check, case: Case) -> Check | None:
    if case.neighbours:
        return None
    nearest = min(case.size.near.ranked, key=lambda run: size_ratio(run, case.params))
    side = "larger" if nearest.params_active > case.params else "smaller"
    facts = {"nearest": nearest.id, "apart": size_ratio(nearest, case.params), "side": side}
    return replace(check, value=float(case.params), runs=[nearest], facts=facts)


def lr(check: Check, case: Case) -> Check | None:
    """Compare the lr with the lrs of the nearest published runs and their median.

    Published runs have one lr for all parameters. If the recipe has different lrs for the embedding and the hidden
    weights, the check uses the number in the range of these lrs that is nearest to the median.
    """
    known = case.near(attrgetter("peak_lr"))
    if not known:
        return None
    middle = median(known)
    lrs = [row.lr for row in case.rows if row.role in (Role.HIDDEN_WEIGHT, Role.EMBEDDING, Role.TIED_EMBEDDING)]
    value = case.hidden("lr")
    value = min(middle, max(value, *lrs)) if value < middle else max(middle, min(value, *lrs))
    lrs_by_law = [law.lr for law in case.size.laws if law.lr]
    facts = {"middle": middle, "times": value / middle, "least": min(lrs_by_law), "most": max(lrs_by_law)}
    facts |= {"lowest": known[0], "highest": known[-1]}
    facts |= {"lower": min(known[0], middle / 3), "upper": max(known[-1], 3 * middle)}
    return replace(check, value=value, suggestions=[case.at_base("lr", middle)], runs=case.neighbours, facts=facts)


def qk_norm(check: Check, case: Case) -> Check | None:
    """Compare the recipe's lr with the highest lr of the nearest published runs without QK-norm."""
    without = [run for run in case.neighbours if run.arch.qk_norm is False]
    if case.recipe.model.qk_norm or not without:
        return None
    highest = max(run.peak_lr or 0.0 for run in without)
    unstable = [f"{run.id}: {what}; {action}" for run, what, action in _unstable("without qk-norm")]
    return replace(
        check,
        value=case.hidden("lr"),
        of_run=lambda run: None if run.arch.qk_norm else run.peak_lr,
        suggestions=[{"model.qk_norm": True}, case.at_base("lr", highest, math.floor)],
        runs=without,
        facts={"highest": highest, "unstable": unstable},
    )


def _unstable(words: str) -> list[tuple[PublishedRun, str, str | None]]:
    """Return published instabilities with ``words`` in their description, as (run, what happened, remedy)."""
    return [
        (run, one.what, one.action) for run in load_runs() for one in run.instabilities if words in one.what.lower()
    ]


def z_loss(check: Check, case: Case) -> Check | None:
    """Return the check if a recipe without a z-loss has a high lr, otherwise None.

    An lr is high if it is over 1.5 times the highest lr of the near runs without a z-loss (at least two runs), and at
    most twice the highest lr of the published runs with a z-loss.
    """

    def has_z_loss(run: PublishedRun) -> bool:
        return bool(run.optim and (run.optim.z_loss or run.optim.z_loss_used))

    if case.recipe.hyperparameters.z_loss:
        return None
    value, without = case.hidden("lr"), [run for run in case.neighbours if not has_z_loss(run)]
    users = [run for run in case.runs if has_z_loss(run) and (run.peak_lr or 0) >= value / 2]
    highest = max((run.peak_lr or 0.0 for run in without), default=math.inf)
    if not (len(without) > 1 and value > 1.5 * highest and users):
        return None
    suggestions = [{"hyperparameters.z_loss": 1e-4}, case.at_base("lr", highest, math.floor)]
    return replace(check, value=value, suggestions=suggestions, runs=users[:5], facts={"highest": highest})


def z_loss_weight(check: Check, case: Case) -> Check | None:
    return replace(check, of_run=lambda run: term(run, check.path)) if check.value else None


def beta2(check: Check, case: Case) -> Check:
    """Compare beta2 with limits that depend on the batch: 0.999 is usual only for batches of at most 2^18 tokens."""
    known = [run.optim.beta2 for run in case.runs if run.optim and run.optim.beta2]
    if case.batch <= _SMALL_BATCH:
        check = replace(check, **check.otherwise)
    facts = {"usual": known.count(0.95), "known": len(known), "batch": case.batch}
    return replace(check, facts={**check.facts, **facts})


def weight_decay(check: Check, case: Case) -> Check | None:
    tuned = case.recipe.hyperparameters
    moved = check.value and ratio(check.value, tuned.weight_decay) > 1.02
    return None if moved or tuned.optimizer == "adam" else check


def l2_decay(check: Check, case: Case) -> Check | None:
    """Report a weight decay with ``adam``, which adds it to the gradient. Published decays are for AdamW."""
    return check if case.recipe.hyperparameters.optimizer == "adam" and check.value else None


def muon(check: Check, case: Case) -> Check | None:
    """Report Muon, because the compared published values are for Adam or AdamW."""
    return check if case.recipe.hyperparameters.optimizer == "muon" else None


def muon_lr(check: Check, case: Case) -> Check | None:
    """Compare Muon's lr, converted to AdamW's scale, with the lrs of near Adam, AdamW and Muon runs."""
    value = case.muon("lr")
    near = [run for run in _with_muon() if size_ratio(run, case.params) <= FACTOR]
    known = sorted([*case.near(attrgetter("peak_lr")), *(run.peak_lr for run in near if run.peak_lr)])
    if value is None or not known:
        return None
    base, middle = case.recipe.hyperparameters.of_matrices("lr"), median(known)
    facts = {"lowest": known[0], "highest": known[-1], "middle": middle}
    facts |= {"lower": min(known[0], middle / 3), "upper": max(known[-1], 3 * middle)}
    wanted = {"hyperparameters.muon.lr": float(f"{base * middle / value:.2g}")}
    return replace(check, value=value, suggestions=[wanted], runs=[*near, *case.neighbours], facts=facts)


def muon_decay(check: Check, case: Case) -> Check | None:
    """Compare Muon's weight decay, converted to AdamW's scale. Return None if Muon updates no matrix."""
    value = case.muon("weight_decay")
    if value is None:
        return None
    base = case.recipe.hyperparameters.of_matrices("weight_decay")
    wanted = {"hyperparameters.muon.weight_decay": float(f"{base * 0.1 / value:.2g}") if value else 0.1}
    return replace(check, value=value, suggestions=[wanted], runs=_with_muon())


def muon_momentum(check: Check, case: Case) -> Check | None:
    return replace(check, value=case.muon("beta1"), runs=_with_muon()) if case.recipe.hyperparameters.muon else None


def _with_muon() -> list[PublishedRun]:
    return [run for run in load_runs() if run.optimizer == "muon"]


def timescale(check: Check, case: Case) -> Check | None:
    """Compare the timescale of weight decay with the best timescale according to the Power Lines law.

    The timescale is batch / (lr x decay x tokens), a share of the run. In published runs, it is 0.34 to 10.9 times
    the best timescale, and 33 times in GPT-NeoX-20B. Return None without weight decay, and with the optimizer adam.
    """
    decay = case.hidden("weight_decay")
    if not decay or case.recipe.hyperparameters.optimizer == "adam":
        return None

    def of_run(run: PublishedRun) -> float | None:
        decay = run.optim and run.optim.weight_decay
        if not (decay and run.peak_lr and run.batch_tokens and run.tokens):
            return None
        tau = run.batch_tokens / (run.peak_lr * decay * run.tokens)
        return tau / power_lines_tau(run.params_active, run.tokens)

    tau, best = case.batch / (case.hidden("lr") * decay * case.tokens), power_lines_tau(case.params, case.tokens)
    low, high = map(float, check.usual)
    by = tau / best / min(max(tau / best, low), high)  # factor on decay or lr that leads to the usual range
    inside = math.ceil if by > 1 else math.floor
    fitted = find_law("Power Lines 2025 timescale").fitted
    return replace(
        check,
        value=tau / best,
        of_run=of_run,
        suggestions=[
            case.at_base("weight_decay", decay * by, inside),
            case.at_base("lr", case.hidden("lr") * by, inside),
            case.with_batch(case.batch / by),
        ],
        sure=check.sure and not fitted.beyond(case.params, case.tokens, 6 * case.params * case.tokens),
        facts={"tau": tau, "best": best},
    )


def decay_of_gains(check: Check, case: Case) -> Check | None:
    decays = any(row.weight_decay for row in case.rows if not row.role.is_matrix)
    return replace(check, value=1.0) if decays else None


def decay_of_embeddings(check: Check, case: Case) -> Check | None:
    """Report weight decay of an untied embedding without an embedding norm."""
    decays = [row.weight_decay for row in case.rows if row.role is Role.EMBEDDING and row.module == "embedding"]
    if not any(decays) or case.recipe.model.embedding_norm:
        return None
    runs = [run for run in load_runs() if run.optim and run.optim.decay_embeddings is False]
    return replace(check, value=next(filter(None, decays)), runs=runs)


def clip(check: Check, case: Case) -> Check:
    written = case.recipe.hyperparameters.grad_clip
    if written.limit and written.mode != "global":
        other = replace(check, usual=(), of_run=lambda run: None)
        return replace(other, value=written.limit, facts={"other": written.mode})
    facts = {"limit": written.limit or None, "off": not written.limit}
    return replace(check, value=written.limit or math.inf, facts=facts)


def tokens_per_parameter(check: Check, case: Case) -> Check:
    value, most = case.tokens / case.params, case.published(attrgetter("tokens_per_parameter"))[1]
    return replace(
        check,
        value=value,
        suggestions=[case.with_tokens(math.floor(most if value > most else _CHINCHILLA) * case.params)],
        facts={"few": value < _CHINCHILLA, "experts": case.recipe.model.experts},
    )


def steps(check: Check, case: Case) -> Check:
    def of_run(run: PublishedRun) -> float | None:
        return run.tokens / run.batch_tokens if run.tokens and run.batch_tokens else None

    smaller = case.tokens / 10_000
    # Suggest half of that batch, too: rounding to whole sequences may leave too few steps.
    batches = [case.with_batch(smaller), case.with_batch(smaller / 2)]
    return replace(
        check,
        value=float(case.recipe.steps),
        of_run=of_run,
        suggestions=[*batches, case.with_tokens(10_000 * case.batch)],
    )


def epochs(check: Check, case: Case) -> Check | None:
    if case.corpus_tokens is None:
        stand_in = "python-stdlib" in {source.source for source in case.recipe.data.sources}
        if stand_in and case.tokens > 16 * STDLIB_TOKENS:
            return replace(check, path="data.source", facts={"stand_in": STDLIB_TOKENS})
        return None

    def of_run(run: PublishedRun) -> float | None:
        known = run.data.tokens_in_dataset if run.data else None
        return run.tokens / known if run.tokens and known else None

    suggestions = [case.with_tokens(4 * case.corpus_tokens)]
    return replace(check, value=case.tokens / case.corpus_tokens, of_run=of_run, suggestions=suggestions)


def batch(check: Check, case: Case) -> Check | None:
    """Compare the batch with the largest batch of the nearest published runs. Any smaller batch passes."""
    known = case.near(attrgetter("batch_tokens"))
    if not known:
        return None
    return replace(
        check,
        suggestions=[case.with_batch(median(known)), case.with_batch(known[-1])],
        runs=case.neighbours,
        facts={"least": known[0], "most": known[-1]},
    )


@cache
def _critical_batch(params: float, tokens: float) -> float:
    return laws.critical_batch(laws.evaluate(params, tokens))


def critical_batch(check: Check, case: Case) -> Check:
    """Compare the batch with the median of the critical batches that the laws predict."""

    def of_run(run: PublishedRun) -> float | None:
        if not (run.batch_tokens and run.tokens):
            return None
        return run.batch_tokens / _critical_batch(run.params_active, run.tokens)

    middle = laws.critical_batch(case.size.laws)
    return replace(
        check,
        value=case.batch / middle,
        of_run=of_run,
        suggestions=[case.with_batch(middle), case.with_batch(0.9 * middle)],
        facts={"laws": laws.batches(case.size.laws, "critical"), "batch": case.batch},
    )


def no_ramp(check: Check, case: Case) -> Check | None:
    if case.recipe.batch.ramp is not None or case.recipe.batch.stages:
        return None

    def of_run(run: PublishedRun) -> float | None:
        return run.batch_tokens if run.constant_batch or run.ramp_start == 1 else None

    start, over = case.sequences(case.batch / 8), round(0.03 * case.tokens)
    ramp = {"start_tokens": start, "increment_tokens": case.batch - start, "over_tokens": over}
    return replace(
        check,
        of_run=of_run,
        suggestions=[{"batch.ramp": ramp}],
        runs=[run for run in case.runs if run.ramp_start and (run.batch_tokens or 0) >= 2e6][:5],
    )


def ramp_start(check: Check, case: Case) -> Check | None:
    ramp = case.recipe.batch.ramp
    if ramp is None:
        return None
    tenth = case.sequences(case.batch / 10)
    start = {"batch.ramp.start_tokens": case.batch - 9 * tenth, "batch.ramp.increment_tokens": tenth}
    return replace(
        check,
        value=ramp.start_tokens / case.batch,
        suggestions=[start],
        facts={"start": ramp.start_tokens},
    )


def ramp_length(check: Check, case: Case) -> Check | None:
    """Compare the length of a batch ramp with published ramps that have small increments."""
    ramp = case.recipe.batch.ramp
    if ramp is None:
        return None

    def of_run(run: PublishedRun) -> float | None:
        over, in_stages = run.ramp_tokens, run.ramp and run.ramp.kind == "stages"
        return over / run.tokens if over and run.tokens and not in_stages else None

    shorter = {"batch.ramp.over_tokens": round(0.04 * case.tokens)}
    return replace(check, value=ramp.over_tokens / case.tokens, of_run=of_run, suggestions=[shorter])


def warm_up(check: Check, case: Case) -> Check:
    """Check the warm-up's share of the run: 0.1% to 10% is usual. Below 0.1%, a warm-up of 2,000 steps or more gives
    only a note."""
    value, batches = case.recipe.schedule.warmup_tokens, case.recipe.batches
    taken, longest = batches.first_step_at(value), case.published(attrgetter("warmup_fraction"))[1]
    shortest = 0.0 if taken >= _STEPS_OF_WARMUP else 0.001
    hundredth = round(0.01 * case.tokens)
    usual = min(hundredth, batches.tokens_at_step(_STEPS_OF_WARMUP))
    others = (usual, math.ceil(0.001 * case.tokens), hundredth)
    return replace(
        check,
        value=value / case.tokens,
        suggestions=[{"schedule.warmup_tokens": tokens} for tokens in others],
        facts={"steps": taken, "shortest": shortest, "longest": longest, "most": max(0.5, longest)},
    )


def final_lr(check: Check, case: Case) -> Check:
    schedule = case.recipe.schedule
    never_falls = schedule.decay in ("constant", "inverse_sqrt")
    decays = {"schedule.decay": "cosine"} if never_falls else {}
    return replace(
        check,
        value=schedule.multiplier(case.tokens, case.tokens),
        suggestions=[{"schedule.min_lr_ratio": 0.1, **decays}],
        path="schedule.decay" if never_falls else check.path,
    )


def precision(check: Check, case: Case) -> Check | None:
    """Report fp16. Even with leaven's loss scale, it can overflow where bf16 does not."""
    if case.recipe.precision.compute != "fp16":
        return None
    unstable = _unstable("fp16")
    return replace(
        check,
        of_run=lambda run: run.precision and run.precision.dtype == "fp16",
        runs=[run for run, *_ in unstable],
        facts={"unstable": [f"{run.id}: {what}" for run, what, _ in unstable]},
    )
