"""Runs that come into trouble, as a user meets them: one line, an exit code, nothing lost."""

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

import leaven.cli.train as verb
import leaven.training.checkpoint as leaven_checkpoint
from leaven.distributed.sharded import ShardedModel
from leaven.training.checkpoint import checkpoints
from leaven.training.run_folder import RunFolder

Verb = Callable[..., tuple[int, str, str]]

NO_NUMBERS = ("--set", "hyperparameters.lr=1e30", "--set", "hyperparameters.weight_decay=0")
OVERFLOW = ("--set", "precision.compute=fp16", "--set", "hyperparameters.init_std=3")


def strictly(path: Path) -> list[dict[str, Any]]:
    """Lines of a file as any reader of JSON takes them: NaN and Infinity are no numbers there."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{path} holds {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("on_spike", ["off", "stop", "rollback", "skip"])
def test_a_run_that_is_no_number_any_more_fails_in_words(
    leaven: Verb, tiny_file: Path, tmp_path: Path, on_spike: str
) -> None:
    run = tmp_path / "run"
    command = ("train", tiny_file, "--run", run, "--log-every", 1, *NO_NUMBERS)
    code, out, err = leaven(*command, "--set", f"stability.on_spike={on_spike}")
    assert (code, out) == (1, "")
    assert "stopped: " in err
    assert "nan" in err or "inf" in err
    assert RunFolder(run).finish() is None
    lines, events = strictly(run / "metrics.jsonl"), strictly(run / "events.jsonl")
    assert events[-1]["event"] == "stop"
    assert on_spike == "rollback" or any(line["update_norm"] is None or line["loss"] is None for line in lines)
    code, _, err = leaven("report", run, "-o", tmp_path / "report.html")
    assert (code, err) == (0, "") if lines else (2, err)


def test_an_overflow_of_fp16_is_a_row_like_others(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _, err = leaven("train", tiny_file, "--run", run, "--log-every", 1, *OVERFLOW)
    assert code == 0
    lines = strictly(run / "metrics.jsonl")
    skipped = next(line for line in lines if line["skipped"])
    assert (skipped["grad_norm"], skipped["update_norm"]) == (None, 0)
    assert "  nan  " in err or "  inf  " in err


@pytest.fixture
def stopped_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """As by a SIGTERM that comes when a run has so many steps."""

    def at(run: Path, steps: int) -> None:
        @contextmanager
        def stopping() -> Iterator[Callable[[], bool]]:
            yield lambda: len(RunFolder(run).metrics()) >= steps

        monkeypatch.setattr(verb, "stopping", stopping)

    return at


def test_stopped_with_no_room_to_save_it_says_from_where_it_goes_on(
    leaven: Verb,
    tiny_file: Path,
    tmp_path: Path,
    stopped_after: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, save = tmp_path / "run", leaven_checkpoint.save_file

    def full(tensors: Any, path: Path) -> None:
        if list(path.parent.glob("../tokens-*1024")):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(leaven_checkpoint, "save_file", full)
    stopped_after(run, 6)
    code, _, err = leaven("train", tiny_file, "--run", run)
    assert code == 75
    said = "tokens, not saved (No space left on device); run it again to resume from 1,024 tokens"
    assert said in err.splitlines()[-1]


def test_with_every_checkpoint_damaged_nothing_is_touched(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert leaven("train", tiny_file, "--run", run)[0] == 0
    events = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text("".join(line for line in events.splitlines(True) if '"finish"' not in line))
    for path in checkpoints(run / "checkpoints"):
        (path / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, err = leaven("train", tiny_file, "--run", run)
    assert (code, err.count("error: ")) == (2, 1)
    assert "every checkpoint is damaged (tokens-000000000010240, " in err.splitlines()[-1]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 4.00 GiB"), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize("steps", [0, 4])
def test_out_of_memory_is_one_line_and_a_run_that_failed(
    leaven: Verb, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, steps: int
) -> None:
    run, work, done = tmp_path / "run", ShardedModel.forward_backward, []

    def limited(self: ShardedModel, *arguments: Any) -> Any:
        if len(done) >= steps:
            raise error
        done.append(1)
        return work(self, *arguments)

    monkeypatch.setattr(ShardedModel, "forward_backward", limited)
    code, out, err = leaven("train", tiny_file, "--run", run, "--set", "batch.micro_batch=4")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: out of memory; for a training lower [batch] micro_batch or set it")
    assert run.exists() == (steps > 0)
