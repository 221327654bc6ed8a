"""Measure speed and memory of tokenising: `python benchmarks/tokenising.py [--mb 200] [--repeats 3] [--ways NAMES]`.

The text is a .jsonl of consecutive lines of Python's standard library, so that it is similar on every machine. Each
method runs in its own process. Methods take turns, in the opposite order in every second round, and medians are
printed with minimum and maximum. "threads" is a single process with one thread per core, as leaven does for small
corpora. "tokenizers alone" and "tokenizers with threads" encode the same texts with the `tokenizers` library, with
one thread and with one thread per core: they read and write no files, and their seconds begin when the texts are in
memory.

"MB/s a core" divides the speed by the cores that a method may use: one, or all of this machine. The last two columns
compare a method with `tokenizers` on the same cores in the same round, by elapsed time and by processor time.

On two cores, `--repeats 2 --ways "2 processes,threads,tokenizers with threads"` takes about 5 minutes.
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
from leaven.planning.this_machine import cores
from leaven.recipe.data import Data, DataSource

VOCAB_SIZE = 32_768
ALONE, ALONE_WITH_THREADS = "tokenizers alone", "tokenizers with threads"
WAYS = {"1 thread": (1, 1), "threads": (1, 0), "2 processes": (2, 0), ALONE: (0, 1), ALONE_WITH_THREADS: (0, 0)}
"""(processes of leaven, or 0 without leaven; threads of the tokenizer, or 0 for as many as there are cores)."""
WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
BATCH = 1_000  # documents that "tokenizers alone" encodes at a time


def generate(path: Path, n_bytes: int) -> None:
    """Write documents of 20 to 400 consecutive lines of the standard library, in random order."""
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
            for way in list(ways)[:: -1 if repeat % 2 else 1]:
                processes, threads = ways[way]
                cache = Path(folder, f"{way} {repeat}")
                command = [sys.executable, __file__, "--way", str(path), str(trained.tokenizer_path), str(cache)]
                environment = os.environ | ({"RAYON_NUM_THREADS": str(threads)} if threads else {})
                run = subprocess.run([*command, str(processes)], check=True, capture_output=True, env=environment)
                results[way].append(json.loads(run.stdout))
        size = path.stat().st_size / 1e6
        print(
            f"{size:.0f} MB of .jsonl, lines of Python's standard library; vocabulary {trained.vocab_size:,}; "
            f"{cores()} cores; medians of {options.repeats} (range)"
        )
        heads = f"{'k tokens/s':>20} {'MB/s a core':>12} {'processor s':>12} {'GiB here':>9} {'largest child':>14}"
        print(f"{'':24} {heads} {'of tokenizers':>14} {'by processor':>13}")
        for way, runs in results.items():
            speeds = sorted(run["tokens"] / run["seconds"] / 1e3 for run in runs)
            keys = ("seconds", "processor_seconds", "self_gib", "largest_child_gib")
            seconds, busy, here, child = (statistics.median(run[key] for run in runs) for key in keys)
            speed = f"{statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
            used = 1 if ways[way][1] == 1 else cores()
            alone = results.get(ALONE if used == 1 else ALONE_WITH_THREADS, [])
            shares = [
                f"{statistics.median(theirs[key] / run[key] for theirs, run in zip(alone, runs, strict=True)):.2f}"
                if alone
                else "-"
                for key in keys[:2]
            ]
            print(
                f"{way:24} {speed:>20} {size / seconds / used:12.2f} {busy:12.1f} {here:9.2f} {child:14.2f} "
                f"{shares[0]:>14} {shares[1]:>13}"
            )


if __name__ == "__main__":
    main()
