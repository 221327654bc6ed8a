"""Write the tables of docs/evidence/performance.md from results of throughput.py that were saved with `--json`, and
of accelerator.py: `python -m benchmarks.performance [RESULTS.json ...]`.

New results of throughput.py replace those of the same case, dtype, model, clock and threads in
benchmarks/throughput.json. Those of a GPU replace the same parts in benchmarks/accelerator.json. The tables are made
from these two files. Without arguments, only the tables are written again.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "throughput.json"
GPU_RESULTS = Path(__file__).parent / "accelerator.json"  # missing until a GPU was at hand
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "performance.md"
AIM = 1.15  # times the best peer
MATMUL_AIMS = {"d256": 0.65, "d512": 0.75}  # share of the best matmul
_TABLE = re.compile(r"\| model \|.*\n(?:\|.*\n)+")
_GPU_TABLES = re.compile(r"(?<=<!-- rows of accelerator.json -->\n).*?(?=\n## )", re.DOTALL)


def key(result: dict[str, Any]) -> tuple[Any, ...]:
    model = result["rows"][0]["model"]
    return model != "Llama", result["clock"] != "wall", result["dtype"] != "fp32", result["case"]


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of the page: a row for each case, ratios to the best peer first."""
    lines = [
        "| model | size | dtype | clock, threads | eager / best peer | compiled / best peer | of the best matmul "
        "| aims | best peer | its tokens/s | ours, eager | ours, compiled | date |",
        "|---" * 13 + "|",
    ]
    for result in sorted(results, key=key):
        ours = {row["arm"].endswith("compiled"): row for row in result["rows"] if row["arm"].startswith("leaven")}
        best = max(
            (row for row in result["rows"] if not row["arm"].startswith("leaven")),
            key=lambda row: row["tokens_per_second"][0],
        )
        eager, compiled = ours[False], ours[True]
        share, aim = max(row["share_of_matmul"] for row in ours.values()), MATMUL_AIMS.get(result["case"])
        met = [_met(f"{AIM} eager", eager["of_best_peer"], AIM), _met("compiled", compiled["of_best_peer"], AIM)]
        met += [_met(f"{aim:.0%} of the matmul", share, aim)] if aim else []
        cells = [
            eager["model"],
            result["case"],
            result["dtype"],
            f"{result['clock']}, {result['threads']}",
            *(f"**{row['of_best_peer']:.2f}**" for row in (eager, compiled)),
            f"{share:.0%}",
            ", ".join(met),
            best["arm"],
            *(_speed(row) for row in (best, eager, compiled)),
            result["date"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def gpu_tables(parts: dict[str, Any]) -> str:
    """Return a table for each part of accelerator.py: its rows, and why rows are missing."""
    lines = []
    for name, part in parts.items():
        lines += ["", f"### {name}", "", f"{part['device']}, torch {part['torch']}, {part['date']}.", ""]
        lines += [f"Incomplete: {part['error'].splitlines()[-1]}", ""] if part["error"] else []
        keys = list(dict.fromkeys(key for row in part["rows"] for key in row if key != "longest"))
        if keys:
            rows = [[_cell(row.get(key, "")) for key in keys] for row in part["rows"]]
            heads = [key.replace("_", " ") for key in keys]
            lines += [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(keys), *rows)]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {share:.0%}" for key, share in value.items())
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")


def _met(name: str, value: float, aim: float) -> str:
    return f"{name}: {'met' if value >= aim else 'missed'}"


def _speed(row: dict[str, Any]) -> str:
    median, least, most = row["tokens_per_second"]
    return f"{median:,.0f} ({least:,.0f} to {most:,.0f})"


def main(paths: list[str]) -> None:
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    found = {(*key(result), result["threads"]): result for result in saved}
    parts = json.loads(GPU_RESULTS.read_text()) if GPU_RESULTS.exists() else {}
    for path in paths:
        given = json.loads(Path(path).read_text())
        if isinstance(given, list):
            found |= {(*key(result), result["threads"]): result for result in given}
            continue
        where = {name: given[name] for name in ("device", "torch", "date")}
        new = {name: where | part for name, part in given["parts"].items() if part["rows"]}
        if given["rehearsal"]:
            print(gpu_tables(new))  # no measurement, so not for the page
        else:
            parts |= new
            GPU_RESULTS.write_text(json.dumps(parts, indent=1) + "\n")
    results = sorted(found.values(), key=key)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    page = _TABLE.sub(lambda _: table(results), PAGE.read_text(encoding="utf-8"), count=1)
    PAGE.write_text(_GPU_TABLES.sub(lambda _: gpu_tables(parts), page, count=1) if parts else page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
