"""Defines the command ``leaven laws``."""

from typing import Annotated

import typer

from leaven.catalogue.laws import compute_optimal, critical_batch, evaluate, lr_at_batch
from leaven.cli.common import JsonOption, count_option, option, print_document, require_alone
from leaven.errors import InputError
from leaven.views.terminal.laws import laws_screen, optimum_screen


def laws(
    context: typer.Context,
    params: Annotated[
        int | None,
        count_option(
            "Size of the model, embeddings included, e.g. 7B. For a mixture of experts, count only the parameters "
            "that a token uses."
        ),
    ] = None,
    tokens: Annotated[int | None, count_option("Length of the run in tokens, e.g. 2T.")] = None,
    params_non_embedding: Annotated[
        int | None, count_option("Size of the model without embeddings. Several laws use it.", "--params")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        count_option(
            "Batch size in tokens. Also print each law's lr at this batch size, and this batch size divided by the "
            "law's batch size."
        ),
    ] = None,
    flops: Annotated[
        int | None,
        count_option(
            "Training FLOPs, instead of --params and --tokens. Print the compute-optimal parameters and tokens."
        ),
    ] = None,
    experts: Annotated[
        int,
        option(
            "Number of experts divided by the number that a token uses, e.g. 16 for 8 of 128 experts. One loss law "
            "depends on this ratio.",
            min=1,
        ),
    ] = 1,
    json_output: JsonOption = False,
) -> None:
    """Give --params and --tokens. Or give only --flops, to predict the compute-optimal parameters and tokens with
    Chinchilla's approaches and later laws."""
    if flops is not None:
        require_alone(context, "--flops", "params tokens batch_tokens params_non_embedding experts")
        sizes = compute_optimal(flops)
        print_document(sizes, optimum_screen(sizes), json_output)
        return
    if params is None or tokens is None:
        missing = "--params" if params is None else "--tokens"
        raise InputError(f"{missing} is missing; type: leaven laws --params COUNT --tokens COUNT")
    if params_non_embedding is not None and params_non_embedding > params:
        raise InputError(
            f"--params-non-embedding {params_non_embedding:,} is above --params {params:,}, which includes the "
            "embeddings; give a smaller --params-non-embedding"
        )
    rows = evaluate(params, tokens, params_non_embedding=params_non_embedding, experts=experts)
    if batch_tokens is not None:
        critical = critical_batch(rows)
        rows = [
            row.model_copy(
                update={
                    "at_batch": lr_at_batch(row, batch_tokens, critical),
                    "batch_ratio": batch_tokens / row.batch_tokens if row.batch_tokens else None,
                }
            )
            for row in rows
        ]
    print_document(
        rows, laws_screen(rows, params, tokens, batch_tokens, params_non_embedding, experts=experts), json_output
    )
