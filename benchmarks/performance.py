"""Write the tables of docs/evidence/performance.md from results of throughput.py that were saved with `--json`:
`python -m benchmarks.performance [RESULTS.json ...]`.

New results replace those of the same case, dtype, model, clock and threads in benchmarks/throughput.json,
from which the tables are made. Without arguments, only the tables are written again.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "throughput.json"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "performance.md"
AIM = 1.15  # times the best peer
MATMUL_AIMS = {"d256": 0.65, "d512": 0.75}  # share of the best matmul
_TABLE = re.compile(r"\| model \|.*\n(?:\|.*\n)+")


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


def _met(name: str, value: float, aim: float) -> str:
    return f"{name}: {'met' if value >= aim else 'missed'}"


def _speed(row: dict[str, Any]) -> str:
    median, least, most = row["tokens_per_second"]
    return f"{median:,.0f} ({least:,.0f} to {most:,.0f})"


def main(paths: list[str]) -> None:
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    found = {(*key(result), result["threads"]): result for result in saved}
    for path in paths:
        found |= {(*key(result), result["threads"]): result for result in json.loads(Path(path).read_text())}
    results = sorted(found.values(), key=key)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: table(results), page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
