"""Calibration factors computed by hand, and the history file under damage, full disks and concurrent writers."""

from multiprocessing import get_context
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import TINY
from tests.planning.shapes import SMALL, record

from leaven.documents.planning import CalibrationRow
from leaven.planning import calibration as module
from leaven.planning.calibration import (
    NEWEST,
    CalibrationRecord,
    StepCost,
    calibration,
    history,
    predicted,
    remember,
    weighted_median,
)
from leaven.planning.plan import plan_recipe
from leaven.planning.this_machine import processor
from leaven.recipe.files import parse_recipe
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.views.numbers import published_range

H100 = "H100-SXM-80GB"


def took(time: float, memory: float | None = None, **changes: object) -> CalibrationRecord:
    """A run whose time and memory are multiples of the planner's current prediction."""
    one = record(**changes)
    said = predicted(one.model, one.arrangement, H100, "bf16")
    gib = None if memory is None else said.memory_gib * memory
    return one.model_copy(update={"measured": StepCost(step_seconds=said.step_seconds * time, memory_gib=gib)})


def factors(records: list[CalibrationRecord], accelerator: str = H100) -> CalibrationRow:
    found = calibration(records, accelerator, SMALL.params, Layout(), compute="bf16", step_seconds=1.0)
    return found


def of(factor: float) -> ModelShape:
    return SMALL.model_copy(update={"n_layers": int(SMALL.n_layers * factor)})


def test_runs_on_other_accelerators_or_dtypes_do_not_count() -> None:
    others = [
        took(2, accelerator="A100-SXM-80GB"),
        took(2, accelerator=None),
        took(2, compute="fp32"),
        record(measured=None),
        took(2, model=of(40)),  # 20 times the parameters
    ]
    for records in (others, []):
        assert calibration(records, H100, SMALL.params, Layout(), compute="bf16", step_seconds=1.0) is None
    found = factors([*others, took(1.25)])
    assert (found.time, found.runs, found.memory) == (pytest.approx(1.25), 1, None)


def test_a_run_that_was_resumed_counts_once() -> None:
    """With the record of its last start."""
    starts = [took(time, run="abc") for time in (2, 3, 4)]
    found = factors([*starts, took(2, run="def"), took(1)])
    assert (found.runs, found.low, found.high) == (3, pytest.approx(1), pytest.approx(4))
    on_a_cpu = record(accelerator="cpu", device=processor(), run="abc")
    assert factors([took(2, run="abc"), on_a_cpu]).time == pytest.approx(2)


def test_the_text_has_the_numbers_of_threads() -> None:
    """A plan does not know how many threads its run will have, so the reader has to compare them."""
    runs = [record(accelerator="cpu", device=processor(), threads=threads) for threads in (1, 4, 1)]
    for records, text in (
        (runs[:1], "1 run on this accelerator with 1 CPU thread"),
        (runs, " with 1 or 4 CPU threads"),
    ):
        assert text in factors(records, "cpu").says


def test_far_runs_are_ignored_if_near_ones_exist() -> None:
    far = [took(3, layout=Layout(dp=2, zero=1)), took(3, layout=Layout(compile=True)), took(3, model=of(8))]
    only = factors(far)
    assert (only.time, only.runs) == (pytest.approx(3), 3)
    near = factors([*far, took(1.1, model=of(2))])
    assert (near.time, near.runs) == (pytest.approx(1.1), 1)


def test_only_the_newest_runs_count() -> None:
    found = factors([took(9)] * 150 + [took(1.5)] * NEWEST)
    assert (found.time, found.runs, found.high) == (pytest.approx(1.5), NEWEST, pytest.approx(1.5))


def test_nearer_runs_have_more_weight() -> None:
    """One run of weight 1 / (1 + 1 kind) and two of 1 / (1 + 3 kinds) weigh the same: the median is between them."""
    other = Layout(dp=2, zero=3, compile=True)
    tie = [took(1, layout=Layout(compile=True)), took(2, layout=other), took(2, layout=other)]
    found = factors(tie)
    assert found.time == pytest.approx(1.5)
    nearer = factors([*tie, took(1, layout=Layout(compile=True))])
    assert nearer.time == pytest.approx(1)


def test_an_improved_planner_is_compared_with_the_same_measurement() -> None:
    """The prediction in the record counts only if the accelerator is no longer in the table."""
    wrong = took(1.5).model_copy(update={"predicted": StepCost(step_seconds=1e9)})
    found = factors([wrong])
    assert found.time == pytest.approx(1.5)
    unknown = record(accelerator="X9")
    found = factors([unknown], "X9")
    assert (found.time, found.memory) == (pytest.approx(1.5), pytest.approx(1.2))


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 5)), min_size=1, max_size=9))
def test_a_weight_counts_as_so_many_values(values: list[tuple[float, int]]) -> None:
    many = [value for value, weight in values for _ in range(weight)]
    assert weighted_median([(value, float(weight)) for value, weight in values]) == pytest.approx(median(many))


def recipe() -> Recipe:
    return parse_recipe(TINY.replace("SOURCE", "text.txt"), "tiny").replace(
        {"model": SMALL.model_dump(), "batch.tokens": 65_536, "precision.compute": "bf16"}
    )


def test_a_plan_by_the_history_and_the_planners_own_beside_it() -> None:
    bare = plan_recipe(recipe(), "1xH100", "mbs=8")
    runs = [took(0.9, 1.1), took(1.3, 1.2), took(1.18, 1.0)]
    plan = bare.calibrated(runs, "bf16")
    assert bare.calibrated([], "bf16") is bare
    assert plan.speed.mfu == pytest.approx(bare.speed.mfu / 1.18)
    assert plan.seconds == pytest.approx(1.18 * bare.seconds)
    assert (plan.chosen.memory, plan.chosen.fits) == (bare.chosen.memory, bare.chosen.fits)
    assert plan.job.calibration.says == "x1.18 from 3 runs on this accelerator (0.9 to 1.3)"
    assert plan.job.calibration.uncalibrated_step_seconds == bare.speed.step_seconds
    assert plan.job.calibration.memory == pytest.approx(1.1)


def test_a_calibration_is_in_every_time_of_a_plan() -> None:
    bare = plan_recipe(recipe(), "8xH100")
    plan = bare.calibrated([took(5.0)], "bf16")
    how = plan.chosen.arrangement
    asked = f"tp={how.layout.tp},pp={how.layout.pp},zero={how.layout.zero},recompute=none,mbs={how.micro_batch}"
    found, own = plan.document(asked).dump(), bare.document(asked).dump()
    step = found["speed"]["step_seconds"]
    assert step == pytest.approx(5 * own["speed"]["step_seconds"])
    points = [point for point in found["pareto"] if point["layout"] == found["layout"]]
    explained = sum(part["chosen"] for part in found["explain"]["seconds"].values())
    same = [found["explain"]["step_seconds"], found["ramp"]["points"][-1]["step_seconds"], explained]
    assert [*same, *(point["step_seconds"] for point in points)] == pytest.approx([step] * (3 + len(points)))
    for mine, theirs in zip(found["alternatives"], own["alternatives"], strict=True):
        assert mine["step_seconds"] == pytest.approx(5 * theirs["step_seconds"])
    for mine, theirs in zip(found["ramp"]["choices"], own["ramp"]["choices"], strict=True):
        assert mine["hours"] == pytest.approx(5 * theirs["hours"])
    assert found["explain"]["line"] == own["explain"]["line"] == "this is the chosen layout"
    assert found["calibration"]["uncalibrated_step_seconds"] == own["speed"]["step_seconds"]


def test_memory_that_runs_took_can_say_that_it_does_not_fit() -> None:
    bare = plan_recipe(recipe(), "1xH100", "mbs=8")
    assert bare.calibrated([took(1, 1.5)], "bf16").cautions == bare.cautions
    (said,) = set(bare.calibrated([took(1, 50.0)], "bf16").cautions) - set(bare.cautions)
    assert said.startswith("runs on this accelerator needed 50 times the planned memory; with this factor, this run")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAVEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def numbers() -> list[int]:
    return [int(each.seconds) for each in history()]


def test_a_record_is_read_back(cache: Path) -> None:
    one = record(layout=Layout(dp=8, zero=3, recompute="full"), measured=StepCost(step_seconds=2.0), threads=4)
    assert remember(one) is None
    assert history() == [one]


def test_lines_that_are_not_records_are_skipped(cache: Path) -> None:
    file = cache / "history.jsonl"
    remember(record(1))
    whole = file.read_bytes()
    foreign = [
        b"\xff\xfe not text",
        b'{"something": "else"}',
        whole.replace(b'"step_seconds":1.5', b'"step_seconds":-1.5').strip(),
        whole.replace(b'"n_layers":12', b'"n_layers":"twelve"').strip(),
        b"",
    ]
    file.write_bytes(b"\n".join(foreign) + b"\n" + whole[: len(whole) // 2])  # the last line is incomplete
    remember(record(2))
    faults: list[str] = []
    assert [int(each.seconds) for each in history(faults.append)] == [2]
    assert [fault.partition(" and was skipped;")[0] for fault in faults] == [f"line 1 of {file} is damaged"]
    file.write_bytes(whole.replace(b'"steps":50', b'"steps":50,"of a later version":[1,2]'))
    assert numbers() == [1]


def test_damaged_lines_are_named(cache: Path) -> None:
    """As after a crash: two of three lines are zeros."""
    for number in (1, 2, 3):
        remember(record(number))
    first, second, third = (file := cache / "history.jsonl").read_bytes().splitlines(keepends=True)
    file.write_bytes(bytes(len(first) - 1) + b"\n" + bytes(len(second) - 1) + b"\n" + third)
    faults: list[str] = []
    assert [int(each.seconds) for each in history(faults.append)] == [3]
    assert len(faults) == 1
    skipped = f"2 damaged lines of {file}, from line 1 to 2, were skipped"
    assert faults[0].startswith(f"{skipped}; the other lines are used to correct planned times")


def test_a_missing_folder_or_a_full_disk_loses_only_the_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[str] = []
    assert history(faults.append) == []  # before the first run
    assert faults == []
    cache.write_text("in the way")
    assert "File exists" in remember(record())
    assert history() == []
    cache.unlink()
    cache.symlink_to("away")
    assert "a link to away, which is missing (is its disk mounted?); bring it back, or set" in (
        remember(record()) or ""
    )
    assert history(faults.append) == []
    assert len(faults) == 1
    assert f"{cache} is a link to away, which is missing" in faults.pop()
    cache.unlink()
    (cache / "history.jsonl").mkdir(parents=True)
    assert "this is a folder" in remember(record())
    assert history(faults.append) == []
    assert "history.jsonl: cannot be read: Is a directory; make it readable" in faults.pop()
    (cache / "history.jsonl").rmdir()
    remember(record(1))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.storage, "append", full)
    assert "No space left on device" in remember(record(2))
    assert numbers() == [1]


def test_the_history_keeps_the_newest_records_within_its_limit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 5_000)
    for number in range(1, 101):
        remember(record(number))
    found = numbers()
    assert found == list(range(found[0], 101))
    line = len(record().model_dump_json(exclude_defaults=True)) + 1
    assert 5_000 <= sum(file.stat().st_size for file in cache.iterdir()) + line <= 2 * 5_000 + 3 * line


def write_many(first: int) -> None:
    module.LIMIT_BYTES = 20_000
    for number in range(first, first + 25):
        assert remember(record(number)) is None


def test_concurrent_processes_lose_no_record(cache: Path) -> None:
    """About 25 lines fill a file, so one process moves the full file aside while the other appends."""
    context = get_context("fork")
    writers = [context.Process(target=write_many, args=(first,)) for first in (1, 26)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = numbers()
    assert len(found) == len(set(found))
    assert {25, 50} <= set(found)
    assert [n for n in found if n <= 25] == sorted(n for n in found if n <= 25)


def test_a_prediction_is_a_cost_or_nothing() -> None:
    found = predicted(SMALL, record().arrangement, H100, "bf16")
    assert 4 * SMALL.params * 4 / 2**30 < found.memory_gib < 80  # weights, gradients and two moments in fp32 at least
    impossible = Layout(pp=64)  # of twelve layers
    assert predicted(SMALL, record(layout=impossible).arrangement, H100, "bf16") is None
    assert predicted(SMALL, record().arrangement, "X9", "bf16") is None


def test_a_plan_has_the_range_of_published_runs_until_it_is_calibrated() -> None:
    bare = plan_recipe(recipe(), "1xH100")
    low, llm_foundry, *_ = published_range(bare.document())
    assert low.endswith("a step, judging by published runs on H100 boards")
    assert llm_foundry == "x1.07 to x1.65 of the planned time: llm-foundry of October 2023 (70 runs)"
    assert published_range(bare.calibrated([took(1.3)], "bf16").document()) == []
    assert "no published run on H200-SXM-141GB was" in published_range(plan_recipe(recipe(), "1xH200").document())[0]
    exact = bare.document()
    exact = exact.model_copy(
        update={"published_times": [exact.published_times[0].model_copy(update={"low": 1, "high": 1})]}
    )
    assert published_range(exact)[0].endswith(" a step, judging by published runs on H100 boards")
    of_host = exact.model_copy(update={"time": exact.time | {"host": exact.speed.step_seconds / 2}})
    assert published_range(of_host)[0].startswith("not known: the host decides the time of a step")
