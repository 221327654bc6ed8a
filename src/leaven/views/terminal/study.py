"""Show a study live in the terminal, and then its answer."""

import math
import statistics
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_quantity, format_seconds
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.study_document import (
    UNDER_WAY,
    Answer,
    Coordinate,
    Dimension,
    Outlook,
    StudyDocument,
    StudyTrial,
    covered,
    signed,
)
from leaven.views import points
from leaven.views.tables import LABEL, Cell, Column, joined
from leaven.views.terminal.live import LiveScreen

EVERY = 10  # without a terminal, a status line is printed after this number of trials
ROWS, NAMES = 8, 6  # largest number of rows in the table of values, and of names in a sentence
INDENT = " " * LABEL
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
    since: float  # the start, of time.monotonic


class TuneScreen(LiveScreen):
    """The live screen of a study: a row for each trial, including trials that other commands run. In a terminal, it
    also shows what each worker is doing, below the rows.

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
        self._lock_rows = threading.RLock()  # ``_status`` takes no lock: rich calls it under its own lock
        self.bar("trials", state.ended, trials, "")
        self.above = self._status
        for line in joined(headline(state), self.console.width):
            self.line(line)
        if self._shown:
            # Do not say that the search continues: it may have stopped by itself.
            self.line(f"  {self._done()} trials are done")

    def started(self, number: int, worker: str) -> None:
        """Record that a worker of this command has started a trial."""
        with self._lock_rows:
            self._running[number] = _Running(self._name(worker), time.monotonic())

    def ended(self, state: StudyDocument) -> None:
        """Show trials that have ended. ``state`` is the current document of the study, which includes trials of other
        commands."""
        with self._lock_rows:
            unknown, self._state = _noise(self._state) is None, state
            new = [other for other in _ended(state) if other.number not in self._shown]
            for trial in new:
                self._say(trial)
            if unknown and (noise := _noise(state)) is not None:
                self.line(f"  {noise}; smaller gains do not count")
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
                CHANGED: expected + points.summary(trial, self._state, room - len(expected), self._best),
            }
        )
        if _leads(trial, self._best):
            self._best = trial

    def _judged(self, trial: StudyTrial) -> tuple[Cell, Cell]:
        """Return the loss of a trial and its difference from the best. For a trial that ended early, return why and
        where it ended."""
        if trial.state != "complete" or trial.loss is None:
            style = "yellow" if trial.state == "stopped" else "red"
            return Text(trial.state, style), Text(points.share(trial, self._state), style)
        if trial.purpose != "search" or self._best is None or self._best.loss is None:
            return f"{trial.loss:.4f}", ""
        delta = trial.loss - self._best.loss
        better = delta < 0
        return f"{trial.loss:.4f}", Text(f"{delta:+.4f} {'*' if better else ' '}", "green" if better else "")

    def _name(self, worker: str) -> str:
        """Return the short name of a worker: w1, w2 and so on, in the order in which workers first appear."""
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
        """Return the median time of the trials that have ended, in seconds, including diverged and stopped trials."""
        seconds = [trial.seconds for trial in self._state.trials if trial.seconds]
        return statistics.median(seconds) if seconds else None

    def _done(self) -> str:
        done = len(self._shown)
        return f"{done} of {self._trials}" if self._trials and done <= self._trials else f"{done}"

    def _time_left(self) -> str:
        """Return the time until the first limit of the budget is reached, estimated from the trials so far."""
        usual, left = self._usual(), list[float]()
        if usual is None:
            return ""
        rate = self._workers / usual  # trials per second
        if self._trials is not None:
            left.append((self._trials - len(self._shown)) / rate)
        spent = [trial.flops for trial in self._state.trials if trial.flops]
        if self._flops is not None and spent:
            left.append((self._flops - sum(spent)) / statistics.median(spent) / rate)
        if self._hours is not None:
            left.append(3600 * self._hours - self._busy())
        return f"{format_seconds(min(left))} left" if left and min(left) > 0 else ""

    def _busy(self) -> float:
        """Return the total time in which at least one trial was running, in seconds."""
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
        parts.append(f"{self._workers} workers" if self._workers > 1 else "1 worker")
        return [*parts, left] if (left := self._time_left()) else [*parts]


def headline(state: StudyDocument) -> list[str]:
    """Return three texts: the name of a study, its method with the number of dimensions, and its noise."""
    count = len(state.space)
    method = f"{state.method}, {count} dimension{'s' if count != 1 else ''}"
    return [f"study {state.name}", method, _noise(state, repeats=1) or "noise not measured"]


def _noise(state: StudyDocument, repeats: int = 2) -> str | None:
    """Return the noise as text, or None if it was measured with fewer than ``repeats`` repeated runs."""
    if state.noise_floor is None or state.noise_runs < repeats:
        return None
    return f"noise {state.noise_floor:.4f} nats ({state.noise_runs} repeat{'s' if state.noise_runs > 1 else ''})"


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


def answer_lines(state: StudyDocument, folder: Path, width: int | None, budget: int | None = None) -> Iterator[str]:
    """Yield the lines of a study's answer and of the files that contain it. Lines are wrapped at ``width``
    characters, indented below their labels.

    ``budget`` is the number of trials that the search was allowed to run.
    """
    lines = answer_text(state, width)
    if state.stalled:
        of = f"{state.ended} of {budget}" if budget is not None and budget > state.ended else f"{state.ended}"
        lines.append(f"stopped    after {of} trials: the last rounds gained less than the noise")
    lines.append(f"recipe     {folder / 'best.toml'} (with a reason for each value under [why])")
    if state.fewer is not None:
        lines.append(f"{INDENT}{folder / 'fewest.toml'} (the fewest changes)")
    for line in lines:
        if width is None:
            yield line
        else:
            yield textwrap.fill(line, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def answer_text(answer: Answer, width: int | None = None) -> list[str]:
    """Return what a search has found, in aligned lines. Before the finalists have run, return what is expected.

    Columns of the table that do not fit into ``width`` characters are left out.
    """
    if not answer.coordinates:
        return [answer.advice] if answer.advice else []
    moved = any(answer.octaves.values())
    lines = []
    if (best := answer.best) is not None:
        against = f", {signed(-answer.gain)} against the start" if answer.gain is not None and moved else ""
        lines.append(f"best       {best.loss:.4f} nats per token, {best.certainty}{against}")
        if best.fresh > 1:
            lines.append(f"{INDENT}the mean of {best.fresh} runs that were not used to choose it")
        if not moved:
            tried = any(each.importance for each in answer.coordinates)
            reason = "nothing was found that is known to be better" if tried else "nothing else was run"
            lines.append(f"{INDENT}the start itself: {reason}")
    if answer.noise_floor is not None:
        degrees = "1 degree" if answer.noise_runs == 1 else f"{answer.noise_runs} degrees"
        source = "given" if answer.noise_runs == GIVEN else f"{degrees} of freedom"
        lines.append(f"noise      {answer.noise_floor:.4f} nats, standard deviation between seeds ({source})")
    if worth := [each for each in answer.coordinates if each.worth]:
        lines += _worth_tuning(answer, worth[:ROWS], width)
        lines += [f"{INDENT}and {len(worth) - ROWS} more"] if len(worth) > ROWS else []
    for i, each in enumerate(each for each in answer.coordinates if each.at_end):
        label = INDENT if i else f"{'at the end':{LABEL}}"
        lines.append(f"{label}{short_path(each.path)}: {each.end}")
        wider = _wider(answer.dimension(each.path), each.best)
        lines.append(f"{INDENT}the optimum may lie beyond; to search farther, {wider}")
    if moved:
        lines += _fewest_changes(answer)
    if answer.idle:
        count = f"{len(answer.idle)} of {len(answer.coordinates)}"
        lines.append(f"not worth  {count}: resetting them all to the start costs less than the noise")
        lines.append(INDENT + _names([short_path(path) for path in answer.idle]))
    if unsure := [each.gain for each in answer.unsure]:
        gains = f"{round(sum(unsure), 4) + 0.0:.4f}{' together' if len(unsure) > 1 else ''}"
        lines.append(f"unsure     {len(unsure)} not known to have gained more than the noise: {gains}")
    if answer.informed is not None:
        verdict = "used" if answer.informed else "dropped, because the trials contradict it"
        lines.append(f"prior      {verdict}: what laws or an earlier study said before the search")
    if answer.outlook is not None:
        lines += _outlook(answer.outlook, answer.noise_floor)
    return lines


def _outlook(outlook: Outlook, noise: float | None) -> list[str]:
    """Return lines that say how much more trials would gain, and which two values bring most of the predicted
    gain."""
    lines = []
    if outlook.gain is not None:
        against = ", less than the noise" if noise is not None and outlook.gain < noise else ""
        cost = f" ({outlook.flops:.2g} FLOPs)" if outlook.flops else ""
        gain = f"are expected to gain {outlook.gain:.4f} nats{against}"
        lines.append(f"outlook    {outlook.trials} more trials{cost} {gain}")
    if outlook.pair is not None:
        names = " and ".join(map(short_path, outlook.pair))
        lines.append(f"two values {names} alone bring {outlook.pair_share:.0%} of the predicted gain")
    return lines


def _worth_tuning(answer: Answer, worth: Sequence[Coordinate], width: int | None) -> list[str]:
    """Return the table of values that were worth tuning. If it is too wide, the least useful columns are left out."""
    dimensions = [answer.dimension(each.path) for each in worth]
    flat = [
        "" if d.unit == "choice" else " to ".join(map(d.change, each.flat))
        for d, each in zip(dimensions, worth, strict=True)
    ]
    columns = {
        "change": [d.change(each.best) for d, each in zip(dimensions, worth, strict=True)],
        "as good between": flat,
        "gain": [f"{each.gain:.4f} +-{each.gain_deviation:.4f}" for each in worth],
        "importance": [f"{each.importance:.0%}" for each in worth],
    }
    names = [short_path(each.path) for each in worth]
    first = LABEL + max(map(len, names))
    widths = {head: max(len(head), *map(len, cells)) for head, cells in columns.items()}
    for head in ("importance", "as good between", "gain"):
        if width is not None and first + sum(2 + widths[kept] for kept in columns) > width:
            del columns[head]
    rows = [("mattered", list(columns))]
    rows += [(INDENT + name, [cells[i] for cells in columns.values()]) for i, name in enumerate(names)]
    return [
        f"{label:{first}}" + "".join(f"  {cell:>{widths[head]}}" for head, cell in zip(columns, cells, strict=True))
        for label, cells in rows
    ]


def _fewest_changes(answer: Answer) -> list[str]:
    """Return the lines about the point that has the fewest changes and is as good as the best point."""
    assert answer.fewest_octaves is not None
    if answer.fewest_octaves == answer.octaves:
        return ["fewest     no point with fewer changes that was run is equal to the best within noise"]
    moved = {path: octaves for path, octaves in answer.fewest_octaves.items() if octaves}
    far = sum(abs(x) for path, x in moved.items() if answer.dimension(path).unit == "octave")
    changes = (
        f"{len(moved)} of {len(answer.octaves)} changed, {far:.1f} octaves in all"
        if moved
        else "none changed: the start"
    )
    cost = f"expected {signed(answer.fewest_cost or 0.0)}"
    lines = [f"fewest     {changes}, equal to the best within noise; {cost}"]
    if answer.fewest is not None:
        lines.append(f"{INDENT}measured {answer.fewest.loss:.4f}, {answer.fewest.certainty}")
    if moved:
        ordered = sorted(moved.items(), key=lambda item: -abs(item[1]))
        lines.append(
            INDENT + _names([f"{short_path(path)} {answer.dimension(path).change(x)}" for path, x in ordered])
        )
    return lines


def _wider(dimension: Dimension, best: float) -> str:
    """Return text with the recipe setting that widens the search. ``best`` is the best value, in the units of the
    dimension, and lies at a bound of the search."""
    low, high, step = dimension.low, dimension.high, 2 * dimension.scale
    low, high = (low, math.ceil(high + step)) if best > 0 else (math.floor(low - step), high)
    # 0, which is the value of the recipe, must be between the two bounds.
    return f'set [tuning.octaves] "{dimension.path}" = [{min(low, -1 / 8):.4g}, {max(high, 1 / 8):.4g}]'


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")
