"""Where a run went back, and what it has left out since: pure functions of the tokens trained.

A run that goes back keeps a list of its returns, the newest last. Everything else follows from it: which part of the
stream is passed over, how far the lr is lowered, and which checkpoints are of a past that has been undone. Nothing
depends on the checkpoint that a return began from, so a run comes to the same bits with any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leaven.recipe.batch import BatchSchedule
from leaven.recipe.recipe import Stability
from leaven.training.spikes import WINDOW, Anomaly


@dataclass(frozen=True)
class Rewind:
    """A return to the state at ``to_tokens`` trained; counts are in tokens.

    ``skip_from`` to ``skip_to`` is the stretch of the stream left out from there on. The lr is multiplied by ``lr``,
    rising back to 1 over ``lr_tokens``. ``attempt`` counts the returns for one trouble, which was found at step
    ``found_step``; it is 0 for a return by hand.
    """

    to_tokens: int
    skip_from: int
    skip_to: int
    lr: float = 1.0
    lr_tokens: int = 0
    attempt: int = 0
    found_step: int = 0


def rollback(
    rewinds: Sequence[Rewind], trouble: Anomaly, batches: BatchSchedule, stability: Stability, oldest_tokens: int
) -> Rewind:
    """The return for a trouble, after those that were before.

    A first attempt goes back to the first suspicious step and leaves out the data of the trouble and as much again
    after it. Each further one for the same trouble takes four times as much after it, and as much more before it:
    garbage may be longer than what was seen of it, and a trouble older than its first sign. It does not go back
    further than ``oldest_tokens``, the oldest checkpoint there is.
    """
    last = rewinds[-1] if rewinds else None
    # It is the same trouble if it begins again within a window of steps.
    again = last is not None and last.attempt > 0 and trouble.onset <= last.found_step + WINDOW
    attempt = last.attempt + 1 if last is not None and again else 1
    steps, wider = trouble.step - trouble.onset + 1, 4 ** (attempt - 1)
    first = max(trouble.onset - 1 - steps * (wider - 1), 0)
    to_tokens = max(batches.tokens_at_step(first), oldest_tokens)
    found_tokens = batches.tokens_at_step(trouble.step)
    return Rewind(
        to_tokens=to_tokens,
        skip_from=position(rewinds, to_tokens),
        skip_to=position(rewinds, found_tokens) + steps * wider * batches.batch_at(found_tokens),
        lr=stability.rollback_lr,
        lr_tokens=stability.rollback_lr_tokens or 0,
        attempt=attempt,
        found_step=trouble.step,
    )


def oldest_checkpoint(
    rewinds: Sequence[Rewind], trouble: Anomaly, batches: BatchSchedule, stability: Stability, every_tokens: int
) -> int:
    """The tokens trained at the oldest checkpoint there is when a trouble is found, by the schedule of those that are
    due: what a stop has added or a damage taken away must not change what is decided."""

    def kept(there: list[int], step: int, good_tokens: int) -> list[int]:
        """Those there are when ``step`` is read, if it was trained on from the last of ``there``."""
        reached = batches.tokens_at_step(step - 1)
        thresholds = range((there[-1] // every_tokens + 1) * every_tokens, reached + 1, every_tokens)
        due = [batches.tokens_at_step(batches.first_step_at(threshold)) for threshold in thresholds]
        due = firsts([*there, *(tokens for tokens in due if tokens <= reached)], every_tokens, -1)
        return staying(due, good_tokens, stability.keep, stability.keep_every_tokens)

    there = [0]
    for rewind in rewinds:
        if rewind.attempt:
            there = kept(there, rewind.found_step, rewind.to_tokens)
            there = [tokens for tokens in there if tokens <= rewind.to_tokens]
        else:
            there = [rewind.to_tokens]
    return kept(there, trouble.step, batches.tokens_at_step(trouble.onset - 1))[0]


def staying(due: Sequence[int], good_tokens: int, keep: int, keep_every_tokens: int | None) -> list[int]:
    """Those of the due checkpoints, in tokens, that stay: the newest, the last good one, and those kept for good."""
    stay = {*due[-keep:], *[tokens for tokens in due if tokens <= good_tokens][-1:]}
    if keep_every_tokens is not None:
        stay |= {*firsts(due, keep_every_tokens, 0)}
    return sorted(stay)


def firsts(there: Sequence[int], every_tokens: int, last: int) -> list[int]:
    """The first in each ``every_tokens``, after the ``last`` stretch."""
    found = []
    for tokens in there:
        if tokens // every_tokens > last:
            found.append(tokens)
            last = tokens // every_tokens
    return found


def skipped(rewinds: Sequence[Rewind]) -> tuple[tuple[int, int], ...]:
    """The stretches of the stream that are left out, in tokens, disjoint and in order."""
    stretches: list[tuple[int, int]] = []
    for start, end in sorted((rewind.skip_from, rewind.skip_to) for rewind in rewinds):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        elif start < end:
            stretches.append((start, end))
    return tuple(stretches)


def position(rewinds: Sequence[Rewind], tokens: int) -> int:
    """Where in the stream, in tokens, the step begins that has ``tokens`` trained before it."""
    for start, end in skipped(rewinds):
        if tokens >= start:
            tokens += end - start
    return tokens


def lr_factor(rewinds: Sequence[Rewind], tokens: int) -> float:
    """What the schedule's lr is multiplied by once ``tokens`` are trained."""
    factor = 1.0
    for rewind in rewinds:
        since = tokens - rewind.to_tokens
        if 0 < since < rewind.lr_tokens:
            factor *= rewind.lr + (1 - rewind.lr) * since / rewind.lr_tokens
    return factor


def undone(rewinds: Sequence[Rewind], known: int, tokens: int) -> bool:
    """Whether the state at ``tokens`` trained is of an undone past, if it was reached after ``known`` returns."""
    return any(tokens > rewind.to_tokens for rewind in rewinds[known:])
