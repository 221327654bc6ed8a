"""Compare training runs: their losses, the tokens that they needed for the same loss, and their recipes."""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from leaven.catalogue.findings import Case
from leaven.catalogue.terms import diff_in_terms
from leaven.documents.runs import ComparedRun, ComparedValue, ComparisonDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import adamw_rows
from leaven.training.rewind import changed_values, text_left_out
from leaven.views.folders import RunView, read_folder
from leaven.views.render import render
from leaven.views.run_charts import colours, run_charts
from leaven.views.terminal.files import comparison_tables

MOST_RUNS = 9  # the number of colours of the charts
_COMPARABLE: dict[str, Callable[[Recipe], Any]] = {
    "training texts": lambda recipe: sorted(str(source.model_dump()) for source in recipe.data.sources),
    "ends of documents": lambda recipe: (recipe.data.documents, recipe.data.end_of_text),
    "tokenizers": lambda recipe: recipe.data.tokenizer,
    "vocabulary sizes": lambda recipe: recipe.model.vocab_size,
    "sequence lengths": lambda recipe: recipe.model.seq_len,
    "numbers of validation tokens": lambda recipe: recipe.evaluation.tokens,
}
"""The recipe values that must be equal so that the validation losses of two runs can be compared."""


def comparison_page(folders: Sequence[Path], output: Path) -> tuple[str, ComparisonDocument]:
    """Compare the runs in ``folders`` with the first run. Return an HTML page and a document.

    Both state ``output`` as the path of the page, but nothing is written. Raise InputError if a folder is given
    twice or has no run with steps, if there are more than `MOST_RUNS` folders, or if plotly is missing.
    """
    if len(folders) > MOST_RUNS:
        raise InputError(f"{len(folders)} runs are too many for one page; give at most {MOST_RUNS}")
    runs = [_run(folder, folders) for folder in folders]
    document = compare(runs, output)
    results, different = comparison_tables(document)
    page = render(
        "comparison.html.j2",
        run_charts(*runs),
        kind="comparison",
        title=f"{len(runs)} runs",
        comparison=document,
        results=results,
        colours=colours(len(runs)),
        different=different,
        averaged=any(run.averaged for run in runs),
        command=shlex.join(["leaven", "report", *map(str, folders), "-o", str(output)]),
    )
    return page, document


def _run(folder: Path, folders: Sequence[Path]) -> RunView:
    if sum(folder.resolve() == other.resolve() for other in folders) > 1:
        raise InputError(f"{folder} is given twice; give different runs")
    run = read_folder(folder)
    if not isinstance(run, RunView):
        raise InputError(
            f"{folder} is not a training run, and only runs can be compared; to report on this folder, give it alone"
        )
    return replace(run, title=str(folder))


def compare(runs: Sequence[RunView], output: Path) -> ComparisonDocument:
    """Compare each run with the first run. Each run's title must be its folder."""
    first = runs[0]
    return ComparisonDocument(
        path=str(output),
        runs=[
            ComparedRun(
                path=run.title,
                name=run.recipe.name,
                finished=run.finished,
                loss=run.loss,
                difference=None if run is first or run.loss is None or first.loss is None else run.loss - first.loss,
                speedup=None if run is first else speedup(run.validation, first.validation),
                tokens=run.tokens,
                seconds=run.seconds,
                tokens_per_second=run.tokens_per_second,
                rollbacks=sum(event["event"] == "rollback" for event in run.returns),
            )
            for run in runs
        ],
        different=_different([run.recipe for run in runs]),
        warnings=list(_warnings(runs)),
    )


def speedup(run: Sequence[tuple[int, float]], first: Sequence[tuple[int, float]]) -> float | None:
    """Return (tokens that ``first`` needs to reach a loss) / (tokens that ``run`` needs): 2 if ``run`` needs half.

    The loss is the final loss of the worse run. Both arguments are lists of (tokens, validation loss). Return None if
    a list has fewer than two entries, or if the better run has reached the loss at its first validation.
    """
    if min(len(run), len(first)) < 2:
        return None
    better, worse = (run, first) if run[-1][1] <= first[-1][1] else (first, run)
    tokens = _tokens_at(better, worse[-1][1])
    if tokens is None:
        return None
    return worse[-1][0] / tokens if better is run else tokens / worse[-1][0]


def _tokens_at(validation: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return the tokens, interpolated, at which a run reached ``loss``, or None if before the first validation.

    ``validation`` has pairs (tokens, loss), at least one with a loss of at most ``loss``.
    """
    (before, above), (after, below) = next(
        pair for pair in pairwise(validation) if min(pair[0][1], pair[1][1]) <= loss
    )
    if above <= loss:
        return None
    return before * math.pow(after / before, (above - loss) / (above - below))


def _different(recipes: Sequence[Recipe]) -> list[ComparedValue]:
    own: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    for recipe in recipes[1:]:
        rows = diff_in_terms(recipes[0], recipe, lambda one: Case(one, adamw_rows(one)).as_trained)
        own |= {row.path: row.a for row in rows}
        others.append({row.path: row.b for row in rows})
    return [
        ComparedValue(path=path, values=[value, *(other.get(path, value) for other in others)])
        for path, value in own.items()
    ]


def _warnings(runs: Sequence[RunView]) -> Iterator[str]:
    for run in runs:
        if not run.finished:
            share = run.tokens / run.recipe.data.tokens
            yield f"{run.title} is not finished: it has trained {share:.0%} of its tokens"
        if run.gaps:
            yield f"{run.title}: {run.gaps}"
        if changed := changed_values(run.folder):
            yield f"{run.title} was trained with {', '.join(changed)}, because --rewind-to changed its recipe"
        if left_out := text_left_out(run.folder):
            yield f"{run.title} skipped {left_out}, because of --skip-tokens"
    own = runs[0].recipe
    different = [what for what, of in _COMPARABLE.items() if any(of(run.recipe) != of(own) for run in runs)]
    yield from (f"the {what} differ, so the losses cannot be compared" for what in different)
    if not different and len({run.folder.text() for run in runs} - {None}) > 1:
        yield "the training texts differ, although their paths are equal, so the losses cannot be compared"
    if any(run.recipe.data.seed != own.data.seed for run in runs):
        yield "the seeds differ, so the differences include the noise between seeds"
