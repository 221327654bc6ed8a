"""Compare planned memory with that of a training step: `PYTHONPATH=src python -m benchmarks.memory [NAME ...]`.

Runs on the CPU, where torch.profiler records every allocation and release of a tensor, and nothing else: no context,
no kernel workspaces, no fragmentation. So the planner's fixed amount and its reserve are left out of the comparison.
The rank that needs the most memory is printed, in the second step, when all states exist. Processes that communicate
use more memory than planned, because buffers of gloo are recorded too. `leaven check memory` checks any layout
without these buffers, and tests/distributed/test_dry_run.py compares this check with real processes.
"""

import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from benchmarks._tiny import tiny_recipe
from tests.distributed.pool import Pool
from torch.profiler import ProfilerActivity, profile

from leaven.data.tokens import TokenSet, prepare
from leaven.distributed.process_group import join_process_group
from leaven.planning.arrangement import Arrangement, grad_accumulation
from leaven.planning.memory import Memory, stage_memory
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.verification.memory import tensors

MIB = 2**20
MODEL: dict[str, Any] = {
    "model.vocab_size": 4096,
    "model.n_layers": 8,
    "model.d_model": 256,
    "model.n_heads": 4,
    "model.n_kv_heads": 4,
    "model.d_head": 64,
    "model.d_ff": 704,
    "model.seq_len": 256,
    "batch.tokens": 256 * 16,
    "data.tokens": 256 * 16 * 8,
    "batch.micro_batch": 2,
    "precision.compute": "bf16",
}


def layouts() -> dict[str, dict[str, Any]]:
    def at(**layout: Any) -> dict[str, Any]:
        return {f"layout.{key}": value for key, value in layout.items()}

    return {
        "one process": {},
        "one process, fp32": {"precision.compute": "fp32"},
        "one process, recompute": at(recompute="full"),
        "dp2, ZeRO 0": at(dp=2),
        "dp2, ZeRO 1": at(dp=2, zero=1),
        "dp2, ZeRO 2": at(dp=2, zero=2),
        "dp2, ZeRO 3": at(dp=2, zero=3),
        "dp4, ZeRO 3": at(dp=4, zero=3),
        "tp2": at(tp=2),
        "tp2, recompute": at(tp=2, recompute="full"),
        "pp2": at(pp=2),
        "pp4, gpipe": at(pp=4, schedule="gpipe"),
        "pp4, gpipe, recompute": at(pp=4, schedule="gpipe", recompute="full"),
        "pp4, zero-bubble": at(pp=4, schedule="zero-bubble"),
        "pp2 tied": at(pp=2) | {"model.tied_embeddings": True},
        "pp2 interleaved": at(pp=2, schedule="interleaved", stages_per_rank=2),
        "2x2x2, ZeRO 1": at(dp=2, tp=2, pp=2, zero=1),
        "2x2x2, ZeRO 3": at(dp=2, tp=2, pp=2, zero=3),
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with tiny_recipe() as (tiny, _), closing(Pool()) as ranks:
        table(ranks, tiny.replace(MODEL), names)


def table(ranks: Pool, tiny: Recipe, names: list[str]) -> None:
    tokens = prepare(tiny.data, tiny.model.vocab_size)
    print("| layout | parameters and moments | the rest at its peak | together | predicted | ratio |")
    print("|---|---|---|---|---|---|")
    for name, changes in layouts().items():
        if names and name not in names:
            continue
        recipe = tiny.replace(changes)
        states, rest = max(ranks(recipe.layout.ranks, taken, recipe, tokens), key=sum)
        said = max((predicted(recipe, rank) for rank in range(recipe.layout.pp)), key=lambda memory: memory.total)
        total = states + rest
        print(
            f"| {name} | {states / MIB:.1f} MiB | {rest / MIB:.1f} | {total / MIB:.1f} | {said.total / MIB:.1f} "
            f"| {said.total / total:.2f} |",
            flush=True,
        )


def predicted(recipe: Recipe, rank: int) -> Memory:
    layout, size = recipe.layout, recipe.batch.micro_batch
    assert isinstance(size, int)
    how = Arrangement(layout, size, grad_accumulation(layout, recipe.model.seq_len, recipe.batch.tokens, size))
    code = replace(tensors(recipe), logits_at_once=2**22)  # the chunk size on a CPU (model/loss.py)
    return stage_memory(recipe.model, how, rank, code)


def taken(recipe: Recipe, tokens: TokenSet) -> tuple[int, int]:
    """Return bytes of parameters and optimizer states, and the peak of all other bytes in a step."""
    with join_process_group(recipe.layout, torch.device("cpu")) as group:
        training = Training(recipe, tokens, device="cpu", group=group)
        training.step()
        training.sharded.drop_gradients()
        parameters = training.sharded.local_parameters
        states = sum(each.nbytes for each in (*parameters, *training.optimizer.state_dict().values()))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            training.step()
        level = highest = 0
        events = watched.profiler.kineto_results.events()
        for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
            level += event.nbytes()
            highest = max(highest, level)
    return states, highest


if __name__ == "__main__":
    main(sys.argv[1:])
