"""Where the text comes from, in which shares, and how much of it is consumed."""

from fractions import Fraction
from math import lcm
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from leaven.recipe.base import Part

STDLIB_TOKENS = 3_000_000
"""Tokens of python-stdlib, about: 10.7 MB, 2.86 M tokens with a vocabulary of 4,096 (docs/log.md)."""
LONGEST_PERIOD = 100_000
"""Samples after which a mixture repeats, at most: the common denominator of its proportions."""


class Source(Part):
    """One of several places that text comes from.

    ``source`` is what ``[data] source`` may be by itself. ``weight`` is its share of the samples, against the sum of
    all weights. ``text`` names the key (.jsonl) or column (.parquet, hf://) that holds the text.
    """

    source: str
    weight: float = Field(default=1.0, gt=0)
    text: str = "text"


def _form(source: Any) -> str:
    return "tag:several" if isinstance(source, list | tuple) else "tag:one"


_Several = Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]


class Data(Part):
    """``source`` is python-stdlib, a path or glob, or hf://org/dataset; or a list of :class:`Source`.

    ``tokenizer`` is bpe (trained on the sources), the path of a tokenizer.json, or hf://org/model. ``tokens`` is the
    duration; epochs are tokens / corpus tokens. ``seed`` fixes the initialisation, the order of the data and the
    masks of dropout. ``documents`` are "packed" end to end, each token seeing all before it in its window, or
    "isolated": attention, positions and loss stop at the end of a document. Up to ``corrupt_share`` of the lines, and
    of the files, of a source may be unreadable and are skipped.
    """

    source: Annotated[
        Annotated[str, Tag("tag:one")] | Annotated[_Several, Tag("tag:several")], Discriminator(_form)
    ] = "python-stdlib"
    tokenizer: str = "bpe"
    tokens: int = Field(gt=0)
    seed: int = Field(default=0, ge=0)
    documents: Literal["packed", "isolated"] = "packed"
    corrupt_share: float = Field(default=0.001, ge=0, le=1)

    @model_validator(mode="after")
    def _can_be_mixed(self) -> "Data":
        names = [source.source for source in self.sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"source {twice!r} stands there twice; give it once, with the sum of the weights")
        period = lcm(*(share.denominator for share in self.proportions))
        if period > LONGEST_PERIOD:
            raise ValueError(
                f"weights {', '.join(f'{source.weight:g}' for source in self.sources)} have no common denominator up "
                f"to {LONGEST_PERIOD:,}; round them, for example to whole per cents"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(source=self.source),) if isinstance(self.source, str) else self.source

    @property
    def proportions(self) -> tuple[Fraction, ...]:
        """Each source's share of the samples; weights are taken as they are written, 0.1 for a tenth."""
        weights = [Fraction(repr(source.weight)) for source in self.sources]
        return tuple(weight / sum(weights) for weight in weights)
