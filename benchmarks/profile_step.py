"""Show where the time of leaven's training step goes, by group of operations: `python -m benchmarks.profile_step`.

It trains the shapes of benchmarks/throughput.py under torch.profiler, and adds up the time that each operation itself
takes on the main thread. Times are medians of rounds. To profile an older version, put its src folder first:
`PYTHONPATH=OLDER/src python -m benchmarks.profile_step`. `--table BEFORE.json AFTER.json` prints the table of
docs/evidence/performance.md.
"""

import argparse
import json
import re
import statistics
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


def profiled(task: Task, rounds: int, steps: int) -> dict[str, Any]:
    """Return the seconds of a step, in all and of each group: medians of rounds with and without the profiler."""
    config.cpp.enable_kernel_profile = task.compiled  # compiled kernels appear under their names
    run, _ = leaven_steps(task)
    run(3)  # compiles, and creates the optimizer states
    seconds, groups = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        run(steps)
        seconds.append((time.perf_counter() - began) / steps)
        with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("steps"):
            run(steps)
        groups.append(Counter[str]())
        for event in recorded.key_averages():
            groups[-1][group_of(event.key)] += event.self_cpu_time_total / 1e6 / steps
    by_group = {group: statistics.median(each[group] for each in groups) for group in GROUPS}
    return {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "groups": by_group}


def table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return a table of shares, before → after, with a column for each case that both have."""
    olds = {_title(old): old for old in before}
    pairs = [(_title(new), olds[_title(new)], new) for new in after if _title(new) in olds]
    lines = ["| | " + " | ".join(title for title, *_ in pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for group in GROUPS:
        cells = [[run["groups"][group] / sum(run["groups"].values()) for run in runs] for _, *runs in pairs]
        lines.append(f"| {group} | " + " | ".join(f"{old:.0%} → {new:.0%}" for old, new in cells) + " |")
    return "\n".join(lines)


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps in a round")
    parser.add_argument("--json", type=Path, help="add the result to this file")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="only print this table")
    args = parser.parse_args()
    if args.table:
        return print(table(*(json.loads(path.read_text()) for path in args.table)))
    torch.set_num_threads(args.threads)
    task = Task(args.arm, args.case, args.compiled, args.dtype, "cpu", args.threads, 1, "wall", 0.0)
    result = vars(task) | profiled(task, args.rounds, args.steps)
    median, least, most = (result[key] * 1e3 for key in ("seconds", "least", "most"))
    print(f"{_title(result)}: {median:.0f} ms a step ({least:.0f} to {most:.0f}), without the profiler")
    for group, seconds in result["groups"].items():
        print(f"{seconds * 1e3:>8.1f} ms {seconds / sum(result['groups'].values()):>6.1%}  {group}")
    if args.json:
        saved = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*saved, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
