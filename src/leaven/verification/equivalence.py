"""The equivalence check: does another batch at the same data train the same model?

The batch rule of Adam (Malladi et al. 2022, arXiv 2205.10287; with decay Mlodozeniec et al. 2025) says that
batches kappa times larger with an lr sqrt(kappa) times higher, betas to the power kappa and so on follow the same
stochastic differential equation: the final loss is the same as long as gradients are mostly noise. It does not say
that it is the best one. The control arm moves the batch and nothing else; if its loss stays as well, the check has
seen nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

from leaven.recipe.errors import InputError
from leaven.verification.model_family import ModelFamily, RunSetting
from leaven.verification.runs import RunStore
from leaven.verification.verdict import CheckRow, Verdict, curve

LEAST_STEPS = 200
"""Of the largest batch. With fewer a run is all warm-up and its loss is made by the number of steps: measured on 64
steps, the right rule was off by 1.8 nats at batch x 1/4."""

TOLERANCE = 0.02
"""Of the loss that was learnt since a uniform guess. The equation is a limit of small lrs: measured on a toy, the
rule holds to 5% of the excess loss from batch x 1/4 to x 8, where no rule is off by 50%."""

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
        InputError: if a batch is no whole number of sequences, the rule cannot follow it, or the folder is in use.
        Stopped: if the store was asked to stop; finished runs are in its folder.
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
    """What seeds alone may differ by, two standard errors of a difference of means, or the rule's own inexactness.

    Both from the losses at the family's own batch, which no rule has moved: a fault must not widen its own limit.
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
    same = abs(worst) <= limit  # not so for what is no number
    if arm == "rule":
        note = "" if same else "the loss moves with the batch  <- too few steps for the rule, or a lr too high?"
        return CheckRow(arm, "batch", worst, limit, same, parts, note, max(abs(worst) - limit, 0.0))
    note = (
        "moves with the batch, as it should" if not same else "moves no more than noise: longer runs or more ratios"
    )
    return CheckRow(arm, "batch", worst, limit, not same, parts, note)
