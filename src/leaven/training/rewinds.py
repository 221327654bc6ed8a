"""Defines the rewinds of a run and computes their effects. A rewind returns the run to an earlier state,
automatically after a spike or by hand.

A run keeps a list of its rewinds, the newest last. Everything else follows from that list by pure functions of the
number of tokens trained: which part of the stream is skipped, how far the lr is lowered, and which checkpoints have
been undone. Nothing depends on the checkpoint from which a rewind continued, so the results are bit-identical for
every choice of checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Return whether a rewind has undone a saved state. The state was saved after ``tokens`` trained tokens, when the
    run had had ``known`` rewinds."""
    return any(tokens > rewind.to_tokens for rewind in rewinds[known:])
