"""Measure the processor time of commands that need no torch: `python benchmarks/start_up.py`.

Prints the best of nine runs in seconds, and its ratio to `python -c "import pydantic, rich, typer"`, which every
command needs. An earlier ratio stands beside it. A slow or busy machine changes a ratio by a third, so no ratio is an
error. The last line is the processor time to read and validate the published runs. Byte code is cached, as after `pip
install`.

`--gb 10` measures something else: `leaven train` with one step of a tiny model, from the start of the process to its
end, on a file of 10 GB of 16-bit token ids. The file is sparse, so it takes no space and is read faster than from a
disk. The first start reads all ids for checksums, later starts do not; a file of 1 MB shows the time without them.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASE = "import pydantic, rich, typer"
VERB = "import sys; sys.argv = ['leaven', *{!r}.split()]; from leaven.cli import main; main()"
LOADING = (
    "import time; from leaven.catalogue.runs import load_runs; began = time.process_time(); load_runs();"
    "print(time.process_time() - began)"
)
MEASURED = {  # ratios of 30 November 2026, on 2 cores of a Xeon with other work on both
    "--help": 1.9,
    "recipes list": 4.7,
    "laws --params 1B --tokens 20B": 3.2,
    "plan bloom-176b --gpus 384xA100-80GB": 4.9,
}


def seconds(code: str, cache: str) -> float:
    """Return the processor time of a new Python process that runs ``code``, to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ending = f"import atexit, sys, time; atexit.register(lambda: sys.stderr.write(str(time.process_time()))); {code}"
    done = subprocess.run(
        [sys.executable, "-c", ending],
        env=environment | {"PYTHONPYCACHEPREFIX": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stderr)


def train(gigabytes: float, starts: int = 3) -> None:
    """Print elapsed and processor time of `leaven train` with one step, for each start on a file of token ids."""
    recipe = Path(__file__).parent / "tuning" / "proxy.toml"
    for size in (0.001, gigabytes):
        with tempfile.TemporaryDirectory() as folder:
            ids = Path(folder, "ids.bin")
            with ids.open("wb") as file:  # zeros without room on the disk; a file that ends with them is refused
                file.seek(2 * int(size * 1e9 / 2) - 2)
                file.write(b"\1\0")
            changes = [f"data.source={ids}", "data.tokens=512", "schedule.warmup_tokens=0", "evaluation.tokens=512"]
            sets = [word for change in (*changes, "precision.compute=fp32") for word in ("--set", change)]
            for start in range(1, starts + 1):
                command = [sys.executable, "-m", "leaven", "train", str(recipe), "--run-folder", f"{folder}/{start}"]
                began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                environment = os.environ | {"LEAVEN_CACHE": f"{folder}/cache", "LEAVEN_DEVICE": "cpu"}
                subprocess.run([*command, *sets], env=environment, capture_output=True, check=True)
                took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
                busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                print(f"{size:g} GB of token ids, start {start}: {took:6.1f} s, {busy:6.1f} s of processor time")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gb", type=float, help="instead: start `leaven train` on a file of this many GB of token ids"
    )
    gigabytes = parser.parse_args().gb
    if gigabytes:
        train(gigabytes)
        return
    cases = {BASE: BASE, **{verb: VERB.format(verb) for verb in MEASURED}}
    with tempfile.TemporaryDirectory() as cache:
        times = {name: min(seconds(code, cache) for _ in range(9)) for name, code in cases.items()}
        loading = min(float(_printed(LOADING)) for _ in range(9))
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for name, took in times.items():
        measured = f"  (was {MEASURED[name]:.1f})" if name in MEASURED else ""
        print(f"{name:<40} {took:6.3f} s   x {took / times[BASE]:.1f}{measured}")
    print(f"{'reading the published runs alone':<40} {loading:6.3f} s")


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
