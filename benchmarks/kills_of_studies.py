"""Kill commands of a study at random moments: `PYTHONPATH=src python -m benchmarks.kills_of_studies [KILLS]
[--store journal|sqlite|postgresql]`.

Two `leaven tune` commands share a study over a cheap shell command. A random one of them is killed with SIGKILL, with
its process group, at a random moment, and started again immediately. In a study in SQLite, every third kill happens
while another process holds a lock on the file for seconds. Before every fifth kill, the PostgreSQL server is stopped
as by `pg_ctl stop -m immediate`, and started again; a command that found no server at its start is started again,
too. Each study has TRIALS trials; when it has ended, another one begins, until KILLS are reached.

The command writes each loss to a log of its own. At the end of each study, the benchmark fails if a trial is missing
or counted twice, if the budget is not used exactly, if a loss differs from that in the log, if the loss of the answer
is not the mean of its runs with fresh seeds, or if it is above the lowest loss in the log by more than 4 times the
noise.
"""

import argparse
import json
import math
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from tests.tuning.test_postgresql import FOUND, Server

TRIALS = 24  # too few for a search to end because it stalls
PATIENCE = 300.0  # seconds without a new trial after which a study counts as stuck
HELD_SECONDS = 3.0  # how long a lock on the SQLite file is held
# The loss depends on the seed only a little, so that the answer is the point with the lowest loss.
COMMAND = """
command = '''awk 'BEGIN {
  loss = sprintf("%.9f", 2 + log({lr}) ^ 2 + log({wd} / 3) ^ 2 + 0.001 * sin(7 * {seed} + {lr}))
  print "{lr},{wd},{seed}", loss >> "log"; close("log"); print "loss", loss}' && sleep 0.1'''
loss.pattern = "loss {loss}"
[space]
lr = {start = 2.0, low = 0.01, high = 100.0}
wd = {start = 1.0, low = 0.01, high = 100.0}
"""


def main(kills: int, store: str, seed: int) -> int:
    draw, counts, seconds = random.Random(seed), Counter[str](), list[float]()
    with tempfile.TemporaryDirectory(prefix="leaven-kills-", dir="/tmp") as name, server(store) as database:
        while counts["kills"] < kills:
            counts["studies"] += 1
            folder = Path(name, f"study-{counts['studies']}")
            folder.mkdir()
            (folder / "tiny.toml").write_text(COMMAND)
            study = Study(folder, store, database)
            try:
                study.disturb(kills, draw, counts, seconds)
                study.check(counts)
            except Failed as failed:
                print(f"{store}: FAILED after {counts['kills']} kills: {failed}\n{study.output()}")
                return 1
            finally:
                study.end()
    waited = statistics.median(seconds) if seconds else math.nan
    print(
        f"{store}: {counts['kills']} kills in {counts['studies']} studies of {TRIALS} trials, {counts['held']} while "
        f"locked, {counts['restarts']} restarts of the server. Each trial counted once, none lost, losses and "
        f"answers as in the log. {counts['again']} trials of killed commands ran again, {counts['failed']} failed "
        f"after two killed attempts. {waited:.1f} s from a kill to the next trial (median)."
    )
    return 0


class Failed(Exception):
    """Raised if a study has lost a trial, is stuck, or gives a wrong answer."""


@contextmanager
def server(store: str) -> "Iterator[Server | None]":
    """Yield a PostgreSQL server if the store needs one."""
    if store != "postgresql":
        yield None
        return
    if not FOUND:
        raise SystemExit("no PostgreSQL server is installed (Debian: postgresql)")
    with tempfile.TemporaryDirectory(prefix="leaven-postgresql-", dir="/tmp") as name:
        made = Server(Path(name))
        try:
            yield made
        finally:
            made.stop()


class Study:
    """Two commands that share a study."""

    def __init__(self, folder: Path, store: str, database: "Server | None") -> None:
        self.folder, self._server = folder, database
        where = {"journal": "study", "sqlite": "sqlite:///study.db"}.get(store)
        self.where = where or (database.database(folder.name.replace("-", "_")) if database else "")
        self.lockable = folder / "study.db" if store == "sqlite" else None
        self.commands = [self._start(which) for which in range(2)]

    def _start(self, which: int) -> "subprocess.Popen[bytes]":
        verb = [sys.executable, "-m", "leaven", "tune", "tiny.toml", "--study", self.where, "--trials", str(TRIALS)]
        verb += ["--noise", "0.001", "--json"] + ([] if self.where == "study" else ["--out", f"out-{which}"])
        with (self.folder / f"{which}.json").open("wb") as out, (self.folder / f"{which}.err").open("ab") as err:
            return subprocess.Popen(verb, cwd=self.folder, stdout=out, stderr=err, start_new_session=True)

    def disturb(self, kills: int, draw: random.Random, counts: Counter[str], seconds: list[float]) -> None:
        """Kill commands until the study has ended. After ``kills`` kills, only wait for the end."""
        while counts["kills"] < kills and not self._wait(len(self._log()) + draw.randint(0, 2)):
            time.sleep(draw.uniform(0, 3.0))
            if counts["kills"] % 5 == 4 and self._server:
                self._server.stop()
                self._server.start()
                counts["restarts"] += 1
            which = draw.randrange(2)
            if self.commands[which].poll() is not None:  # the study has ended
                break
            holds = self.lockable is not None and self.lockable.exists() and counts["kills"] % 3 == 2
            with self._locked() if holds else nullcontext():
                os.killpg(self.commands[which].pid, signal.SIGKILL)
                self.commands[which].wait()
                counts["kills"] += 1
                counts["held"] += holds
                began, trials = time.monotonic(), len(self._log())
                self.commands[which] = self._start(which)
            if self._wait(trials + 1):
                break
            seconds.append(time.monotonic() - began)
            print(f"{counts['kills']} of {kills} kills, {trials} losses in the log", flush=True)
        self._wait(sys.maxsize)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock on the SQLite file during the block, and for ``HELD_SECONDS`` after it."""
        assert self.lockable is not None
        with closing(sqlite3.connect(self.lockable, isolation_level=None, timeout=30)) as database:
            database.execute("BEGIN IMMEDIATE")
            yield
            time.sleep(HELD_SECONDS)

    def _wait(self, losses: int) -> bool:
        """Wait until the log has so many losses. Return True if a command has ended before."""
        until, seen = time.monotonic() + PATIENCE, -1
        while (now := len(self._log())) < losses:
            if now != seen:
                seen, until = now, time.monotonic() + PATIENCE
            codes = [command.poll() for command in self.commands]
            for which in range(2):
                if codes[which] == 2 and self._server and "cannot be opened" in self._last_line(which):
                    # It started while the server was stopped; leaven promises one line and exit code 2.
                    self.commands[which], codes[which] = self._start(which), None
            if any(codes) or time.monotonic() > until:
                raise Failed(f"exit codes {codes}" if any(codes) else f"no new loss for {PATIENCE:.0f} s")
            if None not in codes or (losses < sys.maxsize and 0 in codes):
                return True
            time.sleep(0.02)
        return False

    def _log(self) -> list[tuple[tuple[float, ...], float]]:
        """Return ((lr, wd, seed), loss) of each run of the command that has ended."""
        file = self.folder / "log"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(tuple(map(float, values.split(","))), float(loss)) for values, loss in lines]

    def check(self, counts: Counter[str]) -> None:
        """Raise Failed if the study's documents do not agree with each other and with the log of losses."""
        outs = ["study"] if self.where == "study" else ["out-0", "out-1"]
        documents = [json.loads((self.folder / out / "study.json").read_text()) for out in outs]
        document, log = documents[0], self._log()
        if any(other["trials"] != document["trials"] for other in documents):
            raise Failed("the two commands have other trials")
        trials, losses = document["trials"], dict(log)
        states = Counter(trial["state"] for trial in trials)
        counts["failed"] += states["failed"]
        counts["again"] += len(log) - states["complete"]
        if len(trials) != TRIALS or states["complete"] + states["failed"] != TRIALS:
            raise Failed(f"{dict(states)}, not {TRIALS} trials")
        runs = Counter((*trial["octaves"].values(), trial["seed"]) for trial in trials)
        if len({trial["number"] for trial in trials}) != TRIALS or max(runs.values()) > 1:
            raise Failed(f"a trial counts twice: {runs.most_common(1)}")
        complete = [trial for trial in trials if trial["state"] == "complete"]
        logged = [losses.get((*trial["values"].values(), trial["seed"])) for trial in complete]
        if logged != [trial["loss"] for trial in complete]:
            raise Failed(f"the losses {[trial['loss'] for trial in complete]} are {logged} in the log")
        best, fresh = document["best"], [t for t in complete if t["octaves"] == document["octaves"] and t["seed"]]
        if not fresh or abs(best["loss"] - statistics.fmean(t["loss"] for t in fresh)) > 1e-12:
            raise Failed(f"the loss {best['loss']} is not the mean of the answer's runs with fresh seeds")
        if best["loss"] > min(losses.values()) + 0.004:
            raise Failed(f"the answer {best} is worse than the lowest loss of the log, {min(losses.values())}")

    def _last_line(self, which: int) -> str:
        return (self.folder / f"{which}.err").read_text().strip().rpartition("\n")[2]

    def output(self) -> str:
        return "\n".join((self.folder / f"{which}.err").read_text()[-2_000:] for which in range(2))

    def end(self) -> None:
        for command in self.commands:
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--store", choices=["journal", "sqlite", "postgresql"], default="journal")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    raise SystemExit(main(arguments.kills, arguments.store, arguments.seed))
