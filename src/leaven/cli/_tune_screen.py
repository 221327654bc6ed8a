"""What a person watches while a study searches, and its answer."""

import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from leaven.cli._screens import Screen
from leaven.recipe.units import format_quantity, format_seconds
from leaven.tuning.document import UNDER_WAY, StudyDocument, StudyTrial
from leaven.views import points
from leaven.views.terminal import cut, joined

EVERY = 10  # trials, after which the foot is said once where there is no terminal to see it on
MOST_LINES = 6  # of workers below the rows
CELL = 53  # characters of each of them


@dataclass(frozen=True)
class _Running:
    number: int
    worker: str
    since: float  # of time.monotonic


class TuneScreen(Screen):
    """A row a trial, those of other commands on the same study too; below them, on a terminal, who does what.

    It may be told from several threads. ``trials``, ``flops`` and ``hours`` are the budget; ``workers`` work at
    once.
    """

    HEADER = "trial      loss  against best  tokens/s  worker  what changed against the best"
    INDENT = HEADER.index("what")

    def __init__(
        self,
        state: StudyDocument,
        trials: int | None,
        workers: int,
        *,
        flops: float | None = None,
        hours: float | None = None,
    ) -> None:
        super().__init__()
        self._state, self._trials, self._workers = state, trials, workers
        self._flops, self._hours = flops, hours
        self._shown = {trial.number for trial in _ended(state)}
        self._running: dict[int, _Running] = {}
        self._names: dict[str, str] = {}
        self._rows = threading.RLock()  # the foot takes no lock: rich asks for it under its own
        self._task = self._progress.add_task("trials", total=trials, completed=state.ended, left="")
        self._progress.above = self._foot
        for line in joined(headline(state), self._width):
            self.row(line)
        if self._shown:
            # Whether there is more to do turns out: a search may have stopped of itself.
            self.row(f"  {self._done()} trials are done")
        self._best = _best(state)
        self._headed = False

    @property
    def _width(self) -> int:
        return self._progress.console.width

    def asked(self, number: int, worker: str) -> None:
        """A worker of this command has begun a trial."""
        with self._rows:
            self._running[number] = _Running(number, self._name(worker), time.monotonic())

    def ended(self, state: StudyDocument) -> None:
        """Trials have ended; ``state`` is the study with them, and with what other commands have done meanwhile."""
        with self._rows:
            unknown, self._state = _noise(self._state) is None, state
            new = [other for other in _ended(state) if other.number not in self._shown]
            for trial in new:
                self._say(trial)
            if unknown and (noise := _noise(state)) is not None:
                self.row(f"  {noise}; what gains less is no gain")
            ended = len(self._shown)
            total = self._trials and max(self._trials, ended)
            self._progress.update(self._task, completed=ended, total=total, left="")
            if not self._progress.console.is_terminal and ended // EVERY > (ended - len(new)) // EVERY:
                self.row(f"  {' · '.join(self._summary())}")

    def note(self, text: str) -> None:
        self.row(f"  {text}")

    def _say(self, trial: StudyTrial) -> None:
        if not self._headed:
            self.row(Text(cut(self.HEADER, self._width), style="dim"))
            self._headed = True
        self._shown.add(trial.number)
        running = self._running.pop(trial.number, None)
        worker = running.worker if running else self._name(trial.worker or "-")
        speed = format_quantity(trial.tokens_per_second) if trial.tokens_per_second else "-"
        said = Text.assemble(f"{trial.number:5d}  ", self._verdict(trial), f"  {speed:>8}  {worker:>6}  ")
        room = self._width - self.INDENT
        expected = f"{trial.loss:.4f} expected; " if trial.state == "stopped" and trial.loss is not None else ""
        self.row(said + cut(expected + points.told(trial, self._state, room - len(expected), self._best), room))
        if _leads(trial, self._best):
            self._best = trial

    def _verdict(self, trial: StudyTrial) -> Text:
        if trial.state != "complete" or trial.loss is None:
            style = "yellow" if trial.state == "stopped" else "red"
            return Text(f"{trial.state} {points.share(trial, self._state)}".strip().ljust(22), style=style)
        if trial.purpose != "search" or self._best is None or self._best.loss is None:
            return Text(f"{trial.loss:8.4f}  {'':12}")
        delta = trial.loss - self._best.loss
        star = "*" if delta < 0 else " "
        return Text.assemble(f"{trial.loss:8.4f}  ", (f"{delta:+10.4f} {star}", "green" if delta < 0 else ""))

    def _name(self, worker: str) -> str:
        """w1, w2 and so on, in the order in which they are heard of."""
        return "-" if worker == "-" else self._names.setdefault(worker, f"w{len(self._names) + 1}")

    # --- below the rows

    def _foot(self) -> Iterator[RenderableType]:
        at_work = [
            Text.assemble(f" {job.worker:<4}", ("trial ", "dim"), f"{job.number:<5}", self._along(job))
            for job in sorted(self._running.copy().values(), key=lambda job: job.number)
        ]
        at_work += [
            Text.assemble(
                f" {'':4}", ("trial ", "dim"), f"{trial.number:<5}", (trial.worker or "another command", "dim")
            )
            for trial in self._state.trials
            if trial.state == "running" and trial.number not in self._running
        ]
        across = max(self._width // CELL, 1)
        yield Text()
        lines = [at_work[i : i + across] for i in range(0, len(at_work), across)]
        for line in lines[:MOST_LINES]:
            row = Text()
            for cell in line:
                cell.truncate(CELL - 3, overflow="ellipsis")
                cell.pad_right(CELL - len(cell))
                row.append_text(cell)
            yield row
        if len(lines) > MOST_LINES:
            yield Text(f" and {sum(map(len, lines[MOST_LINES:]))} more at work", style="dim")
        yield from joined([*self._summary(), Text("Ctrl-C is safe", style="dim")], self._width)

    def _along(self, job: _Running) -> Text:
        """How long a trial has been at work, of how long they take."""
        spent, usual = time.monotonic() - job.since, self._usual()
        if usual is None:
            return Text(format_seconds(spent))
        done = min(spent / usual, 1.0)
        bar = "━" * round(10 * done)
        return Text.assemble(
            (bar, "green"),
            ("━" * (10 - len(bar)), "dim"),
            f" {format_seconds(spent)} ",
            (f"of {format_seconds(usual)}", "dim"),
        )

    def _usual(self) -> float | None:
        """Seconds that a trial takes: the median of those that have ended, diverged and stopped ones with them."""
        seconds = [trial.seconds for trial in self._state.trials if trial.seconds]
        return statistics.median(seconds) if seconds else None

    def _done(self) -> str:
        done = len(self._shown)
        return f"{done} of {self._trials}" if self._trials and done <= self._trials else f"{done}"

    def _time_left(self) -> str:
        """Until the first limit of the budget, as far as the trials so far tell."""
        usual, left = self._usual(), list[float]()
        if usual is None:
            return ""
        rate = self._workers / usual  # trials a second
        if self._trials is not None:
            left.append((self._trials - len(self._shown)) / rate)
        spent = [trial.flops for trial in self._state.trials if trial.flops]
        if self._flops is not None and spent:
            left.append((self._flops - sum(spent)) / statistics.median(spent) / rate)
        if self._hours is not None:
            left.append(3600 * self._hours - self._busy())
        return f"{format_seconds(min(left))} left" if left and min(left) > 0 else ""

    def _busy(self) -> float:
        """The seconds so far in which at least one trial was going on."""
        from leaven.tuning.service.budget import (
            covered,  # with optuna, which a command that only starts does not wait for
        )

        now, here = time.time(), time.monotonic()
        spans = [(now - (here - job.since), now) for job in self._running.copy().values()]
        spans += [(t.ended - t.seconds, t.ended) for t in self._state.trials if t.ended and t.seconds]
        return covered(spans)

    def _summary(self) -> list[str]:
        state = self._state
        trials = _ended(state)
        parts = [self._done()]
        if self._best is not None:
            parts.insert(0, f"best {self._best.loss:.4f} ({self._best.number})")
            first = min(trials, key=lambda trial: trial.number)
            if first.loss is not None:
                parts.insert(1, f"start {first.loss:.4f}")
        parts += _lost(state)
        parts += [noise] if (noise := _noise(state)) else []
        if state.radius is not None:
            parts.append(f"radius {state.radius:.2f} octave")
        parts.append(f"{self._workers} workers" if self._workers > 1 else "1 worker")
        return [*parts, left] if (left := self._time_left()) else parts


def headline(state: StudyDocument) -> list[str]:
    """What is searched, and how: ``study wheat-proxy``, ``trust-region, 31 dimensions``, radius and noise."""
    count = len(state.space)
    parts = [f"study {state.name}", f"{state.method}, {count} dimension{'s' if count != 1 else ''}"]
    if state.radius is not None:
        parts.append(f"trust region {state.radius:.2f} octave")
    return [*parts, _noise(state) or "noise not measured yet"]


def _noise(state: StudyDocument) -> str | None:
    """What is known of the noise; None before it is measured, as it is by three runs of the start."""
    if state.noise_floor is None or state.noise_runs < 2:
        return None
    return f"noise {state.noise_floor:.4f} nats ({state.noise_runs} repeats)"


def _ended(state: StudyDocument) -> list[StudyTrial]:
    trials = [trial for trial in state.trials if trial.state not in UNDER_WAY]
    return sorted(trials, key=lambda trial: (trial.ended or 0.0, trial.number))


def _lost(state: StudyDocument) -> list[str]:
    """How many trials did not reach their end, by why."""
    states = [trial.state for trial in state.trials]
    return [f"{states.count(kind)} {kind}" for kind in ("diverged", "stopped", "failed") if kind in states]


def _leads(trial: StudyTrial, best: StudyTrial | None) -> bool:
    if trial.state != "complete" or trial.purpose != "search" or trial.loss is None:
        return False
    return best is None or best.loss is None or trial.loss < best.loss


def _best(state: StudyDocument) -> StudyTrial | None:
    best: StudyTrial | None = None
    for trial in state.trials:
        best = trial if _leads(trial, best) else best
    return best
