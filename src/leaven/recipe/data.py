"""The training text: its sources, their proportions, and the number of tokens to train on."""

from fractions import Fraction
from math import lcm
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from leaven.recipe.base import Part
from leaven.recipe.batch import Count

STDLIB_TOKENS = 3_000_000
"""Tokens of the text python-stdlib, rounded; with a vocabulary of 4,096 it has 2.86 M (docs/log.md)."""
LONGEST_PERIOD = 100_000
"""Longest period of the order of the sources, in samples: the common denominator of their shares."""


class DataSource(Part):
    """A source of text or of token ids."""

    source: str  # where the text is: python-stdlib, tiny-shakespeare, a path or glob, or hf://org/dataset
    weight: float = Field(default=1.0, gt=0)  # the source provides weight / (sum of all weights) of the samples
    text: str = "text"  # key (.jsonl) or column (.parquet, hf://) that contains the text, or column of token ids
    # dtype of .bin files of token ids that do not state their dtype; None: uint16.
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    # Where token ids for validation are, as for ``source``. None: a twentieth of the ids of ``source`` is held out.
    validation: str | None = None

    added: ClassVar = ("dtype", "validation")


def _form(source: Any) -> str:
    return "tag:several" if isinstance(source, list | tuple) else "tag:one"


_Several = Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1, max_length=1_000)]


class Data(Part):
    """The sources of training data, the tokenizer, and the number of tokens to train on."""

    # python-stdlib, tiny-shakespeare, a path or glob, hf://org/dataset; or a list of :class:`DataSource`.
    source: Annotated[
        Annotated[str, Tag("tag:one")] | Annotated[_Several, Tag("tag:several")], Discriminator(_form)
    ] = "python-stdlib"
    # bpe: a tokenizer is trained on the sources. If all sources have token ids, none is trained. Other values
    # name a tokenizer: the path of a tokenizer.json, or hf://org/model.
    tokenizer: str = "bpe"
    # Id of the token that ends documents in sources of token ids. None: the id in the tokenizer; without a tokenizer,
    # the id is unknown.
    end_of_text: int | None = Field(default=None, ge=0)
    tokens: Count  # number of tokens to train on; if the text has fewer, it is repeated
    seed: int = Field(default=0, ge=0, lt=2**63)  # of the initialisation, the order of the data and dropout masks
    # packed: documents are concatenated, and each token sees all earlier tokens of its sequence;
    # isolated: attention, positions and loss do not cross the end of a document.
    documents: Literal["packed", "isolated"] = "packed"
    corrupt_share: float = Field(default=0.001, ge=0, le=1)  # most unreadable lines, or files, that a source may have

    added: ClassVar = ("end_of_text",)

    @model_validator(mode="after")
    def _validate_weights(self) -> "Data":
        names = [source.source for source in self.sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"source {twice!r} appears twice; give it once, with the sum of the weights")
        period = lcm(*(share.denominator for share in self.proportions))
        if period > LONGEST_PERIOD:
            raise ValueError(
                f"weights {', '.join(f'{source.weight:g}' for source in self.sources)} have no common denominator up "
                f"to {LONGEST_PERIOD:,}; round them, for example to whole per cents"
            )
        return self

    @property
    def sources(self) -> tuple[DataSource, ...]:
        return (DataSource(source=self.source),) if isinstance(self.source, str) else self.source

    @property
    def proportions(self) -> tuple[Fraction, ...]:
        """Return the share of samples from each source: weight / sum of all weights. 0.1 counts as 1/10 exactly."""
        weights = [Fraction(repr(source.weight)) for source in self.sources]
        return tuple(weight / sum(weights) for weight in weights)
