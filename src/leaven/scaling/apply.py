"""Apply a scaling rule to one tensor of any model."""

import math
from dataclasses import dataclass
from functools import lru_cache

from leaven.recipe.recipe import Scaling
from leaven.recipe.shape import Role
from leaven.scaling.cells import Cell, Ratios, TensorRatios
from leaven.scaling.rules import Rule


@dataclass(frozen=True)
class Factors:
    """The factors by which a scaling rule multiplies a tensor's hyperparameters. All are exactly 1.0 at the base."""

    init_std: float
    lr: float
    eps: float
    weight_decay: float
    forward: float  # factor on the output of the tensor; 1 except for the unembedding and tied embeddings
    residual: float  # factor on a branch before it is added to the residual stream
    attention: float  # factor on the scale of the attention logits, which is usually 1 / sqrt(d_head)
    half_life: float  # factor on the half-life of Adam's moments in steps

    def beta(self, base: float, multiplier: float = 1.0) -> float:
        """Return Adam's beta at this scale: ``base ** (multiplier / self.half_life)``.

        ``base`` is beta at the base. ``multiplier`` is the recipe's multiplier of beta for the tensor's module.
        Papers instead multiply ``1 - beta`` by ``multiplier / half_life``, which may give a beta outside (0, 1).
        """
        return float(base ** (multiplier / self.half_life))


AT_BASE = Factors(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@lru_cache(maxsize=10_000)  # the tensors of a module have the same factors in all blocks
def factors(rule: Rule, role: Role, at: TensorRatios, scaling: Scaling, muon: bool = False) -> Factors:
    """Return the factors of a scaling rule for one tensor. ``muon``: whether Muon updates the tensor."""

    def product(*cells: Cell) -> float:
        return math.prod(cell.factor(at, scaling) for cell in cells)

    return Factors(
        init_std=math.sqrt(product(*rule.of("init_variance", role))),
        lr=product(*rule.of("lr", role, muon)),
        eps=product(*rule.of("eps", role)),
        weight_decay=product(*rule.of("weight_decay", role, muon)),
        forward=product(*rule.of("forward", role)),
        residual=product(rule.residual),
        attention=product(rule.attention),
        half_life=product(rule.half_life),
    )


def tensor_ratios(
    role: Role, shape: tuple[int, ...], base_shape: tuple[int, ...], at: Ratios, head: float = 1.0
) -> TensorRatios:
    """Return the ratios (target scale / base scale) of one tensor.

    Matrices are (fan out, fan in), experts (experts, fan out, fan in), embeddings (rows, width). ``at`` has
    the ratios of the run, and ``head`` is the ratio of head dimensions. Raise ValueError if a matrix has the
    wrong number of dimensions, or the number of experts changes.
    """
    assert len(shape) == len(base_shape), f"{shape} and {base_shape} differ in the number of dimensions"
    sides = 3 if role is Role.EXPERT_WEIGHT else 2
    if role.is_matrix and len(shape) != sides:
        raise ValueError(
            f"a tensor with the role {role} must have {sides} dimensions, but it has {len(shape)}; no rule covers "
            "other tensors, such as the kernels of convolutions"
        )
    if role in {Role.EXPERT_WEIGHT, Role.ROUTER} and shape[0] != base_shape[0]:
        raise ValueError(
            f"the target has {shape[0]} experts and the base has {base_shape[0]}; no rule covers this, so give both "
            "the same number"
        )
    ratio = [side / base_side for side, base_side in zip(shape, base_shape, strict=True)]
    match role:
        case Role.EMBEDDING:
            fan_in, fan_out = 1.0, ratio[1]
        case Role.UNEMBEDDING | Role.ROUTER:
            fan_in, fan_out = ratio[1], 1.0
        case Role.TIED_EMBEDDING:
            fan_in, fan_out = ratio[1], ratio[1]
        case Role.HIDDEN_WEIGHT | Role.EXPERT_WEIGHT:
            fan_in, fan_out = ratio[-1], ratio[-2]
        case Role.UNEMBEDDING_BIAS:
            fan_in, fan_out = 1.0, 1.0
        case _:
            fan_in, fan_out = 1.0, math.prod(shape) / math.prod(base_shape)
    return TensorRatios(fan_in, fan_out, head, at.depth, at.batch, at.tokens)
