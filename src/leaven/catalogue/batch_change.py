"""The lr of a law at another batch than its own, by every rule there is; they do not agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from leaven.catalogue.laws import LawResult
from leaven.catalogue.noise_scale import surge_lr


@dataclass(frozen=True)
class AtBatch:
    """A law's lr at ``batch_tokens``, ``ratio`` times the batch it belongs to.

    ``square_root``: of Adam below the critical batch (the SDE of Malladi et al. 2022, arXiv 2205.10287).
    ``linear``: of SGD there (McCandlish et al. 2018), and of AdamW at fixed weight decay if its timescale is to stay
    (Power Lines). ``surge``: of Adam, falling above the noise scale (arXiv 2405.14578), which is taken to be the
    median of the critical batches. ``own``: as in the law's own data, None where it has not told.
    """

    batch_tokens: float
    ratio: float
    square_root: float
    linear: float
    surge: float
    own: float | None


def critical_batch(results: Sequence[LawResult]) -> float:
    """The median of what the laws say of the critical batch, in tokens, each law once."""
    return median(each.batch_tokens for each in results if each.batch_tokens and is_critical(each))


def is_critical(result: LawResult) -> bool:
    return result.batch_kind == "critical" and result.form_of is None


def lr_at_batch(result: LawResult, batch_tokens: float, noise: float) -> AtBatch | None:
    """None where the law has no lr."""
    if result.lr is None or result.lr_batch_tokens is None:
        return None
    ratio, exponent = batch_tokens / result.lr_batch_tokens, result.lr_batch_exponent
    return AtBatch(
        batch_tokens=batch_tokens,
        ratio=ratio,
        square_root=result.lr * ratio**0.5,
        linear=result.lr * ratio,
        surge=result.lr * surge_lr(batch_tokens, noise) / surge_lr(result.lr_batch_tokens, noise),
        own=None if exponent is None else result.lr * ratio**exponent,
    )
