"""Learning rate, moments, decay and clipping of a recipe against those of published runs."""

import math
from collections.abc import Iterator
from statistics import median

from leaven.catalogue.findings.case import Case, Finding, Limits, ratio, told, upward
from leaven.catalogue.law_table import POWER_LINES_TAU
from leaven.catalogue.laws import evaluate, power_lines_tau
from leaven.catalogue.run import Run
from leaven.catalogue.runs import load_runs
from leaven.recipe.shape import Role
from leaven.recipe.units import format_number, format_quantity

# Below it a higher beta2 averages over as many tokens (Porian et al. 2024, arXiv 2406.19146, tuned it so).
_SMALL_BATCH = 2**18


def lr(case: Case) -> Iterator[Finding]:
    """Over three times or under a third of the median of the neighbours, and beyond all of them.

    A published lr is one for all parameters. Where the rule gives the hidden matrices another lr than the embedding,
    the one nearest to the published median is judged.
    """
    known = case.near(_peak_lr)
    if not known:
        return
    middle, lowest, highest = median(known), known[0], known[-1]
    outside = (min(lowest, middle / 3), max(highest, 3 * middle))
    model = case.recipe.model
    results = evaluate(case.params, case.recipe.data.tokens, params_non_embedding=model.params_non_embedding)
    laws = sorted(result.lr for result in results if result.lr and not result.form_of)
    lrs = [row.lr for row in case.rows if row.role in (Role.HIDDEN_WEIGHT, Role.EMBEDDING, Role.TIED_EMBEDDING)]
    value = case.hidden("lr")
    if value < middle:
        value = min(middle, max(value, *lrs))
    elif value > middle:
        value = max(middle, min(value, *lrs))
    yield from case.judge(
        "hyperparameters.lr",
        value,
        _peak_lr,
        Limits((lowest, highest), outside, (outside[0] / 3, outside[1] * 3)),
        f"peak lr {value:.2g}: {format_number(value / middle, 2)} x the median {middle:.2g} of the nearest "
        f"comparable runs, which "
        f"have {lowest:.2g} .. {highest:.2g}; laws, each at its own batch, say {laws[0]:.2g} .. {laws[-1]:.2g}",
        mends=[{"hyperparameters.lr": case.at_base("lr", middle)}],
        among=case.neighbours,
    )


def qk_norm(case: Case) -> Iterator[Finding]:
    """An lr above all that runs of this size had without QK-norm."""
    without = [run for run in case.neighbours if run.arch.qk_norm is False]
    if case.recipe.model.qk_norm or not without:
        return
    value, highest = case.hidden("lr"), max(run.peak_lr or 0.0 for run in without)
    troubles = [
        f"{run.id}: {trouble.what}; {trouble.action}"
        for run in load_runs()
        for trouble in run.instabilities
        if "without qk-norm" in trouble.what.lower()
    ]
    yield from case.judge(
        "model.qk_norm",
        value,
        lambda run: None if run.arch.qk_norm else run.peak_lr,
        upward(highest, 1.5 * highest, 5 * highest),
        f"no QK-norm at a peak lr of {value:.2g}; of the nearest runs without it none had more than {highest:.2g}"
        + (f". What happened to others: {' | '.join(troubles)}" if troubles else ""),
        mends=[{"model.qk_norm": True}, {"hyperparameters.lr": case.at_base("lr", highest, math.floor)}],
        among=without,
    )


def z_loss(case: Case) -> Iterator[Finding]:
    """An lr half as high again as any that runs of this size had without a z-loss."""
    without = [run for run in case.neighbours if not _z_loss(run)]
    with_it = [run for run in case.runs if _z_loss(run) and (run.peak_lr or 0) >= case.hidden("lr") / 2]
    highest = max((run.peak_lr or 0.0 for run in without), default=math.inf)
    if len(without) > 1 and case.hidden("lr") > 1.5 * highest and with_it:
        yield Finding(
            path="hyperparameters.lr",
            severity="note",
            value=case.hidden("lr"),
            low=None,
            high=highest,
            factor=case.hidden("lr") / highest,
            says=f"peak lr {case.hidden('lr'):.2g} without a z-loss, which leaven does not have; of the nearest runs "
            f"without it none had more than {highest:.2g}, and runs with such an lr used 5e-6 .. 1e-4",
            runs=tuple(run.id for run in with_it[:5]),
            mends=({"hyperparameters.lr": case.at_base("lr", highest, math.floor)},),
        )


def beta1(case: Case) -> Iterator[Finding]:
    value = case.hidden("beta1")
    yield from case.judge(
        "hyperparameters.beta1",
        value,
        told("optim.beta1"),
        Limits((0.88, 0.92), (0.8, 0.95), (0.5, 0.98)),
        f"beta1 {value:.4g} of the hidden matrices; every run with Adam(W) that tells has 0.9",
        mends=[{"hyperparameters.beta1": case.at_base("beta1", 0.9)}],
        scale=_horizon,
    )


def beta2(case: Case) -> Iterator[Finding]:
    """0.999 is Adam's default, and that of hardly any run at a batch of half a million tokens."""
    value, batch = case.hidden("beta2"), case.recipe.batch.tokens
    if batch <= _SMALL_BATCH:
        limits = Limits((0.94, 0.999), (0.9, 0.9995), (0.8, 0.99995))
    else:
        limits = Limits((0.94, 0.98), (0.9, 0.99), (0.8, 0.9995))
    known = [run.optim.beta2 for run in case.runs if run.optim and run.optim.beta2]
    yield from case.judge(
        "hyperparameters.beta2",
        value,
        told("optim.beta2"),
        limits,
        f"beta2 {value:.5g} of the hidden matrices at a batch of {format_quantity(batch)} tokens; "
        f"{sum(beta == 0.95 for beta in known)} of {len(known)} runs have 0.95",
        mends=[{"hyperparameters.beta2": case.at_base("beta2", 0.95)}],
        scale=_horizon,
    )


def eps(case: Case) -> Iterator[Finding]:
    """Only upward: where eps takes over, Adam turns into momentum; a small one has hurt no run here."""
    value = case.hidden("eps")
    yield from case.judge(
        "hyperparameters.eps",
        value,
        told("optim.eps"),
        upward(1e-7, 1e-5, 1e-4),
        f"eps {value:.2g} of the hidden matrices; nearly all runs have 1e-8, the largest published are 1e-5",
        mends=[{"hyperparameters.eps": case.at_base("eps", 1e-8)}],
    )


def weight_decay(case: Case) -> Iterator[Finding]:
    """As it is written, where no rule moves it: one that lowers the lr with the width raises the decay by as much,
    and then :func:`timescale` says whether the two together are usual."""
    value, written = case.hidden("weight_decay"), case.recipe.hyperparameters.weight_decay
    if (value and ratio(value, written) > 1.02) or case.recipe.hyperparameters.optimizer == "adam":
        return
    yield from case.judge(
        "hyperparameters.weight_decay",
        value,
        told("optim.weight_decay"),
        Limits((0.01, 0.1), (0.003, 0.3), (0.0, 1.0)),
        f"weight decay {value:.2g}; published runs have 0.01 .. 0.1, most of them 0.1",
        mends=[{"hyperparameters.weight_decay": 0.1}, {"hyperparameters.weight_decay": 0.01}],
    )


def l2_decay(case: Case) -> Iterator[Finding]:
    """``adam`` adds the decay to the gradient, where Adam divides it by the gradient's size: what its number means
    depends on the gradients, so no published decay says anything of it. Papers call AdamW Adam too."""
    tuned = case.recipe.hyperparameters
    if tuned.optimizer == "adam" and case.hidden("weight_decay"):
        yield Finding(
            path="hyperparameters.optimizer",
            severity="note",
            value=case.hidden("weight_decay"),
            low=None,
            high=None,
            factor=None,
            says=f"L2 decay: no published run. adam adds the decay of {case.hidden('weight_decay'):.2g} to the "
            "gradient and divides the sum by the gradient's size; published decays are AdamW's and say nothing of it",
            mends=({"hyperparameters.optimizer": "adamw"}, {"hyperparameters.weight_decay": 0.0}),
        )


def timescale(case: Case) -> Iterator[Finding]:
    """How long a weight remembers, B / (lr x decay x D), against the best one by Power Lines. All runs but
    GPT-NeoX-20B (33 times) lie within 0.34 and 10.9 of it."""
    decay = case.hidden("weight_decay")
    if not decay or case.recipe.hyperparameters.optimizer == "adam":
        return
    batch, tokens = case.recipe.batch.tokens, case.recipe.data.tokens
    tau = batch / (case.hidden("lr") * decay * tokens)
    best = power_lines_tau(case.params, tokens)
    beyond = POWER_LINES_TAU.fitted.beyond(case.params, tokens, 6 * case.params * tokens)
    usual = (1 / 3, 5.0)
    by = tau / best / min(max(tau / best, usual[0]), usual[1])  # what brings it to the nearest end of the usual
    inside = math.ceil if by > 1 else math.floor
    yield from case.judge(
        "hyperparameters.weight_decay",
        tau / best,
        _timescale,
        Limits(usual, (1 / 5, 12.0), (1 / 20, 50.0)),
        f"lr x decay: weights remember {format_number(tau, 2)} of the run, {format_number(tau / best, 2)} x "
        f"the best by Power Lines "
        f"({best:.2g}); published runs lie within 0.34 .. 11 of it",
        mends=[
            {"hyperparameters.weight_decay": case.at_base("weight_decay", decay * by, inside)},
            {"hyperparameters.lr": case.at_base("lr", case.hidden("lr") * by, inside)},
            case.with_batch(batch / by),
        ],
        sure=bool(case.neighbours) and not beyond,
    )


def decay_of_gains(case: Case) -> Iterator[Finding]:
    if any(row.weight_decay for row in case.rows if not row.role.is_matrix):
        did = [run.id for run in case.runs if run.optim and run.optim.decay_norm_and_bias]
        yield Finding(
            path="hyperparameters.decay_norm_and_bias",
            severity="note",
            value=1.0,
            low=None,
            high=None,
            factor=None,
            says="gains and biases decay towards 0, which most code leaves out (nanoGPT and Megatron-LM: matrices "
            "only); the paper of Complete(d)P prints it",
            did_so=tuple(did),
            mends=({"hyperparameters.decay_norm_and_bias": False},),
        )


def decay_of_embeddings(case: Case) -> Iterator[Finding]:
    """Of an embedding that is one with the unembedding nothing is said: that decays as any matrix does."""
    decayed = [
        row for row in case.rows if row.role is Role.EMBEDDING and row.module == "embedding" and row.weight_decay
    ]
    without = [run.id for run in load_runs() if run.optim and run.optim.decay_embeddings is False]
    if decayed and not case.recipe.model.embedding_norm:
        yield Finding(
            path="hyperparameters.modules.embedding.weight_decay",
            severity="note",
            value=decayed[0].weight_decay,
            low=None,
            high=0.0,
            factor=None,
            says="the embedding decays; OLMo 2 left that out against spikes, for small embeddings have large "
            "gradients, and later runs followed",
            runs=tuple(without),
            mends=({"hyperparameters.modules.embedding.weight_decay": 0.0},),
        )


def grad_clip(case: Case) -> Iterator[Finding]:
    clip = case.recipe.hyperparameters.grad_clip
    mends = ({"hyperparameters.grad_clip": 1.0},)
    if clip.limit and clip.mode != "global":
        yield Finding(
            path="hyperparameters.grad_clip",
            severity="note",
            value=clip.limit,
            low=None,
            high=None,
            factor=None,
            says=f"gradients are clipped {clip.mode}; every published run clips the global norm",
            mends=mends,
        )
        return
    state = f"clipped at {clip.limit:g}" if clip.limit else "not clipped"
    yield from case.judge(
        "hyperparameters.grad_clip",
        clip.limit or math.inf,
        told("optim.grad_clip"),
        Limits((0.1, 1.0), (0.01, 1.0), (0.001, 10.0)),
        f"the gradient is {state}; published runs clip its norm at 1.0, a few lower. OPT-175B's first lineage, at "
        "2.5, exploded again and again",
        mends=mends,
    )


def _horizon(beta: float) -> float:
    """Steps that a moment looks back; a rule may bring a beta to 1 in the last bit."""
    return 1 / (1 - beta) if beta < 1 else math.inf


def _peak_lr(run: Run) -> float | None:
    return run.peak_lr


def _z_loss(run: Run) -> bool:
    return bool(run.optim and (run.optim.z_loss or run.optim.z_loss_used))


def _timescale(run: Run) -> float | None:
    decay = run.optim and run.optim.weight_decay
    if not (decay and run.peak_lr and run.batch_tokens and run.tokens):
        return None
    tau = run.batch_tokens / (run.peak_lr * decay * run.tokens)
    return tau / power_lines_tau(run.params_total, run.tokens)
