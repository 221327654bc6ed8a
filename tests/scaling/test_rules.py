"""The rules as data, against the printed tables, row by row."""

import math

import pytest

from leaven.recipe.recipe import Scaling
from leaven.recipe.shape import Role
from leaven.scaling.apply import Factors, factors, tensor_ratios
from leaven.scaling.cells import Cell, Ratios, TensorRatios
from leaven.scaling.rules import COMPLETE_D_P, QUANTITIES, RULES, Rule

N, L, B, D = 4.0, 8.0, 2.0, 32.0
AT = Ratios(width=N, depth=L, batch=B, tokens=D)
DECAYED = (Role.EMBEDDING, Role.HIDDEN_WEIGHT, Role.EXPERT_WEIGHT, Role.ROUTER, Role.UNEMBEDDING, Role.TIED_EMBEDDING)
# Shapes at the base; the target is N times wider by more heads of the same size.
SHAPES: dict[Role, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(Role, ((16,), (64,))),
    **dict.fromkeys((Role.EMBEDDING, Role.UNEMBEDDING, Role.TIED_EMBEDDING), ((100, 16), (100, 64))),
    Role.HIDDEN_WEIGHT: ((48, 16), (192, 64)),
    Role.EXPERT_WEIGHT: ((8, 48, 16), (8, 192, 64)),
    Role.ROUTER: ((8, 16), (8, 64)),
    Role.QK_NORM: ((8,), (8,)),
    Role.UNEMBEDDING_BIAS: ((100,), (100,)),
}


def scaling(alpha: float, t: float, scale_decay: bool) -> Scaling:
    return Scaling(alpha=alpha, token_exponent=t, scale_decay_with_depth=scale_decay)


def moved(name: str, role: Role, alpha: float = 1.0, t: float = 0.5, scale_decay: bool = False) -> Factors:
    base, target = SHAPES[role]
    return factors(RULES[name], role, tensor_ratios(role, target, base, AT), scaling(alpha, t, scale_decay))


# Every cell as printed, as functions of m_N, m_L and alpha: (variance, lr, eps, decay, forward).
ONE = lambda a: 1  # noqa: E731
PER_N = lambda a: 1 / N  # noqa: E731
BLOCK_LR = lambda a: L ** (a - 1)  # noqa: E731
BLOCK_EPS = lambda a: L**-a / N  # noqa: E731
# The norm of the embedding is not in the printed tables: its gradient moves with that of the embedding.
INPUT = dict.fromkeys((Role.EMBEDDING, Role.EMBEDDING_NORM, Role.EMBEDDING_BIAS), (ONE, ONE, PER_N, 1, 1))
PLAIN = dict.fromkeys((Role.FINAL_NORM, Role.FINAL_BIAS, Role.UNEMBEDDING_BIAS), (ONE, ONE, ONE, 1, 1))
# derived: the papers have no norm on a branch's output
BLOCK = dict.fromkeys((Role.HIDDEN_BIAS, Role.HIDDEN_NORM, Role.OUTPUT_NORM), (ONE, BLOCK_LR, BLOCK_EPS, 1, 1))
HIDDEN = (PER_N, lambda a: L ** (a - 1) / N, BLOCK_EPS, N, 1)
ROUTER = (lambda a: N**-2, lambda a: L ** (a - 1) / N, lambda a: L**-a, N, 1)
PRINTED_COMPLETE_D_P = {  # arXiv 2512.22382, Table 1
    **INPUT,
    **BLOCK,
    **PLAIN,
    Role.HIDDEN_WEIGHT: HIDDEN,
    Role.QK_NORM: (ONE, BLOCK_LR, lambda a: L**-a, 1, 1),
    Role.EXPERT_WEIGHT: HIDDEN,  # derived, as are the router's: the papers have no experts
    Role.ROUTER: ROUTER,
    Role.UNEMBEDDING: (lambda a: N**-2, PER_N, ONE, N, 1),
    Role.TIED_EMBEDDING: (ONE, ONE, PER_N, 1, 1 / N),  # derived by the symmetry tested below
}
ROWS = {
    "standard": {role: (ONE, ONE, ONE, 1, 1) for role in Role},
    # Tensor Programs V, Table 3 (Adam); eps and decay as in the muP column of Table 1.
    "mup": {
        **INPUT,
        **dict.fromkeys(BLOCK, (ONE, ONE, PER_N, 1, 1)),
        **PLAIN,
        **dict.fromkeys((Role.HIDDEN_WEIGHT, Role.EXPERT_WEIGHT), (PER_N, PER_N, PER_N, N, 1)),
        Role.ROUTER: (lambda a: N**-2, PER_N, ONE, N, 1),
        Role.QK_NORM: (ONE, ONE, ONE, 1, 1),
        Role.UNEMBEDDING: (lambda a: N**-2, PER_N, ONE, N, 1),
        Role.TIED_EMBEDDING: (ONE, ONE, PER_N, 1, 1 / N),
    },
    # Dey et al. 2025, Table 1.
    "completep": {
        **dict.fromkeys(INPUT, (ONE, ONE, ONE, 1, 1)),
        **BLOCK,
        **PLAIN,
        **dict.fromkeys((Role.HIDDEN_WEIGHT, Role.EXPERT_WEIGHT), HIDDEN),
        Role.ROUTER: ROUTER,
        Role.QK_NORM: (ONE, BLOCK_LR, lambda a: L**-a, 1, 1),
        Role.UNEMBEDDING: (ONE, ONE, ONE, 1, 1 / N),
        Role.TIED_EMBEDDING: (ONE, ONE, ONE, 1, 1 / N),
    },
    # The printed table but for the eps of the final norm, which is 1 there ("Output weights/biases/norms").
    "complete-d-p": PRINTED_COMPLETE_D_P
    | {role: (ONE, ONE, PER_N, 1, 1) for role in (Role.FINAL_NORM, Role.FINAL_BIAS)},
}
# Batch and token columns: (lr, eps, decay, half-life in steps), and the residual multiplier.
Q = B / D
COLUMNS = dict.fromkeys(("standard", "mup", "completep"), (1, 1, 1, 1)) | {
    "complete-d-p": (math.sqrt(Q), 1 / math.sqrt(Q), math.sqrt(Q), 1 / Q)
}


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(("name", "role"), [(name, role) for name in RULES for role in Role])
def test_tables_row_by_row(name: str, role: Role, alpha: float) -> None:
    variance, lr, eps, decay, forward = ROWS[name][role]
    column = COLUMNS[name]
    found = moved(name, role, alpha)
    assert found.init_std == pytest.approx(math.sqrt(variance(alpha)))
    assert found.lr == pytest.approx(lr(alpha) * column[0])
    assert found.eps == pytest.approx(eps(alpha) * column[1])
    assert found.weight_decay == pytest.approx(decay * column[2])
    assert found.half_life == pytest.approx(column[3])
    assert found.forward == forward
    deep = name not in {"standard", "mup"}
    assert found.residual == pytest.approx(L**-alpha if deep else 1)
    assert found.attention == 1  # the head dimension is kept


def test_betas_keep_their_half_life_as_a_share_of_the_run_and_stay_in_range() -> None:
    found = moved("complete-d-p", Role.HIDDEN_WEIGHT)
    assert math.log(found.beta(0.9)) == pytest.approx(math.log(0.9) * Q)
    # To first order the printed form, 1 - (1 - beta) q; at q = 40 that would be -1.
    assert 1 - found.beta(0.999) == pytest.approx(0.001 * Q, rel=1e-3)
    large = factors(COMPLETE_D_P, Role.HIDDEN_WEIGHT, TensorRatios(batch=40), Scaling())
    assert 0 < large.beta(0.95) < 1
    assert 1 - found.beta(0.999, multiplier=2) == pytest.approx(0.002 * Q, rel=1e-3)


@pytest.mark.parametrize("role", DECAYED)
@pytest.mark.parametrize(("alpha", "scale_decay"), [(1.0, False), (1.0, True), (0.5, True), (0.75, True)])
@pytest.mark.parametrize("t", [0.3, 0.5])
def test_lr_times_decay_times_steps_is_constant(role: Role, alpha: float, scale_decay: bool, t: float) -> None:
    """The total shrinking of a decayed weight over the run does not depend on scale, over all four ratios."""
    found = moved("complete-d-p", role, alpha, t, scale_decay)
    assert found.lr * found.weight_decay * D / B == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["mup", "complete-d-p"])
def test_tied_embedding_is_the_unembedding_row_moved_by_the_abc_symmetry(name: str) -> None:
    """forward x c, std / c, lr / c, eps x c, decay x c leaves AdamW unchanged; c = 1/N here."""
    untied, tied, c = moved(name, Role.UNEMBEDDING), moved(name, Role.TIED_EMBEDDING), 1 / N
    assert tied.forward == pytest.approx(c * untied.forward)
    assert tied.init_std == pytest.approx(untied.init_std / c)
    assert tied.lr == pytest.approx(untied.lr / c)
    assert tied.eps == pytest.approx(untied.eps * c)
    assert tied.weight_decay == pytest.approx(untied.weight_decay * c)


def test_initial_variance_lr_and_decay_follow_the_fan_in_and_eps_the_fan_out() -> None:
    """A matrix whose sides grow by different factors: (48, 16) to (96, 64)."""
    at = tensor_ratios(Role.HIDDEN_WEIGHT, (96, 64), (48, 16), Ratios(width=4))
    assert (at.fan_in, at.fan_out) == (4, 2)
    found = factors(COMPLETE_D_P, Role.HIDDEN_WEIGHT, at, Scaling())
    assert (found.init_std, found.lr, found.weight_decay, found.eps) == (1 / 2, 1 / 4, 4, 1 / 2)
    # Gains per head fill the width, a shared one the head: twice as large heads, half the eps.
    per_head = tensor_ratios(Role.HIDDEN_NORM, (8, 16), (4, 8), Ratios(width=4))
    shared = tensor_ratios(Role.QK_NORM, (16,), (8,), Ratios(width=4))
    assert (per_head.fan_in, per_head.fan_out, shared.fan_out) == (1, 4, 2)


@pytest.mark.parametrize("shape", [(64,), (64, 64, 3)])
def test_a_matrix_must_have_two_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"must have 2 dimensions, but it has {len(shape)}"):
        tensor_ratios(Role.HIDDEN_WEIGHT, shape, shape, Ratios())


@pytest.mark.parametrize("name", RULES)
def test_the_attention_scale_of_larger_heads(name: str) -> None:
    """sqrt(d_base) / d of muP is 1 / sqrt(d) times sqrt(d_base / d); standard keeps 1 / sqrt(d)."""
    found = factors(RULES[name], Role.HIDDEN_WEIGHT, TensorRatios(head=4), Scaling())
    assert found.attention == (1 if name == "standard" else 1 / 2)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_cell_has_a_source_and_is_neutral_at_the_base_to_the_last_bit(rule: Rule) -> None:
    cells = [rule.cells[quantity][role] for quantity in QUANTITIES for role in Role]
    for cell in [*cells, *rule.shared.values()]:
        assert len(cell.source) > 10
        assert cell.factor(TensorRatios(), scaling(0.7, 0.3, True)) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I^-1", 3**-1),
        ("O", 5.0),
        ("I^-2 L^1/2", 3**-2 * 7**0.5),
        ("L^(alpha-1)", 7**-0.3),
        ("D^-t", 11**-0.4),
        ("D^(t-1)", 11**-0.6),
        ("L^w", 7**0.3),
        ("B H^-1/2", 13 * 2**-0.5),
    ],
)
def test_cells(text: str, expected: float) -> None:
    at = TensorRatios(fan_in=3, fan_out=5, depth=7, tokens=11, batch=13, head=2)
    assert Cell(text, "").factor(at, scaling(0.7, 0.4, True)) == pytest.approx(expected)
