"""The duration check: does the best lr change with the tokens of a run as the scaling rule says?

The check sweeps the lr at several durations (run lengths in tokens), and fits the exponent of the best lr over the
tokens. Control runs show how much the rule lowers the loss. At each longer duration, one group of them keeps the lr
of the base, and another group keeps all hyperparameters of the base.

The rule is derived for gradients that are mostly noise. To test this assumption, the check also doubles the batch: it
trains on the same number of tokens, with hyperparameters from the batch rule. The tokens needed to reach a given loss
are proportional to 1 + x, where x = batch / critical batch (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
So a doubled batch needs (1 + 2x) / (1 + x) times the tokens.

The log2 of this ratio is the cost of doubling the batch, in octaves of tokens. It is 0 if gradients are only noise,
0.585 at the critical batch, and 1 if only the number of steps counts. The check measures it as (rise of the loss from
doubling the batch) / (fall of the loss per doubling of the tokens).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from leaven.documents.checks import CheckDocument, MeasuredRow
from leaven.errors import InputError
from leaven.training.early_stopping import divergence_limit
from leaven.verification.foreign import ModelFamily
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.optimum import Array, LossGrid, estimate
from leaven.verification.runs import RunStore
from leaven.verification.sweep import losses_of, sweep

CRITICAL = math.log2(1.5)
"""Cost of doubling the batch at the critical batch size, in octaves of tokens: 1.5 times as many tokens."""

EXPONENT = "exponent of the best lr over tokens"
RULED = "moved by the rule"


def duration(
    family: ModelFamily,
    scale: RunScale,
    ratios: Sequence[float],
    lrs: Sequence[float] | None,
    store: RunStore,
    *,
    seeds: int = 3,
) -> CheckDocument:
    """Run or resume the duration check, which compares the best lr of runs of several lengths.

    ``ratios`` are run lengths as multiples of the family's run length. The check always includes 1. ``lrs`` is the
    grid of :func:`sweep`, or None for a default grid. Raise InputError if no ratio differs from 1, and the same
    errors as :func:`sweep`.
    """
    base, *longer = (replace(scale, tokens=ratio) for ratio in (1.0, *sorted({*ratios} - {1.0})))
    if not longer:
        raise InputError(
            "--durations has only the value 1 (the run length of the recipe), but a duration check compares at least "
            "two run lengths; write --durations 1,2,4"
        )
    document, losses = sweep("duration", family, "lr", [base, *longer], lrs, store=store, seeds=seeds)
    if len(losses) == 1:  # the sweep ended at the base
        return document
    regime = _regime(family, base, losses, store, seeds)
    measured = [*document.measured, regime, *_arms(family, longer, store, seeds)]
    return document.model_copy(update={"measured": measured})


def measured_exponent(document: CheckDocument, run: Path) -> dict[str, object] | None:
    """Return a recipe's new values, by path, for the measured token exponent t: the best lr falls as tokens^-t.

    The values are t (clipped to the range from 0 to 1), the 95% interval of t, and a reason that names the folder
    ``run``. Return None if the check has not found t and the interval.
    """
    found = next((row for row in document.measured if row.name == EXPONENT), None)
    if found is None or found.value is None or found.low is None or found.high is None:
        return None
    low, high = -found.high, -found.low
    outside = "" if 0 <= -found.value <= 1 else f"; the measured {-found.value:.3g} is outside the allowed 0 to 1"
    return {
        "scaling.token_exponent": float(f"{min(max(-found.value, 0.0), 1.0):.3g}"),
        "scaling.token_exponent_interval": (float(f"{low:.3g}"), float(f"{high:.3g}")),
        "why.scaling.token_exponent": (
            f"measured by leaven check duration in {run}, 95% interval {low:.2g} to {high:.2g}{outside}"
        ),
    }


def _regime(
    family: ModelFamily, base: RunScale, losses: Mapping[RunScale, LossGrid], store: RunStore, seeds: int
) -> MeasuredRow:
    """Return a row with the cost of doubling the batch, in octaves of tokens (see the top of this file)."""
    name = "cost of doubling the batch, in octaves of tokens"
    unknown = partial(MeasuredRow, name=name, value=None, low=None, high=None)
    longest = max(losses, key=lambda scale: scale.tokens)
    if not (losses[base].has_optimum and losses[longest].has_optimum):
        return unknown(note="too many runs diverged")
    best = int(losses[base].means.argmin())
    double = replace(base, batch=2.0)
    lr = float(2 ** losses[base].octaves[best])
    doubled = losses_of(family, "lr", {double: [lr]}, store, seeds)[double]
    if len(doubled.diverged):
        return unknown(note="twice the batch diverges")

    def share(grids: Sequence[LossGrid]) -> Array:
        at_base, at_longest, at_double = grids
        octave = (at_base.lowest - at_longest.lowest) / math.log2(longest.tokens / base.tokens)
        cost = at_double.means[..., 0] - at_base.means[..., best]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(octave > 0, cost / octave, math.nan)

    found = estimate(share, [losses[base], losses[longest], doubled])
    if not math.isfinite(found.value):
        return unknown(note="more tokens do not lower the loss")
    if found.low is not None and math.isnan(found.low):  # some of the bootstrap samples
        note = "no interval: more tokens may not lower the loss; give more --seeds or longer --durations"
        return replace(found, low=None, high=None).row(name, note)
    if found.low is None or found.high is None:
        note = "no interval with only one seed; give --seeds 3"
    elif found.high < CRITICAL:
        note = (
            f"limited by noise: the cost is below {CRITICAL:.2f}, so the batch is below the critical one, as the "
            "rule assumes"
        )
    elif found.low > CRITICAL:
        note = (
            f"limited by optimisation: the cost is above {CRITICAL:.2f}, so the batch is above the critical one, "
            "and the rule's exponent of tokens is too large; choose a smaller batch, or use the fitted exponent"
        )
    else:
        note = f"undecided: the interval contains {CRITICAL:.2f}, the value at the critical batch; give more --seeds"
    return found.row(name, note)


def _arms(family: ModelFamily, longer: Sequence[RunScale], store: RunStore, seeds: int) -> list[MeasuredRow]:
    """Return, for each scale in ``longer``, the losses of control runs minus the loss under the rule, in nats.

    One control follows the rule except for the lr, which is the base's. It is left out if the rule does not change
    the lr. The other control keeps all values of the base.
    """
    own, power = family.value("lr"), family.exponent("lr", "tokens")
    settings = {}
    for scale in longer:
        settings[scale, RULED] = RunSetting(scale, own)
        if power:
            settings[scale, "lr left alone"] = RunSetting(scale, own * scale.tokens**-power)
        settings[scale, "nothing moved"] = RunSetting(scale, own, ruled=False)
    losses = store.losses(family, settings, seeds)
    found = []
    for (scale, arm), values in losses.items():
        if arm == RULED:
            continue
        ruled = losses[scale, RULED]
        name = f"tokens x{scale.tokens:g}, {arm}: loss minus loss under the rule, nats"
        if not all(loss < divergence_limit(family.vocab_size) for loss in (*values, *ruled)):
            found.append(MeasuredRow(name=name, value=None, low=None, high=None, note="a run diverged"))
            continue
        pairs = LossGrid.of({1.0: [a - b for a, b in zip(values, ruled, strict=True)]})
        difference = estimate(lambda grids: grids[0].means[..., 0], [pairs])
        note = f"loss {sum(values) / seeds:.4f}, {RULED} {sum(ruled) / seeds:.4f}"
        found.append(difference.row(name, note))
    return found
