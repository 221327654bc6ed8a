"""The batch of a starter and the ramp up to it."""

import math

from leaven.catalogue.batch_change import critical_batch, is_critical
from leaven.catalogue.derivation import Draft, Unsure
from leaven.catalogue.growth import grown
from leaven.catalogue.runs import load_runs, size_ratio
from leaven.catalogue.starter.setting import Setting, said_range
from leaven.catalogue.votes import FACTOR, batch_ramps, middle, ramp_votes
from leaven.recipe.batch import Batch, BatchSchedule, Ramp, Stage
from leaven.recipe.errors import InputError
from leaven.recipe.units import format_quantity

BATCH_TOKENS_EXPONENT = 0.46
"""Of the batch with tokens: the middle of Step Law 0.57, Zhang 0.47, Power Lines 0.46 and 0.38, DeepSeek 0.33."""
LEAST_STEPS = 1_250
"""A batch leaves as many steps; `leaven recipes check` calls fewer than 1,000 outside of what is published."""
FEWEST_STEPS = 200
"""A run with the batch of another is refused below."""
LARGEST_CONSTANT = 8_400_000
"""Tokens of the largest batch that well-documented runs had from their first step (OLMo 2 13B and 32B). Runs with
larger ones grew into them (Llama 3 405B 16 M, Apertus 70B 16.8 M) or do not say."""
MOST_INCREMENTS = 16
"""A ramp starts at a whole share of the batch, 1/2 to 1/16, and grows by as much."""


def choose_batch(draft: Draft, at: Setting) -> int:
    seq_len, lead = at.model.seq_len, at.lead
    optimal = middle({law.law: law.batch_tokens for law in at.laws if law.batch_tokens and not is_critical(law)})
    critical = critical_batch(at.laws)
    if lead and lead.batch_tokens:
        own = max(round(lead.batch_tokens / seq_len), 1)
        sequences = _divisible(own, at.gpus)
        batch = sequences * seq_len
        if at.tokens < FEWEST_STEPS * batch:
            raise InputError(
                f"--from {lead.id}: its batch of {format_quantity(batch)} tokens makes {at.tokens // batch} steps of "
                f"{format_quantity(at.tokens)} tokens; give {format_quantity(FEWEST_STEPS * batch)} or more"
            )
        reason = f"as {lead.id}: lr and batch are taken together; laws {said_range(optimal, format_quantity)}"
        if sequences != own:
            reason += f"; {own:,} sequences made {sequences:,}, which ranks divide"
        said = [f"{format_quantity(batch)} tokens, as {lead.id}", f"laws {said_range(optimal, format_quantity)}"]
        named, spread = [lead.id], max(optimal.high, batch) / min(optimal.low, batch)
    else:
        moved = at.near.middle(
            {
                run.id: run.batch_tokens * (at.tokens / run.tokens) ** BATCH_TOKENS_EXPONENT
                for run in at.near.runs
                if run.batch_tokens and run.tokens
            }
        )
        wanted = at.between(optimal, moved)
        most = min(critical, at.tokens / LEAST_STEPS)
        batch = _sequences(min(wanted, most), most, seq_len, at.gpus) * seq_len
        said = [
            f"{format_quantity(batch)} tokens, {batch // seq_len:,} sequences",
            f"laws {said_range(optimal, format_quantity)} ({at.heard(optimal)})",
            f"neighbours, moved to these tokens, {said_range(moved, format_quantity)}",
        ]
        reason = (
            f"between the middle of the laws, {format_quantity(optimal.value)} ({optimal.told(format_quantity)}), and"
            f" of the neighbours, {format_quantity(moved.value)} (each x (tokens / its tokens)^"
            f"{BATCH_TOKENS_EXPONENT}: {moved.told(format_quantity)}); rounded to {batch // seq_len:,} "
            "sequences, which ranks divide"
        )
        if wanted > most:
            bound = "the critical batch" if most == critical else f"{LEAST_STEPS:,} steps"
            reason += f"; {format_quantity(wanted)} bounded by {bound}"
            said.append(f"bounded by {bound}")
        named = list(moved.by)
        spread = max(optimal.high, moved.high) / min(optimal.low, moved.low)
    draft.unsure.append(Unsure("batch", spread, "a smaller one costs time, one above the critical one tokens"))
    said.append(f"critical batch about {format_quantity(critical)}")
    draft.set("batch.tokens", batch, reason)
    draft.step("batch", said, [*at.law_sources(optimal.by), *at.near.sources(named)])
    return batch


def _divisible(sequences: int, gpus: int) -> int:
    """The nearest number, a sixteenth away at most, that divides over a power of two of the GPUs."""
    unit = math.gcd(gpus, 1 << max(sequences // 16, 1).bit_length() - 1)
    return max(round(sequences / unit), 1) * unit


def _sequences(wanted: float, most: float, seq_len: int, gpus: int) -> int:
    """The nearest number of sequences 2^k or 3 x 2^k that is not above ``most``; of GPUs the odd factor goes in."""
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    bases = (1, 3) if odd == 1 else (odd,)
    sizes = [base << k for base in bases for k in range(48)]
    fitting = [size for size in sizes if size * seq_len <= most] or [min(sizes)]
    return min(fitting, key=lambda size: abs(math.log(size * seq_len / wanted)))


def choose_ramp(draft: Draft, at: Setting, batch: int) -> None:
    near, lead, tokens = at.near, at.lead, at.tokens
    starts, lengths = batch_ramps()
    sequences = batch // at.model.seq_len
    ranks = math.gcd(at.gpus, sequences)  # the most that the batch divides over, and so its start has to
    shares = [n for n in range(2, MOST_INCREMENTS + 1) if sequences % (n * ranks) == 0]
    if lead:
        if growth := grown(lead, tokens, batch, ranks * at.model.seq_len):
            _as_the_lead(draft, at, lead.id, growth)
            return
        own_starts, own_lengths = batch_ramps([lead])
        ramps = bool(lead.batch_grew and own_starts and own_lengths)
        start, length = own_starts.get(lead.id, 1.0), own_lengths.get(lead.id, 0.0)
        about = f"as {lead.id}" if ramps else f"{lead.id} had none, or does not tell enough of it"
        voters: list[str] = [lead.id]
    else:
        speak = [run for run in load_runs() if run.kind == "dense" and size_ratio(run, near.params) <= FACTOR]
        by_family = {run.family: run for run in (speak if near.within else near.runs)}
        votes = ramp_votes(list(by_family.values()))
        large = batch > LARGEST_CONSTANT
        ramps = large or sum(votes.values()) * 2 > len(votes)
        start, length = middle(starts).value, middle(lengths).value
        yes, no = ([id for id, grew in votes.items() if grew is side] for side in (True, False))
        about = f"{len(yes)} of {len(votes)} families of this size grew it"
        about += (f": {', '.join(yes)}" if yes else "") + (f"; not {', '.join(no)}" if no else "")
        if large:
            about = f"a batch above {format_quantity(LARGEST_CONSTANT)} is grown into, whatever the size; {about}"
        voters = list(votes)
    if not (ramps and shares):
        reason = about if not ramps else f"{about}; this batch has no whole share to start from"
        draft.why["batch.tokens"] += f"; no ramp: {about}"
        draft.step("ramp", [f"none: {reason}", _steps(draft, at)], voters)
        return
    # Small starts bind the ranks of data parallelism, so that of the published ones the larger are nearer.
    part = min(shares, key=lambda n: abs(math.log(n * start)))
    first = sequences // part * at.model.seq_len
    ramp = Ramp(start_tokens=first, increment_tokens=first, over_tokens=max(round(length * tokens), 1))
    percent = "{:.1%}".format
    told = {
        "start_tokens": f"1/{part} of the batch; published starts: {middle(starts).told(percent)}",
        "increment_tokens": "as much as the start, so that each batch divides as the first does",
        "over_tokens": f"{length:.1%} of the run; published lengths: {middle(lengths).told(percent)}",
    }
    for key, reason in told.items():
        draft.set(f"batch.ramp.{key}", getattr(ramp, key), f"{reason}; {about}")
    draft.step(
        "ramp",
        [
            f"{format_quantity(first)} -> {format_quantity(batch)} over the first "
            f"{format_quantity(ramp.over_tokens)} tokens, {length:.1%} of the run",
            _steps(draft, at),
            about,
            f"published lengths {', '.join(f'{id} {share:.1%}' for id, share in lengths.items())}",
            f"published starts {', '.join(f'{id} {share:.1%}' for id, share in starts.items())}",
        ],
        [*starts, *lengths, *voters],
    )


def _as_the_lead(draft: Draft, at: Setting, lead: str, growth: Ramp | tuple[Stage, ...]) -> None:
    reason = f"as {lead}, at the same shares of the run"
    if isinstance(growth, Ramp):
        for key, value in growth.model_dump().items():
            draft.set(f"batch.ramp.{key}", value, reason)
    else:
        draft.set("batch.stages", [stage.model_dump() for stage in growth], reason)
    sizes = Batch.model_validate(draft.document["batch"]).sizes
    # Of many increments the first and the last tell.
    said = [f"{format_quantity(size)} from {format_quantity(begin)}" for begin, size in sizes]
    whole = ", ".join(said if len(said) <= 4 else (said[0], "...", said[-1]))
    draft.step("ramp", [f"{whole}, {reason}", _steps(draft, at)], at.near.sources([lead]))


def _steps(draft: Draft, at: Setting) -> str:
    """How many steps the run has, with its ramp."""
    return f"{BatchSchedule(Batch.model_validate(draft.document['batch']).sizes).first_step_at(at.tokens):,} steps"
