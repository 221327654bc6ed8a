"""Processes that die, hang, stop or get a nan: the other processes report it, and no step is lost."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import layout
from tests.training.conftest import losses

from leaven import storage
from leaven.data.tokens import TokenSet, prepare
from leaven.distributed.process_group import join_process_group
from leaven.errors import InputError, ProcessLost
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.metrics import Step
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train

TWO = layout(dp=2, zero=1) | {"batch.micro_batch": 2, "stability.checkpoint_every_tokens": 1_024}


def run(recipe: Recipe, tokens: TokenSet, folder: Path, how: str = "") -> dict[str, Any]:
    """Train a whole run. If ``how`` is ``stop``, the second process stops after six steps. If it is ``nan``, that
    process gets a nan weight before step 10."""
    issue, issued = Training.issue, [0]

    def watched(training: Training) -> Callable[[], Step]:
        issued.append(training.progress.step + 1)
        if how == "nan" and group.rank == 1 and issued[-1] == 10 and issued.count(10) == 1:
            with torch.no_grad():
                training.sharded.local_parameters[0].fill_(torch.nan)
        return issue(training)

    with join_process_group(recipe.layout, torch.device("cpu")) as group, patch.object(Training, "issue", watched):
        stop = lambda: how == "stop" and group.rank == 1 and issued[-1] >= 6  # noqa: E731
        summary = train(recipe, tokens, folder, stop=stop, group=group)
    return {"loss": summary.loss, "steps": summary.steps, "rollbacks": summary.rollbacks, "done": summary.finished}


def loses_its_folder(recipe: Recipe, tokens: TokenSet, folder: Path) -> str:
    """The run folder is moved away after step 5."""

    def on_step(step: Step) -> None:
        if step.step == 5 and group.is_first:
            folder.rename(folder.with_name("moved"))

    try:
        with join_process_group(recipe.layout, torch.device("cpu")) as group:
            train(recipe, tokens, folder, on_step=on_step, group=group)
    except (InputError, ProcessLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nobody missed it"


def given(recipe: Recipe, tokens: TokenSet, folder: Path, other: dict[str, Any]) -> str:
    """The second process is given a recipe with ``other`` values, or other tokens."""
    try:
        with join_process_group(recipe.layout, torch.device("cpu")) as group:
            if group.rank == 1:
                tokens = replace(tokens, **other.pop("tokens", {}))
                recipe = recipe.replace(other)
            train(recipe, tokens, folder, group=group)
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def waits_for_room(recipe: Recipe, tokens: TokenSet, folder: Path) -> bool:
    """The disk of the first process is full until the run waits for room."""
    append, full = storage.append, [True]

    def refused(path: Path, line: bytes) -> None:
        if full and path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, line)

    def on_event(event: str, values: dict[str, Any]) -> None:
        if event == "waits":
            time.sleep(0.1)  # the others wait, too
            full.clear()

    with (
        patch.object(storage, "append", refused),
        join_process_group(recipe.layout, torch.device("cpu")) as group,
    ):
        return train(recipe, tokens, folder, group=group, on_event=on_event).finished


def sees_the_end_late(recipe: Recipe, tokens: TokenSet, folder: Path, rank: int) -> bool:
    """A network disk shows the last event of the run a second late to a process."""
    read = storage.read

    def late(path: Path, most: float = storage.LARGEST) -> bytes:
        lines = read(path, most).splitlines(keepends=True)
        shown = group.rank != rank or Path(path).name != "events.jsonl" or time.monotonic() > begin + 1
        return b"".join(lines if shown else lines[:-1])

    with join_process_group(recipe.layout, torch.device("cpu")) as group, patch.object(storage, "read", late):
        begin = time.monotonic()
        return train(recipe, tokens, folder, group=group).finished


def hangs(recipe: Recipe, tokens: TokenSet, seconds: float) -> str:
    """The second process sleeps before the fourth step."""
    try:
        with join_process_group(recipe.layout, torch.device("cpu")) as group:
            training = Training(recipe, tokens, device="cpu", group=group)
            for number in range(1, 6):
                group.heartbeat(f"in step {number}")
                if group.rank == 1 and number == 4:
                    time.sleep(seconds)
                training.step()
    except ProcessLost as error:
        return str(error)
    return "nobody missed it"


def events(folder: Path) -> list[str]:
    return [event["event"] for event in RunFolder(folder).events()]


@pytest.fixture
def two(tiny: Recipe) -> Recipe:
    return tiny.replace(TWO)


@pytest.fixture
def tokens(tiny: Recipe) -> TokenSet:
    return prepare(tiny.data, tiny.model.vocab_size)


@pytest.mark.long
def test_a_stop_of_one_process_stops_all(two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path) -> None:
    two = two.replace({"data.tokens": 2_304})
    stopped = ranks(2, run, two, tokens, tmp_path / "run", "stop")
    assert [(each["done"], each["steps"]) for each in stopped] == [(False, 6), (False, 6)]
    done = ranks(2, run, two, tokens, tmp_path / "run")
    whole = ranks(2, run, two, tokens, tmp_path / "whole")
    assert done == whole
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")  # to the last bit
    assert len(losses(tmp_path / "run")) == whole[0]["steps"] == 9
    assert events(tmp_path / "whole").count("start") == 1  # only one process writes
    compared = [event for event in RunFolder(tmp_path / "whole").events() if event["event"] == "ranks"]
    assert compared
    assert all({each["slowest"], each["fullest"]} <= {0, 1} for each in compared)
    assert all(each["times_the_median"] >= 1 and each["memory_gib"] > 0 for each in compared)


def test_a_nan_on_one_process_rolls_back_all(two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path) -> None:
    done = ranks(2, run, two.replace({"data.tokens": 3_072}), tokens, tmp_path / "run", "nan")
    assert done[0] == done[1]
    assert done[0]["done"]
    assert done[0]["rollbacks"] == 1
    assert events(tmp_path / "run").count("rollback") == 1


def test_all_wait_for_room_at_the_end_of_a_run(two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path) -> None:
    two = two.replace({"data.tokens": 1_536})
    assert ranks(2, waits_for_room, two, tokens, tmp_path / "run") == [True, True]
    assert len(losses(tmp_path / "run")) == RunFolder(tmp_path / "run").metrics()[-1]["step"]
    assert events(tmp_path / "run")[-1] == "finish"


@pytest.mark.long
def test_all_wait_for_one_that_sees_the_end_of_a_run_late(
    two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path
) -> None:
    two = two.replace({"data.tokens": 1_536})
    ranks(2, run, two, tokens, tmp_path / "run")
    before = events(tmp_path / "run")
    for rank in range(2):
        assert ranks(2, sees_the_end_late, two, tokens, tmp_path / "run", rank) == [True, True]
    assert events(tmp_path / "run") == before


def test_all_end_if_the_run_folder_is_deleted(two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2, loses_its_folder, two, tokens, tmp_path / "run")
    assert first.startswith(f"InputError: run folder {tmp_path / 'run'} was deleted or moved while it was used")
    assert second.startswith("ProcessLost: rank 1 of 2 timed out or lost its connection")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"hyperparameters.lr": 0.03}, "hyperparameters.lr"),
        ({"tokens": {"fingerprint": "b"}}, "text or tokenizer"),
        ({"tokens": {"proportions": (Fraction(1, 2), Fraction(1, 2))}}, "data.source"),
    ],
)
def test_all_processes_need_the_same_recipe_and_text(
    two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    first, second = ranks(2, given, two, tokens, tmp_path / "run", other)
    assert (
        first
        == "Settled: rank 1 differs from rank 0 in recipe, text, tokenizer, [start], --rewind-to or leaven version; "
        "give all ranks the same"
    )
    assert second == f"InputError: rank 1 has another {named} than rank 0; give all ranks the same"
    assert not (tmp_path / "run").exists()


def test_all_processes_need_the_same_start_weights(
    two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path
) -> None:
    for name, byte in (("a", b"\0"), ("b", b"\1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(byte * 1000)
    two = two.replace({"start.weights": str(tmp_path / "a")})
    _, second = ranks(2, given, two, tokens, tmp_path / "run", {"start.weights": str(tmp_path / "b")})
    assert second == "InputError: rank 1 has another [start] weights than rank 0; give all ranks the same"
    assert not (tmp_path / "run").exists()


@pytest.mark.kills
def test_the_error_names_the_process_that_hangs(two: Recipe, tokens: TokenSet, ranks: Pool) -> None:
    two = two.replace({"layout.timeout_seconds": 12})  # enough for the processes to connect on a busy machine
    assert ranks(2, hangs, two, tokens, 0.0) == ["nobody missed it"] * 2
    said, _ = ranks(2, hangs, two, tokens, 20.0)
    assert said.startswith("rank 0 of 2 timed out or lost its connection in ")
    assert ", in step 4; rank 1 is behind: its last heartbeat, " in said
    assert "was in step 4" in said


def torchrun(recipe: Path, folder: Path, processes: int, *options: str) -> list[str]:
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--monitor-interval",
        "0.1",
        *options,
    ]
    return [sys.executable, *launch, "-m", "leaven", "train", str(recipe), "--run-folder", str(folder)]


def processes_of(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.slow  # `make kills` does the same with eight processes, several times
def test_a_restart_by_torchrun_has_the_same_bits(two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path) -> None:
    """torchrun restarts the processes after a kill, with the store of the first start. Then a scheduler's signal to
    all processes stops the run, and one process finishes it."""
    write_recipe(two, tmp_path / "two.toml")
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    said = (tmp_path / "said").open("w+")
    process = subprocess.Popen(
        torchrun(tmp_path / "two.toml", tmp_path / "run", 2, "--max-restarts", "2"), env=environment, stderr=said
    )
    killed = False
    while process.poll() is None:
        steps = len(losses(tmp_path / "run"))
        if not killed and steps >= 8:
            killed = True
            os.kill(processes_of(process.pid)[1], signal.SIGKILL)
        if "resume" in events(tmp_path / "run") and steps >= 20:
            for each in (process.pid, *processes_of(process.pid)):  # torchrun then sends it to its processes again
                os.kill(each, signal.SIGTERM)
            break
        time.sleep(0.01)
    process.wait(timeout=300)
    said.seek(0)
    text = said.read()
    assert "Traceback" not in text.partition("torch/distributed/elastic")[0], text
    assert events(tmp_path / "run").count("resume") == 1, text
    assert "stop" in events(tmp_path / "run"), text
    alone = [sys.executable, "-m", "leaven", "train", str(tmp_path / "two.toml"), "--run", str(tmp_path / "run")]
    one = [f"--set=layout.{key}" for key in ("dp=1", "zero=0")]
    done = subprocess.run([*alone, *one, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks(2, run, two, tokens, tmp_path / "whole")
    mine, whole = losses(tmp_path / "run"), losses(tmp_path / "whole")
    before = len(mine) - len([event for event in RunFolder(tmp_path / "run").metrics() if event["step"] > 20])
    assert mine[:before] == whole[:before]
    assert mine == pytest.approx(whole, abs=1e-5)
    assert json.loads(done.stdout)["loss"] == pytest.approx(ranks(2, run, two, tokens, tmp_path / "whole")[0]["loss"])


def listening(port: int) -> None:
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_resumes_after_losing_a_node(two: Recipe, tokens: TokenSet, ranks: Pool, tmp_path: Path) -> None:
    """Two torchrun agents on this machine have one process each. One agent and its process are killed at step 8. The
    other agent resumes the run alone, with dp = 1."""
    write_recipe(two.replace({"layout.timeout_seconds": 60}), tmp_path / "two.toml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    meet += ["--rdzv-id=leaven", "--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=8"]
    command = torchrun(tmp_path / "two.toml", tmp_path / "run", 1, *meet)
    agents = [subprocess.Popen(command, start_new_session=True)]
    listening(port)  # the first agent serves the rendezvous
    agents.append(subprocess.Popen(command, start_new_session=True))
    try:
        until = time.monotonic() + 240
        while len(losses(tmp_path / "run")) < 8 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(losses(tmp_path / "run")) >= 8
        for process in (*processes_of(agents[1].pid), agents[1].pid):
            os.kill(process, signal.SIGKILL)
        assert agents[0].wait(timeout=240) == 0
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert events(tmp_path / "run").count("resume") == 1
    assert read_recipe(tmp_path / "run" / "recipe.toml").layout.dp == 1
    ranks(2, run, two, tokens, tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
