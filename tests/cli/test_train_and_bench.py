import errno
import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tests.cli.conftest import Verb, document
from tests.data.written import documents, megatron

import leaven.cli.train as verb
import leaven.training.checkpoint as leaven_checkpoint
from leaven.cli.common import stop_on_signal
from leaven.distributed.sharded_model import ShardedModel
from leaven.storage import digest
from leaven.training.rewind import rewinds_of
from leaven.training.run_folder import RunFolder, checkpoints

NO_NUMBERS = ("--set", "hyperparameters.lr=1e19", "--set", "hyperparameters.weight_decay=0")
OVERFLOW = ("--set", "precision.compute=fp16", "--set", "hyperparameters.init_std=3", "--set", "data.tokens=2560")


def strictly(path: Path) -> list[dict[str, Any]]:
    """Lines of a file as any reader of JSON takes them: NaN and Infinity are no numbers there."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{path} holds {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_train_prints_one_document_and_a_line_every_so_many_steps(
    leaven: Verb, tiny_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    base = "scaling.base={width = 16, depth = 2, batch_tokens = 256, tokens = 10_240, d_ff = 16}"
    options = ("--log-to", "none", "--log-every", "10", "--set", "hyperparameters.optimizer=adam", "--set", base)
    code, out, err = leaven("train", tiny_file, "--run", run, *options, "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["tokens"], summary["steps"], summary["rollbacks"]) == (10_240, 40, 0)
    assert summary["mfu"] > summary["mfu_causal"] > 0
    assert "matmul measured on this device" in summary["mfu_convention"]
    assert "warning: complete-d-p multiplies the weight decay of" in err
    shown = [line.split()[:2] for line in err.splitlines()]
    assert all([tokens, "k"] in shown for tokens in ("2.56", "5.12", "7.68", "10.2"))
    assert not (run / "tensorboard").exists()
    code, out, _ = leaven("train", tiny_file, "--run", run, *options)  # finished: prints its result again
    assert (code, "bits per byte" in out) == (0, True)


@pytest.mark.slow  # other tests stop a run with SIGTERM, and a study by closing its terminal
def test_a_closed_terminal_stops_a_run_and_saves_it(tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    many = ("--set", "data.tokens=2_560_000", "--set", "stability.checkpoint_every_tokens=2_560_000")
    words = [
        "-m",
        "leaven",
        "train",
        str(tiny_file),
        "--run",
        str(run),
        "--log-every",
        "1",
        "--log-to",
        "none",
        *many,
    ]
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        os.execv(sys.executable, [sys.executable, *words])
    while not RunFolder(run).metrics():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 2**16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
    assert RunFolder(run).events()[-1]["event"] == "stop"
    assert len(checkpoints(RunFolder(run).checkpoints)) == 2  # at the start, and at the stop


def test_a_second_ctrl_c_interrupts_at_once_but_a_second_sigterm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler and torchrun both send SIGTERM or SIGINT."""
    with stop_on_signal() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)
            assert stop()
        monkeypatch.setattr("leaven.cli.common.AGAIN_AFTER", -1.0)  # later
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# A command like `leaven train 2>&1 | tee log`. Before its {signal}, tee has ended.
PIPED = """
import os, signal, sys
from leaven.cli.common import exit_interrupted, stop_on_signal
from leaven.views.terminal.console import echo, errors
with stop_on_signal() as stop:
    sys.stdin.readline()
    {signal}
    errors.print("a row of progress")
    interrupted = stop()
open("saved", "x").close()
echo("the document of --json")
sys.exit(75 if interrupted else 0)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "code"),
    [("os.kill(os.getpid(), signal.SIGTERM)", 75), ("os.kill(os.getpid(), signal.SIGINT)", 75), ("", 0)],
    ids=["SIGTERM", "SIGINT", "no signal"],
)
def test_a_command_goes_on_without_the_program_that_read_its_output(tmp_path: Path, sent: str, code: int) -> None:
    command = [sys.executable, "-c", PIPED.format(signal=sent)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path
    )
    assert process.stdout is not None
    process.stdout.close()
    process.communicate(b"\n")
    assert (process.returncode, (tmp_path / "saved").exists()) == (code, True)


@pytest.mark.long
def test_the_checkpoint_at_0_tokens_is_used(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run, kept = tmp_path / "run", ("--set", "stability.keep=20", "--set", "data.tokens=2560", "--log-to", "none")
    assert leaven("train", tiny_file, "--run", run, *kept)[0] == 0
    sampled = document(leaven("sample", run, "x", "--tokens", "0", "--max-tokens", "1", "--json"))
    assert sampled["tokens"] == 0
    assert leaven("export", "weights", run, tmp_path / "weights", "--tokens", "0")[0] == 0
    lower = ("--rewind-to", "0", "--set", "hyperparameters.lr=0.002")
    assert leaven("train", tiny_file, "--run", run, *kept, *lower)[0] == 0
    assert rewinds_of(RunFolder(run))[-1].to_tokens == 0
    assert RunFolder(run).finish()
    code, _, err = leaven("train", tiny_file, "--run", run, *kept, *lower)
    assert (code, len(rewinds_of(RunFolder(run)))) == (0, 1)
    assert "--rewind-to 0 was already done by an earlier command, so the run resumes where it is" in err


def test_bench_prints_one_document_and_writes_nothing(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    sizes = ("--micro-batch", "1,4", "--global-batch", "2,8", "--share", "0.5")
    found = document(leaven("bench", tiny_file, *sizes, "--set", "data.seed=1", "--json"))
    (train,) = found["next"]
    assert " --set data.seed=1 --set batch.micro_batch=" in train
    assert [(row["global_batch"], row["micro_batch"]) for row in found["rows"]] == [(2, 1), (8, 1), (8, 4)]
    assert found["rows"][0].keys() >= {"micro_batch", "global_batch", "tokens_per_second", "mfu", "peak_gib"}
    assert found["choose"]["ramp_start"]["share_of_peak"] >= 0.5
    assert sorted(tmp_path.rglob("*")) == before


def test_a_ramp_is_proposed_from_the_noise_scale_of_a_run(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": n, "tokens": 128 * n, "noise_scale": None if n == 1 else 8.0 * n**0.5} for n in range(1, 61)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = document(leaven("bench", tiny_file, "--noise-from", run, "--noise-multiple", "4", "--json"))
    assert found["noise"]["exponent"] == pytest.approx(0.5)
    code, out, _ = leaven("bench", tiny_file, "--noise-from", run, "--noise-multiple", "4")
    assert code == 0
    assert shlex.split(out.splitlines()[-1].removeprefix("next")) == shlex.split(found["next"][0])
    assert shlex.split(found["next"][0])[-2:] == ["--set", *found["set"]]
    lines = [f"{json.dumps(line)}\n" for line in lines]
    zeros = [f"{chr(0) * 50}\n"] * 20
    (run / "metrics.jsonl").write_text("".join([*lines[:20], *zeros, *lines[40:], lines[0][:9]]))
    code, out, err = leaven("bench", tiny_file, "--noise-from", run)
    assert "29 measurements" in out
    assert (code, "20 damaged lines of " in err, "from line 21 to 40, were skipped" in err) == (0, True, True), err
    (run / "metrics.jsonl").write_text("".join(lines))
    finish = {"event": "finish", "time": 1.0, "step": 60, "tokens": 7_680, "seconds": 1.0, "loss": 3.0}
    written = RunFolder(run).lines_of(run / "metrics.jsonl")
    finish["metrics"] = {"lines": 60, "blake2b": digest(b"".join(written), 16)}
    (run / "events.jsonl").write_text(json.dumps(finish) + "\n")
    code, _, err = leaven("bench", tiny_file, "--noise-from", run)
    assert (code, err) == (0, "")
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('": 11.', '": 12.', 1))
    code, _, err = leaven("bench", tiny_file, "--noise-from", run)
    assert (code, "metrics.jsonl is not as the run wrote it" in " ".join(err.split())) == (2, True), err


@pytest.mark.long
@pytest.mark.parametrize("on_spike", ["off", "rollback"])
def test_a_loss_that_is_not_finite_ends_the_run_with_a_message(
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


def test_an_fp16_overflow_is_logged_as_a_skipped_step(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _, err = leaven("train", tiny_file, "--run", run, "--log-every", 1, *OVERFLOW)
    assert code == 0
    lines = strictly(run / "metrics.jsonl")
    skipped = next(line for line in lines if line["skipped"])
    assert (skipped["grad_norm"], skipped["update_norm"]) == (None, 0)
    assert "  nan  " in err or "  inf  " in err


def test_a_stop_on_a_full_disk_says_where_the_run_resumes(
    leaven: Verb, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save = tmp_path / "run", leaven_checkpoint.save_file

    @contextmanager
    def after_six_steps() -> Iterator[Callable[[], bool]]:
        yield lambda: len(RunFolder(run).metrics()) >= 6

    def full(tensors: Any, path: Path) -> None:
        if list(path.parent.glob("../tokens-*1024")):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(leaven_checkpoint, "save_file", full)
    monkeypatch.setattr(verb, "stop_on_signal", after_six_steps)
    code, _, err = leaven("train", tiny_file, "--run", run)
    assert code == 75
    message = "tokens, not saved (No space left on device); run the same command again to resume from 1,024 tokens"
    assert message in err.splitlines()[-1]


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(
    leaven: Verb, scaled_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(scaled_run, tmp_path / "run"))
    events = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text("".join(line for line in events.splitlines(True) if '"finish"' not in line))
    for path in checkpoints(run / "checkpoints"):
        (path / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, err = leaven("train", scaled_run / "recipe.toml", "--run", run)
    assert (code, err.count("error: ")) == (2, 1)
    assert "no checkpoint can be used (damaged: tokens-000000000010240, " in err.splitlines()[-1]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("error", "steps"), [(MemoryError("Unable to allocate 4.00 GiB"), 0), (RuntimeError("can't allocate memory"), 4)]
)
def test_out_of_memory_is_one_line_and_exit_code_1(
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
    assert err.splitlines()[-1].startswith("error: out of memory (")
    assert "lower micro_batch in [batch]" in err
    assert run.exists() == (steps > 0)


@pytest.mark.parametrize("verb", ["train", "tune --study study"])
def test_a_device_that_torch_lacks_gives_one_line(
    leaven: Verb, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    code, out, err = leaven(*verb.split(), tiny_file, "--device", "mps")
    assert (code, out) == (2, "")
    assert " ".join(err.split()).startswith(
        f"error: device mps: torch {torch.__version__} is built without mps; use --device"
    )
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.long
def test_a_damaged_file_of_token_ids_leaves_no_run(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    source = Path(megatron(tmp_path / "ids.bin", documents()))
    train = ("train", tiny_file, "--run", tmp_path / "run", "--set", f"data.source={source}")
    source.write_bytes(source.read_bytes()[:-2])
    code, out, err = leaven(*train)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {source} has ")
    assert "has an index ids.idx that does not fit it" in err
    assert not (tmp_path / "run").exists()
    megatron(source, documents())
    code, out, err = leaven(*train)
    assert code == 0
    assert "nats per token" in out
    assert "bits per byte" not in out
    assert "leaven sample" not in out
