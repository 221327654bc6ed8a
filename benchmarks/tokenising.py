"""Measure speed and memory of tokenising: `python benchmarks/tokenising.py [--mb 200] [--repeats 3] [--ways NAMES]`.

The text is a .jsonl of consecutive lines of Python's standard library, so that it is similar on every machine. Each
method runs in its own process, methods take turns, and medians are printed with minimum and maximum. One of the
methods uses a single process with one thread per core, as leaven does for small corpora. "tokenizers alone" encodes
the same texts with the `tokenizers` library and one thread: it reads and writes no files, and its seconds begin when
the texts are in memory. The last column compares processor seconds with it, in the same turn.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from leaven.data.corpus import open_corpora
from leaven.data.tokens import prepare
from leaven.recipe.data import Data, DataSource

VOCAB_SIZE = 32_768
ALONE = "tokenizers alone"
WAYS = {"1 thread": (1, 1), "threads": (1, 0), "2 processes": (2, 0), ALONE: (0, 1)}
"""(processes of leaven, or 0 without leaven; threads of the tokenizer, or 0 for as many as there are cores)."""
WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
BATCH = 1_000  # documents that "tokenizers alone" encodes at a time


def generate(path: Path, n_bytes: int) -> None:
    """Yield documents of 20 to 400 consecutive lines of the standard library, in random order."""
    chance = random.Random(0)
    (corpus,) = open_corpora([DataSource(source="python-stdlib")], 0.0)
    texts = [document.text.splitlines(keepends=True) for document in corpus.documents()]
    weights = [len(lines) for lines in texts]
    written = 0
    with path.open("w") as file:
        while written < n_bytes:
            (lines,) = chance.choices(texts, weights)
            first = chance.randrange(len(lines))
            text = "".join(lines[first : first + chance.randint(20, 400)])
            written += file.write(json.dumps({"text": text}) + "\n")


def measure(source: str, tokenizer: str, cache: Path, processes: int) -> None:
    """Run one method in this process; print tokens, seconds including reading, processor seconds and peak GiB."""
    if processes:
        began, before = time.perf_counter(), processor_seconds()
        found = prepare(Data(source=source, tokenizer=tokenizer, tokens=1), VOCAB_SIZE, cache, processes=processes)
        tokens = len(found.train) + len(found.validation)
    else:
        encoder = Tokenizer.from_file(tokenizer)
        texts = [json.loads(line)["text"] for line in Path(source).read_text().splitlines()]
        began, before = time.perf_counter(), processor_seconds()
        batches = (encoder.encode_batch_fast(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH))
        tokens = sum(len(encoding.ids) for batch in batches for encoding in batch)
    seconds = time.perf_counter() - began
    here, children = (resource.getrusage(who) for who in WHOSE)
    result = {
        "tokens": tokens,
        "seconds": seconds,
        "processor_seconds": processor_seconds() - before,
        "self_gib": here.ru_maxrss / 2**20,
        "largest_child_gib": children.ru_maxrss / 2**20,
    }
    print(json.dumps(result))


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    return sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime for who in WHOSE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="methods to measure, comma-separated")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        source, tokenizer, cache, processes = options.way
        measure(source, tokenizer, Path(cache), int(processes))
        return
    with TemporaryDirectory() as folder:
        path = Path(folder, "generated.jsonl")
        generate(path, options.mb * 10**6)
        trained = prepare(Data(tokens=1), VOCAB_SIZE, Path(folder, "tokenizer"))
        ways = {way: WAYS[way] for way in options.ways.split(",")}
        results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for repeat in range(options.repeats):
            for way, (processes, threads) in ways.items():
                cache = Path(folder, f"{way} {repeat}")
                command = [sys.executable, __file__, "--way", str(path), str(trained.tokenizer_path), str(cache)]
                environment = os.environ | ({"RAYON_NUM_THREADS": str(threads)} if threads else {})
                run = subprocess.run([*command, str(processes)], check=True, capture_output=True, env=environment)
                results[way].append(json.loads(run.stdout))
        size = path.stat().st_size / 1e6
        print(f"{size:.0f} MB of .jsonl, vocabulary {trained.vocab_size:,}, medians of {options.repeats} (range)")
        heads = f"{'k tokens/s':>20} {'MB/s':>6} {'processor s':>12} {'MB a processor s':>17}"
        print(f"{'':16} {heads} {'GiB here':>9} {'largest child':>14} {'of tokenizers':>14}")
        alone = results.get(ALONE, [])
        for way, runs in results.items():
            speeds = sorted(run["tokens"] / run["seconds"] / 1e3 for run in runs)
            keys = ("seconds", "processor_seconds", "self_gib", "largest_child_gib")
            seconds, busy, here, child = (statistics.median(run[key] for run in runs) for key in keys)
            speed = f"{statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
            pairs = zip(alone, runs, strict=False)  # without "tokenizers alone" there are none
            shares = [theirs["processor_seconds"] / run["processor_seconds"] for theirs, run in pairs]
            print(
                f"{way:16} {speed:>20} {size / seconds:6.1f} {busy:12.1f} {size / busy:17.2f} "
                f"{here:9.2f} {child:14.2f} {f'{statistics.median(shares):.2f}' if shares else '-':>14}"
            )


if __name__ == "__main__":
    main()
