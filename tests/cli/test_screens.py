"""What a person reads: a row is a line, names stay whole, numbers stay, and bad input is told in one line."""

import re
import sys
from collections.abc import Callable
from io import StringIO
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from leaven.catalogue.laws import LAWS
from leaven.catalogue.runs import find_run, load_runs
from leaven.cli import _common, _screens, main
from leaven.cli._train_screen import TrainScreen
from leaven.recipe.files import read_recipe
from leaven.recipe.init_std import COMPARED
from leaven.views.terminal import Column, Columns, Facts, at_point

Read = Callable[..., list[str]]
NUMBERS = ("init", "lr", "decay", "beta1", "beta2", "eps", "multiplier")
TRANSFER = ("--width", "4096", "--depth", "7", "--batch-tokens", "1024", "--tokens", "2M")
# Latent attention, layer-wise widths, no learning rate, no shape, many troubles, AdEMAMix.
UNLIKE = ("kimi-k2", "openelm-3b", "nemotron-4-15b", "idefics-80b", "opt-175b", "apertus-70b", "bloom-176b")
widths = pytest.mark.parametrize("width", [80, 100, 120, 160])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Read:
    """The lines that a verb prints on a terminal of some width; on any, none is longer."""

    def run(width: int, *arguments: object, code: int = 0) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["leaven", *map(str, arguments)])
        monkeypatch.setattr(_common.console, "width", width)
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert (stopped.value.code or 0) == code, err
        if code:
            return err.splitlines()
        lines = out.splitlines()
        # A command to copy is never broken.
        end = next((n for n, line in enumerate(lines) if line.startswith("next       leaven ")), len(lines))
        assert [line for line in lines[:end] if len(line) > width] == []
        return lines[:end]

    return run


@widths
def test_published_runs_are_a_line_each_with_all_numbers(read: Read, width: int) -> None:
    for arguments in (["list"], ["nearest", "--params", "1B", "--tokens", "20B", "--limit", "10"]):
        head, _, *rows = read(width, "recipes", *arguments)
        assert all(title in head for title in ("run", "params", "tokens", "peak lr", "batch"))
        assert ("active" in head) is (arguments == ["list"])
        assert ("source" in head) is (width > 120 or (width == 120 and arguments == ["list"]))
        by_id = {row.split()[0]: row for row in rows}
        shown = [run for run in load_runs() if arguments == ["list"] or run.id in by_id]
        assert len(shown) >= 10
        for run in shown:
            numbers = (run.params_total, run.tokens, run.batch_tokens, run.peak_lr)
            assert len(re.findall(r"\d [kMBT]\b|\d\.\d\de-\d", by_id[run.id])) >= sum(n is not None for n in numbers)
            assert ("*" in by_id[run.id]) is (run.peak_lr is not None and not run.lr_comparable)


def test_nearest_says_what_a_distance_is(read: Read) -> None:
    head, unit, row, *_, last = read(80, "recipes", "nearest", "--params", "1.1B", "--tokens", "3T")
    end = head.index("distance") + len("distance")
    assert unit[:end].split() == ["octaves"]
    assert row[:end].split() == ["tinyllama-1.1b", "0.00"]
    assert last.startswith("distance in octaves of parameters")


@widths
@pytest.mark.parametrize("run", [load_runs()[0], *map(find_run, UNLIKE)], ids=lambda run: run.id)
def test_one_run_leaves_nothing_out(read: Read, width: int, run: Any) -> None:
    lines = read(width, "recipes", "show", run.id)
    flowing = " ".join(" ".join(lines).split())
    for path in run.flat():
        assert "." not in path or any(path in line for line in lines)
    troubles = [text for one in run.instabilities for text in (one.what, one.action, one.outcome) if text]
    for said in (*run.notes, *run.lr_sources, *run.arch.sources, *troubles):
        assert " ".join(said.split()) in flowing
    for exception in run.optim.exceptions.values() if run.optim else ():
        assert f"known from: {exception.confidence}" in flowing


@widths
def test_the_difference_of_two_runs_is_a_line_a_value(read: Read, width: int) -> None:
    head, *rows = read(width, "recipes", "diff", "stablelm-3b-4e1t", "bloom-176b")
    assert head.split() == ["value", "stablelm-3b-4e1t", "bloom-176b"]
    left, right = head.index("stablelm"), head.index("bloom")
    assert all(re.fullmatch(r"[a-z0-9_.]+ +", row[:left]) and row[right - 2 : right] == "  " for row in rows)
    assert any("2,560" in row and "14,336" in row for row in rows)


@widths
def test_laws_are_told_in_full_with_the_spread_last(read: Read, width: int) -> None:
    lines = read(width, "laws", "--params", "1B", "--tokens", "20B")
    flowing = " ".join(" ".join(lines).split())
    for law in LAWS:
        assert any(line.startswith(law.name + " ") for line in lines)
        assert law.conditions in flowing
        assert law.source in flowing
        assert f"trust: {law.trust}" + (f" ({law.doubt})" if law.doubt else "") in flowing
    assert "3.5e-4 .. 2.1e-3, a spread of 6.12x" in flowing
    assert lines[-1].endswith("tune at small scale")


@widths
def test_a_parameter_table_keeps_every_number(read: Read, width: int, tiny_file: Path) -> None:
    for arguments in (["show", tiny_file], ["transfer", tiny_file, *TRANSFER]):
        _, scale, head, unit, *rows = read(width, *arguments)
        rows = list(takewhile(lambda row: not row.startswith("attention  "), rows))
        assert scale.endswith("of the base")
        assert [title for title in head.split() if title in NUMBERS] == list(NUMBERS)
        assert "(a step)" in unit
        assert ("role" in head) is (width >= 120)
        for row in rows:
            assert "…" not in row
            assert len(re.findall(r"(?<= )[\d.]+(?:e-\d+)?(?= |$)", row[17:])) >= len(NUMBERS)
    assert any("4,096 x 8,192" in row for row in rows) is (width >= 120)
    assert set(read_recipe(tiny_file).model.modules) <= {row.split()[0] for row in rows}


@widths
def test_the_inits_stand_side_by_side_whatever_the_width(read: Read, width: int, tiny_file: Path) -> None:
    lines = read(width, "show", tiny_file)
    start = next(n for n, line in enumerate(lines) if line.startswith("init "))
    head = next(n for n, line in enumerate(lines) if line.startswith("std "))
    end = next(n for n, line in enumerate(lines) if line.startswith("nearest "))
    assert "rule: init_std 0.1 at the base, moved by complete-d-p" in lines[start]
    modules = lines[head].split()[2:]
    assert len(modules) == (8 if width > 80 else 6)
    named = [line for line in lines[head + 2 : end] if line[0] != " "]  # what is not is a last block's
    assert [line[:12].strip() for line in named] == ["this recipe", *COMPARED]
    assert all(len(re.findall(r"(?<= )[\d.]+(?:e-\d+)?(?= |$)", line[19:])) == len(modules) for line in named)
    flowing = " ".join(" ".join(lines[end:]).split())
    assert all(init.text in flowing for init in COMPARED.values())


@widths
def test_the_optimizer_says_what_it_does_with_decay(read: Read, width: int, tiny_file: Path) -> None:
    for name, said in (("adamw", "decoupled decay"), ("adam", "L2 in the loss")):
        lines = read(width, "show", tiny_file, "--set", f"hyperparameters.optimizer={name}")
        assert any(line.startswith(f"optimizer  {name}: {said}") for line in lines)


def test_what_all_rows_share_is_told_once_where_even_narrow_gaps_do_not_do() -> None:
    columns = [Column(name, align="point") for name in ("one", "two", "three")]
    table = Columns(columns, [("1", "0.25", "0.9"), ("2", "0.25", "0.95")])
    assert _printed(table, 15) == [
        "one  two three",
        "  1 0.25  0.9",
        "  2 0.25  0.95",
    ]
    assert _printed(table, 10) == ["one three", "  1  0.9", "  2  0.95", "all rows: two 0.25"]


def test_facts_fold_between_parts_and_long_parts_between_words() -> None:
    facts = Facts([("a", ["one two", Text("three")]), ("long", ["four five six seven eight nine ten"])])
    assert _printed(facts, 30) == [
        "a     one two · three",
        "long  four five six seven",
        "      eight nine ten",
    ]


def test_numbers_stand_at_their_points() -> None:
    assert at_point(["0.004", "2.83e-4", "1e-8", "16"]) == [" 0.004  ", " 2.83e-4", " 1e-8   ", "16      "]


def test_without_a_terminal_output_is_120_wide_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "47")
    made = _common._console(stderr=False)
    assert made.width == 120
    assert made.color_system is None


QUANTITY = "is not a quantity; write for example 7B, 2.5T, 500M, 64k or 32_768"
VERBS = (
    "laws, new, show, transfer, plan, hardware, tune, train, sample, bench, report, demo, recipes, check, export, "
    "import"
)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("transfer x.toml --width 1X", f"--width: '1X' {QUANTITY}"),
        ("laws --params -1 --tokens 1B", f"--params: '-1' {QUANTITY}"),
        ("transfer x.toml --depth 1.5", "--depth: '1.5' is not a whole number"),
        ("trian", "no such verb: leaven trian; did you mean train?"),
        ("xyz", f"no such verb: leaven xyz; there are {VERBS}"),
        ("recipes lst", "no such verb: leaven recipes lst; did you mean list?"),
        ("train", "RECIPE is missing; type: leaven train RECIPE"),
        (
            "laws --params 1B",
            "--tokens is missing; type: leaven laws --params COUNT --tokens COUNT",
        ),
        ("recipes diff a", "B is missing; type: leaven recipes diff A B"),
        ("plan x.toml --layuot a", "no such option: --layuot; did you mean --layout?"),
        ("laws --params", "--params requires an argument"),
        ("train a b", "got unexpected extra argument(s) (b); type: leaven train RECIPE"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_to_type(read: Read, typed: str, said: str) -> None:
    assert read(80, *typed.split(), code=2) == [f"error: {said}"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(width=80, record=True, file=open("/dev/null", "w"), soft_wrap=True)  # noqa: SIM115
    monkeypatch.setattr(_screens, "errors", console)
    return console


@pytest.mark.parametrize("width", [80, 120])
def test_rows_of_training_stand_under_their_headers(
    seen: Console, tiny_file: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    step = SimpleNamespace(
        step=1,
        tokens=1_310_000_000,
        loss=3.412,
        lr=9.8e-4,
        grad_norm=12_345.6,
        update_norm=0.0031,
        batch_tokens=393_216,
        tokens_per_second=6_412.3,
        tflops=406.2,
        mfu=0.411,
        memory_gib=50.81,
        noise_scale=1_234_567.0,
    )
    wide = width >= 120
    monkeypatch.setattr(seen, "width", width)
    with TrainScreen(read_recipe(tiny_file), log_every=7) as screen:
        screen.event("start", {"tokens": 0})
        screen.step(step)
        screen.event("validation", {"tokens": 1, "loss": 3.4})
        screen.step(SimpleNamespace(**vars(step) | {"step": 2}))
        screen.step(SimpleNamespace(**vars(step) | {"step": 14}))
    head, row, again = seen.export_text().splitlines()  # step 14 is said when the screen closes
    assert again == row.replace("3.4000", " " * 6)
    assert max(len(head), len(row)) <= width
    ends = [match.end() for match in re.finditer(r"\S+", head)]
    assert [row[:end].split("  ")[-1].strip() for end in ends] == [
        "1.31 B",
        "3.412",
        "3.4000",
        "9.80e-4",
        "1.23e4",
        "0.0031",
        "393 k",
        "6.41 k",
        "41.1%",
        *(["50.8 GiB", "406", "done"] if wide else []),
    ]


@pytest.mark.parametrize(("width", "shown"), [(80, "noise"), (120, "noise MFU memory TFLOP/s left")])
def test_a_noise_scale_stays_in_its_column_between_measurements(
    seen: Console, tiny_file: Path, monkeypatch: pytest.MonkeyPatch, width: int, shown: str
) -> None:
    monkeypatch.setattr(seen, "width", width)
    recipe = read_recipe(tiny_file, ["stability.noise_scale_every_tokens=1024"])
    values: dict[str, Any] = {"lr": 1e-3, "grad_norm": 0.4, "update_norm": 0.0031, "batch_tokens": 256, "loss": 3.0}
    values |= {"tokens_per_second": 6_410.0, "mfu": None, "tflops": 0.1, "memory_gib": 0.5}
    with TrainScreen(recipe, log_every=1) as screen:
        for number, scale in enumerate((None, 1_234_567.0, None)):
            screen.step(SimpleNamespace(step=number, tokens=256 * (number + 1), noise_scale=scale, **values))
    head, *rows = seen.export_text().splitlines()
    assert head.endswith("  ".join(f"{title:>{size}}" for title, size in screen._columns[8:]))
    assert " ".join(title for title, _ in screen._columns[8:]) == shown
    assert max(map(len, (head, *rows))) <= width
    end = head.index("noise") + len("noise")
    assert [row[:end].split("  ")[-1].strip() for row in rows] == ["-", "1.23 M", "1.23 M"]


def test_a_step_that_is_asked_for_and_validated_is_one_row(seen: Console, tiny_file: Path) -> None:
    values: dict[str, Any] = {"lr": 1e-3, "grad_norm": 0.4, "update_norm": 0.0031, "batch_tokens": 256}
    values |= {
        "tokens_per_second": 6_410.0,
        "mfu": None,
        "tflops": 0.1,
        "memory_gib": 0.5,
        "loss": 3.0,
        "noise_scale": None,
    }
    with TrainScreen(read_recipe(tiny_file), log_every=1) as screen:
        for number in range(1, 7):
            tokens = {"tokens": 256 * number}
            screen.step(SimpleNamespace(step=number, **tokens, **values))
            if number % 3 == 0:
                screen.event("checkpoint", tokens)
                screen.event("validation", tokens | {"loss": 3.4})
            if number == 4:
                screen.event("curves_lost", tokens | {"writer": "wandb", "why": "no network"})
    _, *rows = seen.export_text().splitlines()
    shown = [" ".join(row.split()[:3]) for row in rows]
    assert shown == [
        "256 3.000 1.00e-3",
        "512 3.000 1.00e-3",
        "768 3.000 3.4000",
        "1.02 k 3.000",
        "curves of wandb",
        "1.28 k 3.000",
        "1.54 k 3.000",
    ]


@pytest.mark.parametrize("verb", ["new", "demo"])
def test_help_shows_what_is_in_square_brackets(read: Read, verb: str) -> None:
    assert "[data] source" in " ".join(read(120, verb, "--help"))


def test_on_a_terminal_every_step_is_seen(monkeypatch: pytest.MonkeyPatch, tiny_file: Path) -> None:
    """In a row that changes: below the header stand the steps as they come, and nothing of them stays."""
    screen_text = StringIO()
    console = Console(width=80, file=screen_text, force_terminal=True, color_system=None)
    monkeypatch.setattr(_screens, "errors", console)
    values = dict(
        lr=1e-3,
        grad_norm=1.0,
        update_norm=0.1,
        batch_tokens=256,
        tokens_per_second=9e3,
        tflops=0.1,
        mfu=0.1,
        noise_scale=None,
    )
    with TrainScreen(read_recipe(tiny_file)) as screen:
        for number in (1, 2):
            step = SimpleNamespace(step=number, tokens=256 * number, loss=6.0 - number, memory_gib=0.5, **values)
            screen.step(step)
            screen._progress.refresh()
            assert f"    {256 * number}   {6 - number}.000  " in screen_text.getvalue()
    lines = [line for line in screen_text.getvalue().split("\n") if "tokens" in line]
    assert len(lines) == 1


def _printed(renderable: Any, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), soft_wrap=True)  # noqa: SIM115
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]
