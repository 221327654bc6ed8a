"""leaven export: to other people's formats."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, RunArgument, TokensOption, console, emit_json, say_damaged
from leaven.recipe.errors import InputError
from leaven.recipe.units import format_quantity

app = typer.Typer(help="To other people's formats.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def weights(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    to: Annotated[str, typer.Option(help="The format: huggingface.")] = "huggingface",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    tokens: TokensOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write a run's model as a folder that transformers loads, multipliers folded into the weights."""
    from leaven.interop.weights import DTYPES, write_huggingface
    from leaven.training.load import load_run

    if to != "huggingface":
        raise InputError(f"--to {to}: there is huggingface")
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: there are {', '.join(DTYPES)}")
    loaded = load_run(run, tokens)
    say_damaged(loaded.damaged)
    architecture = write_huggingface(
        folder,
        loaded.recipe.model,
        loaded.table,
        loaded.weights,
        tokenizer=loaded.tokenizer_json,
        end_of_text=(str(loaded.tokenizer.id_to_token(loaded.end_of_text)), loaded.end_of_text),
        dtype=dtype,
    )
    if json_output:
        emit_json({"path": str(folder), "architecture": architecture.name, "tokens": loaded.tokens})
    else:
        size = format_quantity(loaded.recipe.model.params)
        console.print(
            f"wrote {folder}: {architecture.name}, {size} parameters in {dtype}, from the checkpoint at "
            f"{loaded.tokens:,} tokens"
        )
