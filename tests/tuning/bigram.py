"""A trainer that knows nothing of leaven: a bigram model of characters, trained by SGD in plain Python."""

import argparse
import json
import math
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

TEXT = [ord(letter) - 97 for letter in "theraininspainstaysmainlyintheplain" * 3]


def train(lr: float, weight_decay: float, seed: int, steps: int = 12) -> Iterator[tuple[int, float]]:
    """Yield (step, mean loss over the text) before the first step and after every step."""
    order = random.Random(seed)
    logits = [[order.gauss(0, 0.1) for _ in range(26)] for _ in range(26)]
    pairs = list(pairwise(TEXT))
    for step in range(steps + 1):
        yield step, sum(_loss(logits[a], b) for a, b in pairs) / len(pairs)
        for a, b in order.sample(pairs, 16):
            chances = _softmax(logits[a])
            for letter in range(26):
                logits[a][letter] -= lr * (chances[letter] - (letter == b) + weight_decay * logits[a][letter])


def _softmax(row: list[float]) -> list[float]:
    highest = max(row)
    weights = [math.exp(x - highest) for x in row]
    return [weight / sum(weights) for weight in weights]


def _loss(row: list[float], target: int) -> float:
    highest = max(row)
    return highest + math.log(sum(math.exp(x - highest) for x in row)) - row[target]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=float(os.environ.get("LR", "0.1")))
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--config")
    parser.add_argument("--out_dir")
    arguments = parser.parse_args()
    if arguments.config:
        vars(arguments).update(json.loads(Path(arguments.config).read_text()))
    for step, loss in train(arguments.lr, arguments.weight_decay, arguments.seed):
        print(f"iter {step}: val loss {loss!r}")
        if arguments.out_dir:
            with Path(arguments.out_dir, "log.jsonl").open("a") as file:
                file.write(json.dumps({"iter": step, "val": loss}) + "\n")
