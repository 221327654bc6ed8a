"""Choose learning rate, schedule, Adam's betas and eps, weight decay and initialisation of a starter recipe."""

import math
from typing import Any

from leaven.catalogue.laws import critical_batch, lr_at_batch, power_lines_tau
from leaven.catalogue.neighbours import middle, most_common
from leaven.catalogue.starter.draft import Evidence, RunSize, StarterDraft
from leaven.catalogue.terms import term
from leaven.errors import InputError
from leaven.recipe.init_std import INITS, usual_std
from leaven.recipe.units import format_quantity

LR_SIZE_EXPONENT = -1 / 3
"""A published lr is converted to another size by the factor (ratio of the parameter counts) ** this exponent.
Published exponents: -0.32 in GPT-3, -0.33 in LLaMA, -0.36 in Porian's law."""
MOST_BY_BATCH = 2.0
"""A published lr is multiplied by sqrt(batch / published batch), limited to this factor up or down. Without the
limit, the factor could reach 10: published batches at one size differ by up to a factor of 100."""
LR_WIDENING = 2.0
"""Largest factor by which the lr may be outside the range of the published lrs, converted to this size and batch."""
LONGEST_WARMUP, SHORTEST_WARMUP = 0.05, 0.001  # shares of the run
NO_VOTE = frozenset({"Kaplan 2020 learning rate"})
"""Laws that `leaven new` does not use. Kaplan's law was fitted to models of 2019 at one batch and one duration."""
LINEAR_TO_ZERO = 15
"""The lr falls linearly to 0 in runs with at least this many tokens per parameter. From 20 tokens on, this was better
than a cosine to 10%, the more so in longer runs (Bergsma et al. 2025, arXiv 2502.15938, 111 M to 1.7 B). The limit is
lower, because a run that is planned for 20 may have 19: the chosen shape may have more parameters than requested.
Nothing is measured from 15 to 20."""
ADAM = {
    "hyperparameters.beta1": 0.9,
    "hyperparameters.beta2": 0.95,
    "hyperparameters.eps": 1e-8,
    "hyperparameters.weight_decay": 0.1,
    "hyperparameters.grad_clip": 1.0,
}
"""The values of nearly all published runs, used if none of the nearest runs publishes a value."""


def batch_factor(batch: int, published: int | None) -> float:
    """Return sqrt(batch / published), a factor on the published lr, limited by `MOST_BY_BATCH`."""
    ratio = math.sqrt(batch / published) if published else 1.0
    return min(max(ratio, 1 / MOST_BY_BATCH), MOST_BY_BATCH)


def lr_evidence(at: RunSize, batch: int) -> Evidence:
    """Return the lrs of laws and of published runs, converted to the model size and ``batch`` of the new recipe.

    If ``--from`` names a run with a known lr, this lr is used without conversion instead of all published lrs.
    """
    run, params, critical = at.reference, at.model.params_active, critical_batch(at.laws)
    moved = {law.law: lr_at_batch(law, batch, critical) for law in at.laws if law.law not in NO_VOTE}
    return at.evidence(
        {name: lr.square_root for name, lr in moved.items() if lr},
        lambda run: (
            run.peak_lr * (params / run.params_active) ** LR_SIZE_EXPONENT * batch_factor(batch, run.batch_tokens)
            if run.peak_lr
            else None
        ),
        run.peak_lr if run else None,
    )


def choose_lr(draft: StarterDraft, at: RunSize, batch: int, where: str) -> float:
    """Choose the peak lr, add it to the draft and return it. ``where`` is the run size as text, for messages."""
    run, evidence = at.reference, lr_evidence(at, batch)
    if run and run.peak_lr:
        message, lr = "lr of the reference", run.peak_lr
    else:
        message, low, high = "hyperparameters.lr", evidence.runs.low / LR_WIDENING, evidence.runs.high * LR_WIDENING
        lr = float(f"{min(max(evidence.middle, low), high):.2g}")
    facts = {"where": where, "most_by_batch": MOST_BY_BATCH, "spread": evidence.spread}
    draft.weigh("lr", "hyperparameters.lr", lr, evidence, message, **facts)
    return lr


def choose_schedule(draft: StarterDraft, at: RunSize, batch: int) -> None:
    """Choose the warm-up and the decay of the lr. Raise InputError if the warm-up fills the run."""
    near, tokens = at.near, at.tokens
    votes_by, lengths = {}, {}
    for id, length in near.values(lambda run: (run.batch_tokens and run.warmup_tokens) or None).items():
        steps = length / near.table[id].batch_tokens
        if near.table[id].batch_grew:  # a warm-up is copied in tokens if the batch grew, else in steps
            votes_by[id], lengths[id] = length, f"{format_quantity(length)} tokens"
        else:
            votes_by[id], lengths[id] = steps * batch, f"{steps:,.0f} steps"
    votes = near.middle(votes_by)
    wanted = votes.value
    own = near.reference is not None and near.reference.id in votes.by
    warmup = round(wanted if own else min(max(wanted, SHORTEST_WARMUP * tokens), LONGEST_WARMUP * tokens))
    if warmup >= tokens:
        raise InputError(
            f"--tokens {format_quantity(tokens)}: the warm-up of --from {', '.join(votes.by)} alone takes "
            f"{format_quantity(warmup)}; give more tokens than that"
        )
    draft.decide(
        "schedule.warmup_tokens",
        warmup,
        own=own,
        votes=votes,
        steps=draft.batches.first_step_at(warmup),
        lengths=lengths,
        longest=LONGEST_WARMUP if wanted > warmup != round(wanted) else None,
        shortest=SHORTEST_WARMUP if wanted < warmup != round(wanted) else None,
    )
    _choose_decay(draft, at)
    draft.step("schedule", [*near.sources(votes.by), "arXiv 2502.15938"], share=warmup / tokens)


def _choose_decay(draft: StarterDraft, at: RunSize) -> None:
    near = at.near
    decay = near.most("schedule.decay")
    assert decay is not None
    floors = near.values("schedule.min_lr_ratio")
    if near.reference is None and at.tokens_per_parameter >= LINEAR_TO_ZERO:
        facts: dict[str, Any] = {"least": LINEAR_TO_ZERO, "each": at.tokens_per_parameter, "model": at.model}
        facts |= {"decays": decay.by, "floors": floors}
        draft.decide("schedule.decay", "linear", "linear to zero", **facts)
        draft.decide("schedule.min_lr_ratio", 0.0, "linear to zero", **facts)
        return
    draft.decide("schedule.decay", decay.value, votes=decay)
    cooldowns = near.values(lambda run: run.cooldown_share)
    if decay.value == "wsd" and cooldowns:
        draft.decide("schedule.decay_ratio", float(f"{middle(cooldowns).value:.3g}"), runs=cooldowns)
    # Only runs with this decay count, because the final lr depends on the decay (linear: 0, cosine: 10%).
    alike = {who: floor for who, floor in floors.items() if decay.by.get(who) == decay.value} or floors
    floor = most_common(alike)
    assert floor is not None
    draft.decide("schedule.min_lr_ratio", float(floor.value), votes=floor)


def choose_adam(draft: StarterDraft, at: RunSize, batch: int, lr: float) -> None:
    """Choose AdamW and its settings, clipping, the z-loss and the initialisation."""
    near, run = at.near, at.reference
    muon = bool(run and run.optimizer == "muon")
    path = "hyperparameters.optimizer"
    draft.decide(path, *(("muon", "muon of the reference") if muon else ("adamw",)))
    for path in (f"hyperparameters.muon.{name}" for name in ("match", "momentum", "ns_steps") if muon):
        if run and (known := term(run, path)) is not None:
            draft.decide(path, known, "muon of the reference")
    voters: list[str] = []
    tau = power_lines_tau(at.model.params_active, at.tokens)
    by_tau = batch / (lr * at.tokens * tau)
    for path, usual in ADAM.items():
        votes = near.most(path)
        value = float(votes.value) if votes else usual
        checked = {"tau": tau, "by_tau": by_tau} if path == "hyperparameters.weight_decay" else {}
        draft.decide(path, value, "adam", votes=votes, known=votes is not None, **checked)
        if votes and path != "hyperparameters.grad_clip":
            voters += votes.by
    if run and (coefficient := term(run, "hyperparameters.z_loss")):
        draft.decide("hyperparameters.z_loss", coefficient, id=run.id)
    published = run.optim if run else None
    if published and published.decay_norm_and_bias:
        draft.decide("hyperparameters.decay_norm_and_bias", True, id=run and run.id)
    undecayed = published.decay_embeddings is False if published else not at.model.tied_embeddings
    if undecayed:
        draft.decide("hyperparameters.modules.embedding.weight_decay", 0.0, id=run and run.id)
    decay = draft.document["hyperparameters"]["weight_decay"]
    off = max(by_tau / decay, decay / by_tau) if decay else math.inf
    if off > 2:
        draft.uncertain["weight decay"] = {"spread": off, "by_tau": by_tau}
    ends = _choose_init(draft, at)
    width = run.arch.d_model if run and run.arch.d_model else at.model.d_model
    draft.step(
        "adam, init",
        [*near.sources(voters), "Power Lines 2025 timescale: arXiv 2505.13738", INITS["mt-nlg"].source],
        ends=ends,
        width=width,
        rules=_init_rules(width),
    )


def _init_rules(width: int) -> dict[str, float]:
    return {
        "mt-nlg sqrt(1/(3d))": usual_std(width),
        "small-init sqrt(2/(5d))": math.sqrt(2 / (5 * width)),
        "fan-in 1/sqrt(d)": math.sqrt(1 / width),
        "gpt2": 0.02,
    }


def _choose_init(draft: StarterDraft, at: RunSize) -> float:
    """Choose the init std. Return a factor on this std for the last matrix of each residual branch."""
    model, run = at.model, at.reference
    width, depth = (run and run.arch.d_model) or model.d_model, (run and run.arch.n_layers) or model.n_layers
    residual = (2 * depth) ** -0.5
    facts: dict[str, Any]
    # The std of a run whose norms this model cannot have ("post") may not suit the model.
    if run and run.init_std and run.arch.norm_placement in (None, model.norm_placement):
        message, ends = "init of the reference", "end of a branch as the reference"
        std, known = run.init_std, run.residual_init_std
        if known is not None:
            residual = (known or std) / std
        facts = {"known": known is not None}
    else:
        message, ends = "hyperparameters.init_std", "end of a branch"
        std = usual_std(width)
        rules = _init_rules(model.d_model)
        scaled = {run.id: run.init_scale for run in at.near.runs if run.init_scale}
        smallest = rules["mt-nlg sqrt(1/(3d))"]
        facts = {
            "width": width,
            "others": {name: value / smallest for name, value in rules.items()},
            "runs": scaled or None,
        }
        found = [*rules.values(), *(value / math.sqrt(model.d_model) for value in scaled.values())]
        draft.uncertain["init std"] = {"spread": max(found) / min(found)}
    draft.decide("hyperparameters.init", "rule")
    draft.decide("hyperparameters.init_std", float(f"{std:.3g}"), message, **facts)
    for module in model.branch_ends if residual != 1 else ():
        draft.decide(f"hyperparameters.modules.{module}.init_std", float(f"{residual:.4g}"), ends, **facts)
    return float(f"{residual:.4g}")
