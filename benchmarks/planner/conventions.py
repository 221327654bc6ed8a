"""FLOP conventions of published tables by name, so that numbers are only compared if they were counted alike.

Each convention is counted by operator, so that it is defined for every model. ``formula`` is its published closed
form, for one family of models, which the tests compare it with. Symbols: N parameters, L layers, h width, a heads of
d, s sequence, V vocabulary; per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

from leaven.errors import InputError
from leaven.planning.blueprint import Blueprint, blueprint
from leaven.planning.flops import flops_per_token, forward_flops, hardware_flops_per_token
from leaven.recipe.layout import Recompute
from leaven.recipe.shape import ModelShape


@dataclass(frozen=True)
class Convention:
    """A way to count FLOPs. ``count(model, recompute)`` returns FLOPs per token."""

    name: str
    formula: str
    source: str
    count: Callable[[Blueprint, Recompute], float]


def _korthikanti_hw(model: Blueprint, recompute: Recompute) -> float:
    if recompute != "selective":
        return hardware_flops_per_token(model, recompute)
    return flops_per_token(model) + 3 * forward_flops(model).attention


def _with_all_parameters(model: Blueprint, embedding: bool = True) -> float:
    """6 N + 12 L a d s; ``embedding``: whether N has the lookup too, where it is not the unembedding."""
    lookup = 0 if model.tied else model.embedding
    n = model.active_params - (0 if embedding else lookup)
    return 6 * n + 3 * forward_flops(model).attention


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention(
            "leaven",
            "6 per matmul weight (unembedding counted, lookup not) + full attention; recomputation not counted",
            "this planner",
            lambda model, _: flops_per_token(model),
        ),
        Convention(
            "leaven_causal",
            "as leaven, attention to the past only",
            "this planner",
            lambda model, _: flops_per_token(model, "causal"),
        ),
        Convention(
            "leaven_hw",
            "as leaven, and what is computed again",
            "this planner",
            hardware_flops_per_token,
        ),
        Convention(
            "narayanan_hw",
            "96 L h^2 (1 + s/(6h) + V/(16 L h)): full recomputation",
            "arXiv 2104.04473, equation 3",
            lambda model, _: hardware_flops_per_token(model, "full"),
        ),
        Convention(
            "korthikanti_model",
            "72 L h^2 (1 + s/(6h) + V/(12 L h))",
            "arXiv 2205.05198, appendix A",
            lambda model, _: flops_per_token(model),
        ),
        Convention(
            "korthikanti_hw",
            "72 L h^2 (1 + s/(3h) + V/(12 L h)) with selective recomputation: it counts the core of attention three "
            "times more, where it is computed once more",
            "arXiv 2205.05198, appendix A",
            _korthikanti_hw,
        ),
        Convention(
            "palm",
            "6 N + 12 L a d s, N all parameters that a token passes",
            "arXiv 2204.02311, appendix B",
            lambda model, _: _with_all_parameters(model),
        ),
        Convention(
            "mpt_mfu",
            "6 N + 12 L h s, N all parameters",
            "github.com/mosaicml/llm-foundry, scripts/train/benchmarking",
            lambda model, _: _with_all_parameters(model),
        ),
        Convention(
            "mpt_hfu",
            "(6 N + 12 L h s), times 4/3 with activation checkpointing",
            "github.com/mosaicml/llm-foundry, scripts/train/benchmarking",
            lambda model, recompute: _with_all_parameters(model) * (4 / 3 if recompute == "full" else 1),
        ),
        Convention(
            "torchtitan",
            "6 N + 12 L a d s, N without the embedding",
            "github.com/pytorch/torchtitan",
            lambda model, _: _with_all_parameters(model, embedding=False),
        ),
    )
}


def counted(model: ModelShape | Blueprint, convention: str, recompute: Recompute = "none") -> float:
    """Training FLOPs per token by a convention.

    Raises:
        InputError: for an unknown convention; lists the known ones.
    """
    if convention not in CONVENTIONS:
        raise InputError(f"no such FLOP convention {convention!r}; known are {', '.join(CONVENTIONS)}")
    return CONVENTIONS[convention].count(blueprint(model), recompute)
