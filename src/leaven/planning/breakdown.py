"""What the activations of a rank are made of, operator by operator: for people who look for what to save."""

from collections import defaultdict

from leaven.planning.activations import block_kept, operators_kept
from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.blueprint import Blueprint, blueprint
from leaven.planning.memory import LEAVEN_BF16, Implementation, in_flight, stage_memory
from leaven.planning.stages import rank_blocks
from leaven.recipe.shape import ModelShape


def activation_parts(
    model: ModelShape | Blueprint, how: Arrangement, stage: int, code: Implementation = LEAVEN_BF16
) -> dict[str, float]:
    """Bytes of one rank by operator, of all its blocks and micro-batches in flight; they add up to the activations
    of :func:`~leaven.planning.memory.stage_memory`.

    With recomputation what stays is ``kept``, whatever it is of. ``elsewhere`` is outside the blocks, sent on to the
    next stage, or inside one block in its backward pass.
    """
    table, layout = blueprint(model), how.layout
    tokens = how.micro_batch * table.seq_len / layout.cp
    tokens *= in_flight(layout, stage, scheduled(layout, how.grad_accumulation))
    found: defaultdict[str, float] = defaultdict(float)
    for block, count in rank_blocks(table, layout.pp, layout.stages_per_rank, stage, code.balance):
        if layout.recompute == "none":
            by_operator = operators_kept(block, table.d_model, table.seq_len, layout.tp, code)
        else:
            kept = block_kept(block, table.d_model, table.seq_len, layout.tp, recompute=layout.recompute, code=code)
            by_operator = {"kept": kept.stays}
        for name, each in by_operator.items():
            found[name] += tokens * count * each
    everything = stage_memory(table, how, stage, code).activations
    return dict(found) | {"elsewhere": max(0.0, everything - sum(found.values()))}
