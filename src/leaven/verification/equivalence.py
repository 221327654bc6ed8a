"""The equivalence check: does another batch size on the same data train an equally good model?

The batch rule of Adam (Malladi et al. 2022, arXiv 2205.10287; with decay Mlodozeniec et al. 2025) says that
batches kappa times larger with an lr sqrt(kappa) times higher, betas to the power kappa and so on follow the same
stochastic differential equation: the final loss is the same as long as gradients are mostly noise, though it need not
be the lowest loss possible. Control runs change only the batch. If their loss stays the same as well, the check is
not conclusive.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from leaven.documents.checks import CheckDocument, VerdictRow
from leaven.recipe.errors import InputError
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.runs import RunStore
from leaven.verification.subject import ModelFamily
from leaven.verification.verdict import curve, verdict

LEAST_STEPS = 200
"""Steps of the run with the largest batch. With fewer, the loss depends mainly on the number of steps: with 64 steps,
the right rule was off by 1.8 nats at batch x 1/4."""

TOLERANCE = 0.02
"""Allowed difference, relative to the improvement over a uniform guess. The equation holds in the limit of small lrs:
in a toy model the rule holds to 5% of the excess loss from batch x 1/4 to x 8, where no rule is off by 50%."""

FACTORY_TOKENS = 524_288
"""Default tokens of a factory's run: 256 steps of a batch x 4."""

ARMS = ("rule", "no rule")


def equivalence(
    family: ModelFamily, scale: RunScale, ratios: Sequence[float], store: RunStore, *, seeds: int = 3
) -> CheckDocument:
    """Run the check, or resume it, at ``ratios`` times the family's batch.

    Raises:
        InputError: if a batch is not a whole number of sequences, the factory takes no ratios, or the folder is in
            use.
        ChecksStopped: if the runs were stopped; finished runs are in the store's folder.
    """
    kappas = sorted({1.0, *ratios})
    if len(kappas) < 2:
        raise InputError("an equivalence check needs another batch: --batch-ratios 0.25,4")
    steps = family.tokens / (family.batch_tokens * kappas[-1])
    if steps < LEAST_STEPS:
        need = math.ceil(LEAST_STEPS * family.batch_tokens * kappas[-1])
        raise InputError(
            f"batch x {kappas[-1]:g} leaves {steps:.0f} steps; the check needs {LEAST_STEPS}. "
            f"Give {need:,} tokens, smaller batches or smaller --batch-ratios"
        )
    trials = {
        (arm, kappa, seed): family.trial(
            RunSetting(replace(scale, batch=kappa), family.value("lr"), seed, ruled=arm == "rule" or kappa == 1)
        )
        for arm in ARMS
        for kappa in kappas
        for seed in range(seeds)
    }
    outcome = store.run(trials.values())
    losses = {
        arm: np.array([[outcome(trials[arm, k, seed]).loss for seed in range(seeds)] for k in kappas]) for arm in ARMS
    }
    limit = _limit(losses["rule"][kappas.index(1.0)], family.vocab_size)
    return verdict(
        "equivalence",
        family.name,
        "largest difference of the final loss to that of batch x 1, nats per token",
        [_row(arm, kappas, losses[arm], limit) for arm in ARMS],
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
    """Return the allowed difference: two standard errors of a difference of means, or the rule's tolerance if larger.

    Both are computed from the losses at the family's own batch, where the rule has no effect. So a fault in the rule
    cannot widen the limit by which it is judged.
    """
    learnt = math.log(vocab_size) - float(losses.mean())
    if len(losses) < 2:
        return TOLERANCE * learnt
    return max(2 * float(losses.std(ddof=1)) * math.sqrt(2 / len(losses)), TOLERANCE * learnt)


def _row(arm: str, kappas: Sequence[float], losses: np.ndarray, limit: float) -> VerdictRow:
    means = losses.mean(1)
    differences = means - means[list(kappas).index(1.0)]
    worst = float(differences[int(np.abs(differences).argmax())])
    parts = {f"x{kappa:g}": float(value) for kappa, value in zip(kappas, differences, strict=True)}
    row = partial(VerdictRow, module=arm, axis="batch", slope=worst, limit=limit, parts=parts)
    same = abs(worst) <= limit  # False for NaN
    if arm == "rule":
        note = "" if same else "the loss changes with the batch  <- too few steps for the rule, or too high an lr?"
        return row(passed=same, note=note, beyond=max(abs(worst) - limit, 0.0))
    if same:
        return row(passed=False, note="changes no more than noise: use longer runs or more ratios")
    return row(passed=True, note="changes with the batch, as expected")
