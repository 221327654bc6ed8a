"""leaven laws: what every empirical law says of a run, or of a budget."""

from dataclasses import asdict
from typing import Annotated

from leaven.catalogue.laws import LawResult, compute_optimal, critical_batch, evaluate, lr_at_batch
from leaven.cli._common import JsonOption, console, count_option, emit_json
from leaven.cli._laws import (
    batch_facts,
    batch_table,
    law_spread,
    law_table,
    optimum_spread,
    optimum_table,
    other_laws,
    range_legend,
)
from leaven.recipe.errors import InputError


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
    """Learning rate, batch, decay and loss by every law: conditions, trust, spread, and how far it is stretched.

    With --flops, the best parameters and tokens for a budget, by Chinchilla's three approaches and those after.
    """
    if flops is not None:
        if any(each is not None for each in (params, tokens, batch_tokens, params_non_embedding)):
            raise InputError("--flops asks for the sizes, --params and --tokens give them; type one or the other")
        _of_budget(flops, json_output)
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
    _of_run(params, params_non_embedding, tokens, batch_tokens, json_output)


def _of_run(
    params: int, params_non_embedding: int | None, tokens: int, batch_tokens: int | None, json_output: bool
) -> None:
    results = evaluate(params, tokens, params_non_embedding=params_non_embedding)
    if json_output:
        emit_json([_document(result, results, batch_tokens) for result in results])
        return
    console.print(law_table(results))
    console.print()
    console.print(other_laws(results))
    console.print()
    if batch_tokens is not None:
        console.print(batch_table(results, batch_tokens))
        console.print(batch_facts(results, batch_tokens))
        console.print()
    console.print(range_legend())
    console.print(law_spread(results, params, tokens, batch_tokens, params_non_embedding))


def _document(result: LawResult, results: list[LawResult], batch_tokens: int | None) -> dict[str, object]:
    document = asdict(result)
    if batch_tokens is not None:
        moved = lr_at_batch(result, batch_tokens, critical_batch(results))
        document["at_batch"] = asdict(moved) if moved else None
        document["batch_ratio"] = batch_tokens / result.batch_tokens if result.batch_tokens else None
    return document


def _of_budget(flops: int, json_output: bool) -> None:
    found = compute_optimal(flops)
    if json_output:
        emit_json([asdict(each) for each in found])
        return
    console.print(optimum_table(found))
    console.print()
    console.print(range_legend())
    console.print(optimum_spread(found))
