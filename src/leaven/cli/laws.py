"""leaven laws"""

from dataclasses import asdict
from typing import Annotated

import typer

from leaven.catalogue.laws import LawResult, compute_optimal, critical_batch, evaluate, lr_at_batch
from leaven.cli.common import JsonOption, count_option, hand_over
from leaven.documents.catalogue import LawRow, OptimumRow
from leaven.recipe.errors import InputError
from leaven.views.terminal.laws import laws_screen, optimum_screen

app = typer.Typer(add_completion=False)


@app.command()
def laws(
    params: Annotated[int | None, count_option("Parameters, e.g. 7B.")] = None,
    tokens: Annotated[int | None, count_option("Training tokens, e.g. 2T.")] = None,
    params_non_embedding: Annotated[
        int | None, count_option("Of --params those without embeddings, which several laws count.")
    ] = None,
    batch_tokens: Annotated[
        int | None, count_option("A batch: each law's lr there, and where it stands against the critical ones.")
    ] = None,
    flops: Annotated[
        int | None, count_option("Instead of --params and --tokens: the best sizes for so many training FLOPs.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """With --flops, the best parameters and tokens for a budget, by Chinchilla's three approaches and those after."""
    if flops is not None:
        if any(each is not None for each in (params, tokens, batch_tokens, params_non_embedding)):
            raise InputError("--flops asks for the sizes, --params and --tokens give them; type one or the other")
        sizes = [OptimumRow(**asdict(each)) for each in compute_optimal(flops)]
        hand_over(sizes, optimum_screen(sizes), json_output)
        return
    for name, value in (("--params", params), ("--tokens", tokens)):
        if value is None:
            raise InputError(f"{name} is missing; type: leaven laws --params COUNT --tokens COUNT")
    if batch_tokens is not None and batch_tokens <= 0:
        raise InputError(f"--batch-tokens {batch_tokens}: a batch has at least one token")
    assert params is not None
    assert tokens is not None
    if params_non_embedding is not None and not 0 < params_non_embedding <= params:
        raise InputError(
            f"--params-non-embedding {params_non_embedding:,}: has to be at least 1 and at most --params {params:,}"
        )
    results = evaluate(params, tokens, params_non_embedding=params_non_embedding)
    rows = [_row(result, critical_batch(results), batch_tokens) for result in results]
    hand_over(rows, laws_screen(rows, params, tokens, batch_tokens, params_non_embedding), json_output)


def _row(result: LawResult, critical: float, batch_tokens: int | None) -> LawRow:
    if batch_tokens is None:
        return LawRow(**asdict(result))
    moved = lr_at_batch(result, batch_tokens, critical)
    ratio = batch_tokens / result.batch_tokens if result.batch_tokens else None
    return LawRow(**asdict(result), at_batch=asdict(moved) if moved else None, batch_ratio=ratio)
