"""Test checks of runs of other programs: verdicts on losses with a known optimum, and which files are refused."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.errors import refused
from tests.tuning.test_command import wandb_log, wandb_row
from tests.views.written import proxy, write_run

from leaven.errors import InputError
from leaven.scaling.transfer import transfer
from leaven.storage import digest
from leaven.training.run_folder import RunFolder
from leaven.training.run_logs import by_event_name
from leaven.verification.logged_rows import RunLogs, named_numbers, read_rows, size_in
from leaven.verification.logged_runs import PROGRESS, collapse_of_runs, curves_of, transfer_of_runs

OCTAVES = range(-9, -3)
Row = dict[str, float | str]


def rows(
    best: dict[int, float], noise: float = 1e-6, *, seeds: int = 3, random: np.random.Generator | None = None
) -> list[Row]:
    """Return runs at each width whose loss is a parabola over log2 lr with its minimum at ``best[width]``."""
    random = random or np.random.default_rng(0)
    return [
        {"width": width, "lr": 2.0**x, "seed": seed, "loss": 3 + 0.05 * (x - at) ** 2 + random.normal(0, noise)}
        for width, at in best.items()
        for x in OCTAVES
        for seed in range(seeds)
    ]


def write(path: Path, written: Iterable[Row]) -> Path:
    lines = list(written)
    if path.suffix == ".csv":
        cells = [list(lines[0]), *(line.values() for line in lines)]
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in cells))
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def own_run(folder: Path, width: int = 64, lr: float = 0.004, seed: int = 0, floor: float = 2.0) -> None:
    """Write a finished run of leaven, whose last loss is about ``floor``. ``lr`` is in base coordinates."""
    recipe = proxy(**{"data.tokens": 81_920, "data.seed": seed, "hyperparameters.lr": lr})
    write_run(folder, transfer(recipe, width=width) if width > 64 else recipe, floor, seed=seed)


def test_the_intervals_and_verdicts_hold_on_parabolas_with_a_known_minimum(tmp_path: Path) -> None:
    covered = failed = passed = 0
    draws = 30
    for number in range(draws):
        random = np.random.default_rng(number)
        same = transfer_of_runs(write(tmp_path / "a.csv", rows({64: -6.3, 256: -6.3}, 0.01, random=random)))
        moved = transfer_of_runs(write(tmp_path / "a.csv", rows({64: -6.3, 256: -7.8}, 0.01, random=random)))
        (row,) = moved.rows
        covered += row.parts["low"] <= -1.5 <= row.parts["high"]  # type: ignore[operator]
        # 1.5 octaves cost 0.11 nats, eleven times the limit.
        failed += not moved.passed and not row.undecided
        passed += same.rows[0].passed is True
        assert not any(row.passed is False and not row.undecided for row in same.rows)
    assert covered >= 0.85 * draws  # with three seeds, intervals are a little too narrow
    assert failed == draws
    assert passed >= 0.8 * draws


def test_the_exponent_and_the_base_are_those_of_the_sizes(tmp_path: Path) -> None:
    best = {256: -8.0, 64: -6.0, 128: -7.0}
    document = transfer_of_runs(write(tmp_path / "runs.jsonl", rows(best, 1e-9)))
    assert [row.axis for row in document.rows] == ["width 64 -> width 128", "width 64 -> width 256"]
    assert [row.slope for row in document.rows] == pytest.approx([-1, -2])
    (exponent,) = document.measured
    assert (exponent.value, exponent.expected) == (pytest.approx(-1), 0)
    assert exponent.note == "0, which means no change, is OUTSIDE the 95% interval"
    assert document.settings["columns not used"] == []


def test_a_folder_of_files_any_value_and_any_size(tmp_path: Path) -> None:
    for number, width in enumerate((64, 128)):
        (tmp_path / str(number)).mkdir()
        named: list[Row] = [
            {"tokens": 1e9 * width, "beta": run["lr"], "loss": run["loss"], "host": "a"}
            for run in rows({width: -6.0}, 0.001)
        ]
        write(tmp_path / str(number) / "sweep.csv", named)
    document = transfer_of_runs(tmp_path, "beta")
    assert document.passed
    assert document.rows[0].axis == "tokens 64000000000 -> tokens 128000000000"
    assert document.rows[0].module == "best beta, octaves"
    assert document.settings["columns not used"] == ["host"]


def test_values_that_differ_by_rounding_are_one_value(tmp_path: Path) -> None:
    runs = rows({64: -6.3, 256: -6.3}, 0.01)
    rounded = [run | {"lr": float(np.float32(run["lr"]))} if number % 2 else run for number, run in enumerate(runs)]
    plain, other = (transfer_of_runs(write(tmp_path / "a.csv", each)) for each in (runs, rounded))
    assert [(row.slope, row.note) for row in other.rows] == [(row.slope, row.note) for row in plain.rows]


def without(column: str) -> Callable[[list[Row]], list[Row]]:
    return lambda runs: [{key: value for key, value in run.items() if key != column} for run in runs]


def changed(**values: float | str) -> Callable[[list[Row]], list[Row]]:
    return lambda runs: [{**runs[0], **values}, *runs[1:]]


REFUSED: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "no loss": (without("loss"), "has no column loss; its columns are width, lr, seed"),
    "no value": (without("lr"), "has no column lr; its columns are width, seed, loss; name the swept hyperp"),
    "no size": (
        without("width"),
        "has no column width or depth or batch or tokens; its columns are lr, seed, loss; add a column",
    ),
    "one size": (lambda runs: [run for run in runs if run["width"] == 64], "one size only, width 64;"),
    "two values": (lambda runs: [run for run in runs if float(run["lr"]) > 0.02], "width 64 has 2 values of lr"),
    "text": (changed(loss="high"), "row 1: loss is 'high', which is not a number; the loss of a diverged run is nan"),
    "empty": (changed(loss=""), "row 1 has no loss; write nan if the run diverged, or its loss if it finished; "),
    "lr 0": (changed(lr=0), "row 1: lr is 0; give a number from 1e-100 to 1e+100"),
    "a huge width": (
        changed(width="1" + "0" * 20),
        "row 1: width is 1e+20; give a whole number of at most 1,000,000",
    ),
    "a width beyond a float": (changed(width="1" + "0" * 400), "row 1: width is inf; give a number from 1e-100 to"),
    "half a width": (changed(width=64.5), "row 1: width is 64.5; give a whole number"),
    "twice": (changed(seed=1), "runs.csv: row 1; keep one of the two, such as the last point of a curve, or name"),
    # A run with a loss above LARGEST_LOSS has diverged.
    **{
        f"all losses {bad}": (
            lambda runs, bad=bad: [run | {"loss": bad} if run["width"] == 64 else run for run in runs],  # type: ignore[misc]
            "width 64 has 0 values of lr without a diverged run",
        )
        for bad in ("nan", "inf", 1e308)
    },
    "0 and 0.0": (lambda runs: [*runs, runs[0] | {"seed": "0.0"}], "row 37 repeats the size, lr and seed"),
    "two columns": (lambda runs: [run | {" LR": 1} for run in runs], "has two columns lr; rename or remove one"),
    "a cell too many": (
        changed(loss="3,1"),
        "line 2: it has 5 cells, but the header has 4; correct or remove the line",
    ),
    "no rows": (lambda runs: [], "has no rows; write a row for each run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_judged_are_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    path = tmp_path / "runs.csv"
    runs = change(rows({64: -6.0, 128: -6.0}))
    write(path, runs) if runs else path.write_text("width,lr,loss\n")
    with pytest.raises(InputError) as refusal:
        transfer_of_runs(path)
    assert message in str(refusal.value)


def test_a_row_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.jsonl", rows({64: -6.0, 128: -6.0}))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3].replace('"loss"', '"loss": 9.0, "loss"'), *lines[4:]]))
    with pytest.raises(InputError) as refusal:
        transfer_of_runs(file)
    assert str(refusal.value) == f'{file}: line 4: one JSON object has the key "loss" 2 times; keep one'


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_file_whose_last_line_is_cut_is_refused(suffix: str, tmp_path: Path) -> None:
    message = {
        ".csv": "line 37: it has 3 cells, but the header has 4; .* or if it is the last, copy",
        ".jsonl": "its last line is cut; copy",
    }[suffix]
    file = write(tmp_path / f"runs{suffix}", rows({64: -6.0, 128: -6.0}))
    whole = file.read_text().removesuffix("\n")
    file.write_text(whole)  # only the newline is missing
    transfer_of_runs(file)
    cuts = [whole.rindex(",")] + ([len(whole) - 1] if suffix == ".jsonl" else [])
    for cut in cuts:
        file.write_text(whole[:cut])
        with pytest.raises(InputError, match=rf"runs\{suffix}: {message} the file again"):
            transfer_of_runs(file)
    if suffix == ".csv":  # a number that is cut looks like a whole one
        file.write_text(whole[: whole.rindex(".") + 2])
        transfer_of_runs(file)


def test_a_cell_with_an_open_quote_does_not_hide_rows(tmp_path: Path) -> None:
    lines = [run | {"note": "ok"} for run in rows({64: -6.0, 128: -6.0})]
    file = tmp_path / "runs.csv"
    for note, other in (
        ('"restarted', "ok"), ('"restarted, twice', "ok"), ('"restarted', '"a, b"'), ('"two\n\nlines"', "ok"),
    ):  # fmt: skip
        write(file, [*lines[:2], lines[2] | {"note": note}, *(line | {"note": other} for line in lines[3:])])
        with pytest.raises(
            InputError, match="line 4: a cell has a line break, or no closing quotation mark; correct"
        ):
            transfer_of_runs(file)
    file.write_text('width,lr,loss,note,host\n64,1,3,"a,b\n64,2,3,"c",d\n')  # the quote of c ends the cell
    with pytest.raises(InputError, match="line 2: a cell has a line break"):
        transfer_of_runs(file)
    write(file, [*lines[:4], lines[4] | {"note": "x" * 200_000}])
    with pytest.raises(InputError, match="line 6: field larger than field limit"):
        transfer_of_runs(file)
    notes = ('"a, b"', '5" disk', '"said ""ok"""', "", '" "')
    expected = transfer_of_runs(write(file, lines))
    noted = [line | {"note": notes[n % len(notes)]} for n, line in enumerate(lines)]
    assert transfer_of_runs(write(file, noted)) == expected
    file.write_text(file.read_text() + "64\n")
    with pytest.raises(InputError, match="line 38: it has 1 cells, but the header has 5; correct or remove the line"):
        transfer_of_runs(file)


def test_rows_of_a_csv_file_have_as_many_cells_as_its_header(tmp_path: Path) -> None:
    runs = rows({64: -6.0, 128: -6.0})
    expected = transfer_of_runs(write(tmp_path / "runs.csv", runs))
    file = write(tmp_path / "runs.csv", [run | {"": n} for n, run in enumerate(runs)])  # the index of pandas
    assert transfer_of_runs(file) == expected
    file.write_text("# of May\n" + write(file, runs).read_text())
    with pytest.raises(InputError, match="its first line begins with #; begin with the names of the columns"):
        transfer_of_runs(file)
    file = tmp_path / "50m.csv"
    file.write_text("step,loss\n10,3.0\n20\n30,2.0\n")
    with pytest.raises(InputError, match="line 3: it has 1 cells, but the header has 2; correct or remove the line"):
        curves_of(file)
    file.write_text("step,loss\n\n10,3.0\n20,\n,\n30,2.0\n40,1.0\n\n \n".replace(" \n", ""))  # 20 has no loss
    assert curves_of(file) == {"50m": [[(10, 3.0), (30, 2.0), (40, 1.0)]]}


def test_files_that_are_no_logs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        transfer_of_runs(tmp_path / "none.csv")
    with pytest.raises(InputError, match=r"no file that ends in \.csv or \.jsonl or \.wandb"):
        transfer_of_runs(tmp_path)
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="is not a CSV file"):
        transfer_of_runs(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("width;lr;loss\n64;0,1;3\n")
    with pytest.raises(InputError, match=r"a\.csv: separate the columns by commas"):
        transfer_of_runs(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"width": 64}\n[1]\n')
    with pytest.raises(InputError, match="line 2 is not a JSON object"):
        transfer_of_runs(tmp_path / "a.jsonl")


def points(run: int = 0) -> list[tuple[int, float]]:
    """Return a loss curve of its own for each ``run``."""
    return [(step, 4 - 0.1 * step + run / 1000) for step in range(1, 11)]


def curve(run: int = 0, **more: float | str) -> list[Row]:
    return [{**more, "step": step, "loss": loss} for step, loss in points(run)]


def test_curves_by_columns_by_file_and_by_subfolder(tmp_path: Path) -> None:
    sizes = {(width, seed): width + seed for width in (128, 64) for seed in (0, 1)}
    lines = [line for (width, seed), run in sizes.items() for line in curve(run, width=width, seed=seed)]
    by_column = write(tmp_path / "all.csv", lines)
    assert curves_of(by_column) == {f"width {width}": [points(width), points(width + 1)] for width in (64, 128)}
    by_name = tmp_path / "names"
    for run, name in enumerate(("100m/a.csv", "100m/b.csv", "20m/a.jsonl", "3m.csv")):
        (by_name / name).parent.mkdir(parents=True, exist_ok=True)
        write(by_name / name, curve(run))
    found = curves_of(by_name)
    assert [(name, len(curves)) for name, curves in found.items()] == [("3m", 1), ("20m", 1), ("100m", 2)]
    theirs = tmp_path / "theirs"  # without a recipe
    theirs.mkdir()
    write(theirs / "metrics.jsonl", curve())
    assert curves_of(theirs) == {"metrics": [points()]}
    write(tmp_path / "note.csv", [line | {"note": "a", "tokens": 5 * int(line["step"])} for line in lines])
    assert collapse_of_runs(tmp_path / "note.csv").settings["columns not used"] == ["note"]
    # Rows without a loss are left out, and of two rows for a step the last one counts.
    lines = [*curve(), {"step": 10, "loss": 2.5}, {"step": 10, "val_loss": 3.0}]
    assert curves_of(write(tmp_path / "more.jsonl", lines)) == {"more": [[*points()[:-1], (10, 2.5)]]}


def lost(width: int, first: int | None, name: str = "loss", **more: float | str | None) -> list[dict[str, Any]]:
    """Return a curve with 20 points, without a loss from step ``first`` on."""
    return [
        {
            "width": width,
            "step": step,
            name: 4 - step / 100 + width / 1e4 if not first or step < first else None,
            **more,
        }
        for step in range(1, 21)
    ]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_loss_that_is_missing_at_the_end_of_a_run_may_be_nan(suffix: str, tmp_path: Path) -> None:
    def read(*runs: list[dict[str, Any]], loss: str = "loss") -> dict[str, list[Any]]:
        lines = [line for run in runs for line in run]
        if suffix == ".csv":  # as pandas writes NaN
            lines = [{name: "" if value is None else value for name, value in line.items()} for line in lines]
        return curves_of(write(tmp_path / f"runs{suffix}", lines), loss)

    whole = read(lost(64, None))["width 64"]
    message = (
        "row {}: the last row of a run has no loss; write nan if the run diverged there, or else remove the rows"
    )
    for runs, row in (
        ((lost(64, None), lost(128, 17)), 40),
        ((lost(128, 20),), 20),
        ((lost(64, None, seed=0), lost(128, 5, seed=3)), 40),
        ((lost(64, None), lost(128, 1)), 40),  # no loss at all
        ((lost(128, 9, "Val/Loss", loss=None),), 20),
        ((lost(64, None), [{"width": 64, "step": 21, "loss": None}]), 21),
        ((lost(64, 15, val_loss=3.0),), 20),
    ):
        with pytest.raises(InputError, match=message.format(row)):
            read(*runs, loss="val/loss" if "Val/Loss" in runs[0][0] else "loss")
    with pytest.raises(InputError, match="has no losses; write nan for those of a diverged run"):
        read(lost(64, 1))
    # Losses that are rarer than the other rows.
    rare = [line | {"loss": line["loss"] if line["step"] % 4 == 0 else None} for line in lost(64, None)]
    assert read(rare) == {"width 64": [[point for point in whole[0] if point[0] % 4 == 0]]}
    for more in (  # rows of another kind, and another row of the last step
        [{"width": 64, "step": 20, "loss": None}] * 3,
        [{"width": None, "step": at, "loss": None} for at in (21, 22)],
        [{"width": 64, "step": None, "loss": None}] * 3,
    ):
        assert read([*lost(64, None), *more]) == {"width 64": whole}
    nan = [line | {"loss": "nan" if line["step"] == 20 else line["loss"]} for line in lost(64, 16)]
    assert len(read(nan)["width 64"][0]) == 16
    if suffix == ".jsonl":  # a line without the key
        assert read([*lost(64, None), {"width": 64, "step": 21}]) == {"width 64": whole}


def test_curves_of_finished_runs_of_leaven(tmp_path: Path) -> None:
    for width, seed in ((64, 0), (64, 1), (128, 0)):
        own_run(tmp_path / f"{width}-{seed}", width, seed=seed)
    found = curves_of(tmp_path)
    assert {name: len(curves) for name, curves in found.items()} == {"width 64": 2, "width 128": 1}
    assert found["width 64"][0][-1][0] == 81_920
    events = tmp_path / "64-0" / "events.jsonl"
    events.write_text("".join(line for line in events.open() if '"finish"' not in line))
    with pytest.raises(InputError, match="has not finished; resume it, or move it to another folder"):
        curves_of(tmp_path)
    with events.open("a") as file:
        file.write('{"event": "stop", "why": "diverged"}\n')
    with pytest.raises(InputError, match="64-0 diverged, so its curve ends early; move the run to another folder"):
        curves_of(tmp_path)


def test_a_copy_of_a_run_is_no_other_seed(tmp_path: Path) -> None:
    own_run(tmp_path / "own" / "a")
    shutil.copytree(tmp_path / "own" / "a", tmp_path / "own" / "a.bak")
    with pytest.raises(InputError, match=r"own/a\.bak repeats the size and seed of .*own/a; remove one of the two"):
        curves_of(tmp_path / "own")
    for run, (name, seed) in enumerate((("a", 0), ("b", 1), ("c", 0.0))):
        write(tmp_path / f"{name}.csv", curve(run, width=64, seed=seed))
    assert curves_of(tmp_path / "a.csv") == {"width 64": [points()]}
    shutil.rmtree(tmp_path / "own")
    with pytest.raises(InputError, match=r"c\.csv repeats the size and seed of .*a\.csv; remove one of the two"):
        curves_of(tmp_path)
    (tmp_path / "c.csv").unlink()
    assert curves_of(tmp_path) == {"width 64": [points(), points(1)]}


def test_curves_with_the_same_losses_are_no_two_seeds(tmp_path: Path) -> None:
    (tmp_path / "50m").mkdir()
    write(tmp_path / "50m" / "a.csv", curve())
    write(tmp_path / "50m" / "b.csv", [*curve()[:-1], {"step": 10, "loss": 2.5}])  # a few equal losses are no copy
    assert len(curves_of(tmp_path)["50m"]) == 2
    shutil.copy(tmp_path / "50m" / "a.csv", tmp_path / "50m" / "a (copy).csv")
    with pytest.raises(InputError, match=r"50m/a\.csv repeats the losses of .*50m/a \(copy\)\.csv; remove one"):
        curves_of(tmp_path)
    seeds = write(tmp_path / "seeds.csv", [*curve(width=64, seed=0), *curve(width=64, seed=1)])
    with pytest.raises(InputError, match=r"seeds\.csv: row 11 repeats the losses of .*seeds\.csv: row 1; remove"):
        curves_of(seeds)


@pytest.mark.parametrize("seeded", [True, False])
def test_rows_with_the_same_losses_are_no_two_seeds(tmp_path: Path, seeded: bool) -> None:
    runs = rows({64: -6.0, 128: -6.0}, 0.001, seeds=1)
    written = (runs, [run | {"seed": 1} for run in runs]) if seeded else [without("seed")(runs)] * 2
    for name, lines in zip(("a", "a (copy)"), written, strict=True):
        write(tmp_path / f"{name}.csv", lines)
    with pytest.raises(InputError, match=r"a\.csv: row 1 repeats the loss of .*a \(copy\)\.csv: row 1; at this size"):
        transfer_of_runs(tmp_path)
    once = [run | {"seed": 1} for run in runs if run["lr"] == 2.0**-6]  # rounded losses of one value may be equal
    assert transfer_of_runs(write(tmp_path / "once.csv", runs + once)).settings["seeds"] == "1 to 2"
    # Losses with few digits are equal now and then, and those of diverged runs always.
    rounded = rows({64: -6.0, 128: -6.0}, 0.01)
    lines = [run | {"loss": "nan" if run["lr"] == 2.0**-4 else f"{run['loss']:.2f}"} for run in rounded]
    assert transfer_of_runs(write(tmp_path / "rounded.csv", lines)).settings["seeds"] == 3


def logged(steps: Iterable[int], **more: float | str) -> list[Row]:
    """Return the points of the loss curve of each run of a sweep."""
    runs = rows({64: -6.0, 128: -6.0}, 0.001, seeds=1)
    return [run | {"loss": float(run["loss"]) + 100 / step**2, "step": step} | more for run in runs for step in steps]


def test_points_of_loss_curves_are_no_seeds(tmp_path: Path) -> None:
    curves = without("seed")(logged(range(100, 1100, 100)))
    message = (
        "row 1 and .*row 2 both have width 64, lr 0.00195312, but step 100 and 200, so they may be points of one "
        "run; keep only the last row of each run; if each row is a run, add the column seed or name"
    )
    for change in (
        lambda run: run,
        lambda run: run | {"name": f"{run['width']} {run['lr']}"},
        lambda run: run | {"step": "", "trainer/global_step": run["step"]},
        *(
            lambda run, column=column: {column if name == "step" else name: value for name, value in run.items()}
            for column in ("_step", "it", "num_steps", "batch_idx", "_runtime", "iter_num")
        ),
    ):
        with pytest.raises(InputError, match=re.sub(" step 100", " .* 100", message)):
            transfer_of_runs(write(tmp_path / "runs.csv", map(change, curves)))
    with pytest.raises(InputError, match="row 2 repeats the size, lr and seed of .*row 1; keep one of the two"):
        transfer_of_runs(write(tmp_path / "runs.csv", [run | {"seed": 0} for run in curves]))
    late = [run for run in curves if float(run["step"]) > 250]  # all steps after a warm-up
    tokens = [{"tokens" if name == "step" else name: value for name, value in run.items()} for run in late]
    transfer_of_runs(write(tmp_path / "runs.csv", tokens))  # eight lengths
    tokens = [run | {"tokens": run["step"]} for run in without("seed")(logged(range(100, 2200, 100)))]
    with pytest.raises(InputError, match="row 21: the rows with width 64, lr 0.00195312 have more than 20 values"):
        transfer_of_runs(write(tmp_path / "runs.csv", tokens))


def test_runs_with_other_numbers_of_steps_are_seeds(tmp_path: Path) -> None:
    """W&B counts steps in calls, so that those of finished runs differ, and diverged runs end early."""
    changes: list[tuple[Callable[[Row, int], Row], bool]] = [  # and whether they are refused without seeds
        (lambda run, seed: {"_step": 2000 + seed}, True),
        (lambda run, seed: {"epoch": 3 + (7 * seed + round(1e4 * float(run["lr"]))) % 5}, True),  # stopped early
        (lambda run, seed: {"_step": 2000, "epoch": 0.99}, False),
        (lambda run, seed: {"step": "", "warmup_steps": 10**seed, "epoch": "last"}, False),
        (lambda run, seed: {"iteration": 10**seed, "name": f"run {seed}"}, False),
        (lambda run, seed: {"iter": 100 * seed, "trial_id": f"run {seed}"}, False),
        (lambda run, seed: {"step": 2000, "tokens": 64 * float(run["width"])}, False),
        (lambda run, seed: {"step": 30, "loss": "nan"} if seed and run["lr"] == 2.0**-4 else {"step": 2000}, False),
    ]
    for change, refuses in changes:
        written = [run | change(run, int(run["seed"])) for run in rows({64: -6.0, 128: -6.0}, 1e-6)]
        with pytest.raises(InputError, match="add the column seed or name") if refuses else nullcontext():
            assert transfer_of_runs(write(tmp_path / "runs.csv", without("seed")(written))).rows
        seeded = [run | {"step": 10 ** int(run["seed"])} for run in written]
        assert transfer_of_runs(write(tmp_path / "runs.csv", seeded)).rows
    batches = [
        run | {"bs": batch, "steps": 64_000 // batch}
        for run in rows({64: -6.0, 128: -6.0}, 1e-3, seeds=1)
        for batch in (16, 32, 64)
    ]
    with pytest.raises(InputError, match="row 2 repeats the size, lr and seed .* or name another swept column"):
        transfer_of_runs(write(tmp_path / "runs.csv", batches))
    swept = [run | {"step": 1000 * float(run["lr"])} for run in rows({64: -6.0, 128: -6.0}, 0.001)]
    assert transfer_of_runs(write(tmp_path / "runs.csv", without("lr")(swept)), "step").passed


@pytest.mark.parametrize("state", ["crashed", "PRUNED", "FAIL", "ERROR", "CANCELLED by 1000", "preempting"])
def test_runs_that_have_not_finished_are_refused(tmp_path: Path, state: str) -> None:
    runs: list[Row] = [run | {"State": "COMPLETE"} for run in rows({64: -6.0, 128: -6.0}, 1e-3)]
    file = write(tmp_path / "runs.csv", [runs[0] | {"State": state}, *runs[1:]])
    with pytest.raises(
        InputError, match=f"row 1: the state of this run is {state.lower()}; write nan as its loss if"
    ):
        transfer_of_runs(file)
    transfer_of_runs(write(file, [runs[0] | {"State": state, "loss": "nan"}, *runs[1:]]))
    with pytest.raises(InputError, match="row 1: the status of this run is"):
        transfer_of_runs(
            write(file, [runs[0] | {"Status": state}, *(run | {"Status": "FINISHED"} for run in runs[1:])])
        )


def test_a_curve_of_a_run_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    runs = [curve(width=64, seed=0, state="running"), curve(1, width=64, seed=1), curve(2, width=128, seed=0)]
    runs[0][-1]["state"] = "finished"  # the trainer has written each row when it was logged
    assert curves_of(write(file, chain(*runs))).keys() == {"width 64", "width 128"}
    runs[1][-1]["Status"] = "crashed"
    with pytest.raises(InputError, match="row 20: the status of this run is crashed; write nan as its loss if"):
        curves_of(write(file, chain(*runs)))
    runs[1][-1]["loss"] = math.nan
    curves_of(write(file, chain(*runs)))
    one = write(tmp_path / "50m.jsonl", [*curve(), {"step": 11, "state": "failed"}])
    with pytest.raises(InputError, match="row 11: the state of this run is failed"):
        curves_of(one)


def test_columns_with_the_progress_of_a_run() -> None:
    progress = (
        "step _step num_steps optimizer_step iter_num train/epoch trainer/global_step train_tokens num_tokens "
        "tokens_seen train/num_input_tokens_seen throughput/total_tokens consumed_train_samples samples _timestamp"
    )
    others = (
        "time_per_step tokens_per_second best_step lr_warmup_samples warmup_steps decay_step micro_batch_tokens "
        "max_steps train_max_samples start_timestamp seconds"
    )
    assert [name for name in (progress + " " + others).split() if PROGRESS.fullmatch(name)] == progress.split()


def test_a_copied_folder_of_tensorboard_is_no_second_seed(tmp_path: Path) -> None:
    for width, octave, repeat in product((64, 128), (-7, -6, -5), (0, 1)):
        run = tmp_path / f"width{width}-lr{2.0**octave}" / f"seed{repeat}"
        run.mkdir(parents=True)
        diverged = math.nan if octave == -5 else 2.0 + repeat / 100
        events = EVENT(1, float_val=[6.0]) + EVENT(2, float_val=[diverged])
        (run / "a.tfevents").write_bytes(events)
    with pytest.raises(InputError, match="has 2 values of lr without a diverged run"):  # diverged runs are no copies
        transfer_of_runs(tmp_path)
    shutil.copytree(tmp_path / "width64-lr0.0078125" / "seed0", tmp_path / "width64-lr0.0078125" / "seed2")
    with pytest.raises(InputError, match=r"0078125/seed2 repeats the losses of .*0078125/seed0; remove one"):
        transfer_of_runs(tmp_path)


def test_a_run_in_two_formats_is_one_seed(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    runs = rows({64: -6.0, 128: -6.0}, 0.001, seeds=1)
    for run in runs:
        name = f"width{run['width']}-lr{run['lr']}"
        for folder, seed in (("none", ""), ("seeds", "-seed0")):
            (of := tmp_path / folder / f"{name}{seed}").mkdir(parents=True)
            (of / "a.tfevents").write_bytes(EVENT(9, float_val=[run["loss"]]))
    for folder in ("none", "seeds"):
        write(tmp_path / folder / "summary.csv", [run | {"seed": ""} for run in runs])
        with pytest.raises(InputError, match=r"both logs of width \d+, lr .*, so they may be one run; if so, move"):
            transfer_of_runs(tmp_path / folder)
    write(tmp_path / "seeds" / "summary.csv", [run | {"seed": 1, "loss": float(run["loss"]) + 0.001} for run in runs])
    assert transfer_of_runs(tmp_path / "seeds").settings["seeds"] == 2
    write(tmp_path / "none" / "summary.csv", [run | {"lr": float(run["lr"]) / 1.5} for run in runs])
    assert transfer_of_runs(tmp_path / "none").settings["seeds"] == 1  # other values
    (tmp_path / "curves" / "50m" / "wandb").mkdir(parents=True)
    theirs = Path(__file__).parents[1] / "tuning" / "wandb" / "offline.wandb"
    shutil.copy(theirs, tmp_path / "curves" / "50m" / "wandb" / "run-x.wandb")
    with SummaryWriter(tmp_path / "curves" / "50m") as writer:
        writer.add_scalar("val/loss", 3.0, 10)
    with pytest.raises(InputError, match=r"50m and .*\.wandb are both logs of 50m, so they may be one run; if so"):
        curves_of(tmp_path / "curves", "val/loss")


def test_folders_of_one_run_in_tensorboard_are_no_seeds(tmp_path: Path) -> None:
    """Keras writes train and validation, and ``add_scalars`` of PyTorch writes loss_train and loss_val."""
    from torch.utils.tensorboard import SummaryWriter

    runs = rows({64: -6.0, 128: -7.0}, 0.001, seeds=1)
    for run in runs:
        name = f"width{run['width']}-lr{run['lr']}"
        for split, more in (("val", 0.0), ("train", -0.1)):
            (of := tmp_path / "keras" / name / split).mkdir(parents=True)
            (of / "a.tfevents").write_bytes(EVENT(9, float_val=[float(run["loss"]) + more]))
        shutil.copytree(tmp_path / "keras" / name / "val", tmp_path / "val" / name)
        (of := tmp_path / "old" / "first" / name).mkdir(parents=True)
        shutil.copytree(tmp_path / "keras" / name / "train", tmp_path / "old" / "second" / name)
        (of / "a.tfevents").write_bytes(EVENT(9, float_val=[float(run["loss"]) + 0.002]))
        with SummaryWriter(tmp_path / "pytorch" / name) as writer:
            writer.add_scalars("loss", {"train": 1.0, "val": run["loss"]}, 9)
        for number, kind in product((0, 1), ("run", "seed")):
            (of := tmp_path / kind / f"{kind}{number}" / name).mkdir(parents=True)
            (of / "a.tfevents").write_bytes(EVENT(9, float_val=[float(run["loss"]) + 0.002 * number]))
    message = "train and .*/val are both logs of width 128, lr .*, so they may be one run; if so, read one of them"
    with pytest.raises(InputError, match=f"{message} with --loss val/loss; if not, give both"):
        transfer_of_runs(tmp_path / "keras")
    shutil.copytree(tmp_path / "keras", tmp_path / "seeded")
    for folder in [*(tmp_path / "seeded").iterdir()]:
        folder.rename(f"{folder}-seed0")
    with pytest.raises(InputError, match="val repeats .*/train; read one of them with --loss val/loss, or name anot"):
        transfer_of_runs(tmp_path / "seeded")
    assert transfer_of_runs(tmp_path / "seeded", loss="val/loss").settings["seeds"] == 1
    for unseeded in ("old", "run"):
        with pytest.raises(InputError, match="move one of them elsewhere; if not, give both a seed"):
            transfer_of_runs(tmp_path / unseeded)
    expected = transfer_of_runs(tmp_path / "val")
    assert expected.settings["seeds"] == 1
    assert transfer_of_runs(tmp_path / "keras", loss="val/loss").rows == expected.rows
    assert transfer_of_runs(tmp_path / "seed").settings["seeds"] == 2
    with pytest.raises(
        InputError, match="loss_val are both logs of .*; if so, read one of them with --loss loss_val/loss; if"
    ):
        transfer_of_runs(tmp_path / "pytorch")
    assert transfer_of_runs(tmp_path / "pytorch", loss="loss_val/loss").rows == expected.rows
    for width, split in product((64, 128), ("train", "val")):
        (of := tmp_path / "curves" / f"width{width}" / split).mkdir(parents=True)
        content = [EVENT(step, float_val=[loss + (split == "val")]) for step, loss in points(width)]
        (of / "a.tfevents").write_bytes(b"".join(content))
    with pytest.raises(InputError, match="both logs of width 128, so they may be one run; if so, read one of them"):
        curves_of(tmp_path / "curves")
    found = curves_of(tmp_path / "curves", loss="train/loss")
    assert {name: len(of) for name, of in found.items()} == {"width 64": 1, "width 128": 1}


def test_unfinished_runs_are_found_if_the_batch_is_the_value(tmp_path: Path) -> None:
    for width, batch, seed in product((64, 128), (8, 16, 32, 64), (0, 1)):
        (run := tmp_path / "runs" / f"width{width}-batch{batch}-seed{seed}").mkdir(parents=True)
        (run / "a.tfevents").write_bytes(EVENT(1024 // batch, float_val=[3 + abs(batch - 20) / 100 + seed / 1e4]))
    assert transfer_of_runs(tmp_path / "runs", "batch").settings["seeds"] == 2
    (run / "a.tfevents").write_bytes(EVENT(4, float_val=[4.0]))
    with pytest.raises(InputError, match="width128-batch64-seed1 ends at step 4, and .*batch64-seed0 at 16; finish"):
        transfer_of_runs(tmp_path / "runs", "batch")
    (run / "a.tfevents").write_bytes(EVENT(4, float_val=[math.nan]))
    transfer_of_runs(tmp_path / "runs", "batch")
    table: list[Row] = [
        {"width": width, "batch": batch, "step": 1024 // batch, "loss": 3 + batch / 1e3 + seed}
        for width, batch, seed in product((64, 128), (8, 16, 32), (0, 1))
    ]
    transfer_of_runs(write(tmp_path / "a.csv", table), "batch")


NAMES: dict[str, dict[str, float] | None] = {
    "width=256,lr=0.004": {"width": 256, "lr": 0.004},
    "width256-lr0.004": {"width": 256, "lr": 0.004},
    "lr=0.004_seed-1": {"lr": 0.004, "seed": 1},
    "batch512k-lr4E-3_Seed1": {"batch": 512_000, "lr": 0.004, "seed": 1},
    "adamw lr_1.e-3, tokens1.5b": {"lr": 0.001, "tokens": 1.5e9},
    "beta1=0.9_beta2=0.95,l2=0.1": {"beta1": 0.9, "beta2": 0.95, "l2": 0.1},
    "mup_width64-head_width_16-run1": {"mup_width": 64, "head_width": 16, "run": 1},
    "optim=adam,width=64,lr=0.001": {"width": 64, "lr": 0.001},
    "model.width=64,optim.lr=0.001,optim.beta2=0.95": {"width": 64, "lr": 0.001, "beta2": 0.95},
    "width64.lr0.001": {"width": 64, "lr": 0.001},
    "tokens1.5b.lr_1.e-3": {"tokens": 1.5e9, "lr": 0.001},
    **dict.fromkeys(
        (
            "width1_024", "width1_024-lr1", "lr0.002_001", "lr4e-3_20240501", "lr3e-4b512", "tokens1b5", "lr2p5",
            "lr-8-7", "log2lr-8", "loglr-8", "lnlr-8", "log2-lr-8", "log-lr-8", "log_lr-8",
             "ln_lr-6,ln-lr6", "log10.lr-3", "beta2_0.95", "20240501",
            "0.5b", "run1-2024", "Nov30_15-05-34_host", "1796051149.26", "v1.2.3", "lr=-3", "lr=0.1x",
            "tokens100mtok", "optim=adam8bit,lr=1", "0.5.width=64", "lr.0.001", "width64_lr0.001_beta2_0.95",
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_names_are_read_whole_or_not_at_all(name: str) -> None:
    found, expected = named_numbers(name), NAMES[name]
    assert (found if found is None else dict(found)) == expected


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("50m", 5e7), ("900K", 9e5), ("pythia-1.5B", 1.5e9), ("3e9", 3e9), ("2btok", 2e9),
        ("1b1", None), ("large", None), ("pythia-70m-v2", None), ("d24e4", None), ("n=1e8", 1e8), ("d24", 24),
    ],
)  # fmt: skip
def test_a_name_of_a_size_has_one_number(name: str, size: float | None) -> None:
    assert size_in(name) == size


def test_names_that_cannot_be_read_and_differ_are_refused(tmp_path: Path) -> None:
    values = [*product((64, 128), (1, 2, 4))]
    same = tensorboard_runs(tmp_path / "a", *(f"sweep 2024-05-01/width{w}/lr{lr}" for w, lr in values))
    assert transfer_of_runs(same).settings["scales"] == ["width 64", "width 128"]  # all have the date
    for number, name in enumerate(("width1_{:03}-lr{}", "width{0}-lr{1}/{0}x{1}", "width{0}-lr{1}-2024-{1}")):
        folder = tensorboard_runs(tmp_path / f"b{number}", *(name.format(w, lr) for w, lr in values))
        with pytest.raises(
            InputError,
            match="cannot read .* in the name .*; rename it to names and numbers .no logarithms.",
        ):
            transfer_of_runs(folder)
    folder = tensorboard_runs(tmp_path / "d", *(f"width{w}_lr{lr}_beta2_0.{lr}" for w, lr in values))
    with refused("cannot read '0.", "in the name width", "_beta2_0.", "lr=0.004,beta2=0.95 or seed0, or"):
        transfer_of_runs(folder)
    ids = [f"width{w}-lr{lr}/offline-run-20240501_12{w:03}{lr}-a1/run-a{w}{lr}.wandb" for w, lr in values]
    theirs = Path(__file__).parents[1] / "tuning" / "wandb" / "offline.wandb"
    for run in ids:
        (tmp_path / "c" / run).parent.mkdir(parents=True)
        shutil.copy(theirs, tmp_path / "c" / run)
    logs = RunLogs.at(tmp_path / "c", "val/loss")
    logs.require_readable_names()
    assert logs.unused_numbers(["width"]) == ["lr"]


def test_numbers_that_occur_twice_are_refused(tmp_path: Path) -> None:
    for name, wrong in (
        ("width64-muon-lr0.02-adam-lr0.003", "lr is 0.02 and 0.003; rename all but one, e.g. replace the -"),
        ("width64/lr1/head-width16", "width is 64 and 16; rename"),
    ):
        with pytest.raises(InputError, match=wrong):
            transfer_of_runs(tensorboard_runs(tmp_path / name[-4:], name))
    names = [
        f"trial{a}/trial{b}-seed{b}-width{w}-lr{lr}"
        for a, (b, w, lr) in enumerate(product((1, 2), (64, 128), (1, 2, 4)))
    ]
    document = transfer_of_runs(tensorboard_runs(tmp_path / "d", *names))
    assert document.settings["columns not used"] == ["step", "trial"]


@pytest.mark.parametrize("changed", ["metrics", "events"])
def test_a_run_of_leaven_whose_lines_were_changed_is_refused(tmp_path: Path, changed: str) -> None:
    run = RunFolder(tmp_path / "run")
    own_run(run.path)
    *events, finish = run.lines_of(run.events_file)
    lines = {"metrics": run.lines_of(run.metrics_file), "events": events}
    digests = {name: {"lines": len(each), "blake2b": digest(b"".join(each), 16)} for name, each in lines.items()}
    lines["events"].append(json.dumps(json.loads(finish) | digests).encode() + b"\n")
    run.events_file.write_bytes(b"".join(lines["events"]))
    assert len(curves_of(tmp_path)) == 1
    lines[changed][0] = lines[changed][0].replace(b'"tokens": ', b'"tokens": 1')
    (run.path / f"{changed}.jsonl").write_bytes(b"".join(lines[changed]))
    with pytest.raises(InputError, match=f"{changed}.jsonl is not as it was when the run finished: "):
        curves_of(tmp_path)


@pytest.mark.parametrize(
    ("steps", "row"),
    [
        ((1, 2, 1), "row 3: step 1 comes after 2"),  # the first step again
        ((10, 20, 30, 15, 25, 35), "row 4: step 15 comes after 30"),  # a step that was not there
        ((1, 1, 2, 2), "row 2: step 1 comes after 1"),
        ((1, 2, 3, 4, 2, 3), "row 6: step 3 comes after 4"),  # a second run that ends earlier
    ],
)
def test_two_runs_in_one_curve_are_refused(steps: tuple[int, ...], row: str, tmp_path: Path) -> None:
    file = write(tmp_path / "runs.csv", [{"step": step, "loss": 3.0} for step in steps])
    with pytest.raises(InputError, match=f"{row}, so these may be two runs; write each run into its own file"):
        curves_of(file)


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ((10, 20, 30, 25, 35, 40), None),  # the second attempt logs at other steps
        ((10, 20, 30, 20, 40), None),
        ((10, 20, 30, 10, 20, 40), "step 10 comes after 30"),
        ((10, 20, 40, 25, 35), "step 35 comes after 40"),
    ],
)
def test_a_resumed_run_of_tensorboard_may_log_at_other_steps(
    steps: tuple[int, ...], fault: str | None, tmp_path: Path
) -> None:
    for run in rows({64: -6.0, 128: -6.0}, 0.001, seeds=1):
        (folder := tmp_path / f"width{run['width']}-lr{run['lr']}").mkdir()
        losses = [float(run["loss"]) + 100 - n for n, step in enumerate(steps[:-1])] + [float(run["loss"])]
        content = b"".join(EVENT(step, float_val=[loss]) for step, loss in zip(steps, losses, strict=True))
        (folder / "a.tfevents").write_bytes(content)
    with refused(fault, "move the file of one of them elsewhere") if fault else nullcontext():
        assert transfer_of_runs(tmp_path).rows[0].slope == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("last", [b"2.5", b"null"])
def test_a_row_of_wandb_without_a_loss_is_skipped_unless_it_is_the_last(last: bytes, tmp_path: Path) -> None:
    for width, lr in product((64, 128), (1, 2, 4)):
        values = (b"3.5", b"null", b"2.%d" % abs(lr - 2), last if (width, lr) == (128, 4) else b"2.%d" % abs(lr - 2))
        found = wandb_log(*(wandb_row(_step=b"%d" % step, loss=loss) for step, loss in enumerate(values)))
        (tmp_path / f"width{width}-lr{lr}.wandb").write_bytes(found)
    with refused("has no loss; write nan if the run diverged") if last == b"null" else nullcontext():
        assert transfer_of_runs(tmp_path).settings["scales"] == ["width 64", "width 128"]


def test_a_run_with_the_whole_tag_is_not_left_out_beside_a_folder_val(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for number, (folder, tag) in enumerate((("50m", "val/loss"), ("150m", "val/loss"), ("val", "loss"))):
        with SummaryWriter(tmp_path / folder) as writer:
            for step, loss in points(number):
                writer.add_scalar(tag, loss, step)
    assert len(RunLogs.at(tmp_path, "val/loss").others) == 3
    with refused("the name val must have one number"):
        curves_of(tmp_path, "val/loss")
    shutil.rmtree(tmp_path / "val")
    assert list(curves_of(tmp_path, "val/loss")) == ["50m", "150m"]


def test_rows_of_a_resumed_run_replace_those_of_the_same_steps(tmp_path: Path) -> None:
    written: list[Row] = [{"step": step, "loss": 10 - n} for n, step in enumerate((1, 2, 3, 2, 3, 4))]
    assert curves_of(write(tmp_path / "runs.csv", written)) == {"runs": [[(1, 10), (2, 7), (3, 6), (4, 5)]]}


def test_sizes_are_in_the_order_of_their_units(tmp_path: Path) -> None:
    sizes = ("500m", "1.5B", "1b", "900K", "3e9", "0.7b/1", "0.6b/1", "2btok")  # the size is the subfolder's name
    for run, size in enumerate(sizes):
        (tmp_path / size).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{size}.csv", curve(run))
    assert list(curves_of(tmp_path)) == ["900K", "500m", "0.6b", "0.7b", "1b", "1.5B", "2btok", "3e9"]
    write(tmp_path / "large.csv", [{"step": 1, "loss": 3.0}])
    with pytest.raises(InputError, match="the name large must have one number, the size; rename it, e.g. to 50m"):
        curves_of(tmp_path)


def test_curves_with_a_wrong_time_or_other_size_columns_are_refused(tmp_path: Path) -> None:
    for at in ("nan", "inf", -1):
        file = write(tmp_path / "a.csv", [{"step": at, "loss": 3.0}])
        with pytest.raises(InputError, match=f"row 1: step is {at}; give a finite number of at least 0"):
            curves_of(file)
    write(tmp_path / "a.csv", [{"width": 64, "step": 1, "loss": 3.0}])
    write(tmp_path / "b128.csv", curve())
    with pytest.raises(InputError, match=r"a\.csv has the size columns width, and .*b128\.csv none; give all files"):
        curves_of(tmp_path)


def test_columns_in_any_case_and_a_time_column_without_values(tmp_path: Path) -> None:
    (tmp_path / "64.CSV").write_text("Step , TOKENS, Loss \n1,,3\n2,,2\n")
    write(tmp_path / "128.jsonl", [{" Tokens": 5, "LOSS": 3.0, "step": 1}])
    assert curves_of(tmp_path) == {"64": [[(1, 3), (2, 2)]], "128": [[(5, 3)]]}
    runs = [{key.upper(): value for key, value in run.items()} for run in rows({64: -6.0, 128: -6.0}, 0.001)]
    assert transfer_of_runs(write(tmp_path / "runs.csv", runs), "LR").passed
    for column in ("loss", "seed"):
        with pytest.raises(InputError, match=f"--value {column}: give the column of the swept hyperparameter"):
            transfer_of_runs(tmp_path / "runs.csv", column)


@pytest.mark.parametrize("written", [("", ""), ("1", ""), ("", "1"), ("nan", "nan")])
def test_rows_without_a_seed_are_runs_of_their_own(written: tuple[str, str], tmp_path: Path) -> None:
    runs = [run | {"seed": written[int(run["seed"])]} for run in rows({64: -6.0, 128: -6.0}, 0.001, seeds=2)]
    document = transfer_of_runs(write(tmp_path / "runs.csv", runs))
    assert document.settings["seeds"] == 2
    assert document.passed


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", denied)
    for name in ("a.csv", "a.jsonl"):
        with pytest.raises(InputError, match=f"{name}: cannot be read: Permission denied"):
            read_rows(tmp_path / name)


def steep(width: int, lrs: Iterable[float], best: float, diverges_at: float = math.inf) -> list[Row]:
    def loss(lr: float, seed: int) -> float:
        return 2 + 0.05 * math.log2(lr / best) ** 2 + seed / 1e4 if lr < diverges_at else math.nan

    return [{"width": width, "lr": lr, "seed": seed, "loss": loss(lr, seed)} for lr in lrs for seed in (0, 1)]


def test_the_check_fails_if_the_best_value_diverges_at_a_larger_size(tmp_path: Path) -> None:
    for diverges_at in (4, 2):  # the second leaves less than three values
        written = steep(64, (1, 2, 3, 4, 8), 4) + steep(128, (1, 2, 3, 4, 8), 4, diverges_at)
        document = transfer_of_runs(write(tmp_path / "rows.csv", written))
        (row,) = document.rows
        assert (document.passed, row.undecided, row.slope) == (False, False, None)
        assert row.note == "the base's best lr, 4, diverges at width 128"


def test_a_best_value_beyond_the_grid_of_a_larger_size_is_undecided(tmp_path: Path) -> None:
    # At width 64, the best lr is between 4 and 8; at width 128, lr 8 diverged.
    written = steep(64, (1, 2, 4, 8), 4.8) + steep(128, (1, 2, 3.5, 4, 8), 3.7, 8)
    (row,) = transfer_of_runs(write(tmp_path / "rows.csv", written)).rows
    assert row.undecided
    assert row.note.startswith("undecided: the base's best lr is outside the grid of width 128; give runs with lr")


def test_run_folders_are_rows_and_curves_of_a_size_differ_in_the_seed_alone(tmp_path: Path) -> None:
    for lr in (0.001, 0.002):
        own_run(tmp_path / f"{lr}", lr=lr)
    with pytest.raises(InputError, match="one size only, width 64; a check of transfer compares two or more"):
        transfer_of_runs(tmp_path)
    with pytest.raises(InputError, match=r"hyperparameters\.lr is 0\.001 in .*0\.001 and 0\.002 in .*0\.002, but"):
        curves_of(tmp_path)


OWN_BASE = {"width": 128, "depth": 4, "batch_tokens": 4_096, "tokens": 81_920}
RAMPED = {"start_tokens": 1_024, "increment_tokens": 1_024, "over_tokens": 20_480}
BETWEEN_SIZES: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    # (changes of both sizes, changes of the larger one, the value that is named)
    ({}, {"scaling.base": OWN_BASE}, "scaling.base.width is 64 in .* and 128 in"),
    (
        {"scaling.base": OWN_BASE | {"width": 32}},
        {"scaling.rule": "mup"},
        "scaling.rule is complete-d-p in .* and mup",
    ),
    ({}, {"hyperparameters.weight_decay": 0.05}, r"hyperparameters.weight_decay is 0\.1 in .* and 0\.05 in"),
    ({}, {"schedule.decay": "linear"}, "schedule.decay is cosine in .* and linear in"),
    ({}, {"model.qk_norm": False}, "model.qk_norm is True in .* and False in"),
    ({}, {"data.documents": "isolated"}, "data.documents is packed in .* and isolated in"),
    ({}, {"start.weights": "model"}, "start.weights is False in .* and True in"),
    (
        {"batch.ramp": RAMPED},
        {"batch.ramp": RAMPED | {"rule": "scaled"}},
        "batch.ramp.rule is fixed in .* and scaled",
    ),
    # These belong to the size or its layout, or they change nothing.
    ({}, {"data.tokens": 163_840, "batch.tokens": 2_048, "schedule.warmup_tokens": 9_000}, None),
    ({}, {"data.source": "moved.txt", "layout.zero": 1, "stability.keep": 5, "evaluation.every_tokens": 8_192}, None),
    ({}, {"scaling.token_exponent_interval": (0.3, 0.5)}, None),
    ({}, {"model.norm_eps": 1e-5, "model.rope_theta": 50_000.0}, None),  # as after leaven transfer --like
    # Another base or rule is refused, even if it changes nothing.
    ({"scaling.rule": "standard"}, {"scaling.base": OWN_BASE}, "scaling.base.width is 64 in .* and 128 in"),
]


@pytest.mark.long
@pytest.mark.parametrize(("both", "larger", "named"), BETWEEN_SIZES)
def test_sizes_of_different_recipes_are_not_compared(
    tmp_path: Path, both: dict[str, Any], larger: dict[str, Any], named: str | None
) -> None:
    """The lr of a recipe is that of its base, so the recipes need one base, and one value of all else."""
    for width, lr in product((64, 128), (0.002, 0.004, 0.008)):
        recipe = proxy(**{"data.tokens": 81_920, "hyperparameters.lr": lr} | both)
        if width > 64:
            recipe = transfer(recipe, width=width).replace(larger)
        write_run(tmp_path / f"{width}-{lr}", recipe, 2 + math.log2(lr / 0.004) ** 2)
    if named is None:
        free = sorted(path for path in larger if path.startswith("model."))
        assert transfer_of_runs(tmp_path).settings["columns not used"] == free
        return
    with pytest.raises(
        InputError, match=f"{named} .* make the recipes of all sizes from one recipe with leaven trans"
    ) as refusal:
        transfer_of_runs(tmp_path)
    of_target = named.startswith(("schedule", "data", "start", "batch"))
    assert ("(with --like, the target keeps its " in str(refusal.value)) == of_target


@pytest.mark.parametrize(
    "change", [{"scaling.rule": "mup"}, {"schedule.decay": "linear"}, {"hyperparameters.lr": 0.003}, {}]
)
def test_curves_of_different_recipes_are_not_compared(tmp_path: Path, change: dict[str, Any]) -> None:
    for width in (64, 128):
        recipe = proxy(**{"data.tokens": 81_920, "hyperparameters.lr": 0.004, "scaling.base": OWN_BASE})
        write_run(tmp_path / f"{width}", transfer(recipe, width=width).replace(change if width > 64 else {}), 3.0)
    if not change:
        assert len(curves_of(tmp_path)) == 2
        return
    with pytest.raises(InputError, match=f"{next(iter(change))} is .* so their curves cannot be compared between"):
        curves_of(tmp_path)


@pytest.mark.parametrize("read", [transfer_of_runs, curves_of])
def test_a_run_whose_lr_a_rewind_changed_is_no_run_with_this_lr(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    own_run(tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    change = {"path": "hyperparameters.lr", "before": 0.001, "after": 0.004}
    rewind = {"event": "rewind", "tokens": 81_920, "to_tokens": 77_824, "skip_from": 0, "skip_to": 0, "lr": 1.0}
    rewind |= {"lr_tokens": 0, "attempt": 0, "found_step": 0, "asked": {}, "earlier_rewinds": []}
    written = events.read_text()
    events.write_text(json.dumps(rewind | {"changes": [change]}) + "\n" + written)
    with pytest.raises(InputError, match=r"run was trained with hyperparameters.lr 0\.001 up to 77.*; move the run"):
        read(tmp_path)
    skip = {
        "changes": [],
        "skip_from": 77_824,
        "skip_to": 78_848,
        "asked": {"rewind_to": 77_824, "skip_tokens": 1_024},
    }
    events.write_text(json.dumps(rewind | skip) + "\n" + written)
    with pytest.raises(InputError, match=r"run skipped 1\.02 k tokens of its text after 77\.8 k tokens, bec"):
        read(tmp_path)
    events.write_text(json.dumps(rewind | {"changes": []}) + "\n" + written)
    assert curves_of(tmp_path)


def test_runs_on_different_texts_are_not_compared(tmp_path: Path) -> None:
    for text, width in (("a", 64), ("b", 128)):
        own_run(folder := tmp_path / text, width)
        start = json.dumps({"event": "start", "text": text}) + "\n"
        (folder / "events.jsonl").write_text(start + (folder / "events.jsonl").read_text())
    with pytest.raises(InputError, match="a and .*b were trained on different texts"):
        transfer_of_runs(tmp_path)


@pytest.mark.parametrize("read", [transfer_of_runs, curves_of])
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("recipe.toml", lambda text: text.replace("residual = 0.7", "residual = 0.8"), "was 0.7, is now 0.8"),
        ("metrics.jsonl", lambda text: text[: text.index('{"step": 3')], "2 lines instead of 40"),
        ("events.jsonl", lambda text: text.replace('"loss": ', '"loss": 1', 1), r"first \d+ lines have been changed"),
    ],
)
def test_runs_of_leaven_whose_files_were_changed_are_not_compared(
    scaled_run: Path, tmp_path: Path, read: Callable[[Path], Any], name: str, change: Callable[[str], str], why: str
) -> None:
    folder = shutil.copytree(scaled_run, tmp_path / "run")
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(InputError, match=rf"run/{name} .*{why}.*; to leave the run out, move it to another folder"):
        read(tmp_path)


def moved(run: Path) -> Path:
    run.rename(away := run.parents[1] / "away")
    run.symlink_to(away)
    return away


def test_empty_folders_and_links_to_nothing_are_refused_beside_runs_alone(tmp_path: Path) -> None:
    for name, width in (("a", 64), ("b", 128)):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        write(tmp_path / "runs" / name / "sweep.jsonl", rows({width: -6.0}, 0.001))
    (tmp_path / "runs" / "a" / "debug.log").symlink_to("gone.log")
    assert transfer_of_runs(tmp_path / "runs").passed
    (tmp_path / "runs" / "c").symlink_to(tmp_path / "away" / "c")
    with pytest.raises(InputError, match="runs/c is a link to .*/away/c, which is missing .is its disk mounted"):
        transfer_of_runs(tmp_path / "runs")


def test_a_run_behind_a_link_is_read_once(tmp_path: Path) -> None:
    for width, lr in product((64, 128), (0.001, 0.002, 0.004)):
        own_run(tmp_path / "runs" / f"{width}-{lr}", width, lr, floor=2 + abs(math.log2(lr * width)))
    expected = transfer_of_runs(tmp_path / "runs")
    away = moved(run := tmp_path / "runs" / "128-0.001")
    (run.parent / "latest").symlink_to("64-0.001")
    (run.parent / "up").symlink_to(tmp_path)
    (away / "data").symlink_to(tmp_path / "nothing")
    (away / "tensorboard").mkdir()
    assert transfer_of_runs(run.parent) == expected


LOST: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (
        lambda run: (shutil.rmtree(run), run.mkdir(), (run / ".lock").touch()),
        "is empty; if a disk belongs there, mount it; if not",
    ),
    "target of a link": (lambda run: shutil.rmtree(moved(run)), "is a link to .*away, which is missing .is its disk"),
    "recipe": (lambda run: (run / "recipe.toml").unlink(), "/recipe.toml: no such file"),
    "metrics": (
        lambda run: (run / "metrics.jsonl").unlink(),
        "/metrics.jsonl is not as it was .* 0 lines instead of",
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_a_run_that_has_lost_files_is_not_left_out(scaled_run: Path, tmp_path: Path, what: str) -> None:
    for name in "ab":
        shutil.copytree(scaled_run, tmp_path / "runs" / name)
    lose, why = LOST[what]
    lose(tmp_path / "runs" / "b")
    with pytest.raises(InputError, match=f"runs/b ?{why}"):
        transfer_of_runs(tmp_path / "runs")


def test_transfer_of_finished_and_diverged_runs_of_leaven(tmp_path: Path) -> None:
    """The verdict is that on a CSV file with the final validation losses and the lrs in base coordinates."""
    written: list[Row] = []
    for width, best in ((64, 0.004), (128, 0.002)):
        for lr in (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
            for seed in (0, 1):
                folder = tmp_path / "runs" / f"{width}" / f"{lr} {seed}"
                own_run(folder, width, lr, seed, 2 + 0.05 * math.log2(lr / best) ** 2 + 0.001 * seed)
                loss: float | str = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["loss"]
                if lr == 0.016:
                    (folder / "events.jsonl").write_text('{"event": "stop", "why": "loss inf at step 7"}\n')
                    loss = "nan"
                written.append({"width": width, "lr": lr, "seed": seed, "loss": loss})
    document = transfer_of_runs(tmp_path / "runs")
    assert document.rows == transfer_of_runs(write(tmp_path / "rows.csv", written)).rows
    assert document.rows[0].slope == pytest.approx(-1, abs=0.01)
    assert document.settings["left out"] == ["width 64, lr 0.016", "width 128, lr 0.016"]
    assert transfer_of_runs(tmp_path / "runs", "hyperparameters.lr").rows[0].slope == document.rows[0].slope
    for value, path in (("init_std", r"hyperparameters\.init_std"), ("beta", "beta")):
        with pytest.raises(InputError, match=rf"hyperparameters\.lr is .* only in {path} and data\.seed; move"):
            transfer_of_runs(tmp_path / "runs", value)
    (folder / "events.jsonl").write_text('{"event": "stop", "why": "interrupted"}\n')
    with pytest.raises(InputError, match="has not finished; resume it"):
        transfer_of_runs(tmp_path / "runs")


def test_runs_of_tensorboard_and_wandb(tmp_path: Path) -> None:
    """The size, value and seed of a run are in the names of its folders."""
    from torch.utils.tensorboard import SummaryWriter

    runs = rows({64: -6.0, 256: -6.0}, 0.001)
    for run in runs:
        with SummaryWriter(tmp_path / "tb" / f"width{run['width']}" / f"lr={run['lr']}_seed-{run['seed']}") as writer:
            writer.add_scalar("val/loss", 9.0, 10)
            writer.add_scalar("val/loss", run["loss"], 20)
            writer.add_scalar("grad_norm", 1.0, 20)
        batch = "512k" if run["width"] == 64 else "1m"
        with SummaryWriter(tmp_path / "units" / f"batch{batch}-lr{run['lr']}_seed{run['seed']}") as writer:
            writer.add_scalar("loss", run["loss"], 20)
    assert transfer_of_runs(tmp_path / "units").settings["scales"] == ["batch 512000", "batch 1000000"]
    document = transfer_of_runs(tmp_path / "tb", loss="val/loss")
    (expected,) = transfer_of_runs(write(tmp_path / "rows.csv", runs)).rows
    assert document.passed
    assert document.rows[0].slope == pytest.approx(expected.slope, abs=1e-4)
    with pytest.raises(InputError, match="has no column loss; it has grad_norm, val/loss; name the loss with --loss"):
        transfer_of_runs(tmp_path / "tb")
    with SummaryWriter(tmp_path / "tb" / "width64" / "lr=1_seed-1") as writer:
        writer.add_scalar("val/loss", 3.0, 10)
    with pytest.raises(InputError, match="lr=1_seed-1 ends at step 10, and .* at 20; finish or remove the shorter"):
        transfer_of_runs(tmp_path / "tb", loss="val/loss")
    shutil.rmtree(tmp_path / "tb" / "width64" / "lr=1_seed-1")
    with pytest.raises(InputError, match=r"_seed-0 repeats the size and seed of .*_seed-0; remove one"):
        curves_of(tmp_path / "tb", loss="val/loss")  # runs with other lrs are no other seeds
    for folder in (tmp_path / "tb").glob("*/*"):
        if not folder.name.startswith(f"lr={2.0**-6}_"):
            shutil.rmtree(folder)
    curves = curves_of(tmp_path / "tb", loss="val/loss")
    assert {name: len(of) for name, of in curves.items()} == {"width 64": 3, "width 256": 3}
    (tmp_path / "wb" / "0.5b" / "run").mkdir(parents=True)
    theirs = Path(__file__).parents[1] / "tuning" / "wandb" / "offline.wandb"
    (tmp_path / "wb" / "0.5b" / "run" / "run-x.wandb").write_bytes(theirs.read_bytes())
    with SummaryWriter(tmp_path / "wb" / "1.5b") as writer:
        writer.add_scalar("val/loss", 3.0, 10)
    found = curves_of(tmp_path / "wb", loss="val/loss")
    assert list(found) == ["0.5b", "1.5b"]
    assert found["0.5b"][0][:3] == [(0, 5.0), (10, 4.5), (20, 4.0)]
    assert math.isnan(found["0.5b"][0][3][1])
    assert curves_of(tmp_path / "wb" / "1.5b", loss="val/loss") == {"1.5b": [[(10, 3.0)]]}


def test_hyperparameters_in_tensorboard_are_no_run(tmp_path: Path) -> None:
    """``add_hparams`` writes an event file with the results into a subfolder of the run."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    runs = rows({64: -6.0, 128: -6.0}, 0.001, seeds=2)
    for run in runs:
        name = f"width{run['width']}-lr{run['lr']}-seed{run['seed']}"
        for kind in ("plain", "hp", "own"):
            with SummaryWriter(tmp_path / kind / name) as writer:
                for step, more in ((10, 1.0), (20, 0.0)):
                    writer.add_scalar("loss", float(run["loss"]) + more, step)
                if kind != "plain":
                    metrics = {"hparam/loss": run["loss"]} if run["seed"] else {"loss": run["loss"]}
                    writer.add_hparams({"lr": run["lr"]}, metrics, run_name="." if kind == "own" else None)
        with SummaryWriter(tmp_path / "result" / name) as writer:
            writer.add_hparams({"lr": run["lr"]}, {"hparam/loss": run["loss"]})
    expected = transfer_of_runs(tmp_path / "plain").rows
    assert transfer_of_runs(tmp_path / "hp").rows == expected
    assert [row.slope for row in transfer_of_runs(tmp_path / "result", loss="hparam/loss").rows] == [
        expected[0].slope
    ]
    assert transfer_of_runs(tmp_path / "own").rows == expected  # with two event files in each folder
    with pytest.raises(InputError, match="has no column loss; it has no columns; name the loss with --loss TAG, or"):
        transfer_of_runs(tmp_path / "result")
    for run in runs:
        with SummaryWriter(
            tmp_path / "placeholder" / f"width{run['width']}-lr{run['lr']}-seed{run['seed']}"
        ) as writer:
            writer.add_hparams({"lr": run["lr"]}, {"loss": run["loss"]})
    with refused("only a result of add_hparams; such results are read only if their name begins with hparam/"):
        transfer_of_runs(tmp_path / "placeholder")
    # A run that has ended before its first loss is not left out.
    lost = tmp_path / "hp" / "width64-lr1-seed0"
    with SummaryWriter(lost) as writer:
        for summary in hparams({"lr": 0.1}, {"hp_metric": -1}):  # type: ignore[no-untyped-call]
            writer._get_file_writer().add_summary(summary)
    with pytest.raises(InputError, match="width64-lr1-seed0 has no column loss; it has no columns"):
        transfer_of_runs(tmp_path / "hp")
    # A run below another, such as one that was started again, is no result.
    with SummaryWriter(tmp_path / "plain" / "width64-lr0.015625-seed0" / "again") as writer:
        writer.add_scalar("loss", 2.0, 20)
    with pytest.raises(InputError, match=r"again repeats the size, lr and seed of"):
        transfer_of_runs(tmp_path / "plain")


@pytest.mark.parametrize("run_name", [None, "hparams"])
def test_each_call_of_add_hparams_replaces_the_results_of_the_last_one(tmp_path: Path, run_name: str | None) -> None:
    """It may be called once an epoch, or again after a restart."""
    from torch.utils.tensorboard import SummaryWriter

    runs = rows({64: -6.0, 128: -6.0}, 0.001, seeds=2)
    for run, restart in product(runs, range(2)):
        with SummaryWriter(tmp_path / f"width{run['width']}-lr{run['lr']}-seed{run['seed']}") as writer:
            for epoch in (2 * restart, 2 * restart + 1):
                found = float(run["loss"]) + 3 - epoch
                writer.add_scalar("loss", found, epoch)
                writer.add_hparams({"lr": run["lr"]}, {"hparam/loss": found}, run_name=run_name)
    expected = transfer_of_runs(write(tmp_path / "rows.csv", without("seed")(runs)))
    (tmp_path / "rows.csv").unlink()
    for loss in ("loss", "hparam/loss"):
        document = transfer_of_runs(tmp_path, loss=loss)
        assert document.settings["seeds"] == 2
        assert document.rows[0].slope == pytest.approx(expected.rows[0].slope, abs=1e-4)


def test_event_files_are_read_in_the_order_of_their_counters(tmp_path: Path) -> None:
    names = [f"events.out.tfevents.1796.host.7.{counter}" for counter in (10, 9, 11)]
    assert [file.name[-2:] for file in sorted(map(Path, names), key=by_event_name)] == [".9", "10", "11"]


def test_results_of_several_runs_in_one_folder_are_several_runs(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    runs = rows({64: -6.0, 128: -6.0}, 0.001, seeds=2)
    with SummaryWriter(tmp_path) as writer:
        for run in runs:
            name = f"width{run['width']}-lr{run['lr']}-seed{run['seed']}"
            writer.add_hparams({"lr": run["lr"]}, {"hparam/loss": run["loss"]}, run_name=name)
    document = transfer_of_runs(tmp_path, loss="hparam/loss")
    assert (document.settings["scales"], document.settings["seeds"]) == (["width 64", "width 128"], 2)
    # A number of a name that is no column distinguishes runs, too: these are no older results of the same runs.
    name = f"width64-lr{runs[0]['lr']}-wd0.2-seed0"
    with SummaryWriter(tmp_path) as writer:
        writer.add_hparams({"wd": 0.2}, {"hparam/loss": 2.0}, run_name=name)
    with pytest.raises(InputError, match=r"seed0 repeats the size, lr and seed of .*; keep one of the two"):
        transfer_of_runs(tmp_path, loss="hparam/loss")


def tensorboard_runs(folder: Path, *names: str) -> Path:
    """Write a run with one loss for each name."""
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.tfevents").write_bytes(EVENT(float_val=[2.0 + number]))
    return folder


def test_numbers_in_the_names_of_runs_are_used_or_named(tmp_path: Path) -> None:
    names = [f"w{w}-depth{d}-lr{lr}-seed{w}-run_a{w}" for w, d, lr in product((64, 128), (2, 4), (1, 2, 4))]
    document = transfer_of_runs(tensorboard_runs(tmp_path / "b", *names))
    assert document.settings["columns not used"] == ["run_a", "step", "w"]
    names = [f"w{w}-depth{d}-seed{w}" for w, d in product((64, 128), (2, 4))]
    for number, name in enumerate(names):
        (run := tmp_path / "c" / name).mkdir(parents=True)
        content = b"".join(EVENT(step, float_val=[loss + number / 100]) for step, loss in points())
        (run / "a.tfevents").write_bytes(content)
    assert collapse_of_runs(tmp_path / "c").settings["columns not used"] == ["w"]
    names = [f"base_width64-tokens{t}m-head_width{t}-lr{lr}" for t, lr in product((1, 2), (1, 2, 4))]
    document = transfer_of_runs(tensorboard_runs(tmp_path / "f", *names))
    assert document.settings["scales"] == ["tokens 1000000", "tokens 2000000"]
    assert document.settings["columns not used"] == ["head_width", "step"]


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    write(tmp_path / "runs.csv", rows({64: -6.0, 128: -6.0}, 0.001))
    (tmp_path / "run").mkdir()
    for name in ("more.csv.gz", "old.JSONL.zst", "notes.txt", "runs.csv.html", "run/config.json"):
        (tmp_path / name).touch()
    assert transfer_of_runs(tmp_path).settings["files not read"] == ["more.csv.gz", "old.JSONL.zst"]
    others = ["1.json", "2.ndjson", "3.tsv", "run/4.parquet"]
    for name in others:
        (tmp_path / name).touch()
    assert transfer_of_runs(tmp_path).settings["files not read"] == [
        *others[:3],
        "more.csv.gz",
        "old.JSONL.zst",
        "1 more",
    ]
    for name in others:
        (tmp_path / name).unlink()
    for width, seed in product((64, 128), (0, 1)):
        own_run(tmp_path / "own" / f"{width} {seed}", width, seed=seed)
    tensorboard_runs(tmp_path / "own", "64 0/tensorboard", "theirs")
    (tmp_path / "study.json").touch()
    unread = ["more.csv.gz", "old.JSONL.zst", "own/theirs", "runs.csv"]
    assert collapse_of_runs(tmp_path).settings["files not read"] == unread
    for name in "tuv":
        (tmp_path / f"{name}.csv").touch()
    assert collapse_of_runs(tmp_path).settings["files not read"] == [*unread, "t.csv", "2 more"]


def test_a_run_with_only_a_text_beside_runs_of_tensorboard_is_named(tmp_path: Path) -> None:
    for width, octave in product((64, 128), OCTAVES):
        run = tmp_path / f"width{width}-lr{2.0**octave}" / "seed0"
        run.mkdir(parents=True)
        (run / "a.tfevents").write_bytes(EVENT(1, float_val=[2 + abs(octave + 6) + width / 1e6]))
        (run / "train.log").write_text("also a text")
        (run.parent / "log.txt").touch()
    assert transfer_of_runs(tmp_path).settings["files not read"] == []
    lost = tmp_path / "width64-lr0.001" / "seed0"
    lost.mkdir(parents=True)
    for name in ("stdout.txt", "train.log"):
        (lost / name).touch()
    assert transfer_of_runs(tmp_path).settings["files not read"] == ["width64-lr0.001/seed0/stdout.txt"]


def test_the_loss_may_have_another_name(tmp_path: Path) -> None:
    runs = rows({64: -6.0, 128: -6.0}, 0.001)
    renamed = [{**run, "loss": 9.0, "Final": run["loss"]} for run in runs]
    found = transfer_of_runs(write(tmp_path / "a.csv", renamed), loss="final")
    assert found.rows == transfer_of_runs(write(tmp_path / "b.csv", runs)).rows
    with pytest.raises(InputError, match=r"has no column val; its columns are width, lr, seed, loss, final"):
        transfer_of_runs(tmp_path / "a.csv", loss="val")
    own_run(tmp_path / "own")
    for check in (transfer_of_runs, curves_of):
        with pytest.raises(InputError, match="which have only one loss; remove --loss val"):
            check(tmp_path / "own", loss="val")


def test_an_integer_beyond_a_float_is_infinite(tmp_path: Path) -> None:
    large = [run | {"loss": 10**400} if run["width"] == 64 else run for run in rows({64: -6.0, 128: -6.0})]
    with pytest.raises(InputError, match="width 64 has 0 values of lr without a diverged run"):
        transfer_of_runs(write(tmp_path / "runs.jsonl", large))
    with pytest.raises(InputError, match="row 1: step is inf; give a finite number of at least 0"):
        curves_of(write(tmp_path / "curve.jsonl", [{"step": 10**400, "loss": 3.0}]))


def tensorboard_record(content: bytes, size: int | None = None) -> bytes:
    from tensorboard.summary.writer.record_writer import masked_crc32c

    header = (len(content) if size is None else size).to_bytes(8, "little")
    sums = [masked_crc32c(part).to_bytes(4, "little") for part in (header, content)]
    return header + sums[0] + content + sums[1]


def tensorboard_event(step: int = 1, shape: Sequence[int] = (), **tensor: Any) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(step=step)
    value = event.summary.value.add(tag="loss")
    value.tensor.dtype = tensor.pop("dtype", 1)
    for size in shape:
        value.tensor.tensor_shape.dim.add(size=size)
    value.tensor.MergeFrom(type(value.tensor)(**tensor or {"float_val": [3.0]}))
    return tensorboard_record(event.SerializeToString())


EVENT = tensorboard_event
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "many elements": (lambda: EVENT(shape=[3 * 10**9]), r"loss is 'a tensor of shape \[3000000000\]', which"),
    "negative": (lambda: EVENT(shape=[-5]), r"tfevents is damaged at byte 0: .* shape \[-5\], with"),
    "resource": (lambda: EVENT(dtype=20), "tfevents is damaged at byte 0: .*type 20"),
    "no type": (lambda: EVENT(dtype=0), "tfevents is damaged at byte 0: .*type 0"),
    "no text": (lambda: EVENT(dtype=7), "tfevents is damaged at byte 0: the record cannot be read"),
    "odd size": (lambda: EVENT(tensor_content=b"abc"), "tfevents is damaged at byte 0: the record cannot be read"),
    "odd bfloat16": (lambda: EVENT(dtype=14, tensor_content=b"abc"), "tfevents is damaged at byte 0: .*type 14"),
    "no event": (lambda: tensorboard_record(b"\xff" * 9), "tfevents is damaged at byte 0: the record cannot be read"),
    "checksum": (lambda: EVENT() + EVENT()[:-1] + b"x", r"tfevents is damaged at byte \d+: a checksum is wrong"),
    "cut": (lambda: EVENT()[:-1], r"\(a.tfevents is cut within the record at byte 0\) has no column loss"),
    "length": (
        lambda: tensorboard_record(b"x", size=10**18),
        r"\(a.tfevents is cut within the record at byte 0\) has no column loss",
    ),
    "back": (lambda: EVENT(2) + EVENT(1), "step 1 comes after 2, so these may be two runs"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tensorboard_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "width64-lr1").mkdir()
    (tmp_path / "width64-lr1" / "a.tfevents").write_bytes(content())
    for check in (transfer_of_runs, curves_of):
        with pytest.raises(InputError, match=message):
            check(tmp_path)


def test_a_tensor_with_one_element_is_a_loss(tmp_path: Path) -> None:
    (tmp_path / "64m").mkdir()
    two = EVENT() + EVENT(2, [1, 1], float_val=[2.0])
    bfloat16 = EVENT(1, dtype=14, half_val=[0x4040]) + EVENT(2, dtype=14, tensor_content=b"\0\x40")
    # The third event may still be written; a crash lengthens the file with zeros, also within an event.
    unfinished = (EVENT(3)[:-1], *(EVENT(3)[:part] + bytes(100) for part in (0, 3, 11, 20)))
    for content in (*(two + end for end in unfinished), bfloat16):
        (tmp_path / "64m" / "a.tfevents").write_bytes(content)
        assert curves_of(tmp_path) == {"64m": [[(1, 3.0), (2, 2.0)]]}
