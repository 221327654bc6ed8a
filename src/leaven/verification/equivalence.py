"""The equivalence check: does another batch size on the same data train an equally good model?

Under the batch rule of Adam (Malladi et al. 2022, arXiv 2205.10287; with weight decay Mlodozeniec et al. 2025),
training at another batch follows the same stochastic differential equation. For a batch kappa times as large, the lr
rises by sqrt(kappa), and the betas are raised to the power kappa. eps and decay change, too. The final loss then
stays the same, if gradients are mostly noise.

The check compares the final losses of two groups of runs. In the first group, the rule adapts the hyperparameters to
the batch, and the loss should stay the same. In the control group, only the batch changes, and the loss should
change. If it does not change, these runs cannot show whether the rule is right, and the check does not pass.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from leaven.documents.checks import CheckDocument, VerdictRow
from leaven.errors import InputError
from leaven.verification.foreign import ModelFamily
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.runs import RunStore
from leaven.verification.verdict import curve, verdict

LEAST_STEPS = 200
"""The fewest steps that a run may have. With fewer, the loss depends mainly on the number of steps. For example, 1/4
of the batch changed the loss of a run of 64 steps by 1.8 nats under a correct rule."""

TOLERANCE = 0.02
"""The loss may always differ by up to this share of (log(vocabulary) - loss), because the batch rule is exact only in
the limit of small lrs. In a toy model, factors of 1/4 to 8 on the batch size change the excess loss by up to 5%
with the rule, and by 50% without it."""

FACTORY_TOKENS = 524_288
"""The default number of tokens in a run of a user's own model: 256 steps with 4 times the default batch."""

ARMS = ("rule", "no rule")  # the two groups of runs


def equivalence(
    family: ModelFamily, scale: RunScale, ratios: Sequence[float], store: RunStore, *, seeds: int = 3
) -> CheckDocument:
    """Run or resume the equivalence check, which compares the final losses of runs with several batch sizes.

    ``ratios`` are batch sizes as multiples of the family's batch. The check always includes 1. Raise InputError if
    no ratio differs from 1, if a run has too few steps, or if a batch or the folder cannot be used. Raise
    ChecksStopped if the runs were stopped.
    """
    kappas = sorted({1.0, *ratios})
    if len(kappas) < 2:
        raise InputError("an equivalence check needs a batch ratio besides 1; give --batch-ratios 0.25,4")
    steps = family.tokens / (family.batch_tokens * kappas[-1])
    if steps < LEAST_STEPS:
        need = math.ceil(LEAST_STEPS * family.batch_tokens * kappas[-1])
        raise InputError(
            f"with batch x {kappas[-1]:g} a run has {steps:.0f} steps, but the check needs {LEAST_STEPS}; "
            f"give {need:,} tokens, smaller batches or smaller --batch-ratios"
        )
    settings = {
        (arm, kappa): RunSetting(replace(scale, batch=kappa), family.value("lr"), ruled=arm == "rule" or kappa == 1)
        for arm in ARMS
        for kappa in kappas
    }
    found = store.losses(family, settings, seeds)
    losses = {arm: np.array([found[arm, kappa] for kappa in kappas]) for arm in ARMS}
    means = {arm: losses[arm].mean(1) for arm in ARMS}
    base = kappas.index(1.0)
    limit = _limit(losses["rule"][base], family.vocab_size)
    return verdict(
        "equivalence",
        family.name,
        "largest difference in final loss from batch x 1, nats per token",
        [_row(arm, kappas, means[arm] - means[arm][base], limit) for arm in ARMS],
        curves=[curve(arm, "batch", "loss", kappas, losses[arm].tolist()) for arm in ARMS],
        settings={
            "rule": family.rule,
            "scale": f"{scale.width}x{scale.depth}",
            "batch_ratios": kappas,
            "seeds": seeds,
            "tokens": family.tokens,
        },
    )


def _limit(losses: np.ndarray, vocab_size: int) -> float:
    """Return the largest difference in mean loss that the check allows, in nats per token.

    It is `TOLERANCE` x (log(vocab_size) - mean loss), or two standard errors of the difference between two means
    over the seeds if they are more. ``losses`` has the loss of each seed at the unchanged batch.
    """
    learnt = math.log(vocab_size) - float(losses.mean())
    if len(losses) < 2:
        return TOLERANCE * learnt
    return max(2 * float(losses.std(ddof=1)) * math.sqrt(2 / len(losses)), TOLERANCE * learnt)


def _row(arm: str, kappas: Sequence[float], differences: np.ndarray, limit: float) -> VerdictRow:
    worst = float(differences[int(np.abs(differences).argmax())])
    parts = {f"x{kappa:g}": float(value) for kappa, value in zip(kappas, differences, strict=True)}
    row = partial(VerdictRow, module=arm, axis="batch", slope=worst, limit=limit, parts=parts)
    same = abs(worst) <= limit  # False for NaN
    if arm == "rule":
        note = "" if same else "the loss changes with the batch  <- too few steps, or lr too high?"
        return row(passed=same, note=note, beyond=max(abs(worst) - limit, 0.0))
    if same:
        return row(passed=False, note="the loss changes by no more than noise; use longer runs or other ratios")
    return row(passed=True, note="the loss changes with the batch, as expected")
