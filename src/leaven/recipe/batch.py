"""The global batch and its growth, as a function of the tokens consumed so far."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from leaven.recipe.base import Part

Count = Annotated[int, Field(gt=0)]
# While the batch is smaller than the full batch, the optimizer uses the values for the full batch (fixed), or the
# values that the scaling rule gives for the smaller batch (scaled).
RampRule = Literal["fixed", "scaled"]


class Ramp(Part):
    """A batch that grows in equal increments, spread evenly over the first part of the run.

    This is Megatron's ``--rampup-batch-size START INCREMENT SAMPLES`` in tokens. SAMPLES is the length of the whole
    ramp, not of one increment: BLOOM's 192 16 9765625 is 116 increments of about 84,186 samples each.
    """

    start_tokens: Count  # the first batch
    increment_tokens: Count
    over_tokens: Count  # length of the ramp
    rule: RampRule = "fixed"  # whether lr, betas, eps and weight decay change with the batch


class BatchStage(Part):
    """A batch size that is used from a given point of the run on."""

    from_tokens: int = Field(ge=0)  # tokens consumed before this stage
    tokens: Count  # the batch of this stage


class Batch(Part):
    """The global batch, its growth, and the micro-batch.

    If the micro-batch does not divide a batch, the batch is split as evenly as possible.
    """

    tokens: Count
    ramp: Ramp | None = None
    stages: Annotated[tuple[BatchStage, ...], Field(strict=False)] = ()
    stages_rule: RampRule | None = None  # like ``ramp.rule``, for ``stages``; None is "fixed"
    micro_batch: Count | Literal["auto"] = "auto"  # sequences per forward pass of a rank; auto: timed at the start

    @model_validator(mode="after")
    def _validate_growth(self) -> "Batch":
        if self.ramp is not None and self.stages:
            raise ValueError("a batch has a ramp or stages, not both; remove one")
        if self.stages_rule and not self.stages:
            raise ValueError("stages_rule needs stages; for a ramp set ramp.rule")
        if self.ramp is not None:
            climb = self.tokens - self.ramp.start_tokens
            if climb < 0:
                raise ValueError(
                    f"the ramp starts at {self.ramp.start_tokens:,} tokens, above its end of {self.tokens:,}; "
                    f"start_tokens must not exceed [batch] tokens"
                )
            if climb % self.ramp.increment_tokens:
                raise ValueError(
                    f"the ramp grows by {climb:,} tokens, which is not a whole number of increments of "
                    f"{self.ramp.increment_tokens:,}; choose increment_tokens so that it divides {climb:,}"
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
        """Return the rule of the ramp or of the stages: ``fixed`` or ``scaled``."""
        return self.ramp.rule if self.ramp else self.stages_rule or "fixed"

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the batch sizes in order, each as (tokens consumed when it begins, batch in tokens).

        The first size begins at 0.
        """
        if self.stages:
            return tuple((stage.from_tokens, stage.tokens) for stage in self.stages)
        if self.ramp is None or self.ramp.start_tokens == self.tokens:
            return ((0, self.tokens),)
        increments = (self.tokens - self.ramp.start_tokens) // self.ramp.increment_tokens
        return tuple(
            # The i-th increment comes with the first token at or after i / increments of the ramp.
            (
                -(-i * self.ramp.over_tokens // increments),
                self.ramp.start_tokens + i * self.ramp.increment_tokens,
            )
            for i in range(increments + 1)
        )


@dataclass(frozen=True)
class Segment:
    """Consecutive steps with the same batch size."""

    first_step: int
    first_token: int  # tokens consumed before the segment
    batch_tokens: int


@dataclass(frozen=True)
class BatchSchedule:
    """The batch of every step of a run; the schedule has no end.

    The batch of a step depends on the tokens consumed before that step. So the batches of all steps before step n add
    up to ``tokens_at_step(n)`` exactly.
    """

    sizes: tuple[tuple[int, int], ...]  # as :attr:`Batch.sizes`: (tokens consumed when it begins, batch in tokens)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        segments = [Segment(0, 0, self.sizes[0][1])]
        for threshold, batch_tokens in self.sizes[1:]:
            last = segments[-1]
            steps = -(-(threshold - last.first_token) // last.batch_tokens)
            if steps <= 0:  # the size before has no step, because a step before it ended beyond this threshold
                segments[-1] = Segment(last.first_step, last.first_token, batch_tokens)
            else:
                consumed = last.first_token + steps * last.batch_tokens
                segments.append(Segment(last.first_step + steps, consumed, batch_tokens))
        return tuple(segments)

    def batch_at(self, tokens: int) -> int:
        """Return the batch, in tokens, of a step that begins with ``tokens`` consumed."""
        return self.sizes[bisect_right(self.sizes, tokens, key=lambda size: size[0]) - 1][1]

    def tokens_at_step(self, step: int) -> int:
        """Return the tokens consumed before step ``step``. Steps are counted from 0."""
        index = bisect_right(self.segments, step, key=lambda segment: segment.first_step) - 1
        segment = self.segments[index]
        return segment.first_token + (step - segment.first_step) * segment.batch_tokens

    def first_step_at(self, tokens: int) -> int:
        """Return the first step that begins with at least ``tokens`` consumed.

        This is the number of steps of a run of ``tokens`` tokens.
        """
        index = bisect_right(self.segments, tokens, key=lambda segment: segment.first_token) - 1
        segment = self.segments[max(index, 0)]
        step = segment.first_step + -(-(tokens - segment.first_token) // segment.batch_tokens)
        return max(step, 0)
