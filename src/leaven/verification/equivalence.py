"""The equivalence check: does another batch size on the same data train an equally good model?

The batch rule of Adam (Malladi et al. 2022, arXiv 2205.10287; with decay Mlodozeniec et al. 2025) says that
batches kappa times larger with an lr sqrt(kappa) times higher, betas to the power kappa and so on follow the same
stochastic differential equation: the final loss is the same as long as gradients are mostly noise. It need not be the
lowest. The control arm changes only the batch; if its loss stays the same as well, the check is not conclusive.
"""

import math
from collections.abc import Sequence

import numpy as np

from leaven.recipe.errors import InputError
from leaven.verification.model_family import ModelFamily, RunSetting
from leaven.verification.runs import RunStore
from leaven.verification.verdict import CheckRow, Verdict, curve

LEAST_STEPS = 200
"""Steps of the run with the largest batch. With fewer, the loss depends mainly on the number of steps: with 64 steps,
the right rule was off by 1.8 nats at batch x 1/4."""

TOLERANCE = 0.02
"""Allowed difference, relative to the improvement over a uniform guess. The equation holds in the limit of small lrs:
in a toy model the rule holds to 5% of the excess loss from batch x 1/4 to x 8, where no rule is off by 50%."""

ARMS = ("rule", "no rule")


def equivalence(
    family: ModelFamily,
    scale: tuple[int, int],
    ratios: Sequence[float],
    store: RunStore,
    *,
    seeds: int = 3,
) -> Verdict:
    """Run the check, or resume it, on the model of a width and depth at ``ratios`` times the family's batch.

    Raises:
        InputError: if a batch is not a whole number of sequences, the factory takes no ratios, or the folder is in
        use. Stopped: if the store was asked to stop; finished runs are in its folder.
    """
    kappas = sorted({1.0, *ratios})
    if len(kappas) < 2:
        raise InputError("an equivalence check needs another batch: --batch-ratios 0.25,4")
    steps = family.tokens / (family.batch_tokens * kappas[-1])
    if steps < LEAST_STEPS:
        need = math.ceil(LEAST_STEPS * family.batch_tokens * kappas[-1])
        raise InputError(
            f"a batch x {kappas[-1]:g} leaves {steps:.0f} steps, too few for an equation that holds in the limit of "
            f"many; give {need:,} tokens, smaller batches or smaller --batch-ratios, for {LEAST_STEPS} steps"
        )
    every = {
        (arm, kappa, seed): family.trial(
            RunSetting(*scale, family.value("lr"), seed, kappa, ruled=arm == "rule" or kappa == 1)
        )
        for arm in ARMS
        for kappa in kappas
        for seed in range(seeds)
    }
    outcome = store.run(every.values())
    losses = {
        arm: np.array([[outcome(every[arm, k, seed]).loss for seed in range(seeds)] for k in kappas]) for arm in ARMS
    }
    limit = _limit(losses["rule"][kappas.index(1.0)], family.vocab_size)
    rows = [_row(arm, kappas, losses[arm], limit) for arm in ARMS]
    verdict = Verdict(
        check="equivalence",
        subject=family.name,
        quantity="largest difference of the final loss to that of batch x 1, nats per token",
        rows=tuple(rows),
        curves=tuple(curve(arm, "batch", "loss", kappas, losses[arm].tolist()) for arm in ARMS),
        settings={
            "rule": family.rule,
            "scale": f"{scale[0]}x{scale[1]}",
            "batch_ratios": kappas,
            "seeds": seeds,
            "tokens": family.tokens,
        },
    )
    return store.keep(verdict)


def _limit(losses: np.ndarray, vocab_size: int) -> float:
    """Return the allowed difference: two standard errors of a difference of means, or the rule's tolerance if larger.

    Both come from the losses at the family's own batch, where the rule has no effect, so that a fault cannot widen
    its own limit.
    """
    learnt = math.log(vocab_size) - float(losses.mean())
    if len(losses) < 2:
        return TOLERANCE * learnt
    return max(2 * float(losses.std(ddof=1)) * math.sqrt(2 / len(losses)), TOLERANCE * learnt)


def _row(arm: str, kappas: Sequence[float], losses: np.ndarray, limit: float) -> CheckRow:
    means = losses.mean(1)
    differences = means - means[list(kappas).index(1.0)]
    worst = float(differences[int(np.abs(differences).argmax())])
    parts = {f"x{kappa:g}": float(value) for kappa, value in zip(kappas, differences, strict=True)}
    same = abs(worst) <= limit  # False for NaN
    if arm == "rule":
        note = "" if same else "the loss changes with the batch  <- too few steps for the rule, or too high an lr?"
        return CheckRow(arm, "batch", worst, limit, same, parts, note, max(abs(worst) - limit, 0.0))
    note = (
        "changes no more than noise: use longer runs or more ratios"
        if same
        else "changes with the batch, as expected"
    )
    return CheckRow(arm, "batch", worst, limit, not same, parts, note)
