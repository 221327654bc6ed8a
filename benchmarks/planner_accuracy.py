"""Compare `leaven plan` with published measurements.

    python benchmarks/planner_accuracy.py [TABLES.yaml ...] [--json] [--page]

Plans every run in the tables (by default those in benchmarks/published) in the layout that was measured. The error of
memory or time is predicted / measured - 1: "mean" is the mean of its absolute value, "bias" its mean, "low" its
minimum. Errors of parameters, FLOPs, MFU and days exclude the rounding of the published numbers. The exit code is 1
if an error is above its limit, and 2 if a file cannot be read.
"""

import argparse
import json
import sys
from itertools import chain, count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for running as a script

from benchmarks.planner.judge import judge
from benchmarks.planner.page import LATER, PAGE, PICTURE, picture, renewed
from benchmarks.planner.tables import Table, read
from benchmarks.planner.verdict import TableVerdict

from leaven.errors import InputError

PUBLISHED = Path(__file__).parent / "published" / "tables.yaml"
LATER_TABLES = [PUBLISHED.with_name(f"blind-experts-{test}.yaml") for test in (2, 3, 4, 5, 6)]
TIMES = Path(__file__).parents[1] / "src" / "leaven" / "planning" / "published_times.toml"
_TOLD = {
    "bloom_layout_search": "BLOOM",
    "mpt_fsdp_bf16": "MPT",
    "mpt_fsdp_h100": "MPT on H100",
    "ultrascale_playbook_summary": "nanotron",
    "torchtitan_llama31_h100": "torchtitan",
}
# The tables with experts in which no faults were searched.
_TOLD_OF_EXPERTS = {
    "simumax_b200_deepseek_v2": "DeepSeek-V2",
    "simumax_b200_deepseek_v3": "DeepSeek-V3",
    "megatron_experts_h100": "Qwen3",
}
# Which training code ran the rows of a table, and when, as `leaven plan` prints it.
_CODES = {
    "mpt_fsdp_h100": "llm-foundry of October 2023",
    "llama3_405b_table4": "Llama 3's own code of 2024",
    "torchtitan_llama31_h100": "torchtitan of December 2024, bf16 and FP8",
    "megatron_llama3_fp8_h100": "Megatron-LM in FP8",
    "ultrascale_playbook_summary": "nanotron of 2025",
    "megatron_experts_h100": "Megatron-LM (Megatron-MoE-ModelZoo)",
    "bloom_layout_search": "Megatron-DeepSpeed of 2022",
    "korthikanti2022_table5": "Megatron-LM of 2022",
    "mpt_fsdp_bf16": "llm-foundry of 2023",
    "simumax_b200_llama3_70b": "Megatron-LM (SimuMax, Llama 3 70B)",
    "simumax_b200_llama3_405b": "Megatron-LM (SimuMax, Llama 3 405B)",
    "simumax_b200_long_context": "Megatron-LM (SimuMax, long sequences)",
    "simumax_b200_deepseek_v2": "Megatron-LM (SimuMax, DeepSeek-V2)",
    "simumax_b200_deepseek_v3": "Megatron-LM (SimuMax, DeepSeek-V3)",
    "megatron_bridge_experts": "Megatron-Bridge 25.11",
    "folding_scaling": "Megatron-LM (MoE Parallel Folding)",
    "bridge_qwen3_30b_h100": "Megatron-Bridge of 2026 (HybridEP)",
    "automodel_h100": "NeMo AutoModel of October 2025",
    "primus_mi355x": "Megatron-LM on ROCm (Primus)",
    "grok1_h100": "NeMo 24.12 (Grok-1)",
    "xtuner_h800": "Pai-Megatron-Patch (measured by XTuner)",
    "torchtitan_deepep_b200": "torchtitan of November 2025 with DeepEP",
    "llama4_maverick_gb200": "Megatron-Bridge (Llama 4)",
    "aws_qwen3_30b_h100": "Megatron-Bridge on AWS (Qwen3-30B)",
    "aws_qwen3_235b_b300": "Megatron-Bridge on AWS (Qwen3-235B)",
    "aws_qwen3_235b_full_b300": "Megatron-Bridge on AWS (Qwen3-235B, full recomputation)",
    "aws_kimi_b300": "Megatron-Bridge on AWS (Kimi K2)",
    "olmoe_mfsdp_h100": "Megatron-FSDP (OLMoE)",
}
_COLUMNS = (
    ("rows", "rows", "{:d}"),
    ("params", "params_err_max", "{:.2%}"),
    ("FLOPs", "flops_err_max", "{:.2%}"),
    ("MFU pt", "mfu_err_max_points", "{:.2f}"),
    ("days", "days_err_max", "{:.1%}"),
    ("memory", "memory_rows", "{:d}"),
    ("mean", "memory_err_mean", "{:.1%}"),
    ("bias", "memory_bias", "{:+.1%}"),
    ("low", "memory_worst_low", "{:+.1%}"),
    ("time", "time_rows", "{:d}"),
    ("mean", "time_err_mean", "{:.1%}"),
    ("OOM fits", "oom_called_fit", "{:d}"),
    ("top 3", "best_in_top3", "{}"),
)


def lines(verdicts: list[TableVerdict]) -> list[str]:
    """Return the printed table, followed by notes on rows that are in no column."""
    width = max(len(verdict.table.id) for verdict in verdicts)
    found = [f"{'table':<{width}}" + "".join(f"{head:>9}" for head, _, _ in _COLUMNS)]
    for verdict in verdicts:
        values = verdict.to_json()
        cells = ("" if values[key] is None else form.format(values[key]) for _, key, form in _COLUMNS)
        found.append(f"{verdict.table.id:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    found = [line.rstrip() for line in found]
    for verdict in verdicts:
        notes = list(_notes(verdict))
        if notes:
            found += ["", verdict.table.id, *(f"  {note}" for note in notes)]
    return found


def _notes(verdict: TableVerdict) -> list[str]:
    notes = [f"{verdict.identities} identities checked"] if verdict.identities else []
    for kind in ("memory", "time"):
        points = [point for point in verdict.points if point.kind == kind]
        if points:
            worst = max(points, key=lambda point: abs(point.error))
            notes.append(f"{kind}: worst {worst.error:+.0%} at {worst.where}")
    if verdict.bubbles:
        notes.append(f"bubble: within {max(verdict.bubbles):.2%} of one slope in {len(verdict.bubbles)} layouts")
    if verdict.groups:
        notes.append(
            f"measured best is of the three best predicted in {sum(verdict.groups)} of {len(verdict.groups)}"
        )
    if verdict.ran_called_too_large:
        notes.append(f"ran and called too large: {len(verdict.ran_called_too_large)} of {verdict.ran}")
    notes += [f"ran out of memory and called fitting: {where}" for where in verdict.oom_called_fit]
    if verdict.chosen:
        notes.append(f"no micro-batch said, time with the fastest that fits: {_rows(verdict.chosen)}")
    notes += [f"{why} ({_rows(rows)})" for why, rows in sorted(verdict.unused.items())]
    if verdict.table.unread:
        notes.append(f"columns not read: {', '.join(verdict.table.unread)}")
    notes += [f"left out, {anomaly}" for anomaly in verdict.anomalies]
    return notes + [f"MISSED {bar}" for bar in verdict.missed()]


def accuracy_line(verdicts: list[TableVerdict], experts: bool = False) -> str:
    """Return the sentence in which ``leaven plan`` states its errors: on dense models, where only tables with many
    rows are used, or on mixtures of experts."""
    told, models = (_TOLD_OF_EXPERTS, "mixtures of experts") if experts else (_TOLD, "runs")

    def stated(verdict: TableVerdict, kind: str) -> str:
        errors = verdict.errors(kind)
        mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
        return f"{mean:.0%} over {len(errors)} rows of {told[verdict.table.id]} (worst {worst:+.0%})"

    many = sorted((v for v in verdicts if v.table.id in told), key=lambda v: list(told).index(v.table.id))
    kinds = (f"{kind} {', '.join(stated(v, kind) for v in many if v.errors(kind))}" for kind in ("time", "memory"))
    return f"mean error on published {models}: {'; '.join(kinds)}; see docs/evidence/planner-accuracy.md"


def published_times(verdicts: list[TableVerdict]) -> str:
    """Return the text of src/leaven/planning/published_times.toml: measured / planned time of a step by table."""
    found = {verdict.table.id: verdict for verdict in verdicts}
    lines = [
        "# Time of a step of published runs, measured / planned: the lowest and the highest row of each table.",
        "# Written by `make docs-accuracy` from benchmarks/published/tables.yaml. `leaven plan` prints those of its",
        "# accelerator.",
        "times = [",
    ]
    for name, code in _CODES.items():
        points = [point for point in found[name].points if point.kind == "time" and point.case]
        ratios = [point.measured / point.predicted for point in points]
        row = {
            "accelerator": points[0].case.cluster.accelerator.name.partition("-")[0] if points[0].case else "",
            "experts": "experts" in name or "deepseek" in name or any(name in tables for tables in LATER.values()),
            "code": code,
            "rows": len(points),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
            "source": found[name].table.sources[str(found[name].table.fields["source"])],
        }
        lines.append(f"  {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in row.items())} }},")
    return "\n".join([*lines, "]", ""])


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def _distinct(tables: list[Table]) -> list[Table]:
    """Return the tables with unique ids: a number is appended to repeated ids."""
    taken: set[str] = set()
    for table in tables:
        table.id = next(
            name for name in chain([table.id], (f"{table.id} ({n})" for n in count(2))) if name not in taken
        )
        taken.add(table.id)
    return tables


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How far the planner is off on published tables.")
    parser.add_argument(
        "tables", nargs="*", type=Path, default=[PUBLISHED], help="YAML files; default: benchmarks/published"
    )
    parser.add_argument("--page", action="store_true", help=f"update {PAGE.name} and its chart")
    parser.add_argument(
        "--accuracy-line", action="store_true", help="print the sentences in which `leaven plan` states its errors"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document: {table: {...}}")
    asked = parser.parse_args(arguments)
    try:
        verdicts = [judge(table) for table in _distinct([table for path in asked.tables for table in read(path)])]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.page:
        later = [judge(table) for path in LATER_TABLES for table in read(path)]
        page = renewed(PAGE.read_text(encoding="utf-8"), "\n".join(lines(verdicts)), verdicts, later)
        PAGE.write_text(page, encoding="utf-8")
        PICTURE.write_text(picture(verdicts), encoding="utf-8")
        TIMES.write_text(published_times([*verdicts, *later]), encoding="utf-8")
    elif asked.accuracy_line:
        print("\n".join(accuracy_line(verdicts, experts) for experts in (False, True)))
    elif asked.json:
        print(json.dumps({verdict.table.id: verdict.to_json() for verdict in verdicts}, indent=1, allow_nan=False))
    else:
        print("\n".join(lines(verdicts)))
    return int(any(verdict.missed() for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
