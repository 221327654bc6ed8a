"""Simulate a pipeline step pass by pass: which rank computes what, and when.

With p ranks, stage s runs on rank s mod p (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). GPipe: Huang et al.
2019, arXiv 1811.06965. Zero-bubble is ZB1P of Qi et al. 2023, arXiv 2401.10241.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.blueprint import Model
from leaven.planning.hardware import Cluster
from leaven.planning.stages import rank_parameters, stage_layers
from leaven.planning.timing import adding_seconds, block_time, logits_seconds, transfer_seconds
from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode
from leaven.recipe.layout import Layout

Kind = Literal["forward", "backward", "input", "weight"]
Key = tuple[Kind, int, int]  # kind, stage, micro-batch


class Pass(NamedTuple):
    """A forward or backward computation of one stage for one micro-batch, with its start and end.

    A zero-bubble schedule splits each backward pass in two: an ``input`` pass computes the gradients that the
    previous stage needs, and a ``weight`` pass computes the gradients of the stage's weights.
    """

    kind: Kind
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The forward and backward passes of every rank, in order. Times have the unit of :func:`simulate`'s inputs."""

    ranks: tuple[tuple[Pass, ...], ...]

    @property
    def end(self) -> float:
        return max(passes[-1].end for passes in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the time in which a rank is idle, as a mean over the ranks."""
        busy = sum(each.end - each.start for passes in self.ranks for each in passes)
        return 1 - busy / (self.end * len(self.ranks))

    def in_flight(self, rank: int) -> int:
        """Return the largest number of forward passes whose activations a rank keeps at the same time."""
        most = now = 0
        for each in self.ranks[rank]:
            now += {"forward": 1, "backward": -1, "input": 0, "weight": -1}[each.kind]
            most = max(most, now)
        return most


def order(layout: Layout, rank: int, micro_batches: int) -> list[Key]:
    """Return the passes of a rank in order. ``micro_batches`` is the result of :func:`arrangement.scheduled`.

    In GPipe, all forward passes come first. In other schedules, a rank first runs some forward passes (the
    first rank runs the most), then alternates forward and backward passes. A zero-bubble schedule splits each
    backward pass into an ``input`` and a ``weight`` pass. On rank r, ``weight`` passes lag r micro-batches behind
    ``input`` passes: the ``weight`` pass of micro-batch 0 follows the ``input`` pass of micro-batch r.
    """
    p, v = layout.pp, layout.stages_per_rank
    passes = v * micro_batches
    ahead = (v - 1) * p + (p - 1 - rank) * (2 if layout.schedule == "interleaved" else 1)
    ahead = passes if layout.schedule == "gpipe" else min(ahead, passes)
    forwards, backwards = (list(_turns(layout, rank, micro_batches, backward)) for backward in (False, True))
    split = layout.schedule == "zero-bubble"
    found: list[Key] = [("forward", *at) for at in forwards[:ahead]]
    for n, at in enumerate(backwards):
        if ahead + n < passes:
            found.append(("forward", *forwards[ahead + n]))
        found.append(("input" if split else "backward", *at))
        if split and n >= rank:
            found.append(("weight", *backwards[n - rank]))
    if split:
        found += [("weight", *at) for at in backwards[max(passes - rank, 0) :]]
    return found


def _turns(layout: Layout, rank: int, micro_batches: int, backward: bool) -> Iterator[tuple[int, int]]:
    """Yield (stage, micro-batch) for all forward or all backward passes of a rank, in order."""
    p, v = layout.pp, layout.stages_per_rank
    together = p if v > 1 else micro_batches
    for first in range(0, micro_batches, together):
        for turn in reversed(range(v)) if backward else range(v):
            for micro_batch in range(first, first + together):
                yield rank + p * turn, micro_batch


def simulate(
    layout: Layout,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | None = None,
) -> Timeline:
    """Return the passes of one optimizer step on every pipeline rank, with their times.

    Args:
        forward: the time of a forward pass through each stage, in any unit.
        backward: the time of a backward pass through each stage, in the same unit.
        weight: the part of ``backward`` that computes weight gradients; by default, as long as ``forward``. The value
            of the first stage is ignored, because all of its backward pass is for weight gradients.
    """
    weight = [backward[0], *(weight or forward)[1:]]
    p, stages = layout.pp, layout.pp * layout.stages_per_rank
    orders = [order(layout, rank, micro_batches) for rank in range(p)]
    seconds: dict[Kind, Sequence[float]] = {"forward": forward, "backward": backward, "weight": weight}
    seconds["input"] = [both - own for both, own in zip(backward, weight, strict=True)]
    # Passes of these kinds wait for the pass of the same kind on the previous (-1) or the next (1) stage.
    sources: dict[Kind, int] = {"forward": -1, "input" if layout.schedule == "zero-bubble" else "backward": 1}
    ended: dict[Key, float] = {}
    done: list[list[Pass]] = [[] for _ in range(p)]
    while len(ended) < sum(map(len, orders)):
        for passes, mine in zip(orders, done, strict=True):  # every rank runs until it has to wait for another rank
            for kind, stage, micro_batch in passes[len(mine) :]:
                source = stage + sources.get(kind, 0)
                needed, waits = (kind, source, micro_batch), source != stage and 0 <= source < stages
                if waits and needed not in ended:
                    break
                start = max(mine[-1].end if mine else 0, ended[needed] if waits else 0)
                end = ended[kind, stage, micro_batch] = start + seconds[kind][stage]
                mine.append(Pass(kind, stage, micro_batch, start, end))
    return Timeline(tuple(map(tuple, done)))


def timeline(model: Model, how: Arrangement, cluster: Cluster, code: TrainingCode = LEAVEN_BF16) -> Timeline:
    """Return the passes of a step with their times in seconds, without gradient exchange and optimizer."""
    layout = how.layout
    block = block_time(model, how, cluster, code)
    layers = stage_layers(model, layout.pp * layout.stages_per_rank, code.balance)
    passes = 3 if layout.recompute == "full" else 2  # passes with communication
    exchanged, sent = block.all_reduce / passes, transfer_seconds(model, how, cluster, code)
    forward = [n * (block.forward + exchanged) + sent for n in layers]
    adding = [
        adding_seconds(rank_parameters(model, layout, rank, code).total, cluster.accelerator, code)
        / layout.stages_per_rank
        for rank in range(layout.pp)
    ]
    turns = layout.stages_per_rank * adding
    backward = [
        n * (block.backward + (passes - 1) * exchanged) + sent + added for n, added in zip(layers, turns, strict=True)
    ]
    weight = [n * block.weight + added for n, added in zip(layers, turns, strict=True)]
    logits = logits_seconds(model, how, cluster, code) / 3  # one forward product, two backward products
    forward[-1] += logits
    backward[-1] += 2 * logits
    weight[-1] += logits
    return simulate(layout, scheduled(layout, how.grad_accumulation), forward, backward, weight)
