"""Kill processes of a run at random moments: `PYTHONPATH=src python -m benchmarks.kills [KILLS] [--layout 2,2,2]
[--minutes M]`.

torchrun's agent starts a run of dp x tp x pp processes and restarts all of them when one is lost. A random process is
killed with SIGKILL at a random moment, every other time while a checkpoint is being written, until KILLS or M minutes
are reached; then the run finishes. The benchmark fails if the run does not finish, if it finishes before KILLS
without --minutes, or if any bit of its losses differs from an undisturbed run. It prints a line after each kill, so
that it leaves a result even if it is stopped.

Processes are forked from one that has imported torch. A restart of eight processes on two cores then takes seconds.
"""

import argparse
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._tiny import tiny_recipe
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import leaven.cli
from leaven.recipe.files import parse_recipe, write_recipe
from leaven.training.run_folder import RunFolder

# Seconds without a new step or event, after which the run counts as stuck. On two cores that others use too, eight
# processes take minutes to start, and a restart that waits for one of them takes `TIMEOUT` longer.
PATIENCE, TIMEOUT = 1_800.0, 600


def main(kills: int, degrees: tuple[int, int, int], seed: int, minutes: float) -> int:
    dp, tp, pp = degrees
    os.environ["OMP_NUM_THREADS"] = "1"
    with tiny_recipe() as (tiny, folder):
        recipe = tiny.replace(
            {
                "model.n_kv_heads": 2,
                "data.tokens": 256 * (60 + 12 * kills),
                "batch.micro_batch": 1,
                "stability.checkpoint_every_tokens": 256 * 4,
                "evaluation.every_tokens": 256 * 100,
                "layout.dp": dp,
                "layout.tp": tp,
                "layout.pp": pp,
                "layout.zero": 1,
                "layout.timeout_seconds": TIMEOUT,
            }
        )
        write_recipe(recipe, folder / "recipe.toml")
        whole = start(folder, "whole", 0)
        if whole.wait() != 0:
            raise SystemExit(f"the undisturbed run failed\n{(folder / 'whole.log').read_text()[-4_000:]}")
        print("the undisturbed run has finished", flush=True)
        until = time.monotonic() + 60 * minutes
        counts = disturbed(folder, kills, random.Random(seed), until)
        expected, found = losses(folder / "whole"), losses(folder / "run")
        same = expected == found
        differ = [step for step, pair in enumerate(zip(expected, found, strict=False), 1) if pair[0] != pair[1]]
        finished = RunFolder(folder / "run").finish() is not None
        if not finished:
            print(f"NOT FINISHED after {counts['kills']} kills\n{(folder / 'run.log').read_text()[-4_000:]}")
        print(
            f"{dp}x{tp}x{pp}: {counts['kills']} kills, {counts['saving']} of them while a checkpoint was being "
            f"written, {counts['again']} steps done again, {counts['seconds']:.0f} s from a kill to the next step "
            "(median); "
            + (
                "losses of the undisturbed run, to the last bit"
                if same
                else f"LOST: {len(found)} steps of {len(expected)}, other losses at {differ[:5] or 'none of them'}"
            )
        )
        return 0 if same and finished and (counts["kills"] >= kills or math.isfinite(minutes)) else 1


def start(folder: Path, run: str, restarts: int) -> "subprocess.Popen[bytes]":
    layout = parse_recipe((folder / "recipe.toml").read_text(), "recipe").layout
    command = ["train", str(folder / "recipe.toml"), "--run-folder", str(folder / run)]
    launch = [sys.executable, "-m", "benchmarks.kills", "--launch", str(layout.ranks), str(restarts), *command]
    with (folder / f"{run}.log").open("ab") as log:
        return subprocess.Popen(launch, stdout=log, stderr=log)


def launch(ranks: int, restarts: int, command: list[str]) -> None:
    """Run ``leaven COMMAND`` in processes as ``torchrun --max-restarts`` does, with torchrun's own agent."""
    multiprocessing.set_forkserver_preload(["leaven.training.trainer", "leaven.cli.train"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
        run_id="kills",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    elastic_launch(config, rank_main)(command)


def rank_main(command: list[str]) -> None:
    if code := leaven.cli.app(command, prog_name="leaven", standalone_mode=False):
        raise SystemExit(code)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def disturbed(folder: Path, kills: int, draw: random.Random, until: float) -> dict[str, float]:
    run = RunFolder(folder / "run")
    process = start(folder, "run", 2 * kills)
    counts: dict[str, float] = {"kills": 0, "saving": 0, "again": 0}
    seconds: list[float] = []
    while counts["kills"] < kills and time.monotonic() < until:
        reached = steps(run) + draw.randint(1, 12)
        if not wait(run, process, lambda reached=reached: steps(run) >= reached):
            break
        time.sleep(draw.uniform(0, 0.2))
        saving = bool(counts["kills"] % 2)
        while saving and process.poll() is None and not list(run.path.glob("checkpoints/.*.tmp")):
            time.sleep(0.001)
        try:  # the agent's children are a fork server and a resource tracker; the ranks are children of the former
            ranks = [rank for child in children(process.pid) for rank in children(child)]
        except FileNotFoundError:  # the agent has ended
            break
        if not ranks:
            break
        counts["saving"] += bool(list(run.path.glob("checkpoints/.*.tmp")))
        reached, began = steps(run), time.monotonic()
        os.kill(draw.choice(ranks), signal.SIGKILL)
        counts["kills"] += 1
        resumed = resumes(run)
        if not wait(run, process, lambda resumed=resumed: resumes(run) > resumed):
            break
        again = int(run.events()[-1]["step"])
        if not wait(run, process, lambda again=again: steps(run) > again):
            break
        seconds.append(time.monotonic() - began)
        counts["again"] += max(reached - again, 0)
        print(
            f"{counts['kills']} of {kills} kills, step {steps(run)}, {seconds[-1]:.0f} s to the next step", flush=True
        )
    wait(run, process, lambda: run.finish() is not None)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:  # stuck, and not ended by SIGTERM
        process.kill()
    counts["seconds"] = sorted(seconds)[len(seconds) // 2] if seconds else float("nan")
    return counts


def wait(run: RunFolder, process: "subprocess.Popen[bytes]", reached: Callable[[], bool]) -> bool:
    """Wait until ``reached``; False if the process ends first, or writes nothing for ``PATIENCE`` seconds."""
    seen, until = (0, 0), time.monotonic() + PATIENCE
    while not reached():
        now = (steps(run), len(run.events()))
        if now != seen:
            seen, until = now, time.monotonic() + PATIENCE
        if process.poll() is not None or time.monotonic() > until:
            process.terminate()
            return False
        time.sleep(0.05)
    return True


def steps(run: RunFolder) -> int:
    lines = run.metrics()
    return int(lines[-1]["step"]) if lines else 0


def resumes(run: RunFolder) -> int:
    return sum(event["event"] == "resume" for event in run.events())


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(folder).metrics()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        launch(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        raise SystemExit
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--layout", default="2,2,2", help="dp,tp,pp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop killing after this time")
    arguments = parser.parse_args()
    dp, tp, pp = (int(part) for part in arguments.layout.split(","))
    raise SystemExit(main(arguments.kills, (dp, tp, pp), arguments.seed, arguments.minutes))
