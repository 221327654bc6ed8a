"""Shape, start and precision of a recipe's model against those of published runs."""

import math
from collections.abc import Iterator

from leaven.catalogue.counting import d_head
from leaven.catalogue.findings.case import SIZE_FACTOR, Case, Finding, Limits, told, upward
from leaven.catalogue.run import Run
from leaven.catalogue.runs import load_runs, size_ratio
from leaven.recipe.shape import BRANCH_ENDS
from leaven.recipe.units import format_number


def init_std(case: Case) -> Iterator[Finding]:
    """In units of sqrt(1 / (3 d)), where MT-NLG 530B and BLOOM-176B started. Fan-in, 1 / sqrt(d), is 1.73 of it and
    the largest rule; BigScience's 104B broke at 3.7."""
    usual = math.sqrt(1 / (3 * case.recipe.model.d_model))
    std = case.init_std
    if not std:
        return
    named = case.recipe.hyperparameters.init != "rule"
    written = case.recipe.hyperparameters.init_std or 0.0
    yield from case.judge(
        "hyperparameters.init" if named else "hyperparameters.init_std",
        std / usual,
        _init_std,
        Limits((0.25, 1.05), (0.1, 1.8), (0.03, 3.0)),
        f"init std {std:.3g} at width {case.recipe.model.d_model} is {format_number(std / usual, 2)} x "
        f"sqrt(1 / (3 d)) = "
        f"{usual:.3g}, where MT-NLG 530B and BLOOM-176B started; with 2.5 x BigScience's 13B had large "
        "spikes, with 3.7 x its 104B failed",
        mends=[
            {"hyperparameters.init": "mt-nlg"}
            if named
            else {"hyperparameters.init_std": float(f"{written * usual / std:.3g}")}
        ],
    )


def residual_std(case: Case) -> Iterator[Finding]:
    """The start of what writes to the residual stream, times sqrt(2 L), over that of what reads it: 1 as in GPT-2."""
    if not case.init_std:
        return
    n_layers = case.recipe.model.n_layers
    value = case.residual_std / case.init_std * math.sqrt(2 * n_layers)
    most = max(_residual_std(run) or 0.0 for run in case.runs if run.arch.norm_placement == "pre")
    modules = case.recipe.hyperparameters.modules
    mend = {
        f"hyperparameters.modules.{module}.init_std": float(
            f"{(modules[module].init_std if module in modules else 1.0) / value:.2g}"
        )
        for module in BRANCH_ENDS
    }
    yield from case.judge(
        "hyperparameters.modules.mlp.out.init_std",
        value,
        lambda run: _residual_std(run) if run.arch.norm_placement == "pre" else None,
        upward(3.0, most, 3 * most),
        f"the ends of the branches start at {case.residual_std / case.init_std:.2g} of the other matrices, "
        f"{format_number(value, 2)} x 1 / sqrt(2 L): {2 * n_layers} of them add up in the residual stream. "
        f"Flat starts belong to "
        "norms on the branches' outputs (OLMo 2)",
        mends=[mend],
    )


def dropout(case: Case) -> Iterator[Finding]:
    """A text that is seen once cannot be learned by heart; whether it is, ``--corpus-tokens`` says."""
    if case.corpus_tokens is not None and case.recipe.data.tokens > 1.5 * case.corpus_tokens:
        return
    value = case.recipe.model.dropout
    without = sum(run.optim is not None and run.optim.dropout == 0 for run in case.runs)
    known = sum(run.optim is not None and run.optim.dropout is not None for run in case.runs)
    seen = "" if case.corpus_tokens else " (if the text is seen more than once, say --corpus-tokens N)"
    yield from case.judge(
        "model.dropout",
        value,
        told("optim.dropout"),
        upward(0.0, 0.0, 0.15),
        f"dropout {value:g} in a run of one epoch{seen}; {without} of the {known} runs that tell have none, the "
        "others 0.1",
        mends=[{"model.dropout": 0.0}],
    )


def precision(case: Case) -> Iterator[Finding]:
    """leaven scales the loss itself, so fp16 never goes without; but it runs out of range where bf16 does not."""
    if case.recipe.precision.compute != "fp16":
        return
    troubled = [(run, one) for run in load_runs() for one in run.instabilities if "fp16" in one.what]
    used = [run.id for run in case.runs if run.precision and run.precision.dtype == "fp16"]
    what = " | ".join(f"{run.id}: {one.what}" for run, one in troubled)
    yield Finding(
        path="precision.compute",
        severity="note",
        value=None,
        low=None,
        high=None,
        factor=None,
        says=f"fp16, with a loss scale that looks after itself; runs since 2022 are in bf16. What happened: {what}",
        runs=tuple(dict.fromkeys(run.id for run, _ in troubled)),
        did_so=tuple(used),
        mends=({"precision.compute": "bf16"},),
    )


def aspect_ratio(case: Case) -> Iterator[Finding]:
    if not case.neighbours:
        return
    model = case.recipe.model
    near = [one for run in case.runs if size_ratio(run, case.params) <= SIZE_FACTOR and (one := _aspect(run))]
    low, high = case.published(_aspect)
    value = model.d_model / model.n_layers
    yield from case.judge(
        "model.n_layers",
        value,
        _aspect,
        Limits((min(near), max(near)), (low, high), (low / 2, 2 * high)),
        f"d_model / n_layers = {format_number(value)}; runs within 4 times the size have "
        f"{min(near):.3g} .. {max(near):.3g}, "
        f"all runs {low:.3g} .. {high:.3g}",
        mends=[{"model.n_layers": max(round(model.d_model / 80), 1)}],
    )


def head_size(case: Case) -> Iterator[Finding]:
    if not case.neighbours:
        return
    model = case.recipe.model
    heads = model.n_heads * model.d_head
    fits = next((size for size in (128, 64) if heads % size == 0), model.d_head)
    yield from case.judge(
        "model.d_head",
        model.d_head,
        lambda run: d_head(run.arch),
        Limits((64, 128), (64, 256), (32, 512)),
        f"heads of {model.d_head}; nearly all runs have 64 .. 128, the largest 256",
        mends=[{"model.d_head": fits, "model.n_heads": heads // fits, "model.n_kv_heads": heads // fits}],
    )


def mlp_ratio(case: Case) -> Iterator[Finding]:
    model = case.recipe.model
    value, gated = model.d_ff / model.d_model, model.gated
    width = round(model.d_model * (8 / 3 if gated else 4) / 64) * 64
    yield from case.judge(
        "model.d_ff",
        value,
        lambda run: _mlp_ratio(run) if bool(run.arch.gated) is gated else None,
        Limits((2.6, 3.6), (2.0, 5.5), (1.0, 8.0)) if gated else Limits((3.9, 4.1), (3.0, 6.0), (2.0, 10.0)),
        f"d_ff / d_model = {format_number(value)}; "
        + ("gated MLPs have 8/3 .. 3.5, a few up to 5.4" if gated else "MLPs without a gate have 4"),
        mends=[{"model.d_ff": max(width, 64)}],
    )


def vocabulary(case: Case) -> Iterator[Finding]:
    vocab, unit = case.recipe.model.vocab_size, 64 * case.recipe.layout.tp
    if vocab % unit:
        padded = -(-vocab // unit) * unit
        yield Finding(
            path="model.vocab_size",
            severity="note",
            value=float(vocab),
            low=None,
            high=None,
            factor=None,
            says=f"a vocabulary of {vocab:,} is no multiple of {unit}: the largest matrix products of the model run "
            "faster padded (nanoGPT: 50,257 to 50,304)",
            runs=("gpt2-124m-nanogpt",),
            mends=({"model.vocab_size": padded},),
        )


def seq_len(case: Case) -> Iterator[Finding]:
    if not case.neighbours:
        return
    value = case.recipe.model.seq_len
    yield from case.judge(
        "model.seq_len",
        value,
        told("data.seq_len"),
        Limits((1024, 8192), (512, 16_384), (128, 65_536)),
        f"sequences of {value:,} tokens; published pre-training has 1,024 .. 8,192; longer ones come at its end",
        mends=[{"model.seq_len": 1024 if value < 1024 else 8192}],
    )


def _init_std(run: Run) -> float | None:
    return run.init_std * math.sqrt(3 * run.arch.d_model) if run.init_std and run.arch.d_model else None


def _residual_std(run: Run) -> float | None:
    if not (run.residual_init_std and run.init_std and run.arch.n_layers):
        return None
    return run.residual_init_std / run.init_std * math.sqrt(2 * run.arch.n_layers)


def _aspect(run: Run) -> float | None:
    return run.arch.d_model / run.arch.n_layers if run.arch.d_model and run.arch.n_layers else None


def _mlp_ratio(run: Run) -> float | None:
    return run.arch.d_ff / run.arch.d_model if run.arch.d_ff and run.arch.d_model else None
