"""Generates text from a trained run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from leaven.model.generate import Sampling, generate
from leaven.model.initialise import name_seed
from leaven.training.load import LoadedRun


@dataclass(frozen=True)
class Sample:
    """Text that follows a prompt."""

    text: str
    tokens: int  # generated
    ended: bool  # whether the model ended the text before ``max_tokens``


def sample(
    run: LoadedRun,
    prompt: str,
    *,
    sampling: Sampling,
    max_tokens: int,
    seed: int = 0,
    number: int = 0,
    on_text: Callable[[str], None] = lambda text: None,
) -> Sample:
    """Return sample ``number`` of a seed, which does not depend on other samples.

    The prompt is the beginning of a document. ``on_text`` is called with each new piece of text, in whole characters.
    """
    tokenizer = run.tokenizer
    tokenizer.encode_special_tokens = True  # as in training: text that spells a special token is text
    given = tokenizer.encode(prompt, add_special_tokens=False).ids
    drawn: list[int] = []
    # Decode prompt and sample together: the text of a token may depend on the one before.
    start = shown = len(tokenizer.decode(given))
    for token in generate(
        run.model,
        [run.end_of_text, *given],
        sampling=sampling,
        generator=torch.Generator().manual_seed(name_seed(seed, "sample", number)),
        vocabulary=run.vocabulary,
        end=run.end_of_text,
        max_tokens=max_tokens,
    ):
        drawn.append(token)
        text = tokenizer.decode([*given, *drawn])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character that is not complete yet
            on_text(text[shown:])
            shown = len(text)
    text = tokenizer.decode([*given, *drawn])
    if text[shown:]:
        on_text(text[shown:])
    return Sample(text[start:], len(drawn), ended=len(drawn) < max_tokens)
