"""Conditions and ranges of `leaven recipes list`, and the errors for unknown paths and values."""

import re

import pytest

from leaven.catalogue.runs import load_runs
from leaven.catalogue.selection import Condition, parse_condition, parse_range, select, values
from leaven.errors import InputError

RUNS = load_runs()


def ids(*conditions: str) -> set[str]:
    return {run.id for run in select(RUNS, map(parse_condition, conditions))}


def test_a_range_is_two_conditions() -> None:
    ends = [Condition("tokens", ">=", str(10**9)), Condition("tokens", "<=", str(25 * 10**8))]
    assert parse_range("tokens", " 1e9 .. 2.5e9 ") == ends


@pytest.mark.parametrize("written", ["1B", "..", "", "10B..1B", "a..b"])
def test_bad_ranges_are_refused(written: str) -> None:
    with pytest.raises(InputError, match=r"not a range|is empty|not a quantity"):
        parse_range("tokens", written)


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        (("optim.beta3>0",), {"apertus-8b", "apertus-70b"}),
        (("arch.norm_placement=Output", "params_total<8B"), {"olmo2-7b", "olmo3-7b"}),
        (
            ("arch.qk_norm = true", "schedule.peak_lr>=3e-3"),
            {"openelm-270m", "openelm-450m", "dclm-411m-1x", "dclm-3b-1x"},
        ),
        (("batch_tokens>60M", "kind!=dense"), {"deepseek-v3", "kimi-k2", "glm-4.5", "mimo-v2-flash"}),
        (("optim.grad_clip<1", "optim.grad_clip!=0.1"), {"gopher-280b", "bloomberggpt-50b", "marin-32b"}),
    ],
)
def test_conditions_all_hold(conditions: tuple[str, ...], found: set[str]) -> None:
    assert ids(*conditions) == found


def test_a_run_without_the_value_meets_no_condition() -> None:
    silent = {run.id for run in RUNS if "optim.beta2" not in values(run)}
    assert silent
    assert not silent & ids("optim.beta2!=0.5")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("schedule.shap=cosine", "no published run has a value 'schedule.shap'; did you mean schedule.shape, "),
        ("schedule.shape=cosin", "no run has schedule.shape 'cosin'; did you mean cosine, "),
        ("arch.qk_norm=yes", "arch.qk_norm is true or false; write arch.qk_norm=true or arch.qk_norm=false"),
        ("optim.beta2>high", "'high' is not a quantity"),
        ("peak_lr>nan", "nan cannot be compared"),
        ("peak_lr", "'peak_lr' is not a condition; write PATH, one of = != < <= > >= and a value"),
    ],
)
def test_a_bad_condition_names_existing_paths_and_values(written: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ids(written)
