"""Where a recipe leaves the range of published runs, and which of them say so.

To add a check: a function from :class:`Case` to findings, its line in ``CHECKS``, and in ``tests/catalogue`` a
planted fault that it finds.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from leaven.catalogue.findings import duration, model, optimiser
from leaven.catalogue.findings.case import Case, Finding, Mend, Row, Severity
from leaven.recipe.recipe import Recipe

__all__ = ["CHECKS", "Case", "Check", "Finding", "Mend", "Row", "Severity", "findings"]

SEVERITIES: tuple[Severity, ...] = ("far outside", "outside", "note")


class Check(NamedTuple):
    name: str
    reads: str
    source: str  # beside the runs that a finding names
    find: Callable[[Case], Iterator[Finding]]


_CATALOGUE = "the published runs"
CHECKS = (
    Check("size", "parameters", _CATALOGUE, duration.size),
    Check(
        "lr", "lr of the hidden matrices", "the nearest run of each lineage; the laws of leaven laws", optimiser.lr
    ),
    Check("qk-norm", "qk_norm, lr", "the nearest run of each lineage; their instabilities", optimiser.qk_norm),
    Check("z-loss", "lr", "the nearest run of each lineage", optimiser.z_loss),
    Check("beta1", "beta1 of the hidden matrices", _CATALOGUE, optimiser.beta1),
    Check("beta2", "beta2 of the hidden matrices, batch", _CATALOGUE, optimiser.beta2),
    Check("eps", "eps of the hidden matrices", _CATALOGUE, optimiser.eps),
    Check("weight decay", "weight decay of the hidden matrices", _CATALOGUE, optimiser.weight_decay),
    Check("l2 decay", "optimizer, weight decay", "Loshchilov and Hutter 2019, arXiv 1711.05101", optimiser.l2_decay),
    Check("timescale", "lr, weight decay, batch, tokens", "Power Lines 2025, arXiv 2505.13738", optimiser.timescale),
    Check(
        "decay of gains",
        "weight decay of gains and biases",
        "karpathy/nanoGPT, model.py; OLMo 2",
        optimiser.decay_of_gains,
    ),
    Check(
        "decay of embeddings",
        "weight decay of the embedding",
        "OLMo 2 report, arXiv 2501.00656",
        optimiser.decay_of_embeddings,
    ),
    Check("clip", "grad_clip", _CATALOGUE, optimiser.grad_clip),
    Check(
        "tokens per parameter", "parameters, tokens", "Chinchilla, arXiv 2203.15556", duration.tokens_per_parameter
    ),
    Check("steps", "tokens, batch, ramp", _CATALOGUE, duration.steps),
    Check("epochs", "tokens, tokens of the text", "Muennighoff et al. 2023, arXiv 2305.16264", duration.epochs),
    Check("batch", "batch", "the nearest run of each lineage", duration.batch),
    Check("critical batch", "batch, parameters, tokens", "the laws of leaven laws", duration.critical_batch),
    Check("no ramp", "batch, ramp", _CATALOGUE, duration.no_ramp),
    Check("ramp start", "ramp", "bigscience-workshop/bigscience: train/tr11-176B-ml", duration.ramp_start),
    Check("ramp length", "ramp, tokens", _CATALOGUE, duration.ramp_length),
    Check("warm-up", "warmup_tokens, tokens, batch", _CATALOGUE, duration.warmup),
    Check("final lr", "decay, min_lr_ratio", _CATALOGUE, duration.min_lr_ratio),
    Check("init std", "init std of the hidden matrices, d_model", "arXiv 2201.11990 and BLOOM-176B", model.init_std),
    Check(
        "residual std", "init std and multipliers of the ends of branches", "GPT-2, Megatron-LM", model.residual_std
    ),
    Check("dropout", "dropout, epochs", _CATALOGUE, model.dropout),
    Check("precision", "compute dtype", "instabilities of the published runs", model.precision),
    Check("aspect ratio", "d_model, n_layers", _CATALOGUE, model.aspect_ratio),
    Check("head size", "d_head", _CATALOGUE, model.head_size),
    Check("mlp ratio", "d_ff, d_model, activation", _CATALOGUE, model.mlp_ratio),
    Check("vocabulary", "vocab_size, tp", "karpathy/nanoGPT, train.py", model.vocabulary),
    Check("sequence length", "seq_len", _CATALOGUE, model.seq_len),
)


def findings(
    recipe: Recipe, resolve: Callable[[Recipe], Sequence[Row]], corpus_tokens: int | None = None
) -> list[Finding]:
    """What every check finds in a recipe, the farthest outside first; each mend has been tried.

    ``resolve`` tells what the parameters of a recipe get. ``corpus_tokens``: how many tokens the text has, where it
    is known; else one epoch is assumed.
    """
    found = _judged(Case(recipe, resolve(recipe), corpus_tokens))
    known = {one.check: one.severity for one in found}

    def brings(mend: Mend, check: str) -> int | None:
        """How many notes a mend brings; None where its own finding stays or another gets worse than a note."""
        try:
            mended = recipe.replace(mend)
        except ValueError:  # of the recipe, or of its base's shape
            return None
        left = {one.check: one.severity for one in _judged(Case(mended, resolve(mended), corpus_tokens))}
        worse = [severity for name, severity in left.items() if _rank(severity) < _rank(known.get(name))]
        return None if check in left or any(severity != "note" for severity in worse) else len(worse)

    def tried(one: Finding) -> Finding:
        notes = [(brought, mend) for mend in one.mends if (brought := brings(mend, one.check)) is not None]
        return replace(one, mends=tuple(mend for _, mend in sorted(notes, key=lambda pair: pair[0])))

    return [tried(one) for one in sorted(found, key=lambda one: _rank(one.severity))]


def _judged(case: Case) -> list[Finding]:
    found = (replace(one, check=check.name, source=check.source) for check in CHECKS for one in check.find(case))
    return [_as_measured(one) if _MEASURED.match(case.recipe.why.get(one.path, "")) else one for one in found]


_MEASURED = re.compile(r"(\S+: )?study ")  # how `leaven tune` begins the reason of a value that it found


def _as_measured(one: Finding) -> Finding:
    """A value that a search has found: leaving the published range is worth a note and no fault."""
    return replace(one, severity="note", says=f"{one.says}; a search found this value, see [why]")


def _rank(severity: Severity | None) -> int:
    return len(SEVERITIES) if severity is None else SEVERITIES.index(severity)
