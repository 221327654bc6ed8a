"""Defines the rewinds of a run, and computes their effect on its data, lr and checkpoints. This module does not
import torch.

A rewind returns the run to an earlier state, automatically after a spike (:mod:`leaven.training.spikes`) or manually
(:mod:`leaven.training.manual_rewind`). The list of rewinds and the number of trained tokens determine which part of
the data is skipped, how far the lr is lowered, and which checkpoints have been undone. If the run continues from a
checkpoint before the target of the rewind, it repeats the steps in between, so the result is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rewind:
    """A return of a run to an earlier state."""

    to_tokens: int  # number of trained tokens to which the run returns
    skip_from: int  # position of the first skipped token in the stream of training tokens
    skip_to: int  # position of the first token after the skipped part
    lr: float = 1.0  # factor on the lr right after the rewind
    lr_tokens: int = 0  # number of tokens over which this factor rises to 1
    attempt: int = 0  # number of rewinds for the same anomaly, including this rewind; 0 for a manual rewind
    found_step: int = 0  # step at which the anomaly was found; 0 for a manual rewind


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
    """Return the position in the token stream, skipped parts included, of the next token to train after ``tokens``
    trained tokens."""
    for start, end in skipped(rewinds):
        if tokens >= start:
            tokens += end - start
    return tokens


def lr_factor(rewinds: Sequence[Rewind], tokens: int) -> float:
    """Return the factor by which the rewinds lower the schedule's lr after ``tokens`` trained tokens."""
    factor = 1.0
    for rewind in rewinds:
        since = tokens - rewind.to_tokens
        if 0 < since < rewind.lr_tokens:
            factor *= rewind.lr + (1 - rewind.lr) * since / rewind.lr_tokens
    return factor


def undone(rewinds: Sequence[Rewind], known: int, tokens: int) -> bool:
    """Return whether a rewind has undone a state that was saved after ``tokens`` trained tokens. ``known`` is the
    number of rewinds before the state was saved."""
    return any(tokens > rewind.to_tokens for rewind in rewinds[known:])
