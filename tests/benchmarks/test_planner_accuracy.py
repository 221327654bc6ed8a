"""Test that benchmarks/planner_accuracy.py reads tables of several forms, and finds planted errors in them."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner.cases import case_of
from benchmarks.planner.exact import identities
from benchmarks.planner.judge import judge
from benchmarks.planner.models import shape_of
from benchmarks.planner.stacks import Unused, stack_of
from benchmarks.planner.tables import read
from benchmarks.planner.verdict import TableVerdict
from benchmarks.planner_accuracy import LATER_TABLES, PUBLISHED, main

from leaven.planning.memory import stage_memory
from leaven.planning.training_codes import TRAINING_CODES

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


def one(tmp_path: Path, text: str) -> TableVerdict:
    file = tmp_path / "tables.yaml"
    file.write_text(SOURCES + text)
    (table,) = read(file)
    return judge(table)


def found(tmp_path: Path, text: str) -> dict[str, Any]:
    return one(tmp_path, text).to_json()


def test_unknown_fields_are_ignored_and_what_is_there_is_compared(tmp_path: Path) -> None:
    values = found(tmp_path, GPT % ("new", "tflops: 148, aggregate_pflops: 227.1, weather: fine, pct_peak: 47"))
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
    assert not [why for why in verdict.unused if "days" in why]
    assert verdict.to_json()["days_err_max"] == max(verdict.days)


def test_a_row_that_ran_out_of_memory_must_not_be_called_fitting(tmp_path: Path) -> None:
    row = GPT % ("oom", "dp: 24, oom: true")
    assert found(tmp_path, row.replace("mbs: 2", "mbs: 32"))["oom_called_fit"] == 0
    verdict = one(tmp_path, row)
    assert verdict.to_json()["oom_called_fit"] == 1
    assert verdict.missed() == ["oom_called_fit 1, bar 0"]


def test_rows_with_an_anomaly_are_left_out_and_reported_and_old_tflops_count_for_memory_only(tmp_path: Path) -> None:
    rows = GPT % ("marked", "dp: 3, iter_s: 1, tflops: 999, anomaly: columns swapped")
    verdict = one(tmp_path, rows)
    assert verdict.anomalies == ["row 1: columns swapped"]
    assert not verdict.points
    assert not verdict.broken
    old = one(tmp_path, GPT % ("old", "iter_s: 1, tflops: 999, tflops_formula: old, mem_gb: 60"))
    assert [point.kind for point in old.points] == ["memory"]
    assert not old.flops


def test_memory_of_the_last_rank_is_compared_with_the_last_stage(tmp_path: Path) -> None:
    (point,) = one(tmp_path, GPT % ("last", "tflops_formula: old, mem_gb: 60, measured_on: last rank")).points
    assert point.case is not None
    stages = [stage_memory(point.case.shape, point.case.how, rank, point.case.stack.code).total for rank in (0, 7)]
    assert point.predicted == stages[1] != stages[0]


def test_a_product_of_degrees_that_is_not_the_gpus_is_reported(tmp_path: Path) -> None:
    verdict = one(tmp_path, GPT % ("broken", "dp: 25, tflops: 148"))
    assert verdict.broken == ["row 1 (1600 is not 1536)"]
    assert any("identities" in bar for bar in verdict.missed())


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("gpus: 1536", "num_gpus: 1536"),
        ("iter_s: 24.8", "iter_ms: 24800"),
        ("pct_peak: 47", "pct_of_peak: '47%'"),
        ("tokens: 300B, days: 13", "days_300B: 13"),
    ],
)
def test_other_spellings_of_a_column_are_the_same_column(tmp_path: Path, ours: str, other: str) -> None:
    kept = "tflops: 148, aggregate_pflops: 227.1, pct_peak: 47"
    text = GPT % ("same", kept if ours in kept else f"{kept}, {ours}")
    assert ours in text
    plain, spelled = one(tmp_path, text), one(tmp_path, text.replace(ours, other))
    for key, value in plain.to_json().items():
        assert spelled.to_json()[key] == (value if value is None else pytest.approx(value, rel=0.01, abs=1e-3)), key
    assert spelled.unused == plain.unused
    assert not spelled.table.unread
    assert plain.to_json()["mfu_err_max_points"] == 0


@pytest.mark.parametrize(
    ("said", "out"),
    [
        ("oom: true", True),
        ("oom: 'no'", False),
        ("mem_gb: OOM", True),
        ("fits: false", True),
        ("note: ran out of memory at the optimizer step", True),
        ("note: did not run out of memory", False),
    ],
)
def test_spellings_of_out_of_memory(tmp_path: Path, said: str, out: bool) -> None:
    verdict = one(tmp_path, GPT % ("oom", said))
    assert (verdict.oom, verdict.ran) == (int(out), 0)


def test_a_measurement_that_is_not_a_number_is_reported_and_a_share_is_a_percentage(tmp_path: Path) -> None:
    verdict = one(tmp_path, GPT % ("range", "tflops: 130-140"))
    assert dict(verdict.unused) == {"not compared: tflops is 130-140": 1}
    share = GPT.replace("flops_convention: narayanan_hw", "")
    for mfu in ("mfu: 0.474", "mfu_pct: 47.4", "mfu: 47.4"):
        assert one(tmp_path, share % ("share", f"tflops: 148, {mfu}")).mfu == [0]  # 148 / 312
    assert one(tmp_path, share % ("share", "tflops: 148, mfu: 0.484")).mfu == [pytest.approx(0.914, abs=1e-3)]


def test_a_bubble_is_held_to_half_a_percent_where_a_layout_ran_at_three_batches(tmp_path: Path) -> None:
    # pp 8 in 2 stages a rank has m + 7/2 slots for m micro-batches: 3 s and 0.25 s a slot
    head, row = (GPT % ("batches", "iter_s: 1.0")).rsplit("      - ", 1)

    def at(bent: float) -> TableVerdict:
        rows = ""
        for m in (16, 48, 96):
            seconds = (3 + 0.25 * (m + 3.5)) * (bent if m == 48 else 1)
            rows += f"      - {row}".replace("2304", str(48 * m)).replace("iter_s: 1.0", f"iter_s: {seconds}")
        return one(tmp_path, head + rows)

    assert max(at(1).bubbles) < 1e-9
    assert not [bar for bar in at(1).missed() if "bubble" in bar]
    assert 0.005 < max(at(1.02).bubbles) < 0.02
    assert [bar for bar in at(1.02).missed() if "bubble" in bar]


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


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(SOURCES + GPT % ("good", "tflops: 148"))
    bad.write_text(SOURCES + GPT % ("bad", "tflops: 20"))
    assert main([str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["good"]["rows"] == 1
    assert main([str(good), str(bad)]) == 1
    printed = capsys.readouterr().out
    assert "MISSED time_err_mean" in printed
    assert "\ngood" in printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("a: [b", "not YAML at line 1"),
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


def test_a_row_can_name_its_training_code_and_what_differs_from_it(tmp_path: Path) -> None:
    file = tmp_path / "tables.yaml"
    named = "code: megatron-deepep, code_changes: 'logit: 14, whole_experts: false', precision: fp8"
    file.write_text(SOURCES + GPT % ("named", named))
    (table,) = read(file)
    stack = stack_of(table.rows[0])
    assert (stack.code.sends, stack.code.logit, stack.code.whole_experts, stack.code.products) == (
        "node",
        14,
        False,
        "fp8",
    )
    for wrong in ("code: nobody", "code: megatron-moe, code_changes: 'colour: 14'"):
        file.write_text(SOURCES + GPT % ("wrong", wrong))
        with pytest.raises(Unused):
            stack_of(read(file)[0].rows[0])


# Parameters in 1e9, all of them, as their authors state them: Mistral AI (46.7B, 141B), arXiv 2504.14960 (57B; G8T8
# has those of 8x22B and a larger router), llama.cpp's count of the published weights (30.53B), Primus (16B),
# OpenAI's model card (20.9B, 116.8B), Ai2 (6.92B).
@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Mixtral-8x7B", 46.7),
        ("Mixtral-8x22B", 141),
        ("Mixtral-8x22B-G8T8", 141),
        ("Qwen2-57B-A14B", 57),
        ("Qwen3-30B-A3B", 30.53),
        ("DeepSeek-V2-Lite", 16),
        ("Qwen1.5-MoE-A2.7B", 14.3),
        ("llama-4-maverick", 401),  # published as 400B
        ("minimax-m2.5", 229),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("olmoe-1b-7b", 6.92),
        ("Grok-1", 316),  # published as 314B: 314.9 in blocks; its benchmark does not tie the embeddings
    ],
)
def test_models_with_experts_have_their_published_number_of_parameters(
    tmp_path: Path, model: str, billions: float
) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(SOURCES + f"  - {{id: one, source: somewhere, seq_len: 4096, rows: [{{model: {model}}}]}}")
    digits = 0 if isinstance(billions, int) else len(str(billions).partition(".")[2])
    assert round(shape_of(read(file)[0].rows[0]).params / 1e9, digits) == billions


def test_no_two_tables_have_one_name() -> None:
    names = [table.id for file in (PUBLISHED, *LATER_TABLES) for table in read(file)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("blind-experts-2.yaml", 77),
        ("blind-experts-3.yaml", 45),
        ("blind-experts-4.yaml", 87),
        ("blind-experts-5.yaml", 45),
        ("blind-experts-6.yaml", 118),
    ],
)
def test_every_row_of_a_blind_test_is_read_with_its_code_and_layout(name: str, number: int) -> None:
    """Nothing is planned here: the file is for one run, whose settings no prediction may have influenced."""
    tables = read(PUBLISHED.with_name(name))
    rows = [row for table in tables for row in table.rows]
    assert len(rows) == number
    assert len({row.where for row in rows}) == number
    for table in tables:
        verdict = TableVerdict(table)
        for row in table.rows:
            identities(row, verdict)
            case, layout = case_of(row), case_of(row).how.layout
            assert not case.chosen
            assert row.get("code") in TRAINING_CODES
            assert case.gbs == row.whole("gbs")
            assert layout.tp * layout.pp * layout.cp * layout.dp == row.whole("gpus")
        assert not verdict.broken
