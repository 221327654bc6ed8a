"""Apply a scaling rule to one tensor of any model."""

import math
from dataclasses import dataclass

from leaven.recipe.shape import Role
from leaven.scaling.cells import Cell, Exponents, Ratios, TensorRatios
from leaven.scaling.rules import Rule


@dataclass(frozen=True)
class Factors:
    """The factors by which the values of a tensor change from base to target; all are exactly 1.0 at the base."""

    init_std: float
    lr: float
    eps: float
    weight_decay: float
    forward: float  # factor on the output of the tensor (the logits)
    residual: float  # factor on a branch before it is added to the residual stream
    attention: float  # factor on the usual scale of the attention logits, 1 / sqrt(d_head)
    half_life: float  # factor on the half-life of Adam's moments in steps

    def beta(self, base: float, multiplier: float = 1.0) -> float:
        """Return ``base ** (multiplier / half_life)``.

        To first order this multiplies ``1 - beta`` by ``multiplier / half_life``, but beta stays within (0, 1). A
        linear formula would move beta1 = 0.9 out of this range if the run has ten times fewer steps. Over batch
        ratios of 1/4 to 8 both formulas gave the same loss.
        """
        return float(base ** (multiplier / self.half_life))


AT_BASE = Factors(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def factors(rule: Rule, role: Role, at: TensorRatios, exponents: Exponents) -> Factors:
    """Return the factors for a tensor with this role and these ratios."""

    def product(*cells: Cell) -> float:
        return math.prod(cell.factor(at, exponents) for cell in cells)

    return Factors(
        init_std=math.sqrt(product(*rule.of("init_variance", role))),
        lr=product(*rule.of("lr", role)),
        eps=product(*rule.of("eps", role)),
        weight_decay=product(*rule.of("weight_decay", role)),
        forward=product(*rule.of("forward", role)),
        residual=product(rule.residual),
        attention=product(rule.attention),
        half_life=product(rule.half_life),
    )


def tensor_ratios(
    role: Role, shape: tuple[int, ...], base_shape: tuple[int, ...], at: Ratios, head: float = 1.0
) -> TensorRatios:
    """Return the ratios of a tensor from its shapes at target and base.

    Matrices are (fan out, fan in), as in ``nn.Linear``; both embeddings are (vocabulary or positions, width). A gain
    or a bias counts as a diagonal matrix: its fan in is 1, its fan out is its size. ``head`` is the ratio of d_head.

    Raises:
        ValueError: if a matrix does not have two dimensions, such as experts in one tensor or a convolution.
    """
    assert len(shape) == len(base_shape), f"{shape} and {base_shape} are not the same tensor at two scales"
    if role.is_matrix and len(shape) != 2:
        raise ValueError(
            f"the role {role} needs a matrix (fan out, fan in), but this tensor has {len(shape)} dimensions; there "
            "is no rule for mixtures of experts and convolutions"
        )
    ratio = [side / base_side for side, base_side in zip(shape, base_shape, strict=True)]
    match role:
        case Role.EMBEDDING:
            fan_in, fan_out = 1.0, ratio[1]
        case Role.UNEMBEDDING:
            fan_in, fan_out = ratio[1], 1.0
        case Role.TIED_EMBEDDING:
            fan_in, fan_out = ratio[1], ratio[1]
        case Role.HIDDEN_WEIGHT:
            fan_in, fan_out = ratio[1], ratio[0]
        case Role.UNEMBEDDING_BIAS:
            fan_in, fan_out = 1.0, 1.0
        case _:
            fan_in, fan_out = 1.0, math.prod(shape) / math.prod(base_shape)
    return TensorRatios(fan_in, fan_out, head, at.depth, at.batch, at.tokens)
