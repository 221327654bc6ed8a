"""Invariants: a right rule keeps all of them, and each planted fault is named by its column."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.verification.families import family

from leaven.documents.checks import VerdictRow
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.scaling.table import ParameterRow, ratios
from leaven.verification.invariants import invariants


def audited(
    fault: Callable[[ParameterRow, Recipe], ParameterRow] | None = None, **more: object
) -> dict[str, VerdictRow]:
    checked = family(fault, **more)  # type: ignore[arg-type]
    return {row.module: row for row in invariants(checked, (64, 128), (2, 4))}


@pytest.mark.parametrize("more", [{}, {"alpha": 0.5}, {"grow_heads": True}])
def test_a_right_rule_keeps_all_invariants(more: dict[str, object]) -> None:
    rows = audited(**more)
    assert all(row.passed for row in rows.values()), rows
    # A gain has no decay; everything else has all five columns.
    assert {name for name, value in rows["norm.mlp"].parts.items() if value is None} == {"lr x decay x steps"}
    assert None not in rows["mlp.out"].parts.values()


def moved(module: str, **by: Callable[[Recipe], float]) -> Callable[[ParameterRow, Recipe], ParameterRow]:
    """Return a fault: values of some modules are multiplied by a function of the recipe."""
    return lambda row, recipe: (
        replace(row, **{name: getattr(row, name) * factor(recipe) for name, factor in by.items()})
        if row.module.startswith(module)
        else row
    )


def width(recipe: Recipe) -> float:
    return ratios(recipe).width


def depth(recipe: Recipe) -> float:
    return ratios(recipe).depth


FAULTS = {
    "gain lr grows with width": (moved("norm.mlp", lr=width), "norm.mlp", "lr x eps x entries", "width"),
    "gain lr falls with depth": (moved("norm.query", lr=lambda r: 1 / depth(r)), "norm.query", "lr x eps", "depth"),
    "lr grows and decay falls": (
        moved("attention.value", lr=lambda r: width(r) ** 0.5, weight_decay=lambda r: width(r) ** -0.5),
        "attention.value",
        "lr x eps x entries",
        "width",
    ),
    "readout lr": (moved("unembedding", lr=lambda r: width(r) ** 0.5), "unembedding", "lr x", "width"),
    "lr where both grow": (
        moved("mlp.in", lr=lambda r: 2.0 if width(r) > 1 < depth(r) else 1.0),
        "mlp.in",
        "lr x",
        "width and depth",
    ),
    "beta1": (lambda row, r: replace(row, beta1=row.beta1 ** width(r)), "embedding", "beta1", "width"),
    "beta2": (lambda row, r: replace(row, beta2=1 - (1 - row.beta2) / width(r) ** 2), "mlp.out", "beta2", "width"),
    "lr grows with tokens": (
        moved("mlp.in", lr=lambda r: ratios(r).tokens, eps=lambda r: 1 / ratios(r).tokens),
        "mlp.in",
        "lr",
        "tokens",
    ),
    "no decay": (
        moved("mlp.in", weight_decay=lambda r: 0.0 + (width(r) == 1)),
        "mlp.in",
        "lr x decay",
        "width",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    fault, module, column, axis = FAULTS[name]
    row = audited(fault)[module]
    assert row.passed is False
    assert row.note.startswith(column)
    assert f"changes with {axis}  <-" in row.note


def test_the_lr_is_judged_without_weight_decay() -> None:
    def fault(row: ParameterRow, recipe: Recipe) -> ParameterRow:
        hidden = row.role is Role.HIDDEN_WEIGHT
        return replace(row, weight_decay=0.0, lr=row.lr * depth(recipe) ** 0.5 if hidden else row.lr)

    rows = audited(fault)
    assert rows["embedding"].passed
    assert rows["mlp.in"].passed is False


def test_a_rule_without_batch_and_tokens_is_not_judged_on_them() -> None:
    rows = audited(rule="completep")
    assert rows["mlp.in"].passed
    assert rows["mlp.in"].parts["lr"] is None
    assert rows["batch"].passed is rows["tokens"].passed is None
