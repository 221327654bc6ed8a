"""leaven laws: what every empirical law says of a run."""

from dataclasses import asdict
from typing import Annotated

from leaven.catalogue.laws import evaluate
from leaven.cli._catalogue import law_spread, law_table
from leaven.cli._common import JsonOption, console, count_option, emit_json


def laws(
    params: Annotated[int, count_option("Parameters, e.g. 7B.")],
    tokens: Annotated[int, count_option("Training tokens, e.g. 2T.")],
    json_output: JsonOption = False,
) -> None:
    """Learning rate and batch by every law, with its conditions, and how far it is extrapolated."""
    results = evaluate(params, tokens)
    if json_output:
        emit_json([asdict(result) for result in results])
        return
    console.print(law_table(results))
    for line in law_spread(results):
        console.print(line)
