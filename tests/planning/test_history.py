"""The history: whatever happens to its file, runs are not harmed and whole lines are read."""

from multiprocessing import get_context
from pathlib import Path

import pytest
from tests.planning.shapes import SMALL, record

from leaven.planning import calibration as module
from leaven.planning.calibration import StepCost, history, predicted, remember
from leaven.recipe.layout import Layout


def numbers(folder: Path) -> list[int]:
    return [int(each.seconds) for each in history(folder)]


def test_a_record_is_read_back(tmp_path: Path) -> None:
    one = record(layout=Layout(dp=8, zero=3, recompute="full"), measured=StepCost(step_seconds=2.0), threads=4)
    assert remember(one, tmp_path / "not" / "there yet")
    assert history(tmp_path / "not" / "there yet") == [one]


def test_lines_that_are_not_records_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    remember(record(1), tmp_path)
    whole = file.read_bytes()
    foreign = [
        b"\xff\xfe not text",
        b'{"something": "else"}',
        b"[" * 5_000,
        b"null",
        whole.replace(b'"step_seconds":1.5', b'"step_seconds":-1.5').strip(),
        whole.replace(b'"step_seconds":1.5', b'"step_seconds":NaN').strip(),
        whole.replace(b'"n_layers":12', b'"n_layers":"twelve"').strip(),
        b"",
    ]
    file.write_bytes(b"\n".join(foreign) + b"\n" + whole[: len(whole) // 2])  # and one that was torn
    remember(record(2), tmp_path)
    assert numbers(tmp_path) == [2]
    file.write_bytes(whole.replace(b'"steps":50', b'"steps":50,"of a later version":[1,2]'))
    assert numbers(tmp_path) == [1]


def test_a_missing_folder_or_a_full_disk_loses_only_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not remember(record(), tmp_path / "file")
    assert history(tmp_path / "file") == []
    (tmp_path / "history.jsonl").mkdir()
    assert not remember(record(), tmp_path)
    assert history(tmp_path) == []
    (tmp_path / "history.jsonl").rmdir()
    remember(record(1), tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.storage, "append", full)
    assert not remember(record(2), tmp_path)
    assert numbers(tmp_path) == [1]


def test_the_history_keeps_the_newest_records_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 5_000)
    for number in range(1, 101):
        remember(record(number), tmp_path)
    found = numbers(tmp_path)
    assert found == list(range(found[0], 101))
    line = len(record().model_dump_json(exclude_defaults=True)) + 1
    assert 5_000 <= sum(file.stat().st_size for file in tmp_path.iterdir()) + line <= 2 * 5_000 + 3 * line


def write_many(folder: Path, first: int) -> None:
    module.LIMIT_BYTES = 20_000
    for number in range(first, first + 25):
        assert remember(record(number), folder)


def test_concurrent_processes_lose_no_record(tmp_path: Path) -> None:
    """Also where one of them puts the full file aside: about 25 lines fill one, and all 50 are in the two."""
    context = get_context("fork")
    writers = [context.Process(target=write_many, args=(tmp_path, first)) for first in (1, 26)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = numbers(tmp_path)
    assert len(found) == len(set(found))
    assert {25, 50} <= set(found)
    assert [n for n in found if n <= 25] == sorted(n for n in found if n <= 25)


def test_a_prediction_is_a_cost_or_nothing() -> None:
    said = predicted(SMALL, record().arrangement, "H100-SXM-80GB", "bf16")
    assert said is not None
    assert said.memory_gib is not None
    assert 4 * SMALL.params * 4 / 2**30 < said.memory_gib < 80  # weights, gradients and two moments in fp32 at least
    impossible = Layout(pp=64)  # of twelve layers
    assert predicted(SMALL, record(layout=impossible).arrangement, "H100-SXM-80GB", "bf16") is None
    assert predicted(SMALL, record().arrangement, "X9", "bf16") is None
    single = predicted(SMALL, record().arrangement, "cpu", "fp32")
    assert single is not None
    assert single.step_seconds > 100 * said.step_seconds
