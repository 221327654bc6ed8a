"""The learning rate of a starter: its peak, and its schedule."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from leaven.catalogue.batch_change import critical_batch, lr_at_batch
from leaven.catalogue.derivation import Draft, Unsure
from leaven.catalogue.growth import cooldown, warmup_tokens
from leaven.catalogue.run import Run
from leaven.catalogue.starter.setting import Setting, said_range, short
from leaven.catalogue.votes import Said, middle
from leaven.recipe.batch import Batch, BatchSchedule
from leaven.recipe.errors import InputError
from leaven.recipe.units import format_quantity

LR_SIZE_EXPONENT = -1 / 3
"""Of a published lr with size within one lineage: GPT-3's table -0.32, LLaMA's -0.33; and of Porian's law, -0.36."""
MOST_BY_BATCH = 2.0
"""How far the batch moves a published lr at most."""
LR_WIDENING = 2.0
"""The lr stays within the neighbours' own, moved to this size and batch, widened by this factor."""
LONGEST_WARMUP, SHORTEST_WARMUP = 0.05, 0.001
NO_VOTE = frozenset({"Kaplan 2020 learning rate"})
"""Laws that `leaven laws` shows and that do not vote: transformers of 2019 at one batch and one length."""
LINEAR_TO_ZERO = 15
"""Tokens a parameter from which on the lr falls linearly to 0: better than a cosine to a tenth from 20 on at 111 M to
1.7 B, and the more so the longer the run (Bergsma et al. 2025, arXiv 2502.15938)."""


def batch_factor(batch: int, published: int | None) -> float:
    """What a published lr is multiplied by for another batch: by the square root of the ratio as a law's, bounded,
    for runs near a size hold theirs at batches a hundred times apart."""
    ratio = math.sqrt(batch / published) if published else 1.0
    return min(max(ratio, 1 / MOST_BY_BATCH), MOST_BY_BATCH)


def choose_lr(draft: Draft, at: Setting, batch: int, where: str) -> float:
    """The peak lr at a scale; ``where`` names it."""
    lead, params = at.lead, at.model.params
    critical = critical_batch(at.laws)
    moved = {law.law: lr_at_batch(law, batch, critical) for law in at.laws}
    laws = middle({name: lr.square_root for name, lr in moved.items() if lr and name not in NO_VOTE})
    said_laws = f"laws at this batch (x sqrt(batch / theirs)) {said_range(laws, short)} ({at.heard(laws)})"
    if lead and lead.peak_lr:
        draft.set(
            "hyperparameters.lr",
            lead.peak_lr,
            f"the peak of {lead.id}, with its batch, at its width and depth; {said_laws}",
        )
        draft.step(
            "lr",
            [f"{short(lead.peak_lr)} peak, as {lead.id}, at its width and depth", said_laws],
            _lr_sources(at, laws, [lead.id]),
        )
        spread = max(laws.high, lead.peak_lr) / min(laws.low, lead.peak_lr)
        draft.unsure.append(Unsure("lr", spread, "tune it at small scale"))
        return lead.peak_lr
    near = at.near.middle(
        {
            run.id: run.peak_lr
            * (params / run.params_total) ** LR_SIZE_EXPONENT
            * batch_factor(batch, run.batch_tokens)
            for run in at.near.runs
            if run.peak_lr
        }
    )
    low, high = near.low / LR_WIDENING, near.high * LR_WIDENING
    lr = float(f"{min(max(at.between(laws, near), low), high):.2g}")
    spread = max(laws.high, near.high) / min(laws.low, near.low)
    draft.set(
        "hyperparameters.lr",
        lr,
        f"{where}, between the middle of the laws, {short(laws.value)} ({laws.told(short)}, each moved to this "
        f"batch by its "
        f"square root), and of the neighbours, {short(near.value)} (each x (size / its size)^-1/3 "
        f"and x sqrt(batch / its batch) within a factor of {MOST_BY_BATCH:g}, the nearer the size the heavier: "
        f"{near.told(short)}); spread {spread:.3g}x",
    )
    draft.step(
        "lr",
        [
            f"{short(lr)} peak {where}",
            said_laws,
            f"neighbours, moved to this size and batch, {said_range(near, short)}",
            "muP, Adafactor, AdEMAMix and Muon runs left out",
            f"spread {spread:.3g}x",
        ],
        _lr_sources(at, laws, near.by),
    )
    draft.unsure.append(Unsure("lr", spread, "tune it at small scale"))
    return lr


def _lr_sources(at: Setting, laws: Said, ids: Iterable[str]) -> list[str]:
    return [*at.law_sources(laws.by), *at.near.sources(ids)]


class _Warmup(NamedTuple):
    """A published warm-up: in steps of a constant batch, or in tokens where the batch grew and a step says little."""

    steps: float
    tokens: float | None

    def __str__(self) -> str:
        return f"{self.steps:,.0f} steps" if self.tokens is None else f"{format_quantity(self.tokens)} tokens"


def _warmup(run: Run) -> _Warmup | None:
    tokens = warmup_tokens(run)
    if not (tokens and run.batch_tokens):
        return None
    return _Warmup(tokens / run.batch_tokens, tokens if run.batch_grew else None)


def choose_schedule(draft: Draft, at: Setting, batch: int) -> None:
    near, tokens = at.near, at.tokens
    lengths = near.of(_warmup)
    votes = near.middle({who: length.tokens or length.steps * batch for who, length in lengths.items()})
    wanted = votes.value
    led = near.lead is not None and near.lead.id in votes.by
    warmup = round(wanted if led else min(max(wanted, SHORTEST_WARMUP * tokens), LONGEST_WARMUP * tokens))
    if warmup >= tokens:
        raise InputError(
            f"--tokens {format_quantity(tokens)}: the warm-up of --from {', '.join(votes.by)} alone takes "
            f"{format_quantity(warmup)}; give more"
        )
    bound = (
        ""
        if warmup == round(wanted)
        else f"; bounded at {LONGEST_WARMUP:.0%} of the run"
        if wanted > warmup
        else f"; at least {SHORTEST_WARMUP:.1%} of the run"
    )
    whose = f"as {', '.join(votes.by)}" if led else "the middle of the neighbours"
    steps = BatchSchedule(Batch.model_validate(draft.document["batch"]).sizes).first_step_at(warmup)
    told = ", ".join(f"{who} {length}" for who, length in lengths.items())
    draft.set(
        "schedule.warmup_tokens",
        warmup,
        f"{steps:,} steps, {whose} ({told}); in steps x the batch, in tokens where the batch grew{bound}",
    )
    decay, floor = _choose_decay(draft, at)
    draft.step(
        "schedule",
        [
            f"warm-up {format_quantity(warmup)} tokens, {warmup / tokens:.2%} of the run",
            f"{steps:,} steps; {whose} {said_range(votes, format_quantity)}{bound}",
            f"{decay} to {floor:.0%}",
        ],
        [*near.sources(votes.by), "arXiv 2502.15938"],
    )


def _choose_decay(draft: Draft, at: Setting) -> tuple[str, float]:
    """The shape of the decay and its floor, as a share of the peak."""
    near = at.near
    decay = near.most("schedule.decay")
    assert decay is not None
    floors = near.values("schedule.min_lr_ratio")
    if near.lead is None and at.tokens_per_parameter >= LINEAR_TO_ZERO:
        reason = (
            f"linear to 0: better than a cosine to 10% from 20 tokens a parameter on, the more so the longer the "
            f"run, here {at.tokens_per_parameter:.3g} (arXiv 2502.15938); neighbours: {decay.told(str)}"
        )
        draft.set("schedule.decay", "linear", reason)
        draft.set("schedule.min_lr_ratio", 0.0, f"{reason}; their floors: {Said(0.0, floors).told('{:.3g}'.format)}")
        return "linear", 0.0
    draft.set("schedule.decay", decay.value, decay.counted(str))
    cooldowns = near.of(cooldown)
    if decay.value == "wsd" and cooldowns:
        share = middle(cooldowns)
        draft.set("schedule.decay_ratio", float(f"{share.value:.3g}"), share.told("{:.3g}".format))
    # A floor belongs to the shape of its decay (0 to a linear one, 10% to a cosine).
    alike = {who: floor for who, floor in floors.items() if decay.by.get(who) == decay.value} or floors
    counts = list(alike.values())
    floor = float(max(dict.fromkeys(counts), key=counts.count))
    floor_said = Said(floor, alike)
    draft.set("schedule.min_lr_ratio", floor, f"of runs that decay so: {floor_said.counted('{:.3g}'.format)}")
    return str(decay.value), floor
