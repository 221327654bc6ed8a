"""Defines the command ``leaven sample``."""

import sys
import time
from typing import Annotated

from rich.text import Text

from leaven.cli.common import DeviceOption, JsonOption, RunArgument, TokensOption, argument, option, print_document
from leaven.documents.runs import SampleDocument
from leaven.errors import InputError
from leaven.views.terminal.console import console, echo, errors, say_skipped, warn


def sample(
    run: RunArgument,
    text: Annotated[str, argument("TEXT", "The prompt to continue.")] = "",
    max_tokens: Annotated[
        int, option("Maximum number of tokens. Generation stops earlier at an end-of-text token.", min=1)
    ] = 200,
    temperature: Annotated[
        float, option("Sampling temperature. At 0, the most likely token is always chosen.", min=0)
    ] = 1.0,
    top_k: Annotated[int, option("Sample from this number of most likely tokens; 0 means all tokens.", min=0)] = 0,
    top_p: Annotated[
        float, option("Sample from the most likely tokens whose total probability reaches this number.", min=0, max=1)
    ] = 1.0,
    seed: Annotated[int, option("Random seed. The same seed gives the same text.")] = 0,
    samples: Annotated[int, option("Number of texts to generate.", min=1)] = 1,
    tokens: TokensOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    from leaven.model.generate import Sampling
    from leaven.training.device import default_device
    from leaven.training.load import load_run, prompt_length, sample

    sampling = Sampling(temperature, top_k, top_p)
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that are not valid UTF-8
        raise InputError("TEXT is not valid UTF-8; type it again in UTF-8") from None
    loaded = load_run(run, tokens)
    say_skipped(loaded.skipped, loaded.changed)
    loaded.model.to(default_device())
    length, most = prompt_length(loaded, text), loaded.model.shape.seq_len
    if length > most:
        warn([f"TEXT has {length:,} tokens, and the model uses only the last {most:,}"])
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
                on_text=lambda piece: (
                    None if json_output else echo(piece, newline=False, raw=not sys.stdout.isatty())
                ),
            )
        )
        if not json_output:
            echo("")
    seconds = time.perf_counter() - began
    if json_output:
        print_document(
            SampleDocument(run=str(run), tokens=loaded.tokens, prompt=text, samples=drawn), [], json_output
        )
        return
    count = sum(each.tokens for each in drawn)
    errors.print(
        f"{count:,} tokens at {count / seconds:.0f} tokens/s; checkpoint at {loaded.tokens:,} tokens, seed {seed}",
        style="dim",
    )
