"""What `leaven check` is given, read: numbers, scales, and the family behind RECIPE or module:factory."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli.common import hand_over, load, prepared
from leaven.documents.checks import CheckDocument
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.views.terminal.checks import check_screen

if TYPE_CHECKING:
    from leaven.verification.foreign import ForeignFamily
    from leaven.verification.model_family import CheckStart, ModelFamily
    from leaven.verification.verdict import Verdict

SubjectArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file (TOML), or module:factory for your own torch model.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Number of random seeds, for initialisation and data.")]
SourceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="For module:factory, the text, as data.source in a recipe, or made-up.",
        show_default="python-stdlib",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.html",
        help="Write an HTML page with the chart to this file.",
        show_default=False,
    ),
]
BATCH_TOKENS = 512


def numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """A list of positive numbers with commas between them."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise InputError(f"{option} {text}: give numbers above 0, separated by commas")
    return values


def above_0(value: float, option: str) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{option} {value:g}: give a number above 0")


def scale_of(text: str, option: str) -> tuple[int, int]:
    width, _, depth = text.strip().partition("x")
    if not (width.isdigit() and depth.isdigit() and int(width) and int(depth)):
        raise InputError(f"{option} {text}: give a size as WIDTHxDEPTH, e.g. 64x4")
    return int(width), int(depth)


def own_scale(subject: str, overrides: list[str] | None) -> tuple[int, int]:
    if is_entry(subject):
        raise InputError(f"{subject}: give the size of the model, e.g. --scale 64x4")
    model = load(Path(subject), overrides).model
    return model.d_model, model.n_layers


def is_entry(subject: str) -> bool:
    """Whether it is module:factory."""
    return ":" in subject and not Path(subject).exists()


def short(
    subject: str,
    overrides: list[str] | None,
    widths: str | None,
    depths: str | None,
    start: "CheckStart",
    batch_tokens: int | None,
    source: str | None,
    alpha: float | None,
    grow_heads: bool,
) -> "tuple[ModelFamily, list[int], list[int], tuple[str, ...]]":
    """What is checked within some steps: the family, its widths and depths, and how it differs from the recipe."""
    from leaven.verification.batches import corpus
    from leaven.verification.model_family import RecipeFamily, calibrated, calibrated_table
    from leaven.verification.small_family import DEPTHS, TIMES, WIDTH, small_family

    wide = numbers(widths, "--widths", int) if widths else [WIDTH * times for times in TIMES]
    deep = numbers(depths, "--depths", int) if depths else list(DEPTHS)
    if all(len(set(axis)) < 2 for axis in (wide, deep)):
        raise InputError("a slope needs at least two sizes; give more --widths or --depths")
    if is_entry(subject):
        if grow_heads:
            raise InputError(f"{subject}: --grow-heads is for recipes; change the factory")
        family = _foreign(subject, overrides, (min(wide), min(deep)), None, batch_tokens, source)
        return replace(family, alpha=alpha or family.alpha), wide, deep, ()
    recipe = _recipe(subject, overrides, {"--source": source, "--alpha": alpha})
    changed: tuple[str, ...] = ()
    if widths is None:
        small = small_family(recipe)
        recipe, wide, changed = small.recipe, list(small.widths), small.changed
    recipe = calibrated(recipe, min(wide), min(deep), start)
    seq_len = recipe.model.seq_len
    batches = corpus(prepared(recipe), seq_len, max((batch_tokens or BATCH_TOKENS) // seq_len, 1))
    return RecipeFamily(recipe, batches, calibrated_table, grow_heads), wide, deep, changed


def long(
    subject: str,
    overrides: list[str] | None,
    scale: tuple[int, int],
    tokens: int | None,
    batch_tokens: int | None,
    source: str | None,
) -> "ModelFamily":
    """What is checked by whole runs."""
    from leaven.training.engine import check_trainable
    from leaven.verification.batches import corpus
    from leaven.verification.model_family import RecipeFamily

    if is_entry(subject):
        return _foreign(subject, overrides, scale, tokens, batch_tokens, source)
    recipe = _recipe(subject, overrides, {"--tokens": tokens, "--batch-tokens": batch_tokens, "--source": source})
    tokens_of_text = prepared(recipe)
    check_trainable(recipe, tokens_of_text)
    seq_len = recipe.model.seq_len
    return RecipeFamily(recipe, corpus(tokens_of_text, seq_len, recipe.batch.tokens // seq_len))


def _recipe(subject: str, overrides: list[str] | None, given: dict[str, object]) -> Recipe:
    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"{option} is only for module:factory; change a recipe with --set, e.g. --set data.tokens=1M"
            )
    return load(Path(subject), overrides)


def _foreign(
    subject: str,
    overrides: list[str] | None,
    scale: tuple[int, int],
    tokens: int | None,
    batch_tokens: int | None,
    source: str | None,
) -> "ForeignFamily":
    from leaven.data.tokens import prepare
    from leaven.verification.foreign import MADE_UP, foreign, text_of
    from leaven.views.terminal.live import LiveScreen

    if overrides:
        raise InputError(f"{subject}: --set is for recipes; change the factory")
    family = foreign(subject, *scale, source=source, batch_tokens=batch_tokens, tokens=tokens)
    if family.source is not None and family.source != MADE_UP:
        with LiveScreen() as screen:
            screen.notes(prepare(text_of(family.source), family.vocab_size, progress=screen.text))
    return family


def finish(
    verdict: "Verdict",
    output: Path | None,
    json_output: bool,
    following: str | None = None,
    changed: tuple[str, ...] | None = None,
) -> None:
    """Print the verdict and what to type next, draw it, and leave with code 1 if it is no.

    ``changed``: what was changed in the recipe to check it; None where a check never does.
    """
    from leaven.views.check_page import write_check

    if changed is not None:
        verdict = replace(verdict, settings={**verdict.settings, "changed for the check": list(changed) or None})
    document = CheckDocument(**verdict.document())
    if output is not None:
        write_check(document.dump(), output)
    more = [f"wrote {output}"] if output is not None else []
    more += [following] if following else []
    hand_over(document, chain(check_screen(document), more), json_output)
    if not verdict.passed:
        raise typer.Exit(1)
