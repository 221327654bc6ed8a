"""Test the page and the screen of a check: drawn limits, and small numbers."""

from pathlib import Path

import pytest
from test_terminal import printed
from written import collapse_check, write_losses_check

from leaven.documents.checks import CheckDocument
from leaven.views.check_page import check_page
from leaven.views.folders import read_check
from leaven.views.terminal.checks import check_screen


@pytest.fixture
def sweep(tmp_path: Path) -> CheckDocument:
    return read_check(write_losses_check(tmp_path / "check"))


def test_a_sweep_draws_the_limits_of_the_shift(sweep: CheckDocument) -> None:
    *others, best, base = sweep.curves
    assert (best.quantity, base.quantity) == ("best", "optimum")
    smaller = best.model_copy(update={"x": [32.0, *best.x[:1]], "y": [4.0, *best.y[:1]]})  # the base is not the first
    sweep = sweep.model_copy(update={"rows": sweep.rows[:1], "curves": [*others, smaller, base]})
    page = check_page(sweep)
    assert "The red lines are the limits of the shift, 0.5 octaves from it." in page
    for level in (2**-0.5, 2**0.5):  # the base's best is 1
        assert f'"y0":{level!r},"y1":{level!r}' in page


def test_rounding_errors_are_printed_as_0() -> None:
    text = "\n".join(printed(check_screen(collapse_check()), 200))
    assert " 0 (0 to 0) " in text
    assert "e-1" not in text
