"""Assign blocks to pipeline ranks, and count each rank's parameters and micro-batches in flight."""

from collections import Counter
from functools import cache
from typing import NamedTuple

from leaven.planning.blueprint import BlockTable, Blueprint, Model, blueprint
from leaven.planning.training_codes import LEAVEN_BF16, Balance, TrainingCode
from leaven.recipe.layout import Layout


@cache
def stage_layers(model: Model, stages: int, balance: Balance = "weight") -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage (at least one), by one of three rules.

    - ``weight``: the largest stage is as small as possible. Embedding and unembedding each count as
      (vocabulary x width) / (matrix weights that a token uses in an average block) blocks.
    - ``number``: stages differ by at most one block. Extra blocks go to the middle stages first, as in BLOOM.
    - ``work``: the stages have about equal FLOPs of blocks and unembedding, as in nanotron.
    """
    table = blueprint(model)
    n_layers = table.n_layers
    if stages == 1:
        return (n_layers,)
    if balance == "number":
        base, more = divmod(n_layers, stages)
        longer = {*[*range(1, stages - 1), 0, stages - 1][:more]}
        return tuple(base + (stage in longer) for stage in range(stages))
    weights = [sum(row.flops for row in block.matmuls) // 2 for block in table.blocks]
    if balance == "work":
        return _by_work(weights, table.embedding, stages)
    end = table.embedding / (sum(weights) / n_layers)  # size of the embedding in blocks
    middle = stages - 2  # number of stages without embedding and unembedding

    def load(layers: tuple[int, ...]) -> tuple[float, float]:
        loads = [layers[0] + end, *layers[1:-1], layers[-1] + end]
        return max(loads), sum(stage**2 for stage in loads)

    def split(first: int, last: int) -> tuple[int, ...] | None:
        rest = n_layers - first - last
        if rest < middle or (not middle and rest):
            return None
        base, more = divmod(rest, middle) if middle else (0, 0)
        return (first, *(base + (stage < more) for stage in range(middle)), last)

    sizes = range(1, -(-n_layers // stages) + 2)
    splits = [found for first in sizes for last in sizes if (found := split(first, last)) is not None]
    return min(splits, key=load)


def _by_work(weights: list[int], unembedding: int, stages: int) -> tuple[int, ...]:
    """Apply the rule ``work``. ``weights`` (by block) and ``unembedding`` (last stage) are in multiply-adds."""
    share, done, layers = (sum(weights) + unembedding) / stages, 0, [0] * stages
    stage = 0
    for left, weight in zip(reversed(range(len(weights))), weights, strict=True):
        layers[stage] += 1
        done += weight
        if stage < stages - 1 and (done > share * (stage + 1) or left == stages - 1 - stage):
            stage += 1
    return tuple(layers)


@cache
def rank_blocks(
    model: Blueprint, pp: int, stages_per_rank: int, rank: int, balance: Balance
) -> tuple[tuple[BlockTable, int], ...]:
    """Return (block, count) for each distinct block on the pipeline rank ``rank``, over all stages of the rank."""
    layers = stage_layers(model, pp * stages_per_rank, balance)
    if len(model.kinds) == 1:
        return ((model.blocks[0], sum(layers[rank::pp])),)
    found: Counter[BlockTable] = Counter()
    for stage in range(rank, len(layers), pp):
        first = sum(layers[:stage])
        found.update(model.blocks[first : first + layers[stage]])
    return tuple(found.items())


class RankParameters(NamedTuple):
    """The number of parameters on one rank, before ZeRO shards them."""

    blocks: float  # parameters in blocks, without routed experts
    experts: float  # this rank's share of the routed experts, which are divided over the ``ep`` ranks
    ends: float  # parameters outside the blocks; a tied embedding counts on the first and on the last rank

    @property
    def total(self) -> float:
        return self.blocks + self.experts + self.ends


def rank_parameters(model: Model, layout: Layout, rank: int, code: TrainingCode = LEAVEN_BF16) -> RankParameters:
    """Return the parameters of all stages of pipeline rank ``rank``."""
    table, t, first, last = blueprint(model), layout.tp, rank == 0, rank == layout.pp - 1
    blocks = rank_blocks(table, layout.pp, layout.stages_per_rank, rank, code.balance)
    ends = 0.0
    if first:
        ends += table.embedding / t + table.embedding_vectors + table.positions
    if last:
        ends += table.final_vectors + (0 if table.tied and first else table.embedding / t)
    return RankParameters(
        blocks=sum(count * (block.whole + block.cut / t) for block, count in blocks),
        experts=sum(count * block.experts for block, count in blocks) / (t * layout.ep),
        ends=ends,
    )


def sharers(layout: Layout) -> tuple[int, int]:
    """Return (n, m): ZeRO shards a parameter of a routed expert over m ranks, and any other parameter over n."""
    ranks = layout.dp * layout.cp // layout.dp_replicate
    return ranks, max(1, ranks // layout.ep)


def in_flight(layout: Layout, rank: int, micro_batches: int) -> float:
    """Return the largest number of micro-batches whose activations a pipeline rank keeps at the same time.

    The number may be a fraction. If a rank has v stages, the activations of one stage count as 1/v micro-batch
    (interleaved 1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    p, v = layout.pp, layout.stages_per_rank
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "zero-bubble":
        return min(micro_batches, p)
    if v == 1:
        return min(micro_batches, p - rank)
    return min(v * micro_batches, 2 * (p - rank - 1) + (v - 1) * p + 1) / v
