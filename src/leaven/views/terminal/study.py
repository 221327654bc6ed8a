"""The live screen of a study, and its answer."""

import statistics
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from leaven.recipe.units import format_quantity, format_seconds
from leaven.tuning.document import UNDER_WAY, StudyDocument, StudyTrial
from leaven.views import points
from leaven.views.terminal.live import LiveScreen
from leaven.views.terminal.tables import LABEL, Cell, Column, joined

EVERY = 10  # trials, after which the status is said once where there is no terminal to see it on
CHANGED = "what changed against the best"
COLUMNS = (
    Column("trial", width=5),
    Column("loss", width=8),
    Column("against best", width=12),
    Column("tokens/s", width=8),
    Column("worker", width=6),
    Column(CHANGED, align="left", free=True),
)


@dataclass(frozen=True)
class _Running:
    worker: str
    since: float  # of time.monotonic


class TuneScreen(LiveScreen):
    """A row for each trial of the study, also those of other commands; below, on a terminal, what each worker does.

    Methods may be called from several threads. ``trials``, ``flops`` and ``hours`` are the budget.
    """

    def __init__(
        self,
        state: StudyDocument,
        trials: int | None,
        workers: int,
        *,
        flops: float | None = None,
        hours: float | None = None,
    ) -> None:
        super().__init__(COLUMNS)
        self._state, self._trials, self._workers = state, trials, workers
        self._flops, self._hours = flops, hours
        self._shown = {trial.number for trial in _ended(state)}
        self._best = _best(state)
        self._running: dict[int, _Running] = {}
        self._names: dict[str, str] = {}
        self._lock_rows = threading.RLock()  # the status takes no lock: rich asks for it under its own
        self.bar("trials", state.ended, trials, "")
        self.above = self._status
        for line in joined(headline(state), self.console.width):
            self.line(line)
        if self._shown:
            # Whether there is more to do turns out: a search may have stopped of itself.
            self.line(f"  {self._done()} trials are done")

    def asked(self, number: int, worker: str) -> None:
        """A worker of this command has started a trial."""
        with self._lock_rows:
            self._running[number] = _Running(self._name(worker), time.monotonic())

    def ended(self, state: StudyDocument) -> None:
        """Trials have ended; ``state`` is the study's document with them and with trials of other commands."""
        with self._lock_rows:
            unknown, self._state = _noise(self._state) is None, state
            new = [other for other in _ended(state) if other.number not in self._shown]
            for trial in new:
                self._say(trial)
            if unknown and (noise := _noise(state)) is not None:
                self.line(f"  {noise}; what gains less is no gain")
            ended = len(self._shown)
            self.bar("trials", ended, self._trials and max(self._trials, ended), "")
            if not self.console.is_terminal and ended // EVERY > (ended - len(new)) // EVERY:
                self.line(f"  {' · '.join(map(str, self._summary()))}")

    def note(self, text: str) -> None:
        self.line(f"  {text}")

    def _say(self, trial: StudyTrial) -> None:
        self._shown.add(trial.number)
        running = self._running.pop(trial.number, None)
        loss, against = self._judged(trial)
        room = self.table.widths[CHANGED]
        expected = f"{trial.loss:.4f} expected; " if trial.state == "stopped" and trial.loss is not None else ""
        self.row(
            {
                "trial": str(trial.number),
                "loss": loss,
                "against best": against,
                "tokens/s": format_quantity(trial.tokens_per_second) if trial.tokens_per_second else "-",
                "worker": running.worker if running else self._name(trial.worker or "-"),
                CHANGED: expected + points.told(trial, self._state, room - len(expected), self._best),
            }
        )
        if _leads(trial, self._best):
            self._best = trial

    def _judged(self, trial: StudyTrial) -> tuple[Cell, Cell]:
        """The loss of a trial and its difference from the best; for one that stopped early, why and where."""
        if trial.state != "complete" or trial.loss is None:
            style = "yellow" if trial.state == "stopped" else "red"
            return Text(trial.state, style), Text(points.share(trial, self._state), style)
        if trial.purpose != "search" or self._best is None or self._best.loss is None:
            return f"{trial.loss:.4f}", ""
        delta = trial.loss - self._best.loss
        better = delta < 0
        return f"{trial.loss:.4f}", Text(f"{delta:+.4f} {'*' if better else ' '}", "green" if better else "")

    def _name(self, worker: str) -> str:
        """w1, w2 and so on, in the order in which workers first appear."""
        return "-" if worker == "-" else self._names.setdefault(worker, f"w{len(self._names) + 1}")

    def _status(self) -> Iterator[RenderableType]:
        usual, now = self._usual(), time.monotonic()
        of = "" if usual is None else f" of {format_seconds(usual)}"
        at_work = [
            f"{job.worker} trial {number} {format_seconds(now - job.since)}{of}"
            for number, job in sorted(self._running.copy().items())
        ]
        at_work += [
            f"{trial.worker or 'another command'} trial {trial.number}"
            for trial in self._state.trials
            if trial.state == "running" and trial.number not in self._running
        ]
        yield Text()
        yield from joined(at_work, self.console.width)
        yield from joined([*self._summary(), Text("Ctrl-C is safe", style="dim")], self.console.width)

    def _usual(self) -> float | None:
        """The median seconds of the trials that have ended, including diverged and pruned ones."""
        seconds = [trial.seconds for trial in self._state.trials if trial.seconds]
        return statistics.median(seconds) if seconds else None

    def _done(self) -> str:
        done = len(self._shown)
        return f"{done} of {self._trials}" if self._trials and done <= self._trials else f"{done}"

    def _time_left(self) -> str:
        """The time until the first limit of the budget, estimated from the trials so far."""
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
        """The seconds so far in which at least one trial was running."""
        from leaven.tuning.service.budget import covered  # with optuna, for which a start does not wait

        now, here = time.time(), time.monotonic()
        spans = [(now - (here - job.since), now) for job in self._running.copy().values()]
        spans += [(t.ended - t.seconds, t.ended) for t in self._state.trials if t.ended and t.seconds]
        return covered(spans)

    def _summary(self) -> list[Cell]:
        state, parts = self._state, list[str]()
        if self._best is not None:
            parts.append(f"best {self._best.loss:.4f} ({self._best.number})")
            first = min(_ended(state), key=lambda trial: trial.number)
            parts += [] if first.loss is None else [f"start {first.loss:.4f}"]
        parts.append(self._done())
        states = [trial.state for trial in state.trials]
        parts += [f"{states.count(kind)} {kind}" for kind in ("diverged", "stopped", "failed") if kind in states]
        parts += [noise] if (noise := _noise(state)) else []
        if state.radius is not None:
            parts.append(f"radius {state.radius:.2f} octave")
        parts.append(f"{self._workers} workers" if self._workers > 1 else "1 worker")
        return [*parts, left] if (left := self._time_left()) else [*parts]


def headline(state: StudyDocument) -> list[str]:
    """What is searched, and how: ``study wheat-proxy``, ``trust-region, 31 dimensions``, radius and noise."""
    count = len(state.space)
    parts = [f"study {state.name}", f"{state.method}, {count} dimension{'s' if count != 1 else ''}"]
    if state.radius is not None:
        parts.append(f"trust region {state.radius:.2f} octave")
    return [*parts, _noise(state) or "noise not measured yet"]


def _noise(state: StudyDocument) -> str | None:
    """The noise as text; None before three runs of the start have measured it."""
    if state.noise_floor is None or state.noise_runs < 2:
        return None
    return f"noise {state.noise_floor:.4f} nats ({state.noise_runs} repeats)"


def _ended(state: StudyDocument) -> list[StudyTrial]:
    trials = [trial for trial in state.trials if trial.state not in UNDER_WAY]
    return sorted(trials, key=lambda trial: (trial.ended or 0.0, trial.number))


def _leads(trial: StudyTrial, best: StudyTrial | None) -> bool:
    if trial.state != "complete" or trial.purpose != "search" or trial.loss is None:
        return False
    return best is None or best.loss is None or trial.loss < best.loss


def _best(state: StudyDocument) -> StudyTrial | None:
    best: StudyTrial | None = None
    for trial in state.trials:
        best = trial if _leads(trial, best) else best
    return best


def answer_lines(said: Sequence[str], folder: Path, fewest: bool, width: int | None) -> Iterator[str]:
    """The answer of a study and its files, folded under their labels at ``width``; a line each without one."""
    files = [f"recipe     {folder / 'best.toml'} (each value with its reason under [why])"]
    files += [f"{'':{LABEL}}{folder / 'fewest.toml'} (the fewest changes)"] if fewest else []
    indent = " " * LABEL
    for line in [*said, *files]:
        if width is None:
            yield line
        else:
            yield textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
