"""Show where the time of leaven's training step goes, by group of operations: `python -m benchmarks.profile_step`.

It trains the shapes of benchmarks/throughput.py under torch.profiler, and adds up the time that each operation itself
takes on the main thread. To profile an older version, put its src folder first: `PYTHONPATH=OLDER/src python -m
benchmarks.profile_step`. `--table BEFORE.json AFTER.json` prints the table of docs/evidence/performance.md.
"""

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks.throughput import CASES, Task, leaven_steps
from torch._inductor import config
from torch.profiler import ProfilerActivity, profile, record_function

# The first pattern that a name matches decides. The name of a compiled kernel lists the operations in it.
GROUPS = {
    "products of linear layers and loss": r"aten::(mm|addmm)$|_linear_pointwise|leaven::onednn",
    "products of attention": r"aten::(bmm|baddbmm)",
    "softmax of attention and loss, exponentials": r"softmax|exp(?!and)|aten::(log|amax)$",
    "copies and casts": r"aten::(copy_|clone|cat)$",
    "Adam and norms of gradients": r"adam|foreach",
    "norms, positions, activations, additions": r"aten::|cpp_fused",
    "Python and autograd": "",
}


def group_of(name: str) -> str:
    """Return the group of an operation or of a compiled kernel."""
    return next(group for group, names in GROUPS.items() if re.search(names, name))


def profiled(task: Task, steps: int) -> dict[str, Any]:
    """Return the seconds of a step with and without the profiler, the shares of groups, and of single operations."""
    config.cpp.enable_kernel_profile = task.compiled  # compiled kernels appear under their names
    run, _ = leaven_steps(task)
    run(3)  # compiles, and creates the optimizer states
    began = time.perf_counter()
    run(steps)
    seconds = (time.perf_counter() - began) / steps
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("steps"):
        run(steps)
    times = Counter({event.key: event.self_cpu_time_total for event in recorded.key_averages()})
    total, groups = sum(times.values()), Counter(dict.fromkeys(GROUPS, 0.0))
    for name, microseconds in times.items():
        groups[group_of(name)] += microseconds / total
    operations = {name: microseconds / total for name, microseconds in times.most_common(30)}
    return {"seconds": seconds, "profiled": total / 1e6 / steps, "shares": dict(groups), "operations": operations}


def table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return a table of milliseconds, before -> after, with a column for each case that both have."""
    olds = {_title(old): old for old in before}
    pairs = [(_title(new), olds[_title(new)], new) for new in after if _title(new) in olds]
    lines = ["| ms of a step | " + " | ".join(title for title, *_ in pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for group in GROUPS:
        cells = [[run["shares"][group] * run["seconds"] * 1e3 for run in runs] for _, *runs in pairs]
        lines.append(f"| {group} | " + " | ".join(f"{old:.0f} → {new:.0f}" for old, new in cells) + " |")
    sums = [[run["seconds"] * 1e3 for run in runs] for _, *runs in pairs]
    return "\n".join([*lines, "| **all** | " + " | ".join(f"**{old:.0f} → {new:.0f}**" for old, new in sums) + " |"])


def _title(result: dict[str, Any]) -> str:
    model = "GPT-2 " if "GPT-2" in result["arm"] else ""
    return f"{model}{result['case']} {result['dtype']}, {'compiled' if result['compiled'] else 'eager'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="d128")
    parser.add_argument("--arm", choices=("leaven", "leaven, GPT-2"), default="leaven")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="add the result to this file")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="only print this table")
    args = parser.parse_args()
    if args.table:
        return print(table(*(json.loads(path.read_text()) for path in args.table)))
    torch.set_num_threads(args.threads)
    task = Task(args.arm, args.case, args.compiled, args.dtype, "cpu", args.threads, 1, "wall", 0.0)
    result = vars(task) | profiled(task, args.steps)
    plain, slower = result["seconds"] * 1e3, result["profiled"] * 1e3
    print(f"{_title(result)}: {plain:.0f} ms a step ({slower:.0f} with the profiler)")
    for group, share in result["shares"].items():
        print(f"{share:>6.1%}  {group}")
    if args.json:
        saved = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*saved, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
