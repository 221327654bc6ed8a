"""How benchmarks/planner_accuracy.py reads tables that it has never seen."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner.judge import judge
from benchmarks.planner.tables import read
from benchmarks.planner.verdict import Verdict
from benchmarks.planner_accuracy import main

KEYS = [
    "rows",
    "params_err_max",
    "flops_err_max",
    "mfu_err_max_points",
    "memory_rows",
    "memory_err_mean",
    "memory_bias",
    "memory_worst_low",
    "time_rows",
    "time_err_mean",
    "days_err_max",
    "oom_called_fit",
    "best_in_top3",
]
SOURCES = """
sources: {somewhere: 'Megatron-LM, a paper', elsewhere: 'github.com/pytorch/torchtitan'}
tables:
"""
# Narayanan 2021, table 1: 145.6B took 148 TFLOP/s and 227.1 PFLOP/s together
GPT = """
  - id: %s
    source: somewhere
    hardware: A100-SXM-80GB, 8 a node (a cluster)
    peak_tflops: 312
    seq_len: 2048
    vocab: 51200
    recompute: full
    flops_convention: narayanan_hw
    colour: blue
    rows:
      - {params_b: 145.6, h: 12288, a: 96, L: 80, tp: 8, pp: 8, gpus: 1536, gbs: 2304, mbs: 2, vpp: 2, %s}
"""


def one(tmp_path: Path, text: str) -> Verdict:
    file = tmp_path / "tables.yaml"
    file.write_text(SOURCES + text)
    (table,) = read(file)
    return judge(table)


def found(tmp_path: Path, text: str) -> dict[str, Any]:
    return one(tmp_path, text).to_json()


def test_unknown_fields_are_ignored_and_what_is_there_is_compared(tmp_path: Path) -> None:
    values = found(tmp_path, GPT % ("new", "tflops: 148, aggregate_pflops: 227.1, weather: fine, pct_peak: 47"))
    assert list(values) == KEYS
    assert (values["rows"], values["params_err_max"], values["flops_err_max"], values["time_rows"]) == (1, 0, 0, 1)
    assert values["mfu_err_max_points"] == 0
    assert values["time_err_mean"] < 0.15
    assert values["memory_err_mean"] is values["days_err_max"] is values["oom_called_fit"] is None


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ("tflops: 148, aggregate_pflops: 230.1", "flops_err_max"),
        ("iter_s: 25.5, tflops: 148", "flops_err_max"),  # 145.6B at 148 takes 24.8 s
        ("tflops: 148, pct_peak: 49", "mfu_err_max_points"),
        ("tflops: 148, tokens: 300B, days: 14.0", "days_err_max"),  # 12.5
        ("tflops: 20", "time_err_mean"),
    ],
)
def test_a_number_that_does_not_follow_from_the_others_misses_its_bar(tmp_path: Path, row: str, key: str) -> None:
    assert [bar.split()[0] for bar in one(tmp_path, GPT % ("wrong", row)).missed()] == [key]


def test_parameters_are_held_to_their_printed_rounding(tmp_path: Path) -> None:
    right, wrong = GPT % ("sizes", "tflops: 148"), (GPT % ("sizes", "tflops: 148")).replace("145.6", "145.8")
    assert found(tmp_path, right)["params_err_max"] == 0
    assert found(tmp_path, wrong)["params_err_max"] == pytest.approx(0.1 / 145.8, rel=0.5)


def test_days_of_a_whole_run_are_counted_with_attention(tmp_path: Path) -> None:
    # Narayanan 2021, 5.1: 175B on 1,024 GPUs at 140 TFLOP/s for 300B tokens is 34 days, 1T on 3,072 at 163 is 84
    text = """
  - id: days
    source: somewhere
    seq_len: 2048
    vocab: 51200
    note: the first for 300B tokens
    rows:
      - {a: 96, h: 12288, L: 96, gpus: 1024, tflops: 140, days: 34}
      - {a: 160, h: 25600, L: 128, gpus: 3072, tflops: 163, days: 84, tokens: 450B}
"""
    verdict = one(tmp_path, text)
    assert 0 < max(verdict.days) < 0.02
    assert not verdict.unused
    assert verdict.to_json()["days_err_max"] == max(verdict.days)


def test_a_row_that_ran_out_of_memory_must_not_be_called_fitting(tmp_path: Path) -> None:
    row = GPT % ("oom", "dp: 24, oom: true")
    assert found(tmp_path, row.replace("mbs: 2", "mbs: 32"))["oom_called_fit"] == 0
    verdict = one(tmp_path, row)
    assert verdict.to_json()["oom_called_fit"] == 1
    assert verdict.missed() == ["oom_called_fit 1, bar 0"]


def test_rows_with_an_anomaly_are_left_out_and_told_and_old_tflops_serve_memory_only(tmp_path: Path) -> None:
    rows = GPT % ("marked", "dp: 3, iter_s: 1, tflops: 999, anomaly: columns swapped")
    verdict = one(tmp_path, rows)
    assert verdict.anomalies == ["row 1: columns swapped"]
    assert not verdict.points
    assert not verdict.broken
    old = one(tmp_path, GPT % ("old", "iter_s: 1, tflops: 999, tflops_formula: old, mem_gb: 60"))
    assert [point.kind for point in old.points] == ["memory"]
    assert not old.flops


def test_a_product_that_is_not_the_gpus_is_told(tmp_path: Path) -> None:
    verdict = one(tmp_path, GPT % ("broken", "dp: 25, tflops: 148"))
    assert verdict.broken == ["row 1 (1600 is not 1536)"]
    assert any("identities" in bar for bar in verdict.missed())


def test_a_row_that_lacks_something_is_counted_with_its_reason(tmp_path: Path) -> None:
    text = (GPT % ("short", "tflops: 148")).replace("params_b: 145.6, ", "")
    for field, why in (("L: 80, ", "no L"), ("mbs: 2, ", "no micro-batch"), ("h: 12288, ", "no h")):
        assert dict(one(tmp_path, text.replace(field, "")).unused) == {why: 1}
    nowhere = text.replace("source: somewhere", "source: nobody")
    assert dict(one(tmp_path, nowhere).unused) == {"it is not said which code ran it": 1}


def test_layouts_models_and_machines_in_words(tmp_path: Path) -> None:
    text = """
  - id: worded
    source: elsewhere
    hardware: H100 96 GB (HBM2e 2.4 TB/s, 500 W limit), 8 a node, 400 Gb/s per GPU
    precision: bf16 unless fp8 is named
    rows:
      - {model: 70B, gpus: 256, layout: fsdp32 x tp8, seq_len: 8192, lbs: 16, ac: full,
         options: compile+float8, tps: 829}
      - {model: 8B, gpus: 8, layout: fsdp4 x cp2, seq_len: 65536, lbs: 1, ac: sac,
         options: compile, tps: 2000, mem_gib: 80}
"""
    big, small, memory = sorted(one(tmp_path, text).points, key=lambda point: (point.kind == "memory", point.where))
    assert memory.kind == "memory"
    assert big.case is not None
    assert small.case is not None
    layout, cluster = big.case.how.layout, big.case.cluster
    assert (layout.dp, layout.tp, layout.zero, layout.recompute, layout.compile) == (32, 8, 3, "full", True)
    assert (big.case.shape.d_model, big.case.how.micro_batch, cluster.gpus) == (8192, 16, 256)
    assert (cluster.accelerator.memory_gib, cluster.accelerator.memory_tb_s) == (96, 2.4)
    assert cluster.accelerator.matmul_flops < 0.9 * 794.5e12  # held to less power
    assert big.case.stack.code.pace.products == "fp8"
    assert small.case.stack.code.pace.products == "bf16"
    assert (small.case.how.layout.cp, small.case.how.layout.dp, small.case.how.layout.recompute) == (
        2,
        4,
        "selective",
    )
    assert big.measured == pytest.approx(32 * 16 * 8192 / 829 / 256)


def test_a_size_stands_for_the_large_gpts_and_flops_need_no_layout(tmp_path: Path) -> None:
    # MT-NLG (arXiv 2201.11990, 2.3): 530B, 1,920 sequences in 60.1 s on 280 nodes, 126 TFLOP/s
    text = """
  - id: large
    source: somewhere
    hardware: A100-SXM-80GB
    seq_len: 2048
    vocab: 51200
    flops_convention: narayanan_hw
    rows:
      - {params_b: 530, gpus: 2240, nodes: 280, gbs: 1920, iter_s: 60.1, tflops: 126}
"""
    verdict = one(tmp_path, text)
    assert (verdict.params, verdict.flops, verdict.identities) == ([0], [0], 1)
    assert not verdict.points  # no layout, no time


def test_a_row_of_a_table_of_several_gpus_says_which_it_had(tmp_path: Path) -> None:
    text = (GPT % ("mixed", "tflops: 148, gpu: a100")).replace("A100-SXM-80GB, 8", "per row; A100 or H100, 8")
    assert one(tmp_path, text).points
    nowhere = one(tmp_path, text.replace(", gpu: a100", ""))
    assert not nowhere.points


def test_the_best_of_several_layouts_is_looked_for_among_batches_alike(tmp_path: Path) -> None:
    head, row = (GPT % ("many", "tflops: 148")).rsplit("      - ", 1)
    row = row.replace("params_b: 145.6, ", "")
    layouts = [("tp: 8, pp: 8", 148), ("tp: 8, pp: 16", 140), ("tp: 4, pp: 16", 145), ("tp: 8, pp: 4", 130)]
    rows = "".join(
        f"      - {row}".replace("tp: 8, pp: 8", degrees).replace("148", str(tflops)).replace(", vpp: 2", "")
        for degrees, tflops in layouts
    )
    assert len(one(tmp_path, head + rows).groups) == 1
    assert one(tmp_path, head + rows.replace("gbs: 2304", "gbs: 1536", 1)).groups == []


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(SOURCES + GPT % ("good", "tflops: 148"))
    bad.write_text(SOURCES + GPT % ("bad", "tflops: 20"))
    assert main([str(good), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["good"]) == KEYS
    assert main([str(good), str(bad)]) == 1
    printed = capsys.readouterr().out
    assert "MISSED time_err_mean" in printed
    assert "\ngood" in printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("a: [b", "not YAML at line 1"),
        ("tables: none", "has no tables"),
        ("- 1", "has no tables"),
        ("tables: [{id: a, rows: 3}]", "table 1 has no list of rows"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    file = tmp_path / "tables.yaml"
    if content is not None:
        file.write_text(content)
    assert main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert said in err
    assert len(err.splitlines()) == 1


def test_it_runs_as_a_script() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "planner_accuracy.py"
    ran = subprocess.run(
        [sys.executable, script, "missing.yaml"], cwd=script.parents[1], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
