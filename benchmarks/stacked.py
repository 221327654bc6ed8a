"""What stacking trials brings on this machine: `python -m benchmarks.stacked [--device cuda]`.

A step of K trials as one model (leaven.training.stacked) against a step of one trial as a training does it, at equal
batches of each trial; K trials one after the other take K times that. The arms take turns in short rounds, so that
whatever else the machine does meets all of them; numbers are medians of the rounds, with the least and the most. On a
processor everything runs in one thread: trials by themselves are a process for each core, and so would stacks be.
`--clock processor` counts processor time: on a machine that others use too, wall time measures them.

On a CUDA device the bar is checked: 16 trials of width 256 in under 3 times the time of one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leaven.data.shards import ShardedTokens, Shards
from leaven.data.tokens import TokenSet
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.machine import machine
from leaven.training.stacked import READ_EVERY, TrialStack
from leaven.training.throughput import device_name, wait

STEPS = 20_000  # of a run, more than are ever done
VOCABULARY = 4_096
BAR = 3.0
Steps = Callable[[int], None]


def recipe_of(width: int, layers: int, sequences: int, seq_len: int, dtype: str) -> Recipe:
    """A Llama of this width, and a batch of so many sequences."""
    head = min(64, width // 2)
    return Recipe.model_validate(
        {
            "name": f"d{width}",
            "model": {
                "n_layers": layers,
                "d_model": width,
                "n_heads": width // head,
                "n_kv_heads": width // head,
                "d_head": head,
                "d_ff": -(-width * 8 // 3 // 32) * 32,
                "vocab_size": VOCABULARY,
                "seq_len": seq_len,
                "qk_norm": True,
            },
            "data": {"source": "random", "tokens": STEPS * sequences * seq_len},
            "batch": {"tokens": sequences * seq_len},
            "hyperparameters": {"lr": 1e-3, "init_std": 0.02},
            "precision": {"compute": dtype},
        }
    )


def random_tokens(seq_len: int) -> TokenSet:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 512 * (seq_len + 1))
    split = ShardedTokens([tokens])
    return TokenSet(
        ("random",), (Fraction(1),), (Shards(split, split, 0, 0, "random", ()),), VOCABULARY, 0, "", Path()
    )


def by_itself(recipe: Recipe, tokens: TokenSet, device: str, compiled: bool) -> Steps:
    training = Training(recipe.replace({"layout.compile": compiled}), tokens, device)

    def steps(count: int) -> None:
        before = training.issue()  # one ahead, as in a run
        for _ in range(count - 1):
            ahead = training.issue()
            before.result()
            before = ahead
        before.result()

    return steps


def stacked(recipe: Recipe, trials: int, tokens: TokenSet, device: str, compiled: bool) -> Steps:
    """Trials that differ in all that the optimiser knows of, on the data of two seeds."""
    recipes = [
        recipe.replace(
            {
                "hyperparameters.lr": 1e-3 * 2 ** (trial % 4 - 2),
                "hyperparameters.beta2": 0.95 + 0.01 * (trial % 4),
                "hyperparameters.residual": 1.1 + 0.1 * (trial % 3),
                "data.seed": trial % 2,
            }
        )
        for trial in range(trials)
    ]
    stack = TrialStack(recipes, tokens, device)
    if compiled:
        for block in stack.model.layers:
            block.compile()

    def steps(count: int) -> None:
        for first in range(0, count, READ_EVERY):
            torch.stack([stack.step() for _ in range(min(READ_EVERY, count - first))]).tolist()

    return steps


class Operations(TorchDispatchMode):
    """Counts what is computed, views left out: on a GPU about what there is to be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*arguments, **(named or {}))


def operations(steps: Steps) -> int:
    """Of a step."""
    with Operations() as seen:
        steps(1)
    return seen.count


def race(
    arms: dict[str, Steps], repeats: int, seconds: float, device: torch.device, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of a step of each arm in each round, the first arm of a round being the next one's last."""

    def milliseconds(steps: Steps, count: int) -> float:
        wait(device)
        began = clock()
        steps(count)
        wait(device)
        return (clock() - began) / count * 1e3

    counts = {}
    for name, steps in arms.items():
        milliseconds(steps, 3)  # compiles, and what else is done once
        counts[name] = max(1, round(seconds * 1e3 / milliseconds(steps, 2)))
    rounds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(repeats):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            rounds[name].append(milliseconds(arms[name], counts[name]))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--stacks", default="1,4,16", help="trials of a stack")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, help="of a trial's batch; 16, on a processor 8")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="bf16, on a processor fp32")
    parser.add_argument("--compile", action="store_true", help="the blocks, in all arms")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of an arm in a round, about")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    sequences, dtype = args.sequences or (16 if cuda else 8), args.dtype or ("bf16" if cuda else "fp32")
    if not cuda:
        torch.set_num_threads(1)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    here, form = machine(), "compiled" if args.compile else "eager"
    batch = f"{sequences} sequences of {args.seq_len} tokens a trial and step"
    print(
        f"{device_name(device)}, {here['cores']} cores, torch {here['torch']}; {args.layers} layers, vocabulary "
        f"{VOCABULARY:,}, {batch}, {dtype}, {form}; medians of "
        f"{args.repeats} rounds of about {args.seconds:g} s, {args.clock} time\n"
    )
    print("| width | trials | ms a step | least to most | times one by itself | trials in its time | operations |")
    print("|---|---|---|---|---|---|---|")
    tokens, bar = random_tokens(args.seq_len), None
    for width in map(int, args.widths.split(",")):
        recipe = recipe_of(width, args.layers, sequences, args.seq_len, dtype)
        arms = {"one by itself": by_itself(recipe, tokens, args.device, args.compile)}
        sizes = {"one by itself": 1} | {f"a stack of {size}": int(size) for size in args.stacks.split(",")}
        for name in [*sizes][1:]:
            arms[name] = stacked(recipe, sizes[name], tokens, args.device, args.compile)
        rounds = race(arms, args.repeats, args.seconds, device, clock)
        for name, values in rounds.items():
            # By the round: a slow minute is slow for both.
            times = statistics.median(a / b for a, b in zip(values, rounds["one by itself"], strict=True))
            print(
                f"| {width} | {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} "
                f"| {times:.2f} | {sizes[name] / times:.2f} | {operations(arms[name]):,} |",
                flush=True,
            )
            if (width, sizes[name]) == (256, 16):
                bar = times
    if cuda and bar is not None:
        verdict = "met" if bar < BAR else "missed"
        print(f"\n16 trials of width 256 take {bar:.2f} times the time of one; the bar is {BAR:g}: {verdict}")


if __name__ == "__main__":
    main()
