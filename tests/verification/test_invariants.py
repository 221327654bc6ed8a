"""Test that a right rule passes the check of optimizer settings, and that its row names each planted fault."""

import pytest
from tests.verification.families import HIDDEN, Fault, depth, family, fault, times, width, zero, zero_if_wide

from leaven.documents.checks import VerdictRow
from leaven.scaling.table import ratios
from leaven.verification.invariants import invariants


def audited(planted: Fault | None = None, **more: object) -> dict[str, VerdictRow]:
    checked = family(planted, **more)  # type: ignore[arg-type]
    return {row.module: row for row in invariants(checked, (64, 128), (2, 4))}


@pytest.mark.parametrize("more", [{}, {"alpha": 0.5}, {"grow_heads": True}])
def test_a_right_rule_keeps_all_invariants(more: dict[str, object]) -> None:
    rows = audited(**more)
    assert all(row.passed for row in rows.values()), rows
    # A gain has no decay; everything else has all five columns.
    assert {name for name, value in rows["norm.mlp"].parts.items() if value is None} == {"lr x decay x steps"}
    assert None not in rows["mlp.out"].parts.values()


LR_AND_DECAY = fault("mlp.out", lr=times(lambda r: width(r) ** 0.5), weight_decay=times(lambda r: width(r) ** -0.5))
BOTH = fault("mlp.in", lr=times(lambda r: 2.0 if width(r) > 1 < depth(r) else 1.0))
TOKENS = fault("mlp.in", lr=times(lambda r: ratios(r).tokens), eps=times(lambda r: 1 / ratios(r).tokens))


@pytest.mark.parametrize(
    ("planted", "module", "column", "axis"),
    [
        (fault("norm.mlp", lr=times(width)), "norm.mlp", "lr x eps x entries", "width"),
        (fault("norm.query", lr=times(lambda r: 1 / depth(r))), "norm.query", "lr x eps", "depth"),
        (LR_AND_DECAY, "mlp.out", "lr x eps x entries", "width"),
        (BOTH, "mlp.in", "lr x", "width and depth"),
        (fault("embedding", beta1=lambda beta, r: beta ** width(r)), "embedding", "beta1", "width"),
        (fault(beta2=lambda beta, r: 1 - (1 - beta) / width(r) ** 2), "mlp.out", "beta2", "width"),
        (TOKENS, "mlp.in", "lr", "tokens"),
        (fault("mlp.in", weight_decay=zero_if_wide), "mlp.in", "lr x decay", "width"),
    ],
)
def test_a_fault_is_named(planted: Fault, module: str, column: str, axis: str) -> None:
    row = audited(planted)[module]
    assert row.passed is False
    assert row.note.startswith(column)
    assert f"changes with {axis}  <-" in row.note


def test_the_lr_is_judged_without_weight_decay() -> None:
    undecayed, lr = fault(weight_decay=zero), fault(HIDDEN, lr=times(lambda r: depth(r) ** 0.5))
    rows = audited(lambda row, recipe: lr(undecayed(row, recipe), recipe))
    assert rows["embedding"].passed
    assert rows["mlp.in"].passed is False


def test_a_rule_without_batch_and_tokens_is_not_judged_on_them() -> None:
    rows = audited(rule="completep")
    assert rows["mlp.in"].passed
    assert rows["mlp.in"].parts["lr"] is None
    assert rows["batch"].passed is rows["tokens"].passed is None
