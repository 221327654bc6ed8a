"""Show a study (a search for hyperparameters) live in the terminal, and then the best values that it found."""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_number, format_quantity, format_seconds
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.study_document import PRUNED, UNDER_WAY, Coordinate, Dimension, StudyDocument, StudyTrial
from leaven.views import numbers, points
from leaven.views.points import findings, repeats, result
from leaven.views.tables import LABEL, Cell, Column, Facts, Table, joined, under
from leaven.views.terminal.live import LiveScreen

EVERY = 10  # without a terminal, a status line is printed each time that this number of trials has ended
ROWS = 8  # largest number of rows in the table of values
COLUMNS = (
    Column("trial", width=5),
    Column("loss", width=8),
    Column("against best", width=12),
    Column("tokens/s", width=8),
    Column("worker", width=6),
    Column("what changed against the best", align="left", free=True),
)


class TuneScreen(LiveScreen):
    """The live screen of a study: a row for each ended trial, and below the rows the running trials.

    Methods may be called from several threads. ``stack`` is the number of trials a worker trains at once.
    """

    def __init__(self, state: StudyDocument, trials: int | None, workers: int, *, stack: int = 1) -> None:
        super().__init__(COLUMNS)
        self._state, self._trials, self._workers, self._stack = state, trials, workers, stack
        self._shown = {trial.number for trial in _ended(state)}
        self._running: dict[int, tuple[str, float]] = {}  # (worker, start in Unix time) by number of the trial
        self._names: dict[str, str] = {}
        self._lock_rows = threading.RLock()  # not for ``_status``, which rich calls with a lock held
        self.bar("trials", state.ended, trials, "")
        self.above = self._status
        count = len(state.space)
        method = f"{state.method}, {count} dimension{'s' if count != 1 else ''}"
        noise = _noise(state, least=1) or "noise not measured"
        for line in joined([f"study {state.name}", method, noise], self.console.width):
            self.line(line)
        if self._shown:
            # Do not say that the search continues: it may have ended.
            self.line(f"  {self._done()} trials are done")

    def started(self, number: int, worker: str) -> None:
        with self._lock_rows:
            self._running[number] = (self._name(worker), time.time())

    def ended(self, state: StudyDocument) -> None:
        """Print a row for each trial that has ended since the last call."""
        with self._lock_rows:
            unknown, self._state = _noise(self._state) is None, state
            new = [other for other in _ended(state) if other.number not in self._shown]
            for trial in new:
                self._say(trial)
            if unknown and (noise := _noise(state)) is not None:
                self.line(f"  {noise}; smaller gains do not count")
            ended = len(self._shown)
            self.bar("trials", ended, self._trials and max(self._trials, ended))
            if not self.console.is_terminal and ended // EVERY > (ended - len(new)) // EVERY:
                self.line(f"  {' · '.join(map(str, self._summary()))}")

    def note(self, text: str) -> None:
        self.line(f"  {text}")

    def _say(self, trial: StudyTrial) -> None:
        best, expected = self._best, ""
        self._shown.add(trial.number)
        worker, _ = self._running.pop(trial.number, (None, 0.0))
        loss: Cell
        against: Cell = ""
        if trial.state == "complete" and trial.loss is not None:
            loss = f"{trial.loss:.4f}"
            if trial.purpose == "search" and best is not None and best.loss is not None:
                star, style = ("*", "green") if trial.loss < best.loss else (" ", "")
                against = Text(f"{numbers.fixed(trial.loss - best.loss, 4, '+')} {star}", style)
        else:
            style = "yellow" if trial.state == PRUNED else "red"
            loss, against = Text(trial.state, style), Text(points.share(trial, self._state), style)
            expected = f"{trial.loss:.4f} expected; " if trial.loss is not None else ""
        room = self.table.widths[len(COLUMNS) - 1] - len(expected)
        speed = format_quantity(trial.tokens_per_second) if trial.tokens_per_second else "-"
        worker = worker or (self._name(trial.worker) if trial.worker else "-")
        changed = expected + points.summary(trial, self._state, room, best)
        self.row([str(trial.number), loss, against, speed, worker, changed])

    @property
    def _best(self) -> StudyTrial | None:
        found = [
            (trial.loss, trial)
            for trial in self._state.trials
            if trial.number in self._shown and trial.state == "complete" and trial.purpose == "search"
            if trial.loss is not None
        ]
        return min(found, key=lambda each: each[0])[1] if found else None

    def _name(self, worker: str) -> str:
        return self._names.setdefault(worker, f"w{len(self._names) + 1}")

    def _status(self) -> Iterator[RenderableType]:
        usual, now = self._usual(), time.time()
        expected = "" if usual is None else f" of {format_seconds(usual)}"
        at_work = [
            f"{worker} trial {number} {format_seconds(now - since)}{expected}"
            for number, (worker, since) in sorted(self._running.copy().items())
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
        seconds = [trial.seconds for trial in self._state.trials if trial.seconds]
        return statistics.median(seconds) if seconds else None

    def _done(self) -> str:
        done = len(self._shown)
        return f"{done} of {self._trials}" if self._trials and done <= self._trials else f"{done}"

    def _summary(self) -> list[Cell]:
        state, parts = self._state, list[str]()
        if (best := self._best) is not None:
            parts.append(f"best {best.loss:.4f} ({best.number})")
            start = next((trial.loss for trial in state.trials if trial.number == 0), None)
            parts += [] if start is None else [f"start {start:.4f}"]
        parts.append(self._done())
        parts += points.counts(state).values()
        parts += [noise] if (noise := _noise(state)) else []
        at_once = f", {self._stack} trials at once" if self._stack > 1 else ""
        parts.append((f"{self._workers} workers" if self._workers > 1 else "1 worker") + at_once)
        return [*parts]


def _noise(state: StudyDocument, least: int = 2) -> str | None:
    """Return the noise between seeds as text, or None if it comes from fewer than ``least`` repeats."""
    if state.noise_floor is None or state.noise_runs < least:
        return None
    return f"noise {state.noise_floor:.4f} nats ({repeats(state)})"


def _ended(state: StudyDocument) -> list[StudyTrial]:
    trials = [trial for trial in state.trials if trial.state not in UNDER_WAY]
    return sorted(trials, key=lambda trial: (trial.ended or 0.0, trial.number))


def expected_values(dimensions: Sequence[Dimension]) -> Iterator[str]:
    """Yield a line for each searched value that scaling laws predict."""
    for each in dimensions:
        if each.expected and isinstance(each.centre, float):
            value, factor = each.centre * 2 ** each.expected[0], 2 ** each.expected[1]
            yield f"expected: {each.path} {format_number(value)}, times or divided by {factor:.1f}"


def answer_screen(state: StudyDocument, folder: Path, budget: int | None = None) -> Iterator[RenderableType]:
    """Yield a study's best loss, the values that mattered, other findings, and the files. A best point must exist.
    ``budget`` is the allowed number of trials."""
    facts = under("best", result(state))
    if state.noise_floor is not None:
        degrees = "1 degree" if state.noise_runs == 1 else f"{state.noise_runs} degrees"
        source = "given" if state.noise_runs == GIVEN else f"{degrees} of freedom"
        facts.append(("noise", f"{state.noise_floor:.4f} nats, standard deviation between seeds ({source})"))
    yield Facts(*facts, indent=LABEL)
    worth = [each for each in state.coordinates if each.worth]
    if worth:
        yield _worth_tuning(state, worth[:ROWS])
        if len(worth) > ROWS:
            yield f"{'':{LABEL}}and {len(worth) - ROWS} more"
    files = [f"{folder / 'best.toml'} (with a reason for each value under [why])"]
    if state.fewer is not None:
        files.append(f"{folder / 'fewest.toml'} (the fewest changes)")
    yield Facts(*findings(state, budget), *under("recipe", files), indent=LABEL)


def _worth_tuning(state: StudyDocument, worth: Sequence[Coordinate]) -> Table:
    def flat(each: Coordinate) -> str:
        dimension = state.dimension(each.path)
        return "" if dimension.unit == "choice" else " to ".join(map(dimension.change, each.flat))

    columns = (
        Column("mattered", lambda each: f"{'':{LABEL}}{short_path(each.path)}", align="left"),
        Column("change", lambda each: state.dimension(each.path).change(each.best)),
        Column("as good between", flat, drop=2),
        Column("gain", lambda each: f"{each.gain:.4f} +-{each.gain_deviation:.4f}", drop=1),
        Column("importance", lambda each: f"{each.importance:.0%}", drop=3),
    )
    return Table.of(columns, worth)
