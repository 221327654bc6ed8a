"""Advice for a search in which every run diverged."""

from collections.abc import Sequence

import numpy as np

from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_number
from leaven.tuning.algorithm import divergence
from leaven.tuning.algorithm.trust_region import DOWN, learning_rates
from leaven.tuning.document import Dimension, StudyTrial

ELSEWHERE = "lower the recipe's learning rate, which is not searched, to half or a quarter"


def advice_when_all_diverged(
    trials: Sequence[StudyTrial], dimensions: Sequence[Dimension], elsewhere: str = ELSEWHERE
) -> str:
    """Return one line that says which value to lower; ``elsewhere`` if no learning rate is searched.

    The learning rate is the usual cause: the advice is to lower it by one octave more than the search has. The only
    other evidence is how long each run lasted: a divergence model of the trials that lasted less than half as
    long as the longest shows which other value made runs diverge soonest.
    """
    diverged = [trial for trial in trials if trial.state == "diverged"]
    points = np.array([[(trial.octaves or {}).get(d.path, 0.0) for d in dimensions] for trial in diverged])
    rates = learning_rates([d.path for d in dimensions])
    start = "the start's too" if (~points.any(1)).any() else "but none was of the start"
    said = f"all {len(diverged)} trials diverged, {start}: " if len(diverged) > 1 else "the only trial diverged: "
    if not rates.any():
        said += elsewhere
    else:
        tried = -points[:, rates].max(1).min()
        rate = next(d for d, is_rate in zip(dimensions, rates, strict=True) if is_rate)
        names = short_path(rate.path) if rates.sum() == 1 else "the learning rates"
        factor = 2.0 ** (max(tried, 0.0) + 1)
        value = (
            f", {format_number(rate.centre / factor)}"
            if rates.sum() == 1 and isinstance(rate.centre, float) and rate.centre
            else ""
        )
        lowered = f" (1/{2**tried:.3g} of it diverged)" if tried >= DOWN else ""
        said += f"start from {names} at 1/{factor:.3g} of what it was{value} or lower{lowered}"
    lasted = np.array([trial.tokens for trial in diverged])
    blamed = divergence.fit(points, lasted < lasted.max() / 2)
    if blamed.slopes.any():
        down, i = divmod(int(np.argmax(blamed.slopes)), len(dimensions))
        if not rates[i]:
            moved = "another" if dimensions[i].levels else "lowered" if down else "raised"
            said += f"; runs diverged soonest where {short_path(dimensions[i].path)} was {moved}"
    return said
