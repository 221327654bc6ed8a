"""Test what the terminal and the page of a check say: verdicts with their colours, limits, and small numbers."""

from pathlib import Path

import pytest
from test_terminal import printed
from written import collapse_check, row, slopes_check, write_losses_check

from leaven.documents.checks import CheckDocument
from leaven.views.check_page import check_page
from leaven.views.checks import check_tables
from leaven.views.folders import read_check
from leaven.views.terminal.checks import check_screen


@pytest.fixture
def sweep(tmp_path: Path) -> CheckDocument:
    return read_check(write_losses_check(tmp_path / "check"))


def test_undecided_has_its_own_colour() -> None:
    check = slopes_check()
    rows = [row(module, "width", 0.9, 0.1, undecided=module == "unsure") for module in ("failed", "unsure")]
    curves = [curve.model_copy(update={"module": each.module}) for each in rows for curve in check.curves[:3]]
    check = check.model_copy(update={"rows": rows, "curves": curves})
    (table,) = check_tables(check)
    assert [(str(cells[-1]), cells[-1].style) for cells in table.table.rows] == [  # type: ignore[union-attr]
        ("FAILED", "red"),
        ("undecided", "yellow"),
    ]
    page = check_page(check)
    assert '<td class="unsure">undecided</td>' in page
    assert '<td class="bad">FAILED</td>' in page
    for name, colour in (("failed", "bad"), ("unsure", "unsure")):
        assert (
            f'"color":"var(--{colour})","width":1.5,"dash":"solid","shape":"linear"}},"marker":{{"color":"var(--{colour})","size":5}},"name":"{name}"'
            in page
        )


def test_a_sweep_says_what_both_limits_mean_and_draws_that_of_the_shift(sweep: CheckDocument) -> None:
    sweep = sweep.model_copy(update={"rows": sweep.rows[:1]})
    lines = printed(check_screen(sweep), 400)
    assert lines[0].endswith(
        "A row passes if its whole regret (95% interval) is at most 0.01 nats, or if its whole shift is at most 0.5 "
        "octaves and the lower end of its regret 0.01 nats"
    )
    page = check_page(sweep)
    assert "The red lines are the limits of the shift, 0.5 octaves from it." in page
    for level in (2**-0.5, 2**0.5):  # the base's best is 1
        assert f'"y0":{level!r},"y1":{level!r}' in page


def test_rounding_errors_are_printed_as_0() -> None:
    text = "\n".join(printed(check_screen(collapse_check()), 200))
    assert " 0 (0 to 0) " in text
    assert "e-1" not in text
