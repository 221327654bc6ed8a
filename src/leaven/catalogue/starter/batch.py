"""Choose the batch of a starter recipe and the ramp up to that batch."""

import math
from collections.abc import Iterable
from typing import Any

from leaven.catalogue.laws import batches, critical_batch
from leaven.catalogue.messages import sentence
from leaven.catalogue.neighbours import middle
from leaven.catalogue.runs import PublishedRun, load_runs
from leaven.catalogue.starter.draft import Evidence, RunSize, StarterDraft
from leaven.errors import InputError
from leaven.recipe.batch import Ramp
from leaven.recipe.recipe import flatten
from leaven.recipe.units import format_quantity

BATCH_TOKENS_EXPONENT = 0.46
"""A published batch is converted to another number of tokens with this exponent: the median of Step Law 0.57, Zhang
0.47, Power Lines 0.46 and 0.38, DeepSeek 0.33."""
LEAST_STEPS = 1_250
"""Usual minimum steps of a run without ``--from``, a little above the limit of 1,000 in `leaven recipes check`."""
FEWEST_STEPS = 200
"""Fewest steps of a run with the batch of a reference run (``--from``). Shorter runs are refused."""
LARGEST_CONSTANT = 8_400_000
"""Largest batch without a ramp in well-documented runs, in tokens (OLMo 2 13B and 32B). Runs with
larger batches had a ramp (Llama 3 405B 16 M, Apertus 70B 16.8 M), or it is not published whether they had one."""
MOST_INCREMENTS = 16
"""The first batch of a ramp is 1/2 to 1/16 of the full batch, because a small batch limits data parallelism. Each
increment has the size of the first batch."""


def batch_ramps(runs: Iterable[PublishedRun] | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Return two dictionaries by run id: the starts and the lengths of published batch ramps.

    A start is (first batch) / (last batch). A length is (tokens of the ramp) / (tokens of the run). Of each model
    family, only the largest run counts. Ramps of the kind ``stages`` are left out. By default, ``runs`` are the
    dense runs.
    """
    starts: dict[str, tuple[str, float]] = {}
    lengths: dict[str, tuple[str, float]] = {}
    # from small to large, so that the largest run of a family is kept
    for run in runs or (run for run in load_runs() if run.kind == "dense"):
        ramp = run.ramp
        if ramp is None or ramp.kind not in ("increments", "linear"):
            continue
        if run.ramp_start:
            starts[run.family] = run.id, run.ramp_start
        if run.ramp_tokens and run.tokens:
            lengths[run.family] = run.id, run.ramp_tokens / run.tokens
        elif ramp.over_fraction_of_samples:
            lengths[run.family] = run.id, ramp.over_fraction_of_samples
    return dict(starts.values()), dict(lengths.values())


def repeated_growth(run: PublishedRun, tokens: int, batch: int, unit: int) -> dict[str, Any] | None:
    """Return a run's batch growth, scaled to the new length, as ``ramp`` or ``stages``; None if impossible.

    Args:
        tokens, batch: length and full batch of the new run, in tokens.
        unit: number of tokens that divides all batch sizes, including ``batch``.
    """
    ramp, length = run.ramp, run.tokens
    if not (run.batch_grew and ramp and length):
        return None
    longer = tokens / length
    if ramp.stages:
        begins = run.stage_begins
        sizes = [max(round(stage["tokens"] / unit), 1) * unit for stage in ramp.stages]
        if begins is None:
            return None
        begun = zip(begins, [*sizes[:-1], batch], strict=True)
        return {"stages": [{"from_tokens": round(begin * longer), "tokens": size} for begin, size in begun]}
    seq_len = run.seq_len
    if not (ramp.kind == "increments" and ramp.start_samples and ramp.n_increments and ramp.over_tokens and seq_len):
        return None
    start = max(round(ramp.start_samples * seq_len / unit), 1)
    climb, count = batch // unit - start, ramp.n_increments
    if climb <= 0:
        return None
    counts = [n for n in range(1, climb + 1) if climb % n == 0]
    nearest = min(counts, key=lambda n: abs(math.log(n / count)))
    increment, over = climb // nearest * unit, max(round(ramp.over_tokens * longer), 1)
    return {"ramp": Ramp(start_tokens=start * unit, increment_tokens=increment, over_tokens=over).model_dump()}


def batch_evidence(at: RunSize) -> Evidence:
    """Return the batches in tokens that laws and published runs suggest for this run length."""
    return at.evidence(
        batches(at.laws, "optimal"),
        lambda run: (
            run.batch_tokens * (at.tokens / run.tokens) ** BATCH_TOKENS_EXPONENT
            if run.batch_tokens and run.tokens
            else None
        ),
        None,
    )


def choose_batch(draft: StarterDraft, at: RunSize) -> int:
    """Choose the batch in tokens, add it to the draft, and return it.

    If the reference run (``--from``) publishes a batch, use it, rounded to suit the GPUs. Raise InputError if this
    gives fewer than `FEWEST_STEPS` steps.

    Otherwise, use the batch that laws and published runs suggest. If possible, it is at most the critical batch, and
    small enough for `LEAST_STEPS` steps.
    """
    seq_len, run = at.model.seq_len, at.reference
    critical = critical_batch(at.laws)
    if run and run.batch_tokens:
        own = max(round(run.batch_tokens / seq_len), 1)
        sequences = _divisible(own, at.gpus)
        batch = sequences * seq_len
        if at.tokens < FEWEST_STEPS * batch:
            raise InputError(
                f"--tokens {format_quantity(at.tokens)}: only {at.tokens // batch} steps with the batch of --from "
                f"{run.id}, {format_quantity(batch)} tokens; give {format_quantity(FEWEST_STEPS * batch)} or more"
            )
        evidence = at.evidence(batches(at.laws, "optimal"), lambda run: None, batch)
        message = "batch of the reference"
        facts: dict[str, Any] = {"own": own if own != sequences else None, "sequences": sequences}
    else:
        message = "batch.tokens"
        evidence = batch_evidence(at)
        most = min(critical, at.tokens / LEAST_STEPS)
        batch = _sequences(min(evidence.middle, most), most, seq_len, at.gpus) * seq_len
        facts = {
            "exponent": BATCH_TOKENS_EXPONENT,
            "sequences": batch // seq_len,
            "wanted": evidence.middle if evidence.middle > most else None,
            "few_steps": most != critical,
            "least_steps": LEAST_STEPS,
        }
    draft.weigh("batch", "batch.tokens", batch, evidence, message, critical=critical, **facts)
    return batch


def choose_ramp(draft: StarterDraft, at: RunSize, batch: int) -> None:
    """Choose whether and how the batch grows.

    With a reference run (``--from``), the batch grows as in that run. Otherwise it grows if it is above
    `LARGEST_CONSTANT`, or if it grew in most model families near this size.
    """
    near, run, seq_len = at.near, at.reference, at.model.seq_len
    starts, lengths = batch_ramps()
    sequences = batch // seq_len
    ranks = math.gcd(at.gpus, sequences)  # the first batch must divide over as many ranks as the full batch does
    shares = [n for n in range(2, MOST_INCREMENTS + 1) if sequences % (n * ranks) == 0]
    if run:
        if growth := repeated_growth(run, at.tokens, batch, ranks * seq_len):
            for path, value in flatten({"batch": growth}).items():
                draft.decide(path, value, "growth of the reference")
            sizes = [
                f"{format_quantity(size)} from {format_quantity(begin)} tokens" for begin, size in draft.batches.sizes
            ]
            first_and_last = sizes if len(sizes) <= 4 else [sizes[0], "...", sizes[-1]]
            steps = draft.batches.first_step_at(at.tokens)
            draft.step("ramp", near.sources([run.id]), "growth of the reference", sizes=first_and_last, steps=steps)
            return
        own_starts, own_lengths = batch_ramps([run])
        ramps = bool(run.batch_grew and own_starts and own_lengths)
        start, length = own_starts.get(run.id, 1.0), own_lengths.get(run.id, 0.0)
        votes: dict[str, bool] = {}
    else:
        families = {run.family: run for run in (near.of_size() if near.close else near.runs)}
        votes = {
            run.id: grew for run in families.values() if run.lr_comparable and (grew := run.batch_grew) is not None
        }
        ramps = batch > LARGEST_CONSTANT or sum(votes.values()) * 2 > len(votes)
        start, length = middle(starts).value, middle(lengths).value
    voters = [run.id] if run else list(votes)
    about = sentence(
        "reasons",
        "growth",
        {
            "reference": draft.reference,
            "ramps": ramps,
            "large": LARGEST_CONSTANT if not run and batch > LARGEST_CONSTANT else None,
            "votes": votes,
            "yes": [id for id, grew in votes.items() if grew],
            "no": [id for id, grew in votes.items() if not grew],
        },
    )
    if not (ramps and shares):
        draft.why["batch.tokens"] += f"; no ramp: {about}"
        steps = draft.batches.first_step_at(at.tokens)
        draft.step("ramp", voters, "no ramp", about=about, no_share=ramps, steps=steps)
        return
    part = min(shares, key=lambda n: abs(math.log(n * start)))
    first = sequences // part * seq_len
    over = max(round(length * at.tokens), 1)
    facts: dict[str, Any] = {"part": part, "length": length, "starts": starts, "lengths": lengths, "about": about}
    for key, tokens in {"start_tokens": first, "increment_tokens": first, "over_tokens": over}.items():
        draft.decide(f"batch.ramp.{key}", tokens, **facts)
    draft.step("ramp", [*starts, *lengths, *voters], steps=draft.batches.first_step_at(at.tokens))


def _divisible(sequences: int, gpus: int) -> int:
    """Return ``sequences``, rounded to a multiple of a power of 2. This is the largest power that divides ``gpus``
    and is at most ``sequences`` / 16. So the result differs by at most 1/32 from ``sequences``."""
    unit = math.gcd(gpus, 1 << max(sequences // 16, 1).bit_length() - 1)
    return max(round(sequences / unit), 1) * unit


def _sequences(wanted: float, most: float, seq_len: int, gpus: int) -> int:
    """Return the allowed number of sequences that is nearest to ``wanted`` tokens and has at most ``most`` tokens.

    Allowed are 2^k and 3 x 2^k. If the largest odd factor q of ``gpus`` is above 1, only q x 2^k is allowed. If all
    allowed numbers exceed ``most``, return the smallest.
    """
    odd = gpus // (gpus & -gpus)  # the largest odd factor
    bases = (1, 3) if odd == 1 else (odd,)
    sizes = [base << k for base in bases for k in range(48)]
    fitting = [size for size in sizes if size * seq_len <= most] or [min(sizes)]
    return min(fitting, key=lambda size: abs(math.log(size * seq_len / wanted)))
