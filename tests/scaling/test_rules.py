"""Complete(d)P as data, against the printed table (arXiv 2512.22382, Table 1), row by row."""

import math

import pytest

from leaven.recipe.shape import Role
from leaven.scaling.rules import COMPLETE_D_P, RULES, STANDARD, Cell, Ratios

N, L, B, D = 4.0, 8.0, 2.0, 32.0
AT = Ratios(width=N, depth=L, batch=B, tokens=D)


def value(cell: str, alpha: float = 1.0, token_exponent: float = 0.5) -> float:
    return Cell(cell).factor(AT, alpha, token_exponent)


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    ("role", "variance", "lr", "eps", "decay"),
    # Exponents as printed: (m_N, m_L in alpha) written out as functions of alpha.
    [
        (Role.EMBEDDING, lambda a: 1, lambda a: 1, lambda a: 1 / N, 1),
        (Role.HIDDEN_WEIGHT, lambda a: 1 / N, lambda a: L ** (a - 1) / N, lambda a: L**-a / N, N),
        (Role.HIDDEN_BIAS, lambda a: 1, lambda a: L ** (a - 1), lambda a: L**-a / N, None),
        (Role.HIDDEN_NORM, lambda a: 1, lambda a: L ** (a - 1), lambda a: L**-a / N, None),
        (Role.QK_NORM, lambda a: 1, lambda a: L ** (a - 1), lambda a: L**-a, None),
        (Role.UNEMBEDDING, lambda a: N**-2, lambda a: 1 / N, lambda a: 1, N),
    ],
)
def test_table_1_row_by_row(role, variance, lr, eps, decay, alpha: float) -> None:  # type: ignore[no-untyped-def]
    row = COMPLETE_D_P.roles[role]
    assert value(row.init_variance, alpha) == pytest.approx(variance(alpha))
    assert value(row.lr, alpha) == pytest.approx(lr(alpha))
    assert value(row.eps, alpha) == pytest.approx(eps(alpha))
    # Table 1 prints 1 for gains and biases ("rest"); we do not decay them at all.
    assert value(row.weight_decay, alpha) == pytest.approx(decay if decay is not None else 0.0)
    assert value(row.forward) == 1  # "Unaugmented"
    assert value(COMPLETE_D_P.residual, alpha) == pytest.approx(L**-alpha)


def test_batch_and_token_columns() -> None:
    q = B / D
    assert value(COMPLETE_D_P.lr) == pytest.approx(math.sqrt(q))
    assert value(COMPLETE_D_P.eps) == pytest.approx(1 / math.sqrt(q))
    assert value(COMPLETE_D_P.weight_decay) == pytest.approx(math.sqrt(q))
    assert value(COMPLETE_D_P.half_life) == pytest.approx(1 / q)


def test_final_norm_eps_departs_from_the_printed_row() -> None:
    """Printed: 1. The gain's gradient is a sum over an unembedding of order 1/N, so its eps falls with it."""
    assert value(COMPLETE_D_P.roles[Role.FINAL_NORM].eps) == 1 / N
    assert value(COMPLETE_D_P.roles[Role.FINAL_NORM].lr) == 1


def test_lr_times_decay_times_steps_is_constant() -> None:
    """At alpha = 1 the total shrinking of a decayed weight over the run does not depend on scale."""
    steps = D / B
    for role in (Role.EMBEDDING, Role.HIDDEN_WEIGHT, Role.UNEMBEDDING, Role.TIED_EMBEDDING):
        row = COMPLETE_D_P.roles[role]
        for token_exponent in (0.3, 0.5):
            product = math.prod(
                value(cell, 1.0, token_exponent)
                for cell in (row.lr, row.weight_decay, COMPLETE_D_P.lr, COMPLETE_D_P.weight_decay)
            )
            assert product * steps == pytest.approx(1.0)


def test_tied_embedding_is_the_unembedding_row_moved_by_the_abc_symmetry() -> None:
    """forward x c, std / c, lr / c, eps x c, decay x c leaves AdamW unchanged; c = 1/N here."""
    untied, tied, c = COMPLETE_D_P.roles[Role.UNEMBEDDING], COMPLETE_D_P.roles[Role.TIED_EMBEDDING], 1 / N
    assert value(tied.forward) == pytest.approx(c * value(untied.forward))
    assert value(tied.init_variance) == pytest.approx(value(untied.init_variance) / c**2)
    assert value(tied.lr) == pytest.approx(value(untied.lr) / c)
    assert value(tied.eps) == pytest.approx(value(untied.eps) * c)
    assert value(tied.weight_decay) == pytest.approx(value(untied.weight_decay) * c)


def test_standard_moves_nothing() -> None:
    for row in STANDARD.roles.values():
        assert {value(cell) for cell in (row.init_variance, row.lr, row.eps, row.forward)} == {1.0}
        assert value(row.weight_decay) in {0.0, 1.0}
    assert {value(cell) for cell in (STANDARD.residual, STANDARD.lr, STANDARD.eps, STANDARD.half_life)} == {1.0}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_every_role_has_a_row_and_all_is_neutral_at_the_base(rule) -> None:  # type: ignore[no-untyped-def]
    assert set(rule.roles) == set(Role)
    base = Ratios()
    for row in rule.roles.values():
        for cell in (row.init_variance, row.lr, row.eps, row.forward, rule.residual, rule.lr, rule.half_life):
            assert Cell(cell).factor(base, 0.7, 0.3) == 1.0  # to the last bit


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("N^-1", N**-1), ("N", N), ("N^-2 L^1/2", N**-2 * L**0.5), ("L^(alpha-1)", L**-0.3), ("D^-t", D**-0.4)],
)
def test_cells(cell: str, expected: float) -> None:
    assert Cell(cell).factor(AT, 0.7, 0.4) == pytest.approx(expected)


def test_a_cell_that_is_no_product_of_powers_is_refused() -> None:
    with pytest.raises(AssertionError, match="not an exponent"):
        Cell("N^x").factor(AT, 1.0, 0.5)
    with pytest.raises(KeyError):
        Cell("Q^2").factor(AT, 1.0, 0.5)
