"""Define the checks that train whole runs: ``leaven check transfer``, ``duration``, ``batch``, ``decay``, ``init``
and ``equivalence``."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli.check_options import (
    OutputOption,
    SeedsOption,
    SourceOption,
    SubjectArgument,
    finish,
    is_factory,
    numbers,
    prepare_text,
    read_subject,
    scale_of,
)
from leaven.cli.common import JsonOption, SetOption, count_option, load_recipe, stop_on_signal
from leaven.documents.checks import CheckDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_text, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.views.terminal.console import errors
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.verification.foreign import ModelFamily
    from leaven.verification.model_instance import Quantity, RunScale
    from leaven.verification.runs import RunStore

LongBatchOption = Annotated[
    int | None, typer.Option(min=1, help="For module:factory: batch size in tokens.", show_default="512")
]
TokensOption = Annotated[
    int | None, count_option("For module:factory: length of a run in tokens.", "131,072; for equivalence 524,288")
]
RunOption = Annotated[
    Path,
    typer.Option(metavar="DIR", help="The folder for the training runs. Run the same command again to resume them."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of worker processes, each with one thread.", show_default="one per core"),
]
ScaleOption = Annotated[
    str | None,
    typer.Option(
        metavar="WIDTHxDEPTH", help="Size of the model as WIDTHxDEPTH, e.g. 64x4.", show_default="the recipe's"
    ),
]
ScalesOption = Annotated[
    str, typer.Option(metavar="LIST", help="Sizes as WIDTHxDEPTH, separated by commas; the first is the base.")
]
LrsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Learning rates to try, at the base size, separated by commas. For module:factory: multiples of its lr.",
        show_default="1/4 to 4 times the recipe's",
    ),
]
DurationsOption = Annotated[
    str,
    typer.Option(metavar="LIST", help="Lengths of runs as multiples of the recipe's length, separated by commas."),
]


def transfer(
    subject: SubjectArgument,
    run: RunOption,
    scales: ScalesOption,
    lrs: LrsOption = None,
    seeds: SeedsOption = 3,
    tokens: TokensOption = None,
    batch_tokens: LongBatchOption = None,
    source: SourceOption = None,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best lr of a small model is also the best lr of a larger model."""
    sizes = _scales(scales)
    family, _ = _models(subject, overrides, sizes[0], tokens, batch_tokens, source)
    finish(_sweep("transfer", family, "lr", lrs, sizes, seeds, workers, run), output, json_output)


def duration(
    subject: SubjectArgument,
    run: RunOption,
    durations: DurationsOption = "1,2,4",
    scale: ScaleOption = None,
    lrs: LrsOption = None,
    seeds: SeedsOption = 3,
    tokens: TokensOption = None,
    batch_tokens: LongBatchOption = None,
    source: SourceOption = None,
    workers: WorkersOption = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.toml",
            help="Write a copy of the recipe with the measured token_exponent to this file.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best lr changes with the length of a run as the rule says, and measure the exponent."""
    from leaven.verification.duration import duration, measured_exponent

    if write is not None:
        _require_token_exponent(subject, overrides)
    ratios = numbers(durations, "--durations", float)
    family, size = _models(subject, overrides, _scale(scale), tokens, batch_tokens, source)
    grid = _grid(family, "lr", lrs)
    document = _train(lambda store: duration(family, size, ratios, grid, store, seeds=seeds), workers, run)
    measured, following = measured_exponent(document, run), None
    if write is not None and measured is not None:
        recipe = load_recipe(Path(subject), overrides).replace(measured)
        write_recipe(recipe, write, template=read_text(Path(subject)))
        following = f"wrote {write}; next: leaven transfer {write} --tokens TOKENS -o big.toml"
    elif write is not None:
        following = f"{write} is not written, because no exponent with an interval was measured; see the advice above"
    elif measured is not None and family.rule is not None:
        option = f"--set scaling.token_exponent={measured['scaling.token_exponent']:g}"
        following = f"to use the measured exponent: leaven transfer {subject} {option} --tokens TOKENS -o big.toml"
    finish(document, output, json_output, following)


def batch(
    subject: SubjectArgument,
    run: RunOption,
    batches: Annotated[
        str, typer.Option(metavar="LIST", help="Batch sizes, as multiples of the recipe's, separated by commas.")
    ] = "0.5,1,2,4",
    scale: ScaleOption = None,
    lrs: LrsOption = None,
    seeds: SeedsOption = 3,
    tokens: TokensOption = None,
    batch_tokens: LongBatchOption = None,
    source: SourceOption = None,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best lr changes with the batch size as the rule says, at the same number of tokens."""
    ratios = numbers(batches, "--batches", float)
    family, size = _models(subject, overrides, _scale(scale), tokens, batch_tokens, source)
    scales = [replace(size, batch=ratio) for ratio in (1.0, *ratios)]
    finish(_sweep("batch", family, "lr", lrs, scales, seeds, workers, run), output, json_output)


def decay(
    subject: SubjectArgument,
    run: RunOption,
    scales: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Sizes as WIDTHxDEPTH, separated by commas; the first is the base.",
            show_default="the recipe's",
        ),
    ] = None,
    durations: DurationsOption = "1",
    decays: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Weight decays to try, at the base size, separated by commas.",
            show_default="1/16 to 16 times the recipe's",
        ),
    ] = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best weight decay of a small model is also the best for a larger model or a longer run."""
    sizes = _scales(scales) if scales else []
    ratios = numbers(durations, "--durations", float)
    if len(sizes) < 2 and not {*ratios} - {1.0}:
        raise InputError(
            "there is nothing to compare; give a second size or length: --scales 64x4,128x4 or --durations 1,2,4"
        )
    family, base = _recipe_models(subject, overrides, "weight decays", sizes[0] if sizes else None)
    every = [base, *sizes, *(replace(base, tokens=ratio) for ratio in ratios)]
    finish(_sweep("decay", family, "weight_decay", decays, every, seeds, workers, run), output, json_output)


def init(
    subject: SubjectArgument,
    run: RunOption,
    scales: ScalesOption,
    stds: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Init stds to try, at the base size, separated by commas.",
            show_default="1/4 to 4 times the recipe's",
        ),
    ] = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best init std of a small model is also the best init std of a larger model."""
    sizes = _scales(scales)
    family, _ = _recipe_models(subject, overrides, "init stds", sizes[0])
    finish(_sweep("init", family, "init_std", stds, sizes, seeds, workers, run), output, json_output)


def equivalence(
    subject: SubjectArgument,
    run: RunOption,
    batch_ratios: Annotated[
        str, typer.Option(metavar="LIST", help="Batch sizes, as multiples of the recipe's, separated by commas.")
    ] = "0.25,0.5,2,4",
    scale: ScaleOption = None,
    seeds: SeedsOption = 3,
    tokens: TokensOption = None,
    batch_tokens: LongBatchOption = None,
    source: SourceOption = None,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that runs with different batch sizes reach the same loss with the rule, and different losses without it.

    The rule is exact in the limit of many steps with noisy gradients. Choose small batches, and at least 200 steps
    with the largest batch.
    """
    from leaven.verification.equivalence import FACTORY_TOKENS, equivalence

    ratios = numbers(batch_ratios, "--batch-ratios", float)
    family, size = _models(
        subject, overrides, _scale(scale), tokens, batch_tokens, source, default_tokens=FACTORY_TOKENS
    )
    document = _train(lambda store: equivalence(family, size, ratios, store, seeds=seeds), workers, run)
    finish(document, output, json_output)


COMMANDS: tuple[Callable[..., Any], ...] = (transfer, duration, batch, decay, init, equivalence)


def _scales(text: str) -> "list[RunScale]":
    return [scale_of(part, "--scales") for part in text.split(",")]


def _scale(text: str | None) -> "RunScale | None":
    return scale_of(text, "--scale") if text else None


def _models(
    subject: str,
    overrides: list[str] | None,
    scale: "RunScale | None",
    tokens: int | None = None,
    batch_tokens: int | None = None,
    source: str | None = None,
    default_tokens: int | None = None,
) -> "tuple[ModelFamily, RunScale]":
    """Return the models of a recipe or a factory, and the scale to train them at. The default is the scale of the
    recipe."""
    from leaven.verification.foreign import foreign
    from leaven.verification.model_instance import RunScale
    from leaven.verification.recipe_family import recipe_models

    read = read_subject(subject, overrides, {"--tokens": tokens, "--batch-tokens": batch_tokens, "--source": source})
    if isinstance(read, Recipe):
        return recipe_models(read, prepare_text), scale or RunScale(read.model.d_model, read.model.n_layers)
    if scale is None:
        raise InputError(f"{subject} has no default size; give the size of the model, e.g. --scale 64x4")
    tokens = tokens or default_tokens
    return foreign(read, scale, prepare_text, source=source, batch_tokens=batch_tokens, tokens=tokens), scale


def _recipe_models(
    subject: str, overrides: list[str] | None, what: str, scale: "RunScale | None"
) -> "tuple[ModelFamily, RunScale]":
    if is_factory(subject):
        raise InputError(f"this check changes {what}, which {subject} does not state; give a recipe file")
    return _models(subject, overrides, scale)


def _grid(family: "ModelFamily", quantity: "Quantity", given: str | None) -> list[float]:
    from leaven.verification.sweep import SWEPT

    swept = SWEPT[quantity]
    return numbers(given, swept.option, float) if given else swept.grid(family)


def _sweep(
    check: str,
    family: "ModelFamily",
    quantity: "Quantity",
    grid: str | None,
    scales: "Sequence[RunScale]",
    seeds: int,
    workers: int | None,
    run: Path,
) -> CheckDocument:
    from leaven.verification.sweep import sweep

    values = _grid(family, quantity, grid)
    return _train(
        lambda store: sweep(check, family, quantity, scales, values, store=store, seeds=seeds)[0], workers, run
    )


def _train(check: "Callable[[RunStore], CheckDocument]", workers: int | None, run: Path) -> CheckDocument:
    """Run a check that trains whole runs, and return its result. Ctrl-C stops the check, and the same command resumes
    it."""
    from leaven.verification.runs import ChecksStopped, RunStore

    workers = workers or os.cpu_count() or 1
    with (
        stop_on_signal() as stop,
        LiveScreen() as screen,
        RunStore(run, workers, screen.counts("runs"), stop) as store,
    ):
        try:
            return store.keep(check(store))
        except ChecksStopped as stopped:
            errors.print(f"stopped: {stopped}; run the same command again to resume from {run}")
            raise typer.Exit(75) from None


def _require_token_exponent(subject: str, overrides: list[str] | None) -> None:
    """Raise InputError unless ``subject`` is a recipe whose scaling rule has a token exponent."""
    from leaven.scaling.rules import RULES

    if is_factory(subject):
        raise InputError(
            f"--write applies only to recipes, not to {subject}; pass token_exponent to leaven.parametrize"
        )
    rule = load_recipe(Path(subject), overrides).scaling.rule
    if "lr" not in RULES[rule].columns:
        raise InputError(
            f"--write needs a rule that scales with tokens, and {rule} does not; type --set scaling.rule=complete-d-p"
        )
