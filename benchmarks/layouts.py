"""Compare every layout with a single process: `PYTHONPATH=src python -m benchmarks.layouts [NAME ...]`.

Runs the layouts of tests/distributed/test_layouts.py and the changes of layout of test_resharding.py, in float64 and
in the compute dtypes. Prints the largest difference from one process in any training or validation loss (nats), in
gradient and update norms (relative) and in parameters, and the seconds of each case, without starting its processes.
"""

import sys
import time
from contextlib import closing
from pathlib import Path

import torch
from benchmarks._tiny import tiny_recipe
from tests.distributed.conftest import once
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import CASES, COMMON, ONE, TIED, differences, layout
from tests.distributed.test_resharding import CHAINS, follow

from leaven.recipe.recipe import Recipe

EVERYTHING = layout(dp=2, tp=2, pp=2, zero=1) | TIED | ONE | {"model.n_layers": 2}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with tiny_recipe() as (tiny, folder), closing(Pool()) as ranks:
        table(ranks, tiny, names, folder)


def table(ranks: Pool, tiny: Recipe, names: list[str], folder: Path) -> None:
    single_process = once()
    print("| layout | loss | norms | parameters | seconds |\n|---|---|---|---|---|")
    cases = [(name, changes, "float64") for name, changes in CASES.items()]
    for compute in ("fp32", "bf16", "fp16"):
        cases.append((f"2x2x2 {compute}", EVERYTHING | {"precision.compute": compute}, "float32"))
    for name, changes, dtype in cases:
        if names and name not in names:
            continue
        single_process(tiny_of(tiny, changes), 3, dtype)  # cached here, outside the timing of the layout
        began = time.perf_counter()
        found = differences(ranks, single_process, tiny, changes, steps=3, dtype=dtype)
        seconds = time.perf_counter() - began
        loss = max(found["loss"], found["validation"])
        print(f"| {name} | {loss:.1e} | {found['norm']:.1e} | {found['parameter']:.1e} | {seconds:.1f} |", flush=True)
    print("\n| saved by, then resumed by | loss |\n|---|---|")
    for number, (name, (changes, chain)) in enumerate(CHAINS.items()):
        if names and name not in names:
            continue
        saved = folder / f"chain-{number}"
        saved.mkdir()
        losses, expected = follow(ranks, single_process, tiny, changes, chain, saved)
        largest = max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True))
        print(f"| {name} | {largest:.1e} |", flush=True)


def tiny_of(tiny: Recipe, changes: dict[str, object]) -> Recipe:
    return tiny.replace(COMMON | {key: value for key, value in changes.items() if not key.startswith("layout.")})


if __name__ == "__main__":
    main(sys.argv[1:])
