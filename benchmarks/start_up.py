"""Measure the processor time of commands that need no torch: `python benchmarks/start_up.py [--check]`.

Prints the best of nine runs in seconds, and its ratio to `python -c "import pydantic, rich, typer"`, which every
command needs; the ratio varies little between machines. With `--check` the exit code is 1 if a ratio is over its
limit. The last line is the processor time to read and validate the published runs. Byte code is cached, as after `pip
install`.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile

BASE = "import pydantic, rich, typer"
VERB = "import sys; sys.argv = ['leaven', *{!r}.split()]; from leaven.cli import main; main()"
LOADING = (
    "import time; from leaven.catalogue.runs import load_runs; began = time.process_time(); load_runs();"
    "print(time.process_time() - began)"
)
LIMITS = {  # limits of the ratio, 1.3 to 1.4 times the measured ratios (docs/log.md)
    "--help": 2.2,
    "recipes list": 5.7,
    "laws --params 1B --tokens 20B": 4.2,
    "plan bloom-176b --gpus 384xA100-80GB": 5.7,
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


def main() -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio exceeds its limit")
    check = parser.parse_args().check
    cases = {BASE: BASE, **{verb: VERB.format(verb) for verb in LIMITS}}
    with tempfile.TemporaryDirectory() as cache:
        times = {name: min(seconds(code, cache) for _ in range(9)) for name, code in cases.items()}
        loading = min(float(_printed(LOADING)) for _ in range(9))
    print(f"{platform.machine()}, Python {platform.python_version()}")
    slow = [verb for verb, limit in LIMITS.items() if times[verb] > limit * times[BASE]]
    for name, took in times.items():
        limit = f"  limit {LIMITS[name]:.1f}" if name in LIMITS else ""
        print(f"{name:<40} {took:6.3f} s   x {took / times[BASE]:.1f}{limit}{'  TOO SLOW' if name in slow else ''}")
    print(f"{'reading the published runs alone':<40} {loading:6.3f} s")
    return int(check and bool(slow))


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
