"""What to lower where every run diverged, and so nothing tells the good values from the bad."""

from collections.abc import Sequence

import numpy as np

from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_number
from leaven.tuning.algorithm import divergence
from leaven.tuning.algorithm.trust_region import DOWN, learning_rates
from leaven.tuning.document import Dimension, StudyTrial

ELSEWHERE = "lower the learning rate of the recipe, which this study leaves alone, to half or a quarter"


def advice_when_all_diverged(
    trials: Sequence[StudyTrial], dimensions: Sequence[Dimension], elsewhere: str = ELSEWHERE
) -> str:
    """Which value to lower after trials that all diverged, in one line; ``elsewhere``, where no learning rate is
    searched. A dimension around 0 is known by its multipliers alone.

    Where nothing ends, nothing tells the bad values from the good but how long a run lasted: a divergence model of
    the trials that lasted less than half as long as the longest blames what these have and the others have not. That
    aside the learning rate is to blame, as it mostly is: by as much as the search has lowered it in vain, and an
    octave more.
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
