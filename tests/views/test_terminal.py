"""Test the screens of commands: tables that fit the terminal, and live screens of runs and studies."""

from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from tests.cli.conftest import Verb

from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.integrity import FAULTS
from leaven.tuning.study_document import Dimension, StudyDocument, StudyTrial
from leaven.views.terminal import console
from leaven.views.terminal.study import TuneScreen
from leaven.views.terminal.training import EVENTS, TrainScreen


def printed(screen: Iterable[RenderableType] | RenderableType, width: int) -> list[str]:
    """Return the lines of a screen, without styles."""
    out = Console(width=width, record=True, file=StringIO(), soft_wrap=True)
    for part in [screen] if hasattr(screen, "__rich_console__") else screen:
        out.print(part)
    return [line.rstrip() for line in out.export_text().splitlines()]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """What a command writes to standard error if that is not a terminal."""
    written = StringIO()
    monkeypatch.setattr(console, "errors", Console(width=80, file=written, soft_wrap=True, highlight=False))
    return written


# --- results


@pytest.mark.parametrize(
    "command",
    [
        "recipes list",
        "recipes show bloom-176b",
        "laws --params 1B --tokens 20B --batch-tokens 1M",
        "hardware H100-80GB",
        "transfer RECIPE --width 4096 --depth 7 --batch-tokens 1024 --tokens 2M",
        "plan RECIPE --gpus cpu",
    ],
)
def test_a_screen_fits_80_columns(
    leaven: Verb, monkeypatch: pytest.MonkeyPatch, tiny_file: Path, command: str
) -> None:
    """Only the commands to copy, under "next", may be longer."""
    monkeypatch.setattr(console.console, "width", 80)
    code, out, _ = leaven(*command.replace("RECIPE", str(tiny_file)).split())
    lines = out.partition("\nnext       leaven ")[0].splitlines()
    assert code == 0
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


# --- the live screen of a run


def test_every_event_has_a_message(seen: StringIO, tiny_file: Path) -> None:
    values: dict[str, Any] = dict(tokens=5_000, why="loss rose", loss=9.0, grad_norm=3.0, step=7, lr=0.5, attempt=1)
    values |= dict(attempts=3, from_tokens=1_000, skip_from=2_000, skip_to=3_000, writer="wandb", slowest=3)
    values |= dict(micro_batch=4, batch_tokens=256, times_the_median=2.0, damaged_checkpoints=["tokens-1"])
    values |= dict(file="metrics.jsonl", missing_checkpoint="tokens-2", emulated=3.42)
    values |= dict(changes=[{"path": "layout.dp", "before": 2, "after": 1}])
    renamed = {"emulated": "start", "full_batch": "ramp", "slow_rank": "ranks"}
    with TrainScreen(read_recipe(tiny_file)) as screen:
        for event in (*EVENTS, *FAULTS):
            before = len(seen.getvalue())
            screen.event(renamed.get(event, event), values)
            assert len(seen.getvalue()) > before, event
    assert "rolled back to 1 k tokens, skipping the data from 2 k to 3 k, lr x0.5" in seen.getvalue()
    assert "emulates fp32, so matrix products take 3.4 times as long" in seen.getvalue()
    assert "checkpoint tokens-2 is missing; the steps up to it are trained again" in seen.getvalue()


# --- the live screen of a study

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
    trial(4, octaves=-1.0, loss=2.6, state="pruned", tokens=400),
    trial(5, octaves=0.585, loss=2.4155, purpose="rerun", seed=1),
)


def after(count: int) -> StudyDocument:
    runs = {0: 0, 1: 0, 2: 1}.get(count, 2)
    found = {"trials": TRIALS[:count], "noise_floor": 0.0031 if runs else None, "noise_runs": runs}
    return NEW.model_copy(update=found)


def test_a_trial_is_one_line(seen: StringIO) -> None:
    with TuneScreen(after(0), 6, 2) as screen:
        for number in range(6):
            screen.started(number, f"thread {number % 2}")
            screen.ended(after(number + 1))
    _, head, *rows = seen.getvalue().splitlines()
    start = head.index("what changed")
    assert [row[:start].split() for row in rows] == [
        ["0", "2.4241", "182", "k", "w1"],
        ["1", "2.4260", "182", "k", "w2"],
        ["2", "2.4139", "-0.0102", "*", "182", "k", "w1"],
        ["noise", "0.0031", "nats", "(2", "repeats);", "smaller", "gains", "do"],
        ["3", "diverged", "at", "18%", "182", "k", "w2"],
        ["4", "pruned", "at", "40%", "182", "k", "w1"],
        ["5", "2.4155", "182", "k", "w2"],
    ]
    assert all(len(row) <= 80 for row in rows)


def test_the_status_shows_the_workers(seen: StringIO) -> None:
    at_work = replace(TRIALS[0], number=7, state="running", loss=None, seconds=None, worker="other:99")
    screen = TuneScreen(after(0), 8, 2)
    screen.started(6, "a")
    screen.ended(after(6).model_copy(update={"trials": (*TRIALS, at_work), "radius": 0.42}))
    lines = printed(screen._status(), 80)
    assert all(len(line) <= 80 for line in lines)
    for part in ("w1 trial 6 ", " s of 60 s", "other:99 trial 7", "best 2.4139 (2)", "start 2.4241", "6 of 8",
                 "noise 0.0031 nats (2 repeats)", "1 diverged", "1 pruned",
                 "2 workers", "Ctrl-C is safe"):  # fmt: skip
        assert part in " ".join(lines)


@pytest.mark.parametrize(
    ("path", "dropout", "effect"),
    [
        ("batch.micro_batch", 0.1, "dropout draws other masks, so losses differ as between seeds"),
        ("batch.micro_batch", 0.0, "so losses may differ in the last bits"),
        ("layout.recompute", 0.1, "so losses may differ in the last bits"),
    ],
)
def test_another_layout_says_what_it_changes(
    path: str, dropout: float, effect: str, tiny: Recipe, seen: StringIO
) -> None:
    with TrainScreen(tiny.replace({"model.dropout": dropout})) as screen:
        screen.event("layout", {"tokens": 5_120, "changes": [{"path": path, "before": 1, "after": 3}]})
    said = " ".join(seen.getvalue().split())
    assert f"{path} 1 -> 3 at 5.12 k tokens: sums are computed in another order" in said
    assert effect in said
