"""Computes the rewinds of a run and their effects, with pure functions of the number of tokens trained.

A run keeps a list of its rewinds, the newest last. Everything else follows from that list: which part of the stream
is skipped, how far the lr is lowered, and which checkpoints have been undone. Nothing depends on the checkpoint from
which a rewind continued, so the results are bit-identical for every choice of checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leaven.recipe.batch import BatchSchedule
from leaven.recipe.recipe import Stability
from leaven.training.spikes import WINDOW, Anomaly


@dataclass(frozen=True)
class Rewind:
    """A return of a run to an earlier state."""

    to_tokens: int  # trained in that state
    skip_from: int  # tokens of the stream: from here ...
    skip_to: int  # ... to here they are skipped
    lr: float = 1.0  # factor on the lr, which rises back to 1 ...
    lr_tokens: int = 0  # ... over this many tokens
    attempt: int = 0  # rewinds for the same anomaly so far, this one included; 0 for a manual rewind
    found_step: int = 0  # step at which the anomaly was found


def rollback(
    rewinds: Sequence[Rewind], anomaly: Anomaly, batches: BatchSchedule, stability: Stability, oldest_tokens: int
) -> Rewind:
    """Return the rewind that responds to an anomaly, given the earlier rewinds.

    The first attempt for an anomaly goes back to the first suspicious step. It skips the data of the anomaly and the
    same amount of data after it. Each further attempt for the same anomaly skips four times as much after it, and
    about the same amount before it: the bad data may extend beyond the suspicious steps on both sides. A rewind does
    not go back beyond ``oldest_tokens``, the position of the oldest checkpoint.
    """
    last = rewinds[-1] if rewinds else None
    # It is the same anomaly if it begins again within a window of steps.
    again = last is not None and last.attempt > 0 and anomaly.onset <= last.found_step + WINDOW
    attempt = last.attempt + 1 if last is not None and again else 1
    steps, wider = anomaly.step - anomaly.onset + 1, 4 ** (attempt - 1)
    first = max(anomaly.onset - 1 - steps * (wider - 1), 0)
    to_tokens = max(batches.tokens_at_step(first), oldest_tokens)
    found_tokens = batches.tokens_at_step(anomaly.step)
    return Rewind(
        to_tokens=to_tokens,
        skip_from=position(rewinds, to_tokens),
        skip_to=position(rewinds, found_tokens) + steps * wider * batches.batch_at(found_tokens),
        lr=stability.rollback_lr,
        lr_tokens=stability.rollback_lr_tokens or 0,
        attempt=attempt,
        found_step=anomaly.step,
    )


def oldest_checkpoint(
    rewinds: Sequence[Rewind], anomaly: Anomaly, batches: BatchSchedule, stability: Stability, every_tokens: int
) -> int:
    """Return the number of tokens trained at the oldest checkpoint that the schedule still keeps when an anomaly is
    found.

    This function does not read the disk: the result must not depend on checkpoints that a stop has added or that are
    damaged.
    """

    def kept(there: list[int], step: int, good_tokens: int) -> list[int]:
        """Return the checkpoints that exist when the result of ``step`` is read. The run continued from the last
        checkpoint of ``there``."""
        reached = batches.tokens_at_step(step - 1)
        thresholds = range((there[-1] // every_tokens + 1) * every_tokens, reached + 1, every_tokens)
        due = [batches.tokens_at_step(batches.first_step_at(threshold)) for threshold in thresholds]
        due = first_in_each_interval([*there, *(tokens for tokens in due if tokens <= reached)], every_tokens, -1)
        return checkpoints_to_keep(due, good_tokens, stability.keep, stability.keep_every_tokens)

    there = [0]
    for rewind in rewinds:
        if rewind.attempt:
            there = kept(there, rewind.found_step, rewind.to_tokens)
            there = [tokens for tokens in there if tokens <= rewind.to_tokens]
        else:
            there = [rewind.to_tokens]
    return kept(there, anomaly.step, batches.tokens_at_step(anomaly.onset - 1))[0]


def checkpoints_to_keep(due: Sequence[int], good_tokens: int, keep: int, keep_every_tokens: int | None) -> list[int]:
    """Return the token counts of the checkpoints to keep: the newest ``keep``, the last checkpoint at or before
    ``good_tokens``, and the first checkpoint in each interval of ``keep_every_tokens``."""
    stay = {*due[-keep:], *[tokens for tokens in due if tokens <= good_tokens][-1:]}
    if keep_every_tokens is not None:
        stay |= {*first_in_each_interval(due, keep_every_tokens, 0)}
    return sorted(stay)


def first_in_each_interval(there: Sequence[int], every_tokens: int, last: int) -> list[int]:
    """Divide tokens into intervals of ``every_tokens``, and return the first token count of ``there`` in each
    interval after interval number ``last``."""
    found = []
    for tokens in there:
        if tokens // every_tokens > last:
            found.append(tokens)
            last = tokens // every_tokens
    return found


def skipped(rewinds: Sequence[Rewind]) -> tuple[tuple[int, int], ...]:
    """Return the intervals of the token stream that are skipped, disjoint and in order."""
    stretches: list[tuple[int, int]] = []
    for start, end in sorted((rewind.skip_from, rewind.skip_to) for rewind in rewinds):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        elif start < end:
            stretches.append((start, end))
    return tuple(stretches)


def position(rewinds: Sequence[Rewind], tokens: int) -> int:
    """Return the position in the token stream at which the step after ``tokens`` trained tokens starts."""
    for start, end in skipped(rewinds):
        if tokens >= start:
            tokens += end - start
    return tokens


def lr_factor(rewinds: Sequence[Rewind], tokens: int) -> float:
    """Return the factor that multiplies the schedule's lr after ``tokens`` trained tokens."""
    factor = 1.0
    for rewind in rewinds:
        since = tokens - rewind.to_tokens
        if 0 < since < rewind.lr_tokens:
            factor *= rewind.lr + (1 - rewind.lr) * since / rewind.lr_tokens
    return factor


def undone(rewinds: Sequence[Rewind], known: int, tokens: int) -> bool:
    """Return whether a later rewind has undone a state that was saved at ``tokens`` trained tokens, after ``known``
    rewinds."""
    return any(tokens > rewind.to_tokens for rewind in rewinds[known:])
