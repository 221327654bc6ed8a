"""leaven check transfer, duration, batch, decay, init and equivalence: checks that train whole runs"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli.check_subject import (
    OutputOption,
    SeedsOption,
    SourceOption,
    SubjectArgument,
    finish,
    is_entry,
    long,
    numbers,
    own_scale,
    scale_of,
)
from leaven.cli.common import JsonOption, SetOption, count_option, load, stopping
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_text, write_recipe
from leaven.views.terminal.console import errors
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.verification.model_family import ModelFamily, Quantity
    from leaven.verification.runs import RunStore
    from leaven.verification.verdict import Verdict

LongBatchOption = Annotated[
    int | None, typer.Option(min=1, help="For module:factory, batch size in tokens.", show_default="512")
]
TokensOption = Annotated[
    int | None, count_option("For module:factory, length of a run in tokens.", "131,072; for equivalence 524,288")
]
RunOption = Annotated[
    Path, typer.Option(metavar="DIR", help="The folder for the training runs; run the command again to resume them.")
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Worker processes, one thread each.", show_default="one per core")
]
ScaleOption = Annotated[
    str | None, typer.Option(metavar="WIDTHxDEPTH", help="Size of the model, e.g. 64x4.", show_default="the recipe's")
]
ScalesOption = Annotated[
    str, typer.Option(metavar="LIST", help="Sizes as WIDTHxDEPTH, separated by commas; the first is the base.")
]
LrsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Learning rates to train with, at the base; for module:factory, multiples of its lr.",
        show_default="1/4 to 4 times the recipe's",
    ),
]
DurationsOption = Annotated[
    str, typer.Option(metavar="LIST", help="Lengths of runs, as multiples of the recipe's, separated by commas.")
]
EQUIVALENCE_TOKENS = 524_288  # 256 steps of a batch x 4


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
    """Check that the best lr of a small model is also the best of a larger one."""
    from leaven.verification import sweep as checks

    pairs = _scales(scales)
    family = long(subject, overrides, pairs[0], tokens, batch_tokens, source)
    grid = _grid(family, "lr", lrs)
    verdict = _carried_out(lambda store: checks.transfer(family, pairs, grid, store, seeds=seeds), workers, run)
    finish(verdict, output, json_output)


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
            help="Write the recipe with the measured token_exponent to this file.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best lr changes with the length of a run as the rule says; measure the exponent."""
    from leaven.verification import duration as checks

    if write is not None:
        _require_token_exponent(subject, overrides)
    ratios = numbers(durations, "--durations", float)
    pair = _pair(subject, overrides, scale)
    family = long(subject, overrides, pair, tokens, batch_tokens, source)
    grid = _grid(family, "lr", lrs)
    verdict = _carried_out(
        lambda store: checks.duration(family, pair, ratios, grid, store, seeds=seeds), workers, run
    )
    fitted = checks.fitted(verdict)
    if write is not None and fitted is not None:
        recipe = load(Path(subject), overrides)
        write_recipe(fitted.applied_to(recipe, run), write, template=read_text(Path(subject)))
    following = None if is_entry(subject) or fitted is None else _next(Path(subject), write, fitted)
    if write is not None and fitted is None:
        following = f"{write} is not written: no exponent with an interval was measured; see the advice above"
    finish(verdict, output, json_output, following)


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
    """Check that the best lr changes with the batch size as the rule says, at equal tokens."""
    from leaven.verification import sweep as checks

    ratios = numbers(batches, "--batches", float)
    pair = _pair(subject, overrides, scale)
    family = long(subject, overrides, pair, tokens, batch_tokens, source)
    grid = _grid(family, "lr", lrs)
    verdict = _carried_out(lambda store: checks.batch(family, pair, ratios, grid, store, seeds=seeds), workers, run)
    finish(verdict, output, json_output)


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
            help="Weight decays to train with, at the base.",
            show_default="1/16 to 16 times the recipe's",
        ),
    ] = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best weight decay of a small model is also the best of a larger one, or of a longer run."""
    from leaven.verification import sweep as checks

    _require_recipe(subject, "weight decays")
    pairs = _scales(scales) if scales else [_pair(subject, overrides, None)]
    ratios = numbers(durations, "--durations", float)
    if len(pairs) < 2 and not {*ratios} - {1.0}:
        raise InputError("nothing to compare; type a second size or length: --scales 64x4,128x4 or --durations 1,2,4")
    family = long(subject, overrides, pairs[0], None, None, None)
    grid = _grid(family, "weight_decay", decays)
    verdict = _carried_out(lambda store: checks.decay(family, pairs, ratios, grid, store, seeds=seeds), workers, run)
    finish(verdict, output, json_output)


def init(
    subject: SubjectArgument,
    run: RunOption,
    scales: ScalesOption,
    stds: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Init stds to train with, at the base.", show_default="1/4 to 4 times the recipe's"
        ),
    ] = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the best init std of a small model is also the best of a larger one."""
    from leaven.verification import sweep as checks

    _require_recipe(subject, "init stds")
    pairs = _scales(scales)
    family = long(subject, overrides, pairs[0], None, None, None)
    grid = _grid(family, "init_std", stds)
    verdict = _carried_out(lambda store: checks.init(family, pairs, grid, store, seeds=seeds), workers, run)
    finish(verdict, output, json_output)


def equivalence(
    subject: SubjectArgument,
    run: RunOption,
    batch_ratios: Annotated[
        str, typer.Option(metavar="LIST", help="Batch sizes, as multiples of the recipe's, separated by commas.")
    ] = ("0.25,0.5,2,4"),
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
    """Check that runs with other batch sizes reach the same loss with the rule, and another loss without it.

    The rule is exact for many steps with noisy gradients: choose small batches, and at least 200 steps for the
    largest.
    """
    from leaven.verification import equivalence as checks

    ratios = numbers(batch_ratios, "--batch-ratios", float)
    pair = _pair(subject, overrides, scale)
    if tokens is None and is_entry(subject):
        tokens = EQUIVALENCE_TOKENS
    family = long(subject, overrides, pair, tokens, batch_tokens, source)
    verdict = _carried_out(lambda store: checks.equivalence(family, pair, ratios, store, seeds=seeds), workers, run)
    finish(verdict, output, json_output)


COMMANDS: tuple[Callable[..., Any], ...] = (transfer, duration, batch, decay, init, equivalence)


def _scales(text: str) -> list[tuple[int, int]]:
    return [scale_of(part, "--scales") for part in text.split(",")]


def _pair(subject: str, overrides: list[str] | None, scale: str | None) -> tuple[int, int]:
    return scale_of(scale, "--scale") if scale else own_scale(subject, overrides)


def _grid(family: "ModelFamily", value: "Quantity", given: str | None) -> list[float]:
    from leaven.verification.sweep import SWEPT

    swept = SWEPT[value]
    return numbers(given, swept.option, float) if given else swept.grid(family)


def _require_recipe(subject: str, what: str) -> None:
    if is_entry(subject):
        raise InputError(f"{subject}: this check changes {what}, which only a recipe states; give a recipe file")


def _carried_out(check: "Callable[[RunStore], Verdict]", workers: int | None, run: Path) -> "Verdict":
    """The verdict of whole training runs, which can be stopped and resumed."""
    from leaven.verification.runs import ChecksStopped, RunStore

    with stopping() as stop, LiveScreen() as screen:
        try:
            return check(RunStore(run, workers or os.cpu_count() or 1, screen.counts("runs"), stop))
        except ChecksStopped as stopped:
            errors.print(f"stopped: {stopped}; run the same command again to resume ({run})")
            raise typer.Exit(75) from None


def _require_token_exponent(subject: str, overrides: list[str] | None) -> None:
    """Raise InputError unless a measured token exponent has a place in what is checked."""
    from leaven.scaling.rules import RULES

    if is_entry(subject):
        raise InputError(f"{subject}: --write is for recipes; pass token_exponent to leaven.parametrize")
    rule = load(Path(subject), overrides).scaling.rule
    if "lr" not in RULES[rule].columns:
        raise InputError(f"--write: rule {rule} moves nothing with tokens; type --set scaling.rule=complete-d-p")


def _next(recipe: Path, written: Path | None, fitted: Any) -> str:
    """The command that uses what was measured."""
    target = "--tokens TOKENS -o big.toml"
    if written is not None:
        return f"wrote {written}; next: leaven transfer {written} {target}"
    option = f"--set scaling.token_exponent={fitted.value:.3g}"
    return f"to use the measured exponent: leaven transfer {recipe} {option} {target}"
