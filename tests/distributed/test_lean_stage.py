"""Memory of a pipeline stage between micro-batches."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.distributed.cases import CPU, sharded
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import layout
from torch.distributed.tensor import DTensor

from leaven.distributed.pipeline import LeanStage, received
from leaven.distributed.process_group import join_process_group
from leaven.model.transformer import Stage
from leaven.recipe.recipe import Recipe

MICRO_BATCHES = 6


@dataclass(frozen=True)
class Held:
    """What a stage holds after the backward pass of a micro-batch."""

    parameters: int  # elements of gathered parameters
    gradients: int  # elements of parameters whose gradient is not sharded yet
    buffers: int  # allocated receive buffers


def watched(recipe: Recipe) -> tuple[list[Held], int]:
    """Return what a stage holds after each backward pass of the second step, and the number of its parameters."""
    seen: list[Held] = []

    class Watched(LeanStage):
        def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
            super().backward_one_chunk(*arguments, **named)
            whole = [each for each in self.submod.parameters() if not isinstance(each, DTensor)]
            # A sharded parameter has a gradient only when the gradient is sharded too.
            shared = [each for each in self.submod.parameters() if isinstance(each, DTensor)]
            waiting = [each for each in whole if each.grad is not None] + [p for p in shared if p.grad is None]
            infos = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
            buffers = [info.buffer for some in infos for info in received(some)]
            seen.append(
                Held(
                    sum(each.numel() for each in whole),
                    sum(each.numel() for each in waiting),
                    sum(not buffer.is_meta for buffer in buffers),
                )
            )

    with join_process_group(recipe.layout, CPU) as group, patch("leaven.distributed.pipeline.LeanStage", Watched):
        model = sharded(recipe, group)
        tokens = torch.zeros(1, recipe.model.seq_len, dtype=torch.int64)
        for _ in range(2):
            seen.clear()
            model.drop_gradients()
            model.forward_backward(MICRO_BATCHES * [(tokens, tokens, None)], 1.0)
        return seen, sum(parameter.numel() for parameter in model.stages[0].parameters())


@pytest.mark.long
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_zero_2_and_3_shard_after_each_micro_batch(zero: int, ranks: Pool, tiny: Recipe) -> None:
    for seen, whole in ranks(4, watched, tiny.replace(layout(dp=2, pp=2, zero=zero))):
        assert [held.parameters for held in seen] == MICRO_BATCHES * [0 if zero == 3 else whole]
        assert [held.gradients for held in seen] == MICRO_BATCHES * [0 if zero >= 2 else whole]


def test_a_buffer_is_freed_with_its_micro_batch(ranks: Pool, tiny: Recipe) -> None:
    """The PipelineStage of torch before 2.15 holds six buffers during the whole step. Under 1F1B, rank 1 of three
    needs at most the buffer of the next input. From torch 2.15 on, a buffer leaves the list when its forward pass
    begins."""
    found = ranks(3, watched, tiny.replace(layout(pp=3) | {"model.n_layers": 3}))
    buffers = [[held.buffers for held in seen] for seen, _ in found]
    assert buffers[0] == buffers[2] == MICRO_BATCHES * [0]
    assert all(0 <= held <= most for held, most in zip(buffers[1], [1, 1, 1, 1, 1, 0], strict=True))


def after_forward(recipe: Recipe) -> set[str]:
    """Return the names of the parameters that are gathered when the loss has been computed."""
    seen: set[str] = set()
    with join_process_group(recipe.layout, CPU) as group:
        model = sharded(recipe, group)

        def look(stage: Stage, *_: Any) -> None:
            seen.update(name for name, each in stage.model.named_parameters() if not isinstance(each, DTensor))

        model.stages[0].register_forward_hook(look)
        tokens = torch.zeros(1, recipe.model.seq_len, dtype=torch.int64)
        model.forward_backward([(tokens, tokens, None)], 1.0)
    return seen


@pytest.mark.parametrize("tied", [False, True])
def test_zero_3_keeps_the_unembedding_and_norms_for_the_backward_pass(tied: bool, ranks: Pool, tiny: Recipe) -> None:
    recipe = tiny.replace(layout(dp=2, zero=3) | {"model.tied_embeddings": tied})
    kept = {each.name for each in recipe.model.parameters() if "norm" in each.name}
    assert ranks(2, after_forward, recipe) == 2 * [kept | {"embedding.weight" if tied else "unembedding.weight"}]
