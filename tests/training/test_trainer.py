"""Training in a run folder: bit-exact resume, gradient accumulation, and checks of the folder."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import refused
from tests.training.conftest import KEPT_STATE, losses, scalars, small_disk

from leaven.data.stream import validation_windows
from leaven.data.tokens import TokenSet, prepare
from leaven.errors import InputError
from leaven.model.transformer import Stage
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training import optimizer
from leaven.training.checkpoint import read_checkpoint
from leaven.training.engine import Training
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train


def test_a_run_learns_and_writes_its_folder(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    summary = train(tiny, tokens, tmp_path / "run", log_to=["tensorboard"])
    run = RunFolder(tmp_path / "run")
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 41)]
    keys = "step tokens loss lr grad_norm update_norm batch_tokens tokens_per_second tflops mfu memory_gib"
    assert set(lines[1]) == {*keys.split(), "skipped", "loss_scale", "modules"}
    assert set(lines[0]) == {*lines[1], "run"}
    assert summary.finished
    assert (summary.tokens, summary.steps, summary.rollbacks) == (10_240, 40, 0)
    assert summary.loss < lines[0]["loss"] - 1.0
    assert summary.bits_per_byte == pytest.approx(summary.loss / math.log(2) * _targets_a_byte(tiny, tokens))
    peak = max(line["lr"] for line in lines)
    assert peak == pytest.approx(0.01)
    assert lines[-1]["lr"] == pytest.approx(0.001)
    assert {event["event"] for event in run.events()} >= {"start", "validation", "checkpoint", "finish"}
    losses_of_lines = [(line["tokens"], pytest.approx(line["loss"])) for line in lines]
    assert scalars(tmp_path / "run")["train/loss"] == losses_of_lines
    assert train(tiny, tokens, tmp_path / "run") == summary  # finished: a second call only returns the result


def _targets_a_byte(recipe: Recipe, tokens: TokenSet) -> float:
    """Return the validation targets divided by their bytes, counted with the tokenizer's own decoder. The text is
    ASCII, so no token ends within a character."""
    from tokenizers import Tokenizer

    targets = validation_windows(tokens.validation, 32, recipe.evaluation.tokens)[:, 1:]
    decoded = Tokenizer.from_file(str(tokens.tokenizer_path)).decode_batch(targets.tolist())
    return float(targets.size / sum(len(text.encode()) for text in decoded))


STATEFUL = KEPT_STATE | {
    "precision.compute": "fp16",
    "stability.noise_scale_every_tokens": 256,
    "hyperparameters.z_loss": 1e-3,
    "batch.ramp": {"start_tokens": 128, "increment_tokens": 64, "over_tokens": 2_000, "rule": "scaled"},
    "scaling.base": {"width": 8, "depth": 1, "batch_tokens": 128, "tokens": 5_120, "d_head": 4},
    "data.tokens": 4_096,
}
MUON = {"hyperparameters.optimizer": "muon", "hyperparameters.muon": {"match": "spectral", "lr": 0.05}}
EXPERTS: dict[str, Any] = {"number": 4, "active": 2, "d_expert": 16, "router": "sigmoid", "balance": "bias"}
EXPERTS = {"model.experts": EXPERTS | {"shared": 1, "bias_step": 0.05}}


# Experts are trained with AdamW, too.
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="adamw", marks=pytest.mark.slow),
        pytest.param(MUON, id="muon"),
        pytest.param(EXPERTS, id="experts"),
    ],
)
def test_a_run_stopped_twice_has_the_same_bits(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """The first stop is in the batch ramp, after the loss scale has halved."""
    monkeypatch.setattr(optimizer, "FIRST_SCALE", 2.0**30)
    recipe, parts = tiny.replace(STATEFUL | more), RunFolder(tmp_path / "parts")
    whole = train(recipe, tokens, tmp_path / "whole")
    for last in (5, 13):
        stopped = train(recipe, tokens, parts.path, stop=lambda last=last: len(parts.metrics()) >= last)
        assert not stopped.finished
        assert stopped.loss is None
        assert parts.metrics()[-1]["loss_scale"] < optimizer.FIRST_SCALE
    resumed = train(recipe, tokens, parts.path)
    exact = ["step", "loss", "grad_norm", "update_norm", "loss_scale", "noise_scale", "z_loss", "batch_tokens"]
    exact += ["max_load", "balance_loss"] if recipe.model.experts else []
    runs = (RunFolder(tmp_path / run).metrics() for run in ("whole", "parts"))
    lines = [[[line[key] for key in exact] for line in run] for run in runs]
    assert lines[0] == lines[1]
    assert (resumed.loss, resumed.noise_scale) == (whole.loss, whole.noise_scale)
    assert whole.noise_scale
    ramp = [event["batch_tokens"] for event in RunFolder(tmp_path / "whole").events() if event["event"] == "ramp"]
    assert ramp == [192, 256]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.kills)])
def test_a_signal_saves_and_exits_with_75(tiny_file: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "leaven", "train", str(tiny_file), "--run", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, "--json", "--set", "data.tokens=10M"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    while number == signal.SIGTERM and process.poll() is None:  # as a scheduler may repeat it
        time.sleep(0.05)
        process.send_signal(number)
    out, errors = process.communicate(timeout=30)  # the grace period of a job after SIGTERM
    assert process.returncode == 75
    document = json.loads(out)
    assert (document["finished"], document["loss"]) == (False, None)
    assert "saved; run the same command again to resume" in errors
    found, damaged = read_checkpoint(tmp_path / "run" / "checkpoints")
    assert found.progress.step == len(losses(tmp_path / "run"))
    assert not damaged


@pytest.mark.long
def test_a_stop_does_not_wait_for_the_end_of_a_long_step_or_evaluation(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes in the third of eight forward passes, first of a step and then of an evaluation. What was
    interrupted is repeated, with the same bits."""
    recipe = tiny.replace({"batch.micro_batch": 1, "model.dropout": 0.1, "data.tokens": 4_096})
    run, whole = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")
    forward, forwards = Stage.forward, list[int]()
    for training, steps in ((True, {4, 5}), (False, {12, 13})):
        forwards.clear()

        def counted(self: Stage, *arguments: Any, training: bool = training, steps: set[int] = steps) -> torch.Tensor:
            if self.training == training and len(run.metrics()) in steps:
                forwards.append(len(run.metrics()))
            return forward(self, *arguments)

        monkeypatch.setattr(Stage, "forward", counted)
        assert not train(recipe, tokens, run.path, stop=lambda: len(forwards) >= 3).finished
        assert len(forwards) == 3
    monkeypatch.undo()
    assert train(recipe, tokens, run.path).finished
    train(recipe, tokens, whole.path)
    assert losses(run.path) == losses(whole.path)
    validations = [
        [(event["step"], event["loss"]) for event in folder.events() if event["event"] == "validation"]
        for folder in (run, whole)
    ]
    assert validations[0] == validations[1]


def test_a_folder_that_cannot_continue_the_run_is_refused_and_left_alone(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    short = tiny.replace({"data.tokens": 512, "schedule.warmup_tokens": 0})
    folder, stranger = RunFolder(tmp_path / "run"), tmp_path / "stranger"
    train(short, tokens, folder.path, stop=lambda: len(folder.metrics()) >= 1)
    stranger.mkdir()
    (stranger / "precious.txt").write_text("do not touch")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    faster = short.replace({"hyperparameters.lr": 0.02})
    for recipe, text, run, says in (
        (faster, tokens, folder.path, "hyperparameters.lr was 0.01, is now 0.02"),
        (short, replace(tokens, fingerprint="other"), folder.path, "an older leaven took another token"),
        (short, tokens, stranger, r"is not empty and holds no recipe.toml"),
    ):
        with pytest.raises(InputError, match=says):
            train(recipe, text, run)
    with folder.locked(), pytest.raises(InputError, match="in use by another process"):
        train(short, tokens, folder.path)  # the lock is per open file: this process is refused like any other
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert train(short, tokens, folder.path).finished


@pytest.mark.long
def test_a_run_keeps_its_micro_batch_unless_the_recipe_changes_it(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    """Another order of summation changes the last bits. With ``auto``, the run keeps its first micro-batch. A changed
    micro-batch is recorded."""
    tiny = tiny.replace({"data.tokens": 2_560})
    two, folder, reported = tiny.replace({"batch.micro_batch": 2}), tmp_path / "run", []
    train(two, tokens, folder, stop=lambda: len(losses(folder)) >= 3)
    train(tiny, tokens, folder, stop=lambda: len(losses(folder)) >= 6)  # auto
    train(two, tokens, tmp_path / "whole")
    whole = losses(tmp_path / "whole")
    done = len(losses(folder))
    assert losses(folder) == whole[:done]
    eight = tiny.replace({"batch.micro_batch": 8, "layout.compile": False})
    train(eight, tokens, folder, on_event=lambda event, values: reported.append((event, values)))
    assert losses(folder)[done:] != whole[done:]
    assert losses(folder) == pytest.approx(whole, abs=1e-4)
    ((_, event),) = [each for each in reported if each[0] == "layout"]
    assert event["changes"] == [{"path": "batch.micro_batch", "before": 2, "after": 8}]
    assert event["tokens"] == 256 * done
    for recipe in (RunFolder(folder).recipe(), read_recipe(folder / "recipe.toml")):
        assert recipe.batch.micro_batch == 8
        assert recipe.why["batch.micro_batch"] == f"since {256 * done:,} tokens; before: 2"


def test_a_folder_killed_before_its_recipe_was_renamed_counts_as_new(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / ".recipe.toml.4711.tmp").write_text("name =")
    assert train(tiny, tokens, run).finished
    assert not list(run.glob(".recipe*"))


@pytest.mark.kills
@pytest.mark.parametrize("checkpoint_every", [256, 10_240], ids=["checkpoints first", "metrics and curves first"])
def test_a_full_disk_is_one_line_and_an_exit_code(tiny_file: Path, tmp_path: Path, checkpoint_every: int) -> None:
    """Run the whole command on a file system of one megabyte, stop it if it waits for room at its end, and run it
    again with more room."""
    with small_disk(tmp_path, "1m") as disk:
        train = [sys.executable, "-m", "leaven", "train", str(tiny_file), "--run", str(disk / "run")]
        sets = ["--set", f"stability.checkpoint_every_tokens={checkpoint_every}", "--set", "model.d_ff=256"]
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * (4096 if checkpoint_every == 256 else 1_035_000))
        with (tmp_path / "stderr").open("w+") as stderr:
            running = subprocess.Popen([*train, *sets], stdout=subprocess.DEVNULL, stderr=stderr)
            while running.poll() is None and "; the run retries, " not in (tmp_path / "stderr").read_text():
                time.sleep(0.05)
            running.terminate()
            code = running.wait(timeout=60)
        printed = (tmp_path / "stderr").read_text()
        waited = "; the run retries, " in printed  # and was stopped like any run
        assert code == (75 if waited else 2)
        assert printed.strip().splitlines()[-1].startswith("stopped at " if waited else "error: ")
        assert "No space left on device" in printed
        assert "Traceback" not in printed
        found, damaged = read_checkpoint(disk / "run" / "checkpoints")
        assert not damaged
        if checkpoint_every == 256:
            assert found is not None
        del found  # it is mapped into memory, and keeps the file system busy
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        subprocess.run([*train, *sets], capture_output=True, text=True, check=True)
        assert len(losses(disk / "run")) == 40


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_weights_are_cast_again_in_each_step(compute: str, tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    """torch keeps cast weights until the outermost autocast ends, and a run is within one that is off."""
    short = tiny.replace({"data.tokens": 2_048, "precision.compute": compute})
    train(short, tokens, tmp_path / "run")
    training = Training(short, tokens)
    assert losses(tmp_path / "run") == [training.step().loss for _ in range(8)]


@pytest.mark.parametrize("setting", ["dtype", "autocast", "no_grad", "inference_mode"])
def test_settings_of_torch_in_the_calling_program_change_nothing(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, setting: str
) -> None:
    short = tiny.replace({"data.tokens": 1_024, "schedule.warmup_tokens": 256})
    expected = train(short, tokens, tmp_path / "plain").loss
    torch.set_default_dtype(torch.bfloat16 if setting == "dtype" else torch.float32)
    contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad()}
    try:
        with contexts.get(setting, torch.inference_mode(mode=setting == "inference_mode")):
            assert train(short, tokens, tmp_path / "run").loss == expected
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"), refused("torch's default device is meta; call"):
        train(short, tokens, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_has_exact_matmuls_whatever_the_calling_program_has_set(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    cpu, cuda, seen = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul, set[tuple[str, bool]]()
    short = tiny.replace({"data.tokens": 512, "schedule.warmup_tokens": 256})
    try:
        for number, precision in enumerate(("bf16", "tf32")):
            if precision == "bf16":
                torch.set_float32_matmul_precision("medium")
            else:  # of one backend, after which torch refuses to say that of all
                cpu.fp32_precision = precision
            train(
                short,
                tokens,
                tmp_path / f"{number}",
                on_step=lambda _: seen.add((cpu.fp32_precision, cuda.allow_tf32)),
            )
            assert (seen, cpu.fp32_precision) == ({("ieee", False)}, precision)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tokens_of_another_recipe_are_refused(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    """A run on them would say in recipe.toml that it was trained on other text."""
    for change, said in (
        ({"data.source": "/mnt/elsewhere/*.txt"}, "data.source"),
        ({"data.tokenizer": "bytes", "data.end_of_text": 0}, "data.tokenizer and data.end_of_text"),
    ):
        with refused(f"tokens were prepared from another {said} than the recipe's; prepare them from this recipe"):
            train(tiny.replace(change), tokens, tmp_path / "run")
    source = tiny.data.sources[0].source
    mixed, other = (
        tiny.replace({"data.source": [{"source": source, "weight": one}, {"source": "b.txt", "weight": 1}]}).data
        for one in (9, 1)
    )
    with refused("tokens were prepared from another data.documents than the recipe's"):
        ids = replace(tokens, sources=tuple(replace(source, train_bytes=0) for source in tokens.sources))
        train(tiny.replace({"data.documents": "isolated"}), ids, tmp_path / "run")
    for vocab_size in (300, 1024):  # the tokenizer is trained, and another one at another size
        with refused("tokens were prepared from another model.vocab_size than the recipe's"):
            train(tiny, prepare(tiny.data, vocab_size), tmp_path / "run")
    with refused("tokens were prepared from another data.source"):
        train(tiny.replace({"data.source": mixed.source}), replace(tokens, data=other), tmp_path / "run")
    assert not (tmp_path / "run").exists()
