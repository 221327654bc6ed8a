"""What a person reads while a study searches, and its answer."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leaven.cli import _screens, tune
from leaven.cli._tune_screen import TuneScreen, headline
from leaven.tuning.document import Best, Coordinate, Dimension, StudyDocument, StudyTrial
from leaven.views.points import changes

PATHS = tuple(f"hyperparameters.modules.attention.query{n}.lr" for n in range(9))
NEW = StudyDocument(
    name="wheat",
    method="trust-region",
    space=PATHS,
    trials=(),
    dimensions=tuple(Dimension(path, 1.0, -3.0, 3.0) for path in PATHS),
)


def trial(number: int, octaves: float = 0.0, loss: float | None = None, **changes: object) -> StudyTrial:
    fields = {
        "state": "complete" if loss is not None else "diverged",
        "values": dict.fromkeys(PATHS, 2**octaves),
        "seconds": 60.0,
        "tokens_per_second": 182e3,
        "octaves": dict.fromkeys(PATHS, octaves),
        "tokens": 1000,
        "worker": f"node:{number % 2}",
        "ended": 1e9 + number,
    }
    return StudyTrial(number=number, loss=loss, **fields | changes)  # type: ignore[arg-type]


TRIALS = (
    trial(0, loss=2.4241),
    trial(1, loss=2.4260, purpose="noise", seed=1),
    trial(2, octaves=0.585, loss=2.4139),
    trial(3, octaves=2.0, tokens=180),
    trial(4, octaves=-1.0, loss=2.6, state="stopped", tokens=400),
    trial(5, octaves=0.585, loss=2.4155, purpose="rerun", seed=1),
)


def after(count: int) -> StudyDocument:
    runs = {0: 0, 1: 0, 2: 1}.get(count, 2)
    found = {"trials": TRIALS[:count], "noise_floor": 0.0031 if runs else None, "noise_runs": runs}
    return NEW.model_copy(update=found)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """What goes into a file or a pipe."""
    written = StringIO()
    monkeypatch.setattr(_screens, "errors", Console(width=80, file=written, soft_wrap=True, highlight=False))
    return written


def test_a_trial_is_a_line_however_much_it_changes(plain: StringIO) -> None:
    with TuneScreen(after(0), 6, 2) as screen:
        for number in range(6):
            screen.asked(number, f"thread {number % 2}")
            screen.ended(after(number + 1))
    assert "\x1b" not in plain.getvalue()
    title, head, *rows = plain.getvalue().splitlines()
    assert title == "study wheat · trust-region, 9 dimensions · noise not measured yet"
    start = head.index("what changed")
    assert [row[:start].split() for row in rows] == [
        ["0", "2.4241", "182", "k", "w1"],
        ["1", "2.4260", "182", "k", "w2"],
        ["2", "2.4139", "-0.0102", "*", "182", "k", "w1"],
        ["noise", "0.0031", "nats", "(2", "repeats);", "what", "gains", "less"],
        ["3", "diverged", "at", "18%", "182", "k", "w2"],
        ["4", "stopped", "at", "40%", "182", "k", "w1"],
        ["5", "2.4155", "182", "k", "w2"],
    ]
    assert [row[start:] for row in rows if not row.startswith("  noise")] == [
        "nothing: the start",
        "the start again, seed +1",
        "attention.query0.lr x1.50, …",
        "attention.query0.lr x2.67, …",
        "2.6000 expected; attention.que…",
        "trial 2 again, seed +1",
    ]
    assert all(len(row) <= 80 for row in rows)


def test_trials_of_other_commands_are_seen_too_and_none_twice(plain: StringIO) -> None:
    with TuneScreen(after(1), 6, 1) as screen:
        screen.asked(2, "mine")
        screen.ended(after(4))  # 1 and 3 are of another command
        screen.ended(after(5))
    rows = plain.getvalue().splitlines()
    assert "  1 of 6 trials are done" in rows
    assert [row.split()[0] for row in rows if row[:5].strip().isdigit() and row[5:7] == "  "] == ["1", "2", "3", "4"]
    workers = {row.split()[0]: row[43:49].strip() for row in rows if row[:5].strip().isdigit() and row[5:7] == "  "}
    assert workers == {"1": "w2", "2": "w1", "3": "w2", "4": "w3"}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_below_the_rows_stands_who_does_what_and_how_long_it_takes(monkeypatch, width: int) -> None:
    console = Console(width=width, file=StringIO(), force_terminal=True, soft_wrap=True, record=True)
    monkeypatch.setattr(_screens, "errors", console)
    at_work = replace(TRIALS[0], number=7, state="running", loss=None, seconds=None, worker="other:99")
    screen = TuneScreen(after(0), 8, 2)
    screen.asked(6, "a")
    screen.ended(after(6).model_copy(update={"trials": (*TRIALS, at_work), "radius": 0.42}))
    console.export_text()
    for renderable in screen._progress.get_renderables():
        console.print(renderable)
    lines = console.export_text().splitlines()
    assert all(len(line) <= width or VALUE in line for line in lines)  # a path is not broken
    said = " ".join(lines)
    assert "w1  trial 6" in said
    assert "of 60 s" in said
    assert "other:99" in said
    # Two trials are left, of a minute each, on two workers.
    for part in ("best 2.4139 (2)", "start 2.4241", "6 of 8", "noise 0.0031 nats (2 repeats)",
                 "1 diverged", "1 stopped", "radius 0.42 octave",
                 "2 workers", "60 s left", "Ctrl-C is safe"):  # fmt: skip
        assert part in said


def test_without_a_terminal_the_state_is_told_now_and_then(plain: StringIO) -> None:
    many = tuple(trial(n, octaves=n / 10, loss=2.5 - n / 1000) for n in range(12))
    with TuneScreen(NEW, 40, 1) as screen:
        for n in range(12):
            screen.ended(NEW.model_copy(update={"trials": many[: n + 1]}))
    told = [row for row in plain.getvalue().splitlines() if row.startswith("  best")]
    assert told == ["  best 2.4910 (9) · start 2.5000 · 10 of 40 · 1 worker · 30 min 00 s left"]


def test_the_headline_says_what_is_known() -> None:
    begun = ["study wheat", "trust-region, 1 dimension", "trust region 0.50 octave"]
    for count, noise in ((2, "noise not measured yet"), (3, "noise 0.0031 nats (2 repeats)")):
        assert headline(after(count).model_copy(update={"radius": 0.5, "space": PATHS[:1]})) == [*begun, noise]


def left(state: StudyDocument, workers: int = 2, **limits: Any) -> str:
    """What the foot says of the time that is left, with nothing at work here."""
    return TuneScreen(state, limits.pop("trials", None), workers, **limits)._time_left()


def test_the_time_left_is_that_to_the_first_limit() -> None:
    # Six runs of 60 seconds, ended a second apart: 65 seconds in which some were going on.
    runs = after(6).model_copy(update={"trials": tuple(replace(trial, flops=1e15) for trial in TRIALS)})
    assert left(runs, trials=10) == "2 min 00 s left"
    assert left(runs, flops=1e16) == "2 min 00 s left"
    assert left(runs, hours=0.1) == "4 min 55 s left"
    assert left(runs, trials=10, hours=0.02) == "7.0 s left"
    assert left(runs, hours=0.01) == ""
    assert left(after(6), flops=1e16) == ""  # nobody says what a run costs
    assert left(after(0), flops=1e16, hours=1.0) == ""


def test_changes_are_whole_as_long_as_one_fits() -> None:
    moved = {"hyperparameters.init_std": math.log2(0.84), "hyperparameters.lr": 1.0, "hyperparameters.eps": 0.001}
    searched = [Dimension(path, 1.0, -3.0, 3.0) for path in moved]
    assert changes(searched, {}, moved, 40) == "lr x2.00, init_std x0.84"
    assert changes(searched, {}, moved, 20) == "lr x2.00, …"
    assert changes(searched, {}, moved, 6) == "lr x2…"
    assert changes(searched, moved, moved, 20) == changes(searched, {}, {}, 20) == ""


def test_what_is_no_factor_is_said_as_it_is() -> None:
    searched = [
        Dimension("model.dropout", 0.0, 0.0, 5.0, unit="tenth"),
        Dimension("schedule.decay", "cosine", 0.0, 2.0, unit="choice", levels=("cosine", "linear", "wsd")),
    ]
    before, now = {"model.dropout": 1.0, "schedule.decay": 0.0}, {"model.dropout": 0.5, "schedule.decay": 2.0}
    assert changes(searched, before, now, 60) == "schedule.decay wsd, model.dropout -0.05"
    assert changes(searched, now, before, 60) == "schedule.decay cosine, model.dropout +0.05"


# --- the answer

VALUE = "hyperparameters.modules.attention.value.weight_decay"
COORDINATE = Coordinate(VALUE, 1.0, (0.5, 1.5), 0.4, 1.0, True, gain_deviation=0.01, at_end=True, end="the bound, 10")
SEARCHED = (Dimension(VALUE, 1.0, -4.0, 1.0, 2.0),)
BEST = Best(5, 3.8601, (3.7096, 4.0107), 2, 2)
FOUND = {
    "best": BEST,
    "octaves": {VALUE: 1.0},
    "noise_floor": 0.0495,
    "noise_runs": 2,
    "coordinates": (COORDINATE,),
    "fewest": BEST,
    "fewest_octaves": {VALUE: 1.0},
    "gain": 0.3673,
    "dimensions": SEARCHED,
}


def answered(monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool, stalled: bool = False) -> list[str]:
    written = StringIO()
    console = Console(width=width, file=written, force_terminal=terminal, soft_wrap=True, highlight=False)
    monkeypatch.setattr(tune, "console", console)
    state = after(6).model_copy(update={**FOUND, "stalled": stalled})
    tune._say(state, 60, Path("runs/a-study-with-a-name"))
    return written.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_are_folded_below_their_labels(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = answered(monkeypatch, width, terminal=True, stalled=True)
    assert all(len(line) <= width or VALUE in line for line in lines)  # a path is not broken
    assert {line[:11].strip() for line in lines} == {
        "", "best", "noise", "mattered", "at the end", "fewest", "stopped", "recipe"
    }  # fmt: skip
    assert " ".join(" ".join(lines).split()).startswith(
        "best 3.8601 nats per token, 95% interval 3.7096 to 4.0107, -0.3673 against the start"
    )
    assert ("importance" in " ".join(lines)) == (width > 80)


def test_what_reads_a_pipe_gets_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = answered(monkeypatch, 60, terminal=False, stalled=True)
    assert lines[0].endswith("95% interval 3.7096 to 4.0107, -0.3673 against the start")
    assert "  importance" in next(line for line in lines if line.startswith("mattered"))


def test_that_a_search_stopped_of_itself_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said_so = "stopped    after 6 of 60 trials: the last rounds gained less than the noise"
    assert said_so in answered(monkeypatch, 120, terminal=True, stalled=True)
    assert not [line for line in answered(monkeypatch, 120, terminal=True) if line.startswith("stopped")]
