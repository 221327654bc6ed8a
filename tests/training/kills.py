"""Kills a run repeatedly with kill -9 at random moments; each attempt is a fork of a process that has imported torch.

python -m tests.training.kills FOLDER prints what was killed when, and what came out, as JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # Adam's first step imports it, which takes a second in every child
from tests.training.planted import in_order, recipe, text

from leaven.training.checkpoint import CheckpointManager, read_checkpoint
from leaven.training.engine import Training
from leaven.training.metrics import Step
from leaven.training.rewind import rewinds_of
from leaven.training.run_folder import RunFolder
from leaven.training.run_lines import RunLines
from leaven.training.trainer import train

KILLS = 20
RECIPE = recipe(
    data__tokens=100 * 256,
    model__dropout=0.1,
    stability__checkpoint_every_tokens=2 * 256,
    batch__ramp={"start_tokens": 128, "increment_tokens": 64, "over_tokens": 8 * 256},
)
TEXT = text(74, 6)


def forked(body: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def killed_at_random(folder: Path) -> dict[str, int]:
    """Kill the run KILLS times, each time after a few steps. Every second kill waits until a checkpoint is being
    written."""
    draw, counts = random.Random(0), {"kills": 0, "saving": 0, "lost": 0}
    for number in range(KILLS):
        reading, writing = os.pipe()

        def on_step(step: Step, writing: int = writing) -> None:
            os.write(writing, b".")

        child = forked(lambda: train(RECIPE, TEXT, folder, on_step=on_step))
        os.close(writing)
        steps = draw.randrange(1, 12)
        while steps and os.read(reading, 1):
            steps -= 1
        deadline = time.monotonic() + 5
        while number % 2 and not list(folder.glob("checkpoints/.*.tmp")) and time.monotonic() < deadline:
            pass
        time.sleep(draw.random() * 0.003)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        counts["kills"] += 1
        counts["saving"] += bool(list(folder.glob("checkpoints/.*.tmp")))
        run = RunFolder(folder)
        counts["lost"] = max(counts["lost"], lost(run))
    return counts


def lost(run: RunFolder) -> int:
    """Return the number of steps since the last whole checkpoint, which a resume repeats."""
    found, damaged = read_checkpoint(run.checkpoints, rewinds_of(run))
    assert not damaged
    lines = run.metrics()
    return (lines[-1]["step"] if lines else 0) - (found.progress.step if found else 0)


def killed_rolling_back(begun: Path, folder: Path, where: str) -> None:
    """Kill the run during its first rollback: right after its event is written, or before one of the calls that
    follow."""
    shutil.copytree(begun, folder)

    def body() -> None:
        armed = False
        event = RunLines.event

        def written(self: RunLines, name: str, **values: Any) -> None:
            nonlocal armed
            event(self, name, **values)
            armed = armed or name == "rollback"
            if armed and where == "event":
                os.kill(os.getpid(), signal.SIGKILL)

        def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if armed:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return call

        RunLines.event = written  # type: ignore[method-assign]
        owners = {
            "clear": CheckpointManager,
            "restore": Training,
            "follow": Training,
            "truncate_metrics": RunLines,
        }
        if where in owners:
            setattr(owners[where], where, deadly(getattr(owners[where], where)))
        train(RECIPE, TEXT, folder)

    _, status = os.waitpid(forked(body), 0)
    assert os.WIFSIGNALED(status), f"{where} was not reached"


def result(folder: Path) -> dict[str, Any]:
    summary = train(RECIPE, TEXT, folder)
    run = RunFolder(folder)
    keys = ("step", "loss", "grad_norm", "update_norm", "lr")
    decisions = ("step", "to_tokens", "skip_from", "skip_to", "attempt", "onset", "numbers")
    return {
        "loss": summary.loss,
        "steps": [[line[key] for key in keys] for line in run.metrics()],
        "rollbacks": [[event[key] for key in decisions] for event in run.events() if event["event"] == "rollback"],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    in_order()
    places = ("event", "clear", "restore", "follow", "truncate_metrics")
    child = forked(
        lambda: train(RECIPE, TEXT, folder / "begun", stop=lambda: len(RunFolder(folder / "begun").metrics()) > 76)
    )
    os.waitpid(child, 0)
    counts = killed_at_random(folder / "random")
    for where in places:
        killed_rolling_back(folder / "begun", folder / where, where)
    # This process trains only now: a process that has trained has threads, and must not be forked.
    runs = {name: result(folder / name) for name in ("whole", "random", *places)}
    print(json.dumps({"counts": counts, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
