"""leaven sample"""

import sys
import time
import unicodedata
from typing import Annotated

import typer
from rich.text import Text

from leaven.cli.common import JsonOption, RunArgument, TokensOption, hand_over
from leaven.documents.runs import SampleDocument
from leaven.recipe.errors import InputError
from leaven.views.terminal.console import console, errors, say_damaged

app = typer.Typer(add_completion=False)


@app.command()
def sample_(
    run: RunArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt to continue.")] = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens; an end-of-text token stops earlier.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Sample from the most likely tokens that together have this probability."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="How many texts to generate.")] = 1,
    tokens: TokensOption = None,
    json_output: JsonOption = False,
) -> None:
    import torch

    from leaven.model.generate import Sampling
    from leaven.training.load import load_run, sample

    sampling = Sampling(temperature, top_k, top_p)
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that are not valid UTF-8
        raise InputError("TEXT is not valid UTF-8; type it in the encoding of the terminal") from None
    loaded = load_run(run, tokens)
    say_damaged(loaded.damaged)
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    drawn, began = [], time.perf_counter()
    for number in range(samples):
        if not json_output:
            if samples > 1:
                console.print(f"{number + 1} of {samples}", style="dim")
            console.print(Text(text, style="bold"), end="")
        drawn.append(
            sample(
                loaded,
                text,
                sampling=sampling,
                max_tokens=max_tokens,
                seed=seed,
                number=number,
                on_text=lambda piece: None if json_output else typer.echo(shown(piece), nl=False),
            )
        )
        if not json_output:
            typer.echo()
    seconds = time.perf_counter() - began
    if json_output:
        hand_over(SampleDocument(run=str(run), tokens=loaded.tokens, prompt=text, samples=drawn), [], json_output)
        return
    count = sum(each.tokens for each in drawn)
    errors.print(
        f"{count:,} tokens, {count / seconds:.0f} a second; checkpoint at {loaded.tokens:,} tokens, seed {seed}",
        style="dim",
    )


def shown(text: str) -> str:
    """Return the text, with control characters replaced on a terminal: a model may generate escape sequences."""
    if not sys.stdout.isatty():
        return text
    return "".join(each if each in "\n\t" or unicodedata.category(each) != "Cc" else "\ufffd" for each in text)
