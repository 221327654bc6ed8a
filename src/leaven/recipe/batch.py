"""The global batch size as a function of the tokens consumed so far: constant, a ramp, or stages."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from leaven.recipe.base import Part

MOST_TOKENS = 10**18  # 10,000 times any published run; this number times 8 bytes still fits into 64 bits
MOST_INCREMENTS = 10_000  # largest number of increments of a ramp; each is an entry in :attr:`Batch.sizes`
Count = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
# Which hyperparameters apply while the batch size is not ``[batch] tokens``. fixed: those for ``[batch] tokens``;
# scaled: those that the scaling rule computes for the present size.
RampRule = Literal["fixed", "scaled"]


class Ramp(Part):
    """A batch that grows in equal increments, spread evenly over the first ``over_tokens`` tokens of the run.

    This is Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``, with all three numbers in tokens.
    """

    start_tokens: Count  # size of the first batch
    increment_tokens: Count  # number of tokens by which each increment enlarges the batch
    over_tokens: Count  # length of the whole ramp, not of one increment
    rule: RampRule = "fixed"  # scaled: lr, betas, eps and weight decay change with the batch size


class BatchStage(Part):
    from_tokens: int = Field(ge=0, le=MOST_TOKENS)  # the stage begins with the first step after this many tokens
    tokens: Count  # batch size in tokens


class Batch(Part):
    """The global batch, its growth, and the micro-batch."""

    tokens: Count  # size of the global batch in tokens; with a ramp or stages, the last size
    ramp: Ramp | None = None
    stages: Annotated[tuple[BatchStage, ...], Field(strict=False)] = ()
    stages_rule: RampRule | None = None  # like ``ramp.rule``, for ``stages``; None is "fixed"
    # Sequences per forward pass of a rank; auto: the fastest number, timed when the run starts. If this number does
    # not divide the batch, the micro-batches are as equal as possible.
    micro_batch: Count | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _validate_growth(self) -> "Batch":
        if self.ramp is not None and self.stages:
            raise ValueError("a batch has a ramp or stages, not both; remove one")
        if self.stages_rule and not self.stages:
            raise ValueError("stages_rule is set without stages; remove stages_rule (for a ramp, set ramp.rule)")
        if self.ramp is not None:
            climb = self.tokens - self.ramp.start_tokens
            if climb < 0:
                raise ValueError(
                    f"the ramp starts at {self.ramp.start_tokens:,} tokens, but [batch] tokens is only "
                    f"{self.tokens:,}; set start_tokens to at most [batch] tokens"
                )
            if climb % self.ramp.increment_tokens:
                raise ValueError(
                    f"the ramp grows by {climb:,} tokens, which is not a whole number of increments of "
                    f"{self.ramp.increment_tokens:,}; choose increment_tokens so that it divides {climb:,}"
                )
            if (increments := climb // self.ramp.increment_tokens) > MOST_INCREMENTS:
                raise ValueError(
                    f"the ramp has {increments:,} increments, more than {MOST_INCREMENTS:,}; raise increment_tokens"
                )
        if self.stages:
            starts = [stage.from_tokens for stage in self.stages]
            if starts[0] != 0 or starts != sorted(set(starts)):
                raise ValueError(f"from_tokens of the stages must start at 0 and increase, not {starts}")
            if self.stages[-1].tokens != self.tokens:
                raise ValueError(
                    f"the last stage has {self.stages[-1].tokens:,} tokens, but [batch] tokens is {self.tokens:,}; "
                    f"make them equal"
                )
        return self

    @property
    def rule(self) -> RampRule:
        return self.ramp.rule if self.ramp else self.stages_rule or "fixed"

    @property
    def smallest_tokens(self) -> int:
        if self.stages:
            return min(stage.tokens for stage in self.stages)
        return self.ramp.start_tokens if self.ramp else self.tokens

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return a pair for each batch size: (tokens consumed before it applies, batch size in tokens)."""
        if self.stages:
            return tuple((stage.from_tokens, stage.tokens) for stage in self.stages)
        if self.ramp is None or self.ramp.start_tokens == self.tokens:
            return ((0, self.tokens),)
        increments = (self.tokens - self.ramp.start_tokens) // self.ramp.increment_tokens
        # Increment i applies once i / increments of the ramp's tokens are consumed, rounded up.
        begins = (-(-i * self.ramp.over_tokens // increments) for i in range(increments + 1))
        return tuple(
            (begin, self.ramp.start_tokens + i * self.ramp.increment_tokens) for i, begin in enumerate(begins)
        )


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size."""

    first_step: int
    first_token: int  # tokens consumed before the segment
    batch_tokens: int


@dataclass(frozen=True)
class BatchSchedule:
    """The batch size of every step, which does not depend on the length of the run."""

    sizes: tuple[tuple[int, int], ...]  # pairs (tokens consumed before the batch size applies, batch size in tokens)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        segments = [Segment(0, 0, self.sizes[0][1])]
        for threshold, batch_tokens in self.sizes[1:]:
            last = segments[-1]
            steps = -(-(threshold - last.first_token) // last.batch_tokens)
            if steps <= 0:  # the last size has no step: the step before it also passed this threshold
                segments[-1] = Segment(last.first_step, last.first_token, batch_tokens)
            else:
                consumed = last.first_token + steps * last.batch_tokens
                segments.append(Segment(last.first_step + steps, consumed, batch_tokens))
        return tuple(segments)

    def batch_at(self, tokens: int) -> int:
        """Return the batch size in tokens of the step that starts after ``tokens`` tokens."""
        return self.sizes[bisect_right(self.sizes, tokens, key=lambda size: size[0]) - 1][1]

    def tokens_at_step(self, step: int) -> int:
        """Return the number of tokens consumed before ``step``. The first step is 0."""
        segment = self.segments[bisect_right(self.segments, step, key=lambda segment: segment.first_step) - 1]
        return segment.first_token + (step - segment.first_step) * segment.batch_tokens

    def first_step_at(self, tokens: int) -> int:
        """Return the smallest number of steps that consume at least ``tokens`` tokens."""
        segment = self.segments[bisect_right(self.segments, tokens, key=lambda segment: segment.first_token) - 1]
        return segment.first_step + -(-(tokens - segment.first_token) // segment.batch_tokens)
