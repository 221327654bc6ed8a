"""Measure the start-up time of verbs that need no torch: `python benchmarks/start_up.py`.

Prints medians of nine with their range, in seconds. The last line is the processor time to read and validate the
published runs.
"""

import platform
import statistics
import subprocess
import sys
import time

CASES = {
    "python alone": "pass",
    "import leaven": "import leaven",
    "the floors without torch": "import leaven.planning.plan, leaven.scaling.transfer, leaven.catalogue.laws",
    "and load the published runs": "from leaven.catalogue.runs import load_runs; load_runs()",
    "and plan 405B on 1,024 GPUs": (
        "from leaven.planning.hardware import parse_cluster; from leaven.planning.layouts import Job;"
        "from leaven.planning.plan import plan;"
        "from leaven.recipe.shape import ModelShape;"
        "shape = ModelShape(n_layers=126, d_model=16384, n_heads=128, n_kv_heads=8, d_head=128, d_ff=53248,"
        " vocab_size=128256, seq_len=8192);"
        "plan(Job(shape, 2048 * 8192, parse_cluster('1024xH100-80GB')), 15 * 10**12)"
    ),
}
LOADING = (
    "import time; from leaven.catalogue.runs import load_runs; began = time.process_time(); load_runs();"
    "print(time.process_time() - began)"
)


def seconds(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def printed(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for name, code in (*CASES.items(), ("the published runs alone", LOADING)):
        measured = printed if code is LOADING else seconds
        times = sorted(measured(code) for _ in range(9))
        print(f"{name:<30} {statistics.median(times):6.3f}   {times[0]:.3f} .. {times[-1]:.3f}")
